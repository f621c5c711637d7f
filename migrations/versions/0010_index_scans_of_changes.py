"""Make the functions of the change log use indexes.

The statistics of a segment that was empty a moment ago would lead the planner to a sequential scan.
"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

FUNCTIONS = ("atproto.changes_after(bigint, integer)", "atproto.latest_seq()")


def upgrade() -> None:
    """Apply the migration."""
    for function in FUNCTIONS:
        op.execute(f"alter function {function} set enable_seqscan = off")
