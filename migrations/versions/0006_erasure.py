"""Add the time from which the records of a deleted account may be erased."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply the migration."""
    op.execute("alter table indexer.repo add column erase_at timestamptz")
    op.execute("create index repo_erasures on indexer.repo (erase_at) where erase_at is not null")
    op.execute(
        "comment on column indexer.repo.erase_at is 'From then on, the records of the deleted account may be erased.'"
    )
