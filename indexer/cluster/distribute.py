"""Distribute the tables of a migrated database over the nodes of a Citus cluster: the command `indexer distribute`.

    step          what is stored after it                                          if it is interrupted
    begin         a row in `distribution`; cursors, gaps and crawls of all buckets  one transaction
    settings      settings of the database, and of the coordinator                  set again
    shards        `resync_queue` in shards of equally many buckets                  those that are too large are cut
    each table    the table in the same shards, with its rows                       one transaction; then it is the next
    two phases    triggers of the plain tables; COMMIT does not number changes      one transaction
    public        views that read one shard, and what their readers need on nodes   again at each call
    commands      only the roles of the daemons may send commands to the nodes      again at each call
    finish        `finished_at` in the row

Each step looks at what is stored, and does the rest. So the command can be killed and run again at any point, and on a
database that is distributed it changes nothing.

No process uses the database meanwhile. The command owns all buckets, and after the first step there is no other session
of this program. A process that starts later reads the row, and ends (`indexer.db.layout.load_layout`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

import asyncpg
from asyncpg import exceptions

from indexer.cluster.nodes import ClusterNode, UnsuitableClusterError, check_nodes, load_nodes
from indexer.cluster.tables import (
    DISTRIBUTED,
    FIRST,
    delete_local_rows,
    distribute_table,
    use_two_phases,
    waiting_tables,
)
from indexer.db.columns import Connection
from indexer.db.connections import NO_TIMEOUTS
from indexer.db.database_errors import connect, database_errors, unusable
from indexer.db.gaps import load_cursors, open_gap
from indexer.db.layout import load_layout
from indexer.db.requirements import require_usable_schema
from indexer.db.shard_lock import FEED, open_lock, session_name
from indexer.reasons import GapReason
from indexer.sync.shard import BUCKETS, Shard
from indexer.sync.stream import Gap, resume_point

SHARDS_PER_NODE = 2
"""Shards for each node if the operator names no number. Twice as many nodes can share them later, and each shard makes
live batches more expensive. A later call of the command can split the shards."""
EVERYTHING = range(FEED.stop)
"""The positions of all buckets, and the feed, which belongs to one process, too."""
WAIT_SECONDS = 0.5
MAX_WAIT_SECONDS = 30.0
"""Time to wait for another call of this command. If it was killed, its sessions end within a few seconds."""
SETTINGS = {
    "citus.max_adaptive_executor_pool_size": "1",
    "citus.max_cached_conns_per_worker": "4",
    "citus.override_table_visibility": "off",
    "jit": "off",
}
"""Settings of the database, which Citus passes on to the workers. docs/performance.md has what was measured.

`max_adaptive_executor_pool_size`: the parts of a statement that are on one node use one connection, one after another.
For small batches that is faster than more connections; for batches of 500 messages it was a little slower.
`max_cached_conns_per_worker`: to open a connection takes longer than most statements.
`override_table_visibility`: otherwise, Citus adds a slow condition to each query of `pg_class`, and every session of
the database driver begins with such a query.
`jit`: the setting of a daemon's session does not reach the sessions on the workers.
"""

RECOVERY, RECOVERY_SECONDS = "citus.recover_2pc_interval", 2
"""A setting of the coordinator: how often Citus completes interrupted commits. Its default is a minute."""

OnProgress = Callable[[str, int, int], None]
"""Called when a table or a shard begins, with its name, and with the number of those that are done, and of all.
`pg_stat_progress_copy` shows how much of the present table was copied."""

_SESSION = NO_TIMEOUTS | {
    "application_name": session_name(EVERYTHING),
    "client_connection_check_interval": "2s",  # a statement ends soon after this process was killed
}

# Of two calls of this command, the one that began later waits for the other one.
_OTHER_SESSIONS = """
    select format('session %s from %s', a.pid, coalesce(host(a.client_addr), 'this machine')) as name,
        a.application_name = $1 as is_command
    from pg_stat_activity a join pg_stat_activity own on own.pid = pg_backend_pid()
    where a.datname = current_database() and a.pid <> own.pid and a.application_name ~ '^indexer( |$)' and (
        a.application_name <> $1
        or coalesce((a.backend_start, a.pid) < (own.backend_start, own.pid), true)
    )
"""
_ROW = "select shards, finished_at is not null as finished from indexer.distribution"
_ADD_ROW = "insert into indexer.distribution (shards) values ($1) returning shards, false as finished"
_REOPEN = """
    update indexer.distribution set shards = coalesce($1, shards), finished_at = null
    returning shards, false as finished
"""
_RENAME_CURSOR = "update indexer.cursor set shard = $3 where relay = $1 and shard = $2"
_WIDEN_CRAWLS = """
    insert into indexer.crawl_progress (purpose, source, collection, cursor, listed, found, began_at, shard, last_gap)
    select purpose, source, collection, null, 0, 0, min(began_at), $1, 0
    from indexer.crawl_progress where shard <> $1 group by 1, 2, 3
    on conflict (purpose, source, collection, shard) do update
    set cursor = null, listed = 0, found = 0, finished_at = null, last_gap = 0
"""
_DISTRIBUTE_FIRST = f"""
    select create_distributed_table('indexer.{FIRST}', 'bucket', shard_count => 1, colocate_with => 'none')
"""
_RECOVERY_INTERVAL = f"select setting::int from pg_settings where name = '{RECOVERY}'"
# An earlier call may have left prepared transactions. Without the privilege, Citus completes them a little later.
_MAY_COMPLETE_PREPARED = "select has_function_privilege('recover_prepared_transactions()', 'execute')"
# The daemons have the privilege USAGE of the schema. At the coordinator, readers do not have it.
_COMMANDS = """
    with command as (
        select oid, proowner from pg_proc where pronamespace = 'pg_catalog'::regnamespace and (
            proname ~ '^run_command_on_' or proname = 'master_run_on_worker'
        )
    ), daemon as (
        select distinct grantee from pg_namespace, aclexplode(coalesce(nspacl, acldefault('n', nspowner)))
        where nspname = 'indexer' and privilege_type = 'USAGE' and grantee <> 0
    )
    select (select string_agg(oid::regprocedure::text, ', ') from command) as functions,
        (select bool_and(pg_has_role(proowner, 'usage')) from command) as may_revoke,
        (select string_agg(grantee::regrole::text, ', ') from daemon) as roles
    where exists (select from command where has_function_privilege('public', oid, 'execute'))
        or exists (select from command, daemon where not has_function_privilege(grantee, oid, 'execute'))
"""
# The shards of all distributed tables that have the same buckets, by the shard of the first table and its hashes.
_GROUPS = f"""
    select shardid as id, shardminvalue::int as lowest, shardmaxvalue::int as highest, nodeid as node
    from pg_dist_shard join pg_dist_placement using (shardid) join pg_dist_node using (groupid)
    where logicalrelid = 'indexer.{FIRST}'::regclass and noderole = 'primary' order by shardminvalue::int
"""
_HASHES = "select bucket, worker_hash(bucket::smallint) from generate_series(0, $1 - 1) bucket order by 2"
_SPLIT = "select citus_split_shard_by_split_points($1, $2::text[], $3::int[], 'block_writes')"


@dataclass(slots=True)
class Distribution:
    """The result of the command.

    Attributes:
        shards: The number of shards of each table.
        nodes: The addresses of the nodes that hold them.
        was_complete: Everything was distributed before.
        tables: The tables that were distributed now.
        notices: What the operator should know or do.
    """

    shards: int
    nodes: list[str]
    was_complete: bool
    tables: list[str]
    notices: list[str]


async def distribute(dsn: str, shards: int | None, on_progress: OnProgress) -> Distribution:
    """Distribute the tables over the nodes, or complete what an earlier call began.

    Args:
        dsn: The coordinator. Its schema is that of this release.
        shards: The number of shards of each table, a divisor of 256. None: `SHARDS_PER_NODE` for each node.
        on_progress: See `OnProgress`.

    Raises:
        SettingsError: The operator has to change something on a node, or to stop a process.
        DatabaseError: A node is unavailable.
    """
    with database_errors(dsn):
        async with connect(dsn, _SESSION) as connection:
            try:
                nodes = await load_nodes(connection)
                check_nodes(nodes)
                await require_usable_schema(dsn)
                async with _owning_everything(connection):
                    holders = [node for node in nodes if node.holds_shards]
                    return await _Command(connection, holders, on_progress).run(shards)
            except UnsuitableClusterError as error:
                raise unusable(dsn, str(error)) from error


def default_shards(nodes: int) -> int:
    """Return the number of shards for so many nodes: a power of two, so that shards have equally many buckets."""
    return min(BUCKETS, 1 << (nodes * SHARDS_PER_NODE - 1).bit_length())


@asynccontextmanager
async def _owning_everything(connection: asyncpg.Connection) -> AsyncIterator[None]:
    """Own all buckets during the block. No other process of this program used the database when it began.

    Raises:
        UnsuitableClusterError: A daemon or another command uses the database.
    """
    await _wait_until_alone(connection)
    async with open_lock(connection, EVERYTHING, await load_layout(connection)) as lock:
        while not await lock.claim():  # noqa: ASYNC110 - asks another process
            await asyncio.sleep(WAIT_SECONDS)
        yield


async def _wait_until_alone(connection: Connection) -> None:
    """Wait until earlier calls of this command have ended.

    Raises:
        UnsuitableClusterError: There is a session of a daemon or of another command, or an earlier call goes on.
    """
    ends = monotonic() + MAX_WAIT_SECONDS
    while others := await connection.fetch(_OTHER_SESSIONS, session_name(EVERYTHING)):
        if monotonic() > ends or not all(session["is_command"] for session in others):
            names = "; ".join(session["name"] for session in others)
            raise UnsuitableClusterError(f"stop the daemons and commands that use it first: {names}")
        await asyncio.sleep(WAIT_SECONDS)


async def _join_shards(connection: Connection) -> None:
    """Store for all buckets what was stored for shards: a shard has other buckets on a distributed database.

    Of the cursors of a relay, the lowest one that is valid stays.

    Raises:
        UnsuitableClusterError: It is one of several databases by bucket, or a shard has never run.
    """
    cursors, every = await load_cursors(connection), str(Shard())
    covered = {position for cursor in cursors for position in Shard.parse(cursor.shard).positions}
    if cursors and len(covered) < BUCKETS:
        shards = ", ".join(sorted({cursor.shard for cursor in cursors}))
        raise UnsuitableClusterError(
            f"its cursors are about {len(covered)} of {BUCKETS} buckets, those of the shards {shards}: it is one of "
            "several databases by bucket, and has a part of the accounts; distribute a new database, or run a daemon "
            "for each of the other shards first"
        )
    for relay in sorted({cursor.relay for cursor in cursors}):
        epoch, point = resume_point(cursors, relay, Shard())
        current = [cursor for cursor in cursors if (cursor.relay, cursor.epoch) == (relay, epoch)]
        valid = [cursor for cursor in current if point is not None and cursor.seq == point.seq]
        kept = min(valid or current, key=lambda cursor: cursor.seq)
        await connection.execute("delete from indexer.cursor where relay = $1 and shard <> $2", relay, kept.shard)
        await connection.execute(_RENAME_CURSOR, relay, kept.shard, every)
        if point is None:
            await open_gap(connection, Gap(relay, every, GapReason.SEQUENCE_RESTARTED))
    await connection.execute("update indexer.gap set shard = $1, reconciled = '{}' where closed_at is null", every)
    await connection.execute(_WIDEN_CRAWLS, every)
    await connection.execute("delete from indexer.crawl_progress where shard <> $1", every)


@dataclass
class _Command:
    """One call of the command, which owns all buckets. The nodes are those that hold shards."""

    _connection: Connection
    _nodes: Sequence[ClusterNode]
    _on_progress: OnProgress
    _notices: list[str] = field(default_factory=list)

    async def run(self, shards: int | None) -> Distribution:
        """Do each step that was not done yet."""
        if await self._connection.fetchval(_MAY_COMPLETE_PREPARED):
            await self._connection.execute("select recover_prepared_transactions()")
        row = await self._connection.fetchrow(_ROW)
        if row is None:
            row = await self._begin(shards or default_shards(len(self._nodes)))
        elif shards is not None and shards != row["shards"]:
            row = await self._reopen(shards)
        elif row["finished"] and await waiting_tables(self._connection):  # restored from the dump of a cluster
            [row] = await self._connection.fetch(_REOPEN, None)
        # A process that connected before the row was stored may not have seen it.
        await _wait_until_alone(self._connection)
        await self._set_settings()
        tables = await waiting_tables(self._connection)
        await self._cut_shards(row["shards"])
        await self._distribute_tables()
        async with self._connection.transaction():
            await use_two_phases(self._connection)
        await self._connection.execute("select indexer.adapt_public_schema()")
        await self._reserve_commands()
        await self._connection.execute("update indexer.distribution set finished_at = now() where finished_at is null")
        names = [node.name for node in self._nodes]
        return Distribution(row["shards"], names, row["finished"], tables, self._notices)

    async def _reopen(self, shards: int) -> asyncpg.Record:
        """Store another number of shards: more than there are, or as many again if none was cut since."""
        existing = len(await self._connection.fetch(_GROUPS))
        if shards < existing:
            raise UnsuitableClusterError(f"its tables have {existing} shards, and shards cannot be joined")
        [row] = await self._connection.fetch(_REOPEN, shards)
        return row

    async def _begin(self, shards: int) -> asyncpg.Record:
        """Store that the database is being distributed; return the new row.

        Raises:
            UnsuitableClusterError: A table is distributed already, in other shards, or accounts are missing.
        """
        waiting = await waiting_tables(self._connection)
        if by_hand := [table for table in DISTRIBUTED if table not in waiting]:
            raise UnsuitableClusterError(f"the tables {', '.join(by_hand)} were distributed by hand; undistribute them")
        async with self._connection.transaction():
            [row] = await self._connection.fetch(_ADD_ROW, shards)
            await _join_shards(self._connection)
        return row

    async def _set_settings(self) -> None:
        """Set what Citus needs, for the sessions that are opened from now on."""
        database = await self._connection.fetchval("select quote_ident(current_database())")
        for setting, value in SETTINGS.items():
            await self._connection.execute(f"alter database {database} set {setting} = '{value}'")
        milliseconds = await self._connection.fetchval(_RECOVERY_INTERVAL)
        if not 0 <= milliseconds <= RECOVERY_SECONDS * 1000:
            try:
                await self._connection.execute(f"alter system set {RECOVERY} = '{RECOVERY_SECONDS}s'")
                await self._connection.execute("select pg_reload_conf()")
            except exceptions.InsufficientPrivilegeError:
                self._notices.append(
                    f"let an administrator set {RECOVERY} = '{RECOVERY_SECONDS}s' on the coordinator: until then, "
                    f"changes whose commit was interrupted stay invisible for up to {milliseconds // 1000} s"
                )

    async def _reserve_commands(self) -> None:
        """Let no reader send a command to the nodes, where it may read shards, with the records of hidden repos."""
        row = await self._connection.fetchrow(_COMMANDS)
        if row is None:
            return
        revoke = (
            f"revoke execute on function {row['functions']} from public; "
            f"grant execute on function {row['functions']} to {row['roles']}"
        )
        if row["may_revoke"]:
            await self._connection.execute(revoke)
        else:
            self._notices.append(f"let an administrator keep readers from sending commands to the nodes: {revoke}")

    async def _cut_shards(self, shards: int) -> None:
        """Cut the shards of the first table, and with them all that are distributed, so that there are this many.

        The parts of a shard stay on its node. If there is only one shard, it is divided among the nodes.

        Raises:
            UnsuitableClusterError: This version of Citus orders the buckets in another way.
        """
        if FIRST in await waiting_tables(self._connection):
            await self._connection.execute(_DISTRIBUTE_FIRST)
        groups = await self._connection.fetch(_GROUPS)
        if len(groups) >= shards:
            return
        order, hashes = zip(*await self._connection.fetch(_HASHES, BUCKETS), strict=True)
        if list(order) != await self._connection.fetchval("select indexer.hash_order()"):
            raise UnsuitableClusterError("this version of Citus orders the buckets in another way than this program")
        ends = [hashes[number * BUCKETS // shards - 1] for number in range(1, shards)]
        for done, group in enumerate(groups):
            inside = [end for end in ends if group["lowest"] <= end < group["highest"]]
            nodes = [group["node"]] * (len(inside) + 1)
            if len(groups) == 1:
                nodes = [self._nodes[number * len(self._nodes) // shards].id for number in range(shards)]
            if inside:
                self._on_progress("shards", done, len(groups))
                await self._connection.execute(_SPLIT, group["id"], [str(end) for end in inside], nodes)

    async def _distribute_tables(self) -> None:
        """Distribute the tables that are not distributed yet, with their rows, and delete all rows that were copied."""
        waiting = await waiting_tables(self._connection)
        for done, table in enumerate(DISTRIBUTED):
            if table in waiting:
                self._on_progress(table, done, len(DISTRIBUTED))
                await distribute_table(self._connection, table)
            await delete_local_rows(self._connection, table)
