"""Store for each gap which positions were compared since, so that it is closed after the number of shards has changed.

Before, only a process of exactly the shard that had opened a gap could close it.
"""

from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    alter table indexer.gap
        add column positions int4range not null generated always as (
            int4range(
                split_part(shard, '/', 1)::int * 256 / split_part(shard, '/', 2)::int,
                (split_part(shard, '/', 1)::int + 1) * 256 / split_part(shard, '/', 2)::int
            )
        ) stored,
        add column reconciled int4multirange not null default '{}'
    """,
)

COMMENTS = {
    "column indexer.gap.positions": "The positions of the shard (docs/glossary.md).",
    "column indexer.gap.reconciled": (
        "Positions that a reconciliation has compared since. The gap is closed when all positions were."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")
