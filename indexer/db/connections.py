"""The connections to the database: a pool, and sessions on connections of their own."""

from asyncio import CancelledError, Event, Semaphore, timeout
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Self

import asyncpg

from indexer.concurrency.event_wait import wait_for_event
from indexer.crash_points import COMMITTED, crash_point
from indexer.db.columns import Connection
from indexer.db.database_errors import CONNECT_TIMEOUT, DatabaseError, database_errors
from indexer.db.layout import load_layout
from indexer.errors import RefusedWriteError
from indexer.reasons import FetchFailure
from indexer.sync.shard import PLAIN

STATEMENT_TIMEOUT = 60.0
"""Seconds after which a statement is cancelled."""
LISTEN_SECONDS = 30.0
"""Time after which a connection that waits for notifications is checked, and in which it must answer."""
CANCEL_TIMEOUT = 5.0
"""Seconds to wait for the end of a cancelled statement."""
ENDS_STATEMENT = (CancelledError, TimeoutError)
"""With these errors, the driver cancels the running statement."""
RESERVED_CONNECTIONS = 3
"""Connections that resyncs leave to the live path, to lease heartbeats, and to reports."""
SERVER_SETTINGS = {
    "application_name": "indexer",
    "jit": "off",  # compiling costs more than executing any of these statements
    "max_parallel_workers_per_gather": "0",  # reports are not urgent, and other processes need the cores
    "idle_in_transaction_session_timeout": "60s",  # a stopped process keeps its locks for so long
}
NO_TIMEOUTS = dict.fromkeys(("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"), "0")

_EMPTY_BATCH = """
    do $$
    declare written indexer.change_batch;
    begin
        insert into indexer.change_batch (segment, size) select current_segment, 0 from indexer.change_log
        returning * into written;
        delete from indexer.change_batch b where b.segment = written.segment and b.id = written.id;
    end $$
"""
_READ_ALL_NODES = "select count(*) from indexer.resync_queue where priority = 0"
"""The table has one such row for each bucket, so that each part of the layout has some."""


class Connections:
    """A pool of database connections, and connections outside it.

    Attributes:
        layout: The layout of the database when it was opened.
        committed: Set after each transaction that may have written changes.
        failed_operations: How many operations ended with a `DatabaseError`.
        last_error: The last of these errors.
    """

    def __init__(self, pool: asyncpg.Pool, connections: int, dsn: str) -> None:
        self.layout = PLAIN
        self._pool = pool
        self.dsn = dsn
        self.resync_connections = Semaphore(max(1, connections - RESERVED_CONNECTIONS))
        self.committed = Event()
        self.failed_operations = 0
        self.last_error: str | None = None

    @classmethod
    async def open(cls, dsn: str, *, connections: int = 10, readonly: bool = False) -> Self:
        """Connect to the database, which has a schema. With `readonly`, the server rejects every write.

        The pool has `connections` connections. Resyncs use all but `RESERVED_CONNECTIONS` of them.

        Raises:
            SettingsError: The operator has to correct something, such as the URL or the password, or to complete an
                interrupted distribution.
        """
        settings = SERVER_SETTINGS | ({"default_transaction_read_only": "on"} if readonly else {})
        with database_errors(dsn):
            pool = await asyncpg.create_pool(
                dsn,
                min_size=1,
                max_size=connections,
                timeout=CONNECT_TIMEOUT,
                command_timeout=STATEMENT_TIMEOUT,
                server_settings=settings,
                reset=_keep_session,
            )
            opened = cls(pool, connections, dsn)
            try:
                opened.layout = await load_layout(pool, complete_in=dsn)
            except BaseException:
                pool.terminate()
                raise
        return opened

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()

    @asynccontextmanager
    async def maintenance_connection(self) -> AsyncIterator[asyncpg.Connection]:
        """Open a connection for statements that may take hours, or for a lock that is held meanwhile."""
        async with self.own_connection(SERVER_SETTINGS | NO_TIMEOUTS, limited=False) as connection:
            yield connection

    @asynccontextmanager
    async def own_connection(
        self, server_settings: dict[str, str], *, limited: bool = True
    ) -> AsyncIterator[asyncpg.Connection]:
        """Open a connection outside the pool; close it at the end. `limited` applies `STATEMENT_TIMEOUT`."""
        with self.count_failures(), database_errors():
            connection = await asyncpg.connect(
                self.dsn,
                timeout=CONNECT_TIMEOUT,
                command_timeout=STATEMENT_TIMEOUT if limited else None,
                server_settings=server_settings,
            )
            try:
                yield connection
            finally:
                await connection.close(timeout=CONNECT_TIMEOUT)

    async def listen(self, channel: str, on_text: Callable[[str | None], None]) -> None:
        """Call a function with the text of each notification, until the connection ends.

        The first call, with None, means that earlier notifications may have been lost.
        """
        ended = Event()
        async with self.own_connection({"application_name": channel}) as connection:
            connection.add_termination_listener(lambda _connection: ended.set())
            await connection.add_listener(channel, lambda *arguments: on_text(arguments[-1]))
            on_text(None)
            while not await wait_for_event(ended, LISTEN_SECONDS):
                await connection.execute("select 1", timeout=LISTEN_SECONDS)

    async def accepts_writes(self) -> bool:
        """Return True if the database commits an empty change batch, so that another write that fails is the cause.

        All servers that have parts of the layout have to answer.
        """
        try:
            async with self.transaction() as connection:
                await connection.fetchval(_READ_ALL_NODES)
                if self.layout.commit_numbers:
                    await connection.execute(_EMPTY_BATCH)
        except (DatabaseError, asyncpg.PostgresError):
            return False
        return True

    @asynccontextmanager
    async def refusals_checked(self) -> AsyncIterator[None]:
        """Raise `DatabaseError` instead of a `RefusedWriteError` of the block if the database stores nothing else."""
        try:
            yield
        except RefusedWriteError as error:
            if await self.accepts_writes():
                raise
            with self.count_failures():
                raise DatabaseError(FetchFailure.UNREACHABLE, f"the database stores nothing: {error}") from error

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Run the block in a transaction, on a connection of the pool."""
        async with self.connection() as connection:
            async with connection.transaction():
                yield connection
            crash_point(COMMITTED)
            self.committed.set()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Acquire a connection for a block in which all transient errors come from the database.

        It is closed if the block is cancelled or a time limit ends it.
        """
        with self.count_failures(), database_errors():
            # `asyncio.timeout` never loses a cancellation. The timeout of `acquire` would apply to `release`, too.
            async with timeout(CONNECT_TIMEOUT):
                connection = await self._pool.acquire()
            try:
                yield connection
            except BaseException as error:
                # Postgres may receive the cancellation of a statement so late that it affects the next one. An inner
                # block may have turned the error of a time limit into a `DatabaseError`.
                if isinstance(error, ENDS_STATEMENT) or isinstance(error.__cause__, ENDS_STATEMENT):
                    # `terminate` would drop the request to cancel the statement, which would go on, with its locks. The
                    # driver closes the socket before it raises one of these errors.
                    with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                        await connection.close(timeout=CANCEL_TIMEOUT)
                raise
            finally:
                await self._pool.release(connection)

    @contextmanager
    def count_failures(self) -> Iterator[None]:
        """Count a `DatabaseError` of the block."""
        try:
            yield
        except DatabaseError as error:
            self.failed_operations += 1
            self.last_error = str(error)
            raise


class Area:
    """The statements about one area, such as gaps: each method takes a connection of the pool.

    Every method raises `DatabaseError` for a transient error, and retries nothing itself.
    """

    def __init__(self, pool: Connections) -> None:
        self._pool = pool

    async def _fetch(self, statement: str, *arguments: object) -> list[asyncpg.Record]:
        async with self._pool.connection() as connection:
            return await connection.fetch(statement, *arguments)

    async def _fetchval(self, statement: str, *arguments: object) -> Any:
        async with self._pool.connection() as connection:
            return await connection.fetchval(statement, *arguments)

    async def _execute(self, statement: str, *arguments: object) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(statement, *arguments)


async def _keep_session(_connection: asyncpg.Connection) -> None:
    """Do nothing when a connection returns to the pool. The driver has ended its transaction, if one was open.

    Sessions of the pool never change: every setting is local to a transaction, and listeners and locks of a session
    have connections of their own. The usual reset of a session would be one more round trip in every operation.
    """
