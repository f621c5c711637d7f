"""Store the time of the last report about an account, because numbers of different relays cannot be compared.

Without it, an old `#account` message of one relay undid a later one of another relay. A process of the previous release
leaves the column as it is, so the time may be too early until the next message about the account.
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
        'The latest time of the messages that hosting_seq has named, as far as it was possible; null: not known.'
    """,
)


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
