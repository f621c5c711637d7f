"""Store the time of the last statement about an account, because numbers of different relays cannot be compared.

Without it, an old `#account` message of one relay undid a later one of another relay.
"""

from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

STATEMENTS = (
    "alter table indexer.repo add column hosting_time timestamptz",
    """
    comment on column indexer.repo.hosting_time is
        'The time of the message hosting_seq of hosting_relay, but not after its arrival; null: it is not known.'
    """,
)


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
