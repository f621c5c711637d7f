"""Learn of new changes: a connection that listens to the notifications of commits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from indexer.concurrency.event_wait import wait_for_event
from indexer.reasons import FetchFailure
from indexer.store.database_errors import CONNECT_TIMEOUT, DatabaseError

CHANNEL = "atproto_changes"
POLL_SECONDS = 5.0
"""Interval at which the log is read even without a notification."""


class ChangeSignal:
    """Is set by each commit with changes."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._changed = asyncio.Event()
        connection.add_termination_listener(lambda _: self._changed.set())

    async def wait(self) -> None:
        """Wait until there was a commit with changes since the last call, or for `POLL_SECONDS`.

        Raises:
            DatabaseError: The connection is lost.
        """
        if not await wait_for_event(self._changed, POLL_SECONDS):
            return
        self._changed.clear()
        if self._connection.is_closed():
            raise DatabaseError(FetchFailure.UNREACHABLE, "the connection that listens for changes is closed")

    def notify(self, *_: object) -> None:
        """Report a commit."""
        self._changed.set()


@asynccontextmanager
async def listen(dsn: str) -> AsyncIterator[ChangeSignal]:
    """Listen for changes on a connection of its own during the block."""
    connection = await asyncpg.connect(
        dsn, timeout=CONNECT_TIMEOUT, server_settings={"application_name": "indexer feed"}
    )
    try:
        signal = ChangeSignal(connection)
        await connection.add_listener(CHANNEL, signal.notify)
        yield signal
    finally:
        connection.terminate()
