"""Create the table of crawl progress, for `indexer discover` and for reconciliation."""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    create table indexer.listing (
        purpose text not null,
        source text not null,
        collection text not null,
        cursor text,
        listed bigint not null,
        found bigint not null,
        began_at timestamptz not null,
        finished_at timestamptz,
        primary key (purpose, source, collection)
    )
    """,
    "comment on table indexer.listing is 'How far the list of accounts of a host has been read, and for what.'",
)


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
