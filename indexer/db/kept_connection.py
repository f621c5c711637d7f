"""A connection that stays open between its uses."""

from asyncio import Lock
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic

import asyncpg

from indexer.db.columns import Connection

MAX_IDLE_SECONDS = 300.0
"""Seconds without use after which the next use opens another connection: a firewall may have forgotten the old one."""
CANCEL_TIMEOUT = 5.0
"""Seconds to wait for the end of a cancelled statement."""


class KeptConnection:
    """A connection for one block at a time. A block opens it if there is none, or none that can be used."""

    def __init__(self, connect: Callable[[], Awaitable[asyncpg.Connection]]) -> None:
        """Use `connect` to open the connection."""
        self._connect = connect
        self._lock = Lock()
        self._used_at = 0.0
        self._connection: asyncpg.Connection | None = None
        self._ended = False

    @asynccontextmanager
    async def use(self) -> AsyncIterator[asyncpg.Connection]:
        """Use the connection in a block. It is closed after a block that raises, because its session may be the cause.

        Raises:
            asyncpg.InterfaceError: `close` was called.
            Exception: What `connect` raises.
        """
        async with self._lock:
            connection = await self._usable()
            try:
                yield connection
            except BaseException:
                await close_in_time(connection)
                raise
            finally:
                self._used_at = monotonic()

    async def close(self) -> None:
        """Close the connection after the block that uses it, and open none again."""
        async with self._lock:
            self._ended = True
            if self._connection is not None:
                await close_in_time(self._connection)

    async def _usable(self) -> asyncpg.Connection:
        """Return the connection, or another one if it is closed or was unused for too long."""
        if self._ended:
            raise asyncpg.InterfaceError("the connection is closed")
        if self._connection is not None and monotonic() > self._used_at + MAX_IDLE_SECONDS:
            self._connection.terminate()
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connect()
        return self._connection


async def close_in_time(connection: Connection) -> None:
    """Close the connection when Postgres has ended a cancelled statement, at the latest after `CANCEL_TIMEOUT`.

    `terminate` would drop the request to cancel it: the statement would go on, with its locks, although nobody waits.
    """
    # The driver closes the socket before it raises one of these, so the connection is closed in any case.
    with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        await connection.close(timeout=CANCEL_TIMEOUT)
