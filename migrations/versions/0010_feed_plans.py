"""The feed's functions find their rows by index, whatever Postgres believes of a segment that was empty just now."""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

FUNCTIONS = ("atproto.changes_after(bigint, integer)", "atproto.latest_seq()")


def upgrade() -> None:
    for function in FUNCTIONS:
        op.execute(f"alter function {function} set enable_seqscan = off")
