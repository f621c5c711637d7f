"""The tables that are distributed with Citus, and what keeps them consistent with the tables of the coordinator.

A distributed database has the tables `DISTRIBUTED` in shards on several nodes: the rows of a bucket are in one shard of
each table, and the shards of the same buckets are on the same node. All other tables are plain tables of the
coordinator, the change log among them.

**Two-phase commit.** A transaction often writes both: records on a node, and the change log and the cursor on the
coordinator. Citus commits in two phases only if it knows of writes on two nodes, and it does not know of writes to
plain tables. So each plain table has the statement trigger `use_two_phases` (`schema/11_cluster.sql`). It does not
matter which write comes first. If a process or a node is killed during the commit, the record of the transaction on the
coordinator decides whether the other nodes commit.

**New tables.** `on_all_nodes` does for the tables of a later migration what `indexer distribute` does for the present
ones.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from indexer.db.columns import Connection
from indexer.db.layout import load_layout

FIRST = "resync_queue"
"""The table that is distributed first, because it never has more than a few rows for each bucket.

Its shards are cut while they are small. The other tables are then distributed in the same way, with their rows.
"""
DISTRIBUTED = (
    FIRST, "repo", "identity", "buffered_event", "record", "record_link", "target_count", "links_to_recount",
)  # fmt: skip
"""The distributed tables. Each one has a column `bucket`, by which it is distributed."""

_WAITING = """
    select table_name from unnest($1::text[]) with ordinality t(table_name, place)
    where to_regclass('indexer.' || table_name) is not null and not exists (
        select from pg_dist_partition where logicalrelid = to_regclass('indexer.' || table_name)
    )
    order by place
"""
_DISTRIBUTE = f"select create_distributed_table($1::text::regclass, 'bucket', colocate_with => 'indexer.{FIRST}')"
# The only table of the coordinator that Citus knows.
_ADD_METADATA = """
    select citus_add_local_table_to_metadata('indexer.distribution')
    where not exists (select from pg_dist_partition where logicalrelid = 'indexer.distribution'::regclass)
"""
_WITHOUT_TRIGGER = """
    select c.oid::regclass::text from pg_class c
    where c.relnamespace = 'indexer'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
        and not exists (select from pg_dist_partition where logicalrelid = c.oid)
        and not relation_is_a_known_shard(c.oid)
        and not exists (select from pg_trigger t where t.tgrelid = c.oid and t.tgname = 'use_two_phases')
"""
_ADD_TRIGGER = """
    create trigger use_two_phases before insert or update or delete on {table}
    for each statement execute function indexer.use_two_phases()
"""
_QUEUE_BATCHES = """
    create constraint trigger queue_batch after insert on indexer.change_batch
    deferrable initially deferred for each row execute function indexer.queue_batch()
"""
_IS_QUEUED = """
    select exists (select from pg_trigger where tgrelid = 'indexer.change_batch'::regclass and tgname = 'queue_batch')
"""
_IS_ON_NODES = """
    select exists (
        select from pg_catalog.pg_dist_object
        where classid = 'pg_proc'::regclass and objid = 'indexer.prepared_transactions(smallint)'::regprocedure
    )
"""
_DELETE_LOCAL_ROWS = "select truncate_local_data_after_distributing_table($1::text::regclass)"


async def waiting_tables(connection: Connection) -> list[str]:
    """Return those of `DISTRIBUTED` that exist and are not distributed yet, in that order."""
    return [name for (name,) in await connection.fetch(_WAITING, DISTRIBUTED)]


async def distribute_table(connection: Connection, table: str) -> None:
    """Distribute a table with its rows, like `FIRST`, in one transaction."""
    await connection.execute(_DISTRIBUTE, f"indexer.{table}")


async def delete_local_rows(connection: Connection, table: str) -> None:
    """Free the space of the rows that were copied to the shards, if there are any. Nothing reads them any more."""
    if await connection.fetchval("select pg_relation_size($1::text::regclass) > 0", f"indexer.{table}"):
        await connection.execute(_DELETE_LOCAL_ROWS, f"indexer.{table}")
        await connection.execute(f"analyze indexer.{table}")


async def use_two_phases(connection: Connection) -> None:
    """Let every transaction that writes a table of the coordinator commit in two phases.

    COMMIT queues change batches instead of numbering them (`indexer.cluster.numbering`), and all nodes get the function
    that this needs.
    """
    await connection.execute(_ADD_METADATA)
    for (table,) in await connection.fetch(_WITHOUT_TRIGGER):
        await connection.execute(_ADD_TRIGGER.format(table=table))
    if not await connection.fetchval(_IS_QUEUED):
        await connection.execute("drop trigger publish on indexer.change_batch")
        await connection.execute(_QUEUE_BATCHES)
    if not await connection.fetchval(_IS_ON_NODES):
        await connection.execute("select create_distributed_function('indexer.prepared_transactions(smallint)')")


@asynccontextmanager
async def on_all_nodes(connection: asyncpg.Connection) -> AsyncIterator[None]:
    """Let the block change the schema, also if the database is distributed over several nodes: see `migrate`.

    The tables that it creates are distributed, and missing triggers are added, in its transaction, unless the database
    was restored from the dump of a cluster: then `indexer distribute` follows.
    """
    exists = await connection.fetchval("select to_regclass('indexer.distribution') is not null")
    if not exists or (await load_layout(connection)).commit_numbers:
        yield
        return
    # One shard after the other. Otherwise, Citus refuses to create a view or a function after a statement on all
    # shards. From now on, `set local` applies to all nodes: so does the limit of the waits for locks.
    await connection.execute("set local citus.multi_shard_modify_mode = 'sequential'")
    await connection.execute("set local citus.propagate_set_commands = 'local'")
    yield
    waiting = await waiting_tables(connection)
    if FIRST not in waiting:
        for table in waiting:
            await distribute_table(connection, table)
            await delete_local_rows(connection, table)
        await use_two_phases(connection)
