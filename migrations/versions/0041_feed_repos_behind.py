"""Store the repos whose changes the feed for clients of tap reads again from the log."""

from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None

COMMENT = (
    "Null, or an object, if changes of some repos were left out. repos: by DID, the number from which no change of the "
    "repo is delivered. delivered_to and undelivered: what the columns of this name say otherwise; these say then that "
    "nothing after the position is delivered."
)


def upgrade() -> None:
    """Apply the migration."""
    op.execute("alter table indexer.feed_delivery add column behind jsonb")
    op.execute(f"comment on column indexer.feed_delivery.behind is '{COMMENT}'")
