"""Index the records without a value that no export contained, so that their repos are found and fetched again."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.execute("create index record_missing on indexer.record (did, bucket) where value_problem = 'missing'")
