"""An index on the few records whose blocks no export had, so that their repos are found and fetched again."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("create index record_missing on indexer.record (did, bucket) where value_problem = 'missing'")
