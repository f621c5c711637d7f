"""Create the table that says whether the tables are distributed over the nodes of a Citus cluster.

It has no row in a plain database. `indexer distribute` adds the row. The daemons read it when they start.
"""

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    create table indexer.distribution (
        singleton boolean primary key default true constraint distribution_singleton check (singleton),
        shards integer not null constraint distribution_shards check (shards between 1 and 256),
        started_at timestamptz not null default now(),
        finished_at timestamptz
    )
    """,
)

COMMENTS = {
    "table indexer.distribution": (
        "One row if the tables of this database are distributed with Citus, or are being distributed; no row in a "
        "plain database."
    ),
    "column indexer.distribution.shards": "The number of shards of each distributed table.",
    "column indexer.distribution.finished_at": "When all tables were distributed; null if that is not complete.",
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")
