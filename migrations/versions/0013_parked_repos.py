"""Add the time at which a repo was parked, with an index, so that due repos are found among many parked ones."""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    alter table indexer.repo add column parked_at timestamptz generated always as (
        case when status = 'desynchronized' and active and next_attempt_at = 'infinity' then updated_at end
    ) stored
    """,
    "create index repo_parked on indexer.repo (bucket, parked_at) where parked_at is not null",
    "comment on column indexer.repo.parked_at is 'Given up on since then, until something wakes it.'",
)


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
