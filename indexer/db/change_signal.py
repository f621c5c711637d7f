"""Learn of new changes: a channel of notifications, and a connection that listens to them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import asyncpg
from asyncpg.exceptions import ProgramLimitExceededError

from indexer.concurrency.event_wait import wait_for_event
from indexer.db.columns import Connection
from indexer.db.database_errors import CONNECT_TIMEOUT, DatabaseError
from indexer.reasons import FetchFailure

CHANNEL = "atproto_changes"
POLL_SECONDS = 5.0
"""Interval at which the log is read even without a notification."""

_QUEUE_USAGE = "select pg_notification_queue_usage()"
_NOTIFY = f"""
    select seq, pg_notification_queue_usage() as queue_usage,
        case when seq > $1 then pg_notify('{CHANNEL}', '')::text end
    from atproto.latest_seq() seq
"""


class Notified(NamedTuple):
    """The state after a notification.

    Attributes:
        seq: The number of the newest change; None if the listeners were not notified, because the queue is full.
        queue_usage: How full the queue of notifications of the server is, from 0 to 1.
    """

    seq: int | None
    queue_usage: float


async def notify(connection: Connection, after: int) -> Notified:
    """Notify the channel if there are changes after the number `after`. Use a connection without a transaction."""
    try:
        [row] = await connection.fetch(_NOTIFY, after)
    except ProgramLimitExceededError:
        return Notified(None, await connection.fetchval(_QUEUE_USAGE))
    return Notified(row["seq"], row["queue_usage"])


class ChangeSignal:
    """Is set by each notification of changes."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._changed = asyncio.Event()
        connection.add_termination_listener(lambda _: self._changed.set())

    async def wait(self) -> None:
        """Wait until there was a notification since the last call, or for `POLL_SECONDS`.

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


async def listen_on(connection: asyncpg.Connection) -> ChangeSignal:
    """Listen for changes on this connection until it is closed."""
    signal = ChangeSignal(connection)
    await connection.add_listener(CHANNEL, signal.notify)
    return signal


@asynccontextmanager
async def listen(dsn: str) -> AsyncIterator[ChangeSignal]:
    """Listen for changes on a connection of its own during the block."""
    connection = await asyncpg.connect(
        dsn, timeout=CONNECT_TIMEOUT, server_settings={"application_name": "indexer feed"}
    )
    try:
        yield await listen_on(connection)
    finally:
        connection.terminate()
