"""The tables that are distributed with Citus, and what keeps them consistent with the tables of the coordinator.

A distributed database has the tables `DISTRIBUTED` in shards on several nodes: the rows of a bucket are in one shard of
each table, and the shards of the same buckets are on the same node. All other tables are plain tables of the
coordinator, the change log among them.

**Two-phase commit.** A transaction often writes both: records on a node, and the change log and the cursor on the
coordinator. Citus commits in two phases only if it knows of writes on two nodes, and it does not know of writes to
plain tables. So each plain table has the statement trigger `use_two_phases`, which updates no row of the table
`distribution`. That table is in the metadata of Citus, so this counts as a write on the coordinator. It does not matter
which write comes first. If a process or a node is killed during the commit, the record of the transaction on the
coordinator decides whether the other nodes commit. The migration 0028 has the function. A test compares the triggers
with the tables, and another one watches what Citus sends for each kind of transaction.

**New tables.** `adapt` does for the tables of a later migration what `indexer distribute` does for the present ones.
`migrate` calls it.
"""

from indexer.store.columns import Connection

FIRST = "resync_queue"
"""The table that is distributed first, because it never has more than a few rows for each bucket.

Its shards are cut while they are small. The other tables are then distributed in the same way, with their rows.
"""
DISTRIBUTED = (
    FIRST, "repo", "identity", "buffered_event", "record", "link", "link_count", "link_delta", "link_recount",
)  # fmt: skip
"""The distributed tables. Each one has a column `bucket`, by which it is distributed."""
METADATA = "distribution"
"""The table of the coordinator that Citus knows."""

_DISTRIBUTED = """
    select relname::text from pg_dist_partition join pg_class on oid = logicalrelid
    where relnamespace = 'indexer'::regnamespace and partmethod = 'h'
"""
_DISTRIBUTE = f"select create_distributed_table($1::text::regclass, 'bucket', colocate_with => 'indexer.{FIRST}')"
_ADD_METADATA = f"""
    select citus_add_local_table_to_metadata('indexer.{METADATA}')
    where not exists (select from pg_dist_partition where logicalrelid = 'indexer.{METADATA}'::regclass)
"""
_WITHOUT_TRIGGER = """
    select c.oid::regclass::text from pg_class c
    where c.relnamespace = 'indexer'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
        and not exists (select from pg_dist_partition where logicalrelid = c.oid)
        and not exists (select from pg_trigger t where t.tgrelid = c.oid and t.tgname = 'use_two_phases')
"""
_ADD_TRIGGER = """
    create trigger use_two_phases before insert or update or delete on {table}
    for each statement execute function indexer.use_two_phases()
"""
_IS_DISTRIBUTED = f"""
    select exists (select from indexer.{METADATA} where finished_at is not null)
"""
_HAS_TABLE = f"select to_regclass('indexer.{METADATA}') is not null"
_SEQUENTIAL = "set local citus.multi_shard_modify_mode = 'sequential'"
_DROP_NUMBERING = "drop trigger if exists publish on indexer.change_batch"


async def is_distributed(connection: Connection) -> bool:
    """Return True if all tables of the database were distributed; False also if there is no schema yet."""
    if not await connection.fetchval(_HAS_TABLE):
        return False
    distributed: bool = await connection.fetchval(_IS_DISTRIBUTED)
    return distributed


async def use_sequential_changes(connection: Connection) -> None:
    """Let the open transaction of a distributed database change the schema: one shard after the other.

    Otherwise, Citus refuses to create a view or a function after a statement on all shards.
    """
    await connection.execute(_SEQUENTIAL)


async def distributed_tables(connection: Connection) -> set[str]:
    """Return the names of the tables of the schema that are distributed already."""
    return {name for (name,) in await connection.fetch(_DISTRIBUTED)}


async def adapt(connection: Connection) -> list[str]:
    """Distribute the tables that are not distributed yet, and add missing triggers; return the distributed ones.

    The database is distributed: `FIRST` has its shards.
    """
    done = await distributed_tables(connection)
    added = [table for table in DISTRIBUTED if table not in done]
    for table in added:
        await distribute_table(connection, table)
    await use_two_phases(connection)
    return added


async def distribute_table(connection: Connection, table: str) -> None:
    """Distribute a table with its rows, like `FIRST`, in one transaction."""
    await connection.execute(_DISTRIBUTE, f"indexer.{table}")


async def use_two_phases(connection: Connection) -> None:
    """Let every transaction that writes a table of the coordinator commit in two phases.

    COMMIT does not number changes any more: a process does that when the transaction is complete on all nodes
    (docs/decisions/0014-change-log-on-a-cluster.md).
    """
    await connection.execute(_ADD_METADATA)
    for (table,) in await connection.fetch(_WITHOUT_TRIGGER):
        await connection.execute(_ADD_TRIGGER.format(table=table))
    await connection.execute(_DROP_NUMBERING)
