"""The locks for which a migration waits, and the sessions that hold them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import asyncpg
import structlog

from indexer.db.blocking_sessions import end_sessions_before_migration
from indexer.db.database_errors import CONNECT_TIMEOUT, DatabaseError, connect, database_errors
from indexer.db.schema_version import FIRST_VERSION
from indexer.sync.backoff import backoff_seconds

MAX_LOCK_SECONDS = 64.0
"""Longest time for which it waits for a lock, if the sessions that hold it will end soon: more than
`LockTimes.consumer_seconds`, so that no number of consumers whose queries overlap can keep it waiting."""
MAX_PAUSE_SECONDS = 10.0
"""Longest time until a migration that got no lock is repeated."""
WATCH_SECONDS = 0.5
LATEST_VIEWS = FIRST_VERSION
"""The last migration that replaces public views."""

# A query has locked its view when it waits for a table. If a migration changes the table first, and replaces the view
# afterwards, both wait for each other, and Postgres ends the migration. So it locks the views before all tables, and
# without them: LOCK TABLE would lock the tables, too. No view has the option.
_LOCK_VIEWS = """
    do $$ declare
        view regclass;
    begin
        for view in
            select oid from pg_class where relkind = 'v'
                and relnamespace in (to_regnamespace('atproto'), to_regnamespace('lexicon'))
            order by oid
        loop
            execute format('alter view %s reset (check_option)', view);
        end loop;
    end $$
"""
_BLOCKING = "select array_remove(pg_blocking_pids($1), 0)"  # 0 is a prepared transaction

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LockTimes:
    """How long a migration waits for locks, and when it ends sessions.

    Attributes:
        lock_seconds: Time for which it first waits for a lock. Queries of the same table or view wait behind it.
        consumer_seconds: Age of the transaction of a consumer at which its session is ended: the limit of its role.
    """

    lock_seconds: float = 2.0
    consumer_seconds: float = 60.0


LOCK_TIMES = LockTimes()


class MigrationLocks:
    """Limits the time for which a migration waits for a lock, and makes way for it between its attempts.

    A wait grows from attempt to attempt as long as all sessions that block the migration are young: then they end soon.
    Otherwise it is short, because every query of the same table or view waits behind the migration.
    """

    def __init__(self, dsn: str, times: LockTimes) -> None:
        self._dsn = dsn
        self._times = times
        self._seconds = times.lock_seconds
        self._attempts = 0
        self._blocking: list[int] = []

    @asynccontextmanager
    async def limited(self, connection: asyncpg.Connection, version: str | None) -> AsyncIterator[None]:
        """Limit the waits of the transaction, and note during the block for which sessions it waits.

        Postgres ends the transaction a minute after this process was stopped, for example with SIGSTOP.

        Public views are locked if the upgrade from this version replaces them.
        """
        milliseconds = round(1000 * self._seconds)
        await connection.execute(
            f"set local lock_timeout = {milliseconds}; set local idle_in_transaction_session_timeout = '60s'"
        )
        pid = await connection.fetchval("select pg_backend_pid()")
        self._blocking = []
        observer = await connect(self._dsn)  # before the wait, which may be shorter than the time to connect
        watch = asyncio.create_task(self._watch(observer, pid), name="watch for whom the migration waits")
        try:
            if version is not None and version < LATEST_VIEWS:
                await connection.execute(_LOCK_VIEWS)
            yield
        except asyncio.CancelledError:
            observer.terminate()  # without a wait for a server that hangs
            raise
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await observer.close(timeout=CONNECT_TIMEOUT)
        if not watch.cancelled():
            watch.result()

    async def make_way(self) -> None:
        """Log for which sessions the migration waited, end those of consumers that are too old, and pause."""
        connection = await connect(self._dsn)
        try:
            sessions = await end_sessions_before_migration(connection, self._blocking, self._times.consumer_seconds)
        finally:
            await connection.close()
        for session in sessions:
            seconds = None if session.seconds is None else round(session.seconds)
            if session.ended:
                log.error("consumer.session-ended", role=session.role, pid=session.pid, seconds=seconds)
            else:
                log.warning("database.migration-waiting", role=session.role, pid=session.pid, seconds=seconds)
        if not self._blocking:
            log.warning("database.migration-waiting", role=None, pid=None, seconds=None)
        elif any(session.is_old(self._times.consumer_seconds) for session in sessions if not session.ended):
            self._seconds = self._times.lock_seconds
        else:
            self._seconds = min(2 * self._seconds, MAX_LOCK_SECONDS)
        self._attempts += 1
        await asyncio.sleep(backoff_seconds(self._attempts, self._dsn, first=0.5, maximum=MAX_PAUSE_SECONDS))

    async def _watch(self, observer: asyncpg.Connection, pid: int) -> None:
        """Note again and again which sessions block this one; keep the last ones.

        If the observer loses its connection, the migration goes on, and does not know which sessions block it later.
        """
        with suppress(DatabaseError), database_errors():
            while True:
                self._blocking = await observer.fetchval(_BLOCKING, pid) or self._blocking
                await asyncio.sleep(WATCH_SECONDS)
