"""From which change on the events are read after all subscribers have left and another one has connected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from indexer.db import Database, change_log_reads
from indexer.readers.jetstream.log_reading import JetstreamReader
from tests.db.change_log_helpers import change, log
from tests.waiting import TIMEOUT, until

pytestmark = pytest.mark.slow


@asynccontextmanager
async def running_reader(db: Database) -> AsyncIterator[JetstreamReader]:
    """Run a reader during the block."""
    reader = JetstreamReader(db)
    running = asyncio.create_task(reader.run())
    try:
        yield reader
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_subscriber_that_connects_while_the_reader_waits_for_changes_gets_the_next_one(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the next change wakes the reader, which begins after it."""
    monkeypatch.setattr(change_log_reads, "POLL_SECONDS", 10 * TIMEOUT)
    await log(sql, change("a"))
    async with running_reader(db) as reader:
        with reader.subscriber():
            await until(lambda: reader.window.end is not None)
        assert reader.window.end is None
        with reader.subscriber():
            await until(lambda: reader.window.end is not None)
            before = reader.window.last
            await log(sql, change("b"))
            await until(lambda: reader.window.last > before)
            chunk = reader.window.after(before)
            assert chunk is not None
            assert (chunk.before, chunk.end.seq) == (before, await db.changes.latest_seq())
