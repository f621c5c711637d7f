"""Session locks on buckets, so that each bucket has one live process at a time.

The locks end with their session. They only prevent duplicate work. Correctness does not depend on them, because every
write of a repo compares the version of its row.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from indexer.store.columns import Connection

LOCK_CLASS = 0x6275636B
"""The first key of the advisory locks: the bytes of "buck". The second key is the bucket."""

_LOCK = "select bool_and(pg_try_advisory_lock($1, bucket)) from unnest($2::integer[]) bucket"


@asynccontextmanager
async def hold(connection: asyncpg.Connection, buckets: range) -> AsyncIterator[asyncio.Event | None]:
    """Hold the locks of the buckets during the block.

    Yields:
        An event that is set if the session ends; None if another session holds one of the locks.
    """
    lost = asyncio.Event()

    def on_termination(_connection: Connection) -> None:
        lost.set()

    connection.add_termination_listener(on_termination)
    try:
        held = await connection.fetchval(_LOCK, LOCK_CLASS, list(buckets))
        yield lost if held else None
    finally:
        connection.remove_termination_listener(on_termination)
        if not connection.is_closed():
            await connection.execute("select pg_advisory_unlock_all()")
