"""A connection that stays open between its uses."""

from asyncio import Lock
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic

import asyncpg

MAX_IDLE_SECONDS = 300.0
"""Seconds without use after which the next use opens another connection: a firewall may have forgotten the old one."""


class KeptConnection:
    """A connection for one block at a time. A block opens it if there is none, or none that can be used.

    Attributes:
        connection: The last connection, which may be closed; None before the first use.
    """

    def __init__(self, connect: Callable[[], Awaitable[asyncpg.Connection]]) -> None:
        """Use `connect` to open the connection."""
        self._connect = connect
        self._lock = Lock()
        self._used_at = 0.0
        self.connection: asyncpg.Connection | None = None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[asyncpg.Connection]:
        """Use the connection in a block. Raises what `connect` raises."""
        async with self._lock:
            if self.connection is not None and monotonic() > self._used_at + MAX_IDLE_SECONDS:
                self.connection.terminate()
            if self.connection is None or self.connection.is_closed():
                self.connection = await self._connect()
            try:
                yield self.connection
            finally:
                self._used_at = monotonic()
