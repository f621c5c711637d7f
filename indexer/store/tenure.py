"""One writer for each bucket at a time: locks of a session, which end with it however it ends.

They keep two processes from doing the same work and stand in nobody's way: what is written is compared and set
by its version all the same.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from indexer.store.rows import Connection

CLASS = 0x6275636B  # of the locks: the bytes of "buck"

_LOCK = "select bool_and(pg_try_advisory_lock($1, bucket)) from unnest($2::integer[]) bucket"


@asynccontextmanager
async def hold(connection: asyncpg.Connection, buckets: range) -> AsyncIterator[asyncio.Event | None]:
    """Holds the buckets as long as the block lasts; None if another session has any of them.

    The event is set if the session ends before.
    """
    lost = asyncio.Event()

    def end(_connection: Connection) -> None:
        lost.set()

    connection.add_termination_listener(end)
    try:
        held = await connection.fetchval(_LOCK, CLASS, list(buckets))
        yield lost if held else None
    finally:
        connection.remove_termination_listener(end)
        if not connection.is_closed():
            await connection.execute("select pg_advisory_unlock_all()")
