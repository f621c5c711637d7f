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
of this program. A process that starts later reads the row, and ends (`indexer.db.placement.require_complete`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

import asyncpg
from asyncpg import exceptions

from indexer.cluster.nodes import (
    ClusterNode,
    UnsuitableClusterError,
    check_nodes,
    load_nodes,
    notices,
)
from indexer.cluster.split_shards import WrittenBytes, cut_shards, load_shard_groups, plan_cuts
from indexer.db.columns import Connection
from indexer.db.database_errors import CONNECT_TIMEOUT, opening, unusable
from indexer.db.distributed_tables import (
    DISTRIBUTED,
    FIRST,
    delete_local_rows,
    distribute_table,
    use_two_phases,
    waiting_tables,
)
from indexer.db.gaps import load_cursors, open_gap
from indexer.db.placement import load_placement
from indexer.db.schema_version import require_current_schema, require_ownership
from indexer.db.shard_lock import FEED, open_lock, session_name
from indexer.reasons import GapReason
from indexer.sync.shard import BUCKETS, Shard
from indexer.sync.stream import Gap, merged

SHARDS_PER_NODE = 2
"""Shards for each node if the operator names no number. Twice as many nodes can share them later, and each shard makes
live batches more expensive. A later call of the command can split the shards."""
EVERYTHING = range(FEED.stop)
"""The positions of all buckets, and the feed, which belongs to one process, too."""
PROGRESS_SECONDS = 1.0
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
"""Called with the name of the step, and with the number of bytes that are distributed or cut, and of all."""

_SESSION = {
    "application_name": session_name(EVERYTHING),
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "client_connection_check_interval": "2s",  # a statement ends soon after this process was killed
}
_OF_COMMAND = [session_name(EVERYTHING), "indexer distribute progress"]
_PROGRESS_SESSION = _SESSION | {"application_name": "indexer distribute progress"}

# Of two calls of this command, the one that began later waits for the other one.
_OTHER_SESSIONS = """
    select format('session %s from %s', a.pid, coalesce(host(a.client_addr), 'this machine')) as name,
        a.application_name = any($1::text[]) as is_command
    from pg_stat_activity a join pg_stat_activity own on own.pid = pg_backend_pid()
    where a.datname = current_database() and a.pid <> own.pid and a.application_name ~ '^indexer( |$)' and (
        a.application_name <> all($1::text[])
        or coalesce((a.backend_start, a.pid) < (own.backend_start, own.pid), true)
    )
"""
_ROW = "select shards, finished_at is not null as finished from indexer.distribution"
_ADD_ROW = "insert into indexer.distribution (shards) values ($1) returning shards, false as finished"
_REOPEN_WITH_SHARDS = """
    update indexer.distribution set shards = $1, finished_at = null returning shards, false as finished
"""
_REOPEN = "update indexer.distribution set finished_at = null returning shards, false as finished"
_FINISH = "update indexer.distribution set finished_at = now() where finished_at is null"
_RENAME_CURSOR = "update indexer.cursor set shard = $3 where relay = $1 and shard = $2"
_DELETE_CURSORS = "delete from indexer.cursor where relay = $1 and shard <> $2"
_WIDEN_GAPS = "update indexer.gap set shard = $1, reconciled = '{}' where closed_at is null"
_WIDEN_CRAWLS = """
    insert into indexer.crawl_progress (purpose, source, collection, cursor, listed, found, began_at, shard, last_gap)
    select purpose, source, collection, null, 0, 0, min(began_at), $1, 0
    from indexer.crawl_progress where shard <> $1 group by 1, 2, 3
    on conflict (purpose, source, collection, shard) do update
    set cursor = null, listed = 0, found = 0, finished_at = null, last_gap = 0
"""
_DELETE_CRAWLS = "delete from indexer.crawl_progress where shard <> $1"
# The releases before this one know no distributed database.
_REQUIRE_RELEASE = """
    insert into indexer.stored_setting select 'oldest_compatible_schema', version_num from indexer.alembic_version
    on conflict (name) do update set value = excluded.value
"""
_DISTRIBUTE_FIRST = f"""
    select create_distributed_table('indexer.{FIRST}', 'bucket', shard_count => 1, colocate_with => 'none')
"""
_SIZES = """
    select relname::text, pg_table_size(oid) as size, reltuples::bigint as rows from pg_class
    where relnamespace = 'indexer'::regnamespace and relname = any($1::text[])
"""
_NEVER_ANALYZED = """
    select relname::text from pg_class
    where relnamespace = 'indexer'::regnamespace and relname = any($1::text[]) and reltuples < 0
"""
_COPIED = """
    select coalesce(sum(result::bigint), 0)::bigint from run_command_on_all_nodes($command$
        select coalesce(sum(tuples_processed), 0) from pg_stat_progress_copy where datid = (
            select oid from pg_database where datname = current_database()
        ) and command = 'COPY FROM'
    $command$) where success
"""
_RECOVERY_INTERVAL = f"select setting::int from pg_settings where name = '{RECOVERY}'"
# An earlier call may have left prepared transactions. Without the privilege, Citus completes them a little later.
_MAY_COMPLETE_PREPARED = "select has_function_privilege('recover_prepared_transactions()', 'execute')"
_ADAPT_PUBLIC_SCHEMA = "select indexer.adapt_public_schema()"
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
_COMPLETE_PREPARED = "select recover_prepared_transactions()"


@dataclass(slots=True)
class Distribution:
    """The result of the command.

    Attributes:
        shards: The number of shards of each table.
        nodes: The addresses of the nodes that hold them.
        tables: The estimated number of rows of each table that was distributed now.
        split_from: The number of shards before, if shards with rows were split now.
        settings: The settings of the database and of the coordinator.
        was_complete: Everything was distributed before.
        notices: What the operator should know or do.
    """

    shards: int
    nodes: list[str]
    was_complete: bool
    tables: dict[str, int] = field(default_factory=dict)
    split_from: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


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
    with opening(dsn):
        async with _session(dsn, _SESSION) as connection:
            try:
                nodes = await load_nodes(connection)
                check_nodes(nodes)
                await require_current_schema(dsn)
                await require_ownership(dsn)
                async with _owning_everything(connection):
                    return await _Command(dsn, connection, nodes, on_progress).run(shards)
            except UnsuitableClusterError as error:
                raise unusable(dsn, str(error)) from error


@asynccontextmanager
async def _session(dsn: str, settings: dict[str, str]) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT, server_settings=settings)
    try:
        yield connection
    finally:
        await connection.close(timeout=CONNECT_TIMEOUT)


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
    async with open_lock(connection, EVERYTHING, await load_placement(connection)) as lock:
        while not await lock.claim():  # noqa: ASYNC110 - asks another process
            await asyncio.sleep(WAIT_SECONDS)
        yield


async def _wait_until_alone(connection: Connection) -> None:
    """Wait until earlier calls of this command have ended.

    Raises:
        UnsuitableClusterError: There is a session of a daemon or of another command, or an earlier call goes on.
    """
    ends = monotonic() + MAX_WAIT_SECONDS
    while others := await connection.fetch(_OTHER_SESSIONS, _OF_COMMAND):
        if monotonic() > ends or not all(session["is_command"] for session in others):
            names = "; ".join(session["name"] for session in others)
            raise UnsuitableClusterError(f"stop the daemons and commands that use it first: {names}")
        await asyncio.sleep(WAIT_SECONDS)


async def _join_shards(connection: Connection) -> None:
    """Store for all buckets what was stored for shards: a shard has other buckets on a distributed database."""
    every = str(Shard())
    await _merge_cursors(connection, every)
    await connection.execute(_WIDEN_GAPS, every)
    await connection.execute(_WIDEN_CRAWLS, every)
    await connection.execute(_DELETE_CRAWLS, every)


async def _require_every_bucket(connection: Connection) -> None:
    """Check that this database has all accounts, unless it is empty.

    Raises:
        UnsuitableClusterError: It is one of several databases by bucket, or a shard has never run.
    """
    shards = {cursor.shard for cursor in await load_cursors(connection)}
    covered = {position for shard in shards for position in shard.positions}
    if shards and len(covered) < BUCKETS:
        raise UnsuitableClusterError(
            f"its cursors are about {len(covered)} of {BUCKETS} buckets, those of the shards "
            f"{', '.join(sorted(map(str, shards)))}: it is one of several databases by bucket, and has a part of the "
            "accounts; distribute a new database, or run a daemon for each of the other shards first"
        )


async def _merge_cursors(connection: Connection, every: str) -> None:
    """Replace the cursors of each relay by one for all buckets: the lowest one that is valid."""
    cursors = await load_cursors(connection)
    for relay in sorted({cursor.relay for cursor in cursors}):
        lowest, complete = merged([cursor for cursor in cursors if cursor.relay == relay])
        await connection.execute(_DELETE_CURSORS, relay, str(lowest.shard))
        await connection.execute(_RENAME_CURSOR, relay, str(lowest.shard), every)
        if not complete:
            await open_gap(connection, Gap(relay, every, GapReason.SEQUENCE_RESTARTED))


class _Command:
    """One call of the command, which owns all buckets."""

    def __init__(self, dsn: str, connection: Connection, nodes: Sequence[ClusterNode], on_progress: OnProgress) -> None:
        self._dsn = dsn
        self._connection = connection
        self._nodes = [node for node in nodes if node.holds_shards]
        self._on_progress = on_progress
        self._notices = notices(nodes)

    async def run(self, shards: int | None) -> Distribution:
        """Do each step that was not done yet."""
        if await self._connection.fetchval(_MAY_COMPLETE_PREPARED):
            await self._connection.execute(_COMPLETE_PREPARED)
        row = await self._connection.fetchrow(_ROW)
        if row is None:
            row = await self._begin(shards or default_shards(len(self._nodes)))
        elif shards is not None and shards != row["shards"]:
            row = await self._reopen(shards)
        elif row["finished"] and await waiting_tables(self._connection):  # restored from the dump of a cluster
            [row] = await self._connection.fetch(_REOPEN)
        # A process that connected before the row was stored may not have seen it.
        await _wait_until_alone(self._connection)
        result = Distribution(row["shards"], [node.name for node in self._nodes], row["finished"])
        result.settings = await self._set_settings()
        sizes = await self._sizes()
        result.tables = {table: rows for table, (_, rows) in sizes.items()}
        result.split_from = await self._cut_shards(row["shards"])
        await self._distribute_tables(sizes)
        async with self._connection.transaction():
            await use_two_phases(self._connection)
        await self._connection.execute(_ADAPT_PUBLIC_SCHEMA)
        await self._reserve_commands()
        await self._connection.execute(_FINISH)
        result.notices = self._notices
        return result

    async def _reopen(self, shards: int) -> asyncpg.Record:
        """Store another number of shards: more than there are, or as many again if none was cut since."""
        existing = len(await load_shard_groups(self._connection))
        if shards < existing:
            raise UnsuitableClusterError(f"its tables have {existing} shards, and shards cannot be joined")
        [row] = await self._connection.fetch(_REOPEN_WITH_SHARDS, shards)
        return row

    async def _begin(self, shards: int) -> asyncpg.Record:
        """Store that the database is being distributed; return the new row.

        Raises:
            UnsuitableClusterError: A table is distributed already, in other shards, or accounts are missing.
        """
        waiting = await waiting_tables(self._connection)
        if by_hand := [table for table in DISTRIBUTED if table not in waiting]:
            raise UnsuitableClusterError(f"the tables {', '.join(by_hand)} were distributed by hand; undistribute them")
        await _require_every_bucket(self._connection)
        async with self._connection.transaction():
            [row] = await self._connection.fetch(_ADD_ROW, shards)
            await self._connection.execute(_REQUIRE_RELEASE)
            await _join_shards(self._connection)
        return row

    async def _set_settings(self) -> dict[str, str]:
        """Set what Citus needs, for the sessions that are opened from now on; return all settings."""
        database = await self._connection.fetchval("select quote_ident(current_database())")
        for setting, value in SETTINGS.items():
            await self._connection.execute(f"alter database {database} set {setting} = '{value}'")
        return SETTINGS | await self._recover_soon()

    async def _recover_soon(self) -> dict[str, str]:
        """Let Citus complete interrupted commits soon; return the setting if this was possible or done before."""
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
                return {}
            milliseconds = RECOVERY_SECONDS * 1000
        return {RECOVERY: f"{milliseconds} ms"}

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

    async def _cut_shards(self, shards: int) -> int | None:
        """Cut the shards of the first table, and with them all that are distributed, so that there are this many.

        Returns:
            The number of shards before, if shards with rows were cut.
        """
        waiting = await waiting_tables(self._connection)
        if FIRST in waiting:
            await self._connection.execute(_DISTRIBUTE_FIRST)
        groups = await load_shard_groups(self._connection)
        cuts = await plan_cuts(self._connection, groups, shards, self._nodes)
        if len(waiting) >= len(DISTRIBUTED) - 1:  # only the first table is distributed
            for cut in cuts:
                await cut_shards(self._connection, cut)
            return None
        total, done = sum(cut.size for cut in cuts), 0
        for number, cut in enumerate(cuts, 1):
            step = f"shard {number} of {len(cuts)}"
            async with self._progress(step, done, cut.size, total, WrittenBytes().count):
                await cut_shards(self._connection, cut)
            done += cut.size
        return len(groups) if cuts else None

    async def _sizes(self) -> dict[str, tuple[int, int]]:
        """Return size in bytes and estimated number of rows of each table that is not distributed yet."""
        waiting = await waiting_tables(self._connection)
        for (table,) in await self._connection.fetch(_NEVER_ANALYZED, waiting):
            await self._connection.execute(f"analyze indexer.{table}")
        return {row["relname"]: (row["size"], row["rows"]) for row in await self._connection.fetch(_SIZES, waiting)}

    async def _distribute_tables(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Distribute the tables with these sizes, with their rows, and delete all rows that were copied."""
        total, moved = sum(size for size, _ in sizes.values()), 0
        for table in DISTRIBUTED:
            size, rows = sizes.get(table, (0, 0))
            if table in sizes and table != FIRST:
                async with self._progress(table, moved, size, total, _copied_bytes(size, rows)):
                    await distribute_table(self._connection, table)
            moved += size
            await delete_local_rows(self._connection, table)

    @asynccontextmanager
    async def _progress(
        self, step: str, done: int, size: int, total: int, count: Callable[[Connection], Awaitable[int]]
    ) -> AsyncIterator[None]:
        """Report the progress of the block.

        Args:
            step: The name of the step.
            done: The bytes of the steps before.
            size: The bytes of the step.
            total: The bytes of all steps.
            count: Returns how many bytes of the step are done, about.
        """
        self._on_progress(step, done, total)

        ended = asyncio.Event()

        async def report() -> None:
            if await _happens(ended, PROGRESS_SECONDS):
                return
            async with _session(self._dsn, _PROGRESS_SESSION) as connection:
                while not ended.is_set():
                    counted = await count(connection)
                    self._on_progress(step, done + min(size, counted), total)
                    await _happens(ended, PROGRESS_SECONDS)

        task = asyncio.create_task(report(), name=f"progress of {step}")
        try:
            yield
        finally:
            # Canceled only if a node does not answer: each canceled query is an error in the log of the server.
            ended.set()
            await asyncio.wait([task], timeout=CONNECT_TIMEOUT)
            task.cancel()
            await asyncio.wait([task])
        self._on_progress(step, done + size, total)


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; return False if it has not happened within this time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _copied_bytes(size: int, rows: int) -> Callable[[Connection], Awaitable[int]]:
    """Return a function that estimates how many bytes of a table of this size have arrived in its shards."""

    async def count(connection: Connection) -> int:
        copied: int = await connection.fetchval(_COPIED)
        return size * copied // max(rows, 1)

    return count
