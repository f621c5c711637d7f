"""From which change on the events are read after all subscribers have left and another one has connected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from indexer.reasons import FetchFailure
from indexer.service.feed.jetstream_reader import JetstreamReader
from indexer.store import DatabaseError, Store, change_signal
from indexer.store.feed_page import FeedPage
from tests.store.change_log_helpers import change, log
from tests.waiting import TIMEOUT, until

pytestmark = pytest.mark.slow

LISTENING = """
    select count(*) from pg_stat_activity where datname = current_database() and application_name = 'indexer feed'
"""


@asynccontextmanager
async def running_reader(store: Store) -> AsyncIterator[JetstreamReader]:
    """Run a reader during the block."""
    reader = JetstreamReader(store)
    running = asyncio.create_task(reader.run())
    try:
        yield reader
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_subscriber_that_connects_while_the_reader_waits_for_changes_gets_the_next_one(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the next change wakes the reader, which begins after it."""
    monkeypatch.setattr(change_signal, "POLL_SECONDS", 10 * TIMEOUT)
    await log(sql, change("a"))
    async with running_reader(store) as reader:
        with reader.subscriber():
            await until(lambda: reader.window.is_open)
        assert not reader.window.is_open
        with reader.subscriber():
            await until(lambda: reader.window.is_open)
            before = reader.window.last
            await log(sql, change("b"))
            await until(lambda: reader.window.last > before)
            chunk = reader.window.after(before)
            assert chunk is not None
            assert (chunk.before, chunk.end.seq) == (before, await store.latest_seq())


async def test_subscriber_after_a_read_that_ended_without_any_gets_only_new_events(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read ends after the last subscriber has left, and the database fails before the next read."""
    reading, resume = asyncio.Event(), asyncio.Event()
    read_page = store.feed_page

    async def one_slow_page(after: int, max_changes: int, max_bytes: int) -> FeedPage:
        if resume.is_set():
            raise DatabaseError(FetchFailure.UNREACHABLE, "the database is down")
        reading.set()
        await resume.wait()
        return await read_page(after, max_changes, max_bytes)

    async def nobody_listens() -> bool:
        return bool(await sql.fetchval(LISTENING) == 0)

    async with running_reader(store) as reader:
        with monkeypatch.context() as patch:
            patch.setattr(store, "feed_page", one_slow_page)
            with reader.subscriber():
                await until(reading.is_set)
            await log(sql, change("a"))
            resume.set()
            await until(nobody_listens)
        await log(sql, change("b"))
        newest = await store.latest_seq()
        with reader.subscriber():
            await until(lambda: reader.window.is_open)
            assert reader.window.last == newest
