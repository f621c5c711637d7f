"""Add the time at which an undecidable commit was applied to a repo, with an index to find the oldest ones."""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

STATEMENTS = (
    "alter table indexer.repo add column unproven_since timestamptz",
    "create index repo_unproven on indexer.repo (unproven_since) where unproven_since is not null",
    """
    comment on column indexer.repo.unproven_since is
        'When the first undecidable commit since the last complete export was applied; null: there is none.'
    """,
)


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
