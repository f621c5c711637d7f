"""Index the identities that are known to have changed, so that they are refreshed."""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.execute("create index identity_stale on indexer.identity (fetched_at) where stale")
