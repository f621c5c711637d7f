"""Create the table that says whether the tables are distributed over the nodes of a Citus cluster.

It has no row in a plain database. `indexer distribute` adds the row. The daemons read it when they start.

`indexer distribute` also adds triggers with the function `use_two_phases`. Citus commits a transaction in two phases
only if it knows of writes on two nodes, and it knows nothing of writes to plain tables of the coordinator. The table
`distribution` is in its metadata, so an update of that table counts as a write on the coordinator, also if it changes
no row.
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
    # Security definer: the triggers also fire for consumers, which may not write private tables.
    """
    create function indexer.use_two_phases() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    begin
        update indexer.distribution set shards = shards where false;
        return null;
    end $$
    """,
    "revoke all on function indexer.use_two_phases() from public",
)

COMMENTS = {
    "table indexer.distribution": (
        "One row if the tables of this database are distributed with Citus, or are being distributed; no row in a "
        "plain database."
    ),
    "column indexer.distribution.shards": "The number of shards of each distributed table.",
    "column indexer.distribution.finished_at": "When all tables were distributed; null if that is not complete.",
    "function indexer.use_two_phases()": (
        "On a distributed database, lets each transaction that writes a table of the coordinator commit in two phases."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")
