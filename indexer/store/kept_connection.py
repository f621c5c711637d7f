"""A connection that stays open between its uses."""

from asyncio import Lock
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic

import asyncpg

MAX_IDLE_SECONDS = 300.0
"""Seconds after which an unused connection is replaced, as in a pool: a firewall may have forgotten it."""


class KeptConnection:
    """A connection for one block at a time, opened when it is first needed, and again after it was lost or unused.

    Attributes:
        connection: The last connection, which may be closed.
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
