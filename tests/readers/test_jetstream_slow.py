"""Subscribers that are too slow, and outages of the database: nobody else notices, and nothing is lost."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from indexer.db import Database
from indexer.readers import connection
from indexer.readers.jetstream.log_reading import EventWindow
from tests.database_proxy import DatabaseProxy
from tests.db.repo_rows import insert, put, synchronized
from tests.readers.jetstream_client import JetstreamClient, feed, subscribed
from tests.waiting import TIMEOUT, until

pytestmark = pytest.mark.slow

TEXT = '{"text": "' + "x" * 100_000 + '"}'
EVENTS = 300
"""30 MB of events: more than the window and the buffers of the operating system."""


async def write_events(db: Database, first: int = 0, count: int = EVENTS) -> None:
    """Log events of 100 kB, a few in each transaction."""
    for number in range(first, first + count, 5):
        changes = tuple(put(f"app.test.post/{n:05}", TEXT) for n in range(number, number + 5))
        await insert(db, synchronized(number), changes=changes)


async def rkeys(client: JetstreamClient, count: int) -> list[str]:
    return [event["commit"]["rkey"] for event in await client.take(count)]


def expected(first: int = 0, end: int = EVENTS) -> list[str]:
    return [f"{number:05}" for number in range(first, end)]


async def test_slow_subscriber_is_disconnected_with_a_reason_and_others_do_not_notice(
    database: str, db: Database, tmp_path: Path
) -> None:
    async with feed(database, tmp_path, roles="feed") as (daemon, address), AsyncExitStack() as stack:
        daemon.stages.jetstream_reader.window = EventWindow(max_bytes=1_000_000, max_seconds=60.0)
        slow, fast = [await stack.enter_async_context(subscribed(address)) for _ in range(2)]
        await until(lambda: daemon.stages.jetstream_reader.window.end is not None)
        for number in range(0, EVENTS, 10):
            await write_events(db, number, 10)
            assert await rkeys(fast, 10) == expected(number, number + 10)
        received, (code, reason) = await slow.rest()
        assert code == 1008
        assert reason.startswith("too slow: the next events are no longer in memory; reconnect")
        assert [event["commit"]["rkey"] for event in received] == expected(0, len(received))
        assert 0 < len(received) < EVENTS
        await until(lambda: daemon.counter("feed_disconnections", kind="jetstream", reason="too-slow") == 1)
        async with subscribed(address, ("cursor", received[-1]["time_us"])) as again:
            assert await rkeys(again, EVENTS - len(received) + 1) == expected(len(received) - 1)


async def test_subscriber_that_reads_nothing_is_disconnected(
    database: str, db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SEND_SECONDS", 3.0)
    async with (
        feed(database, tmp_path, roles="feed") as (daemon, address),
        subscribed(address, ("cursor", 0)),
        subscribed(address, ("cursor", 0)) as fast,
    ):
        received, _ = await asyncio.gather(rkeys(fast, EVENTS), write_events(db))
        assert received == expected()
        await until(lambda: daemon.counter("feed_disconnections", kind="jetstream", reason="not-reading") == 1)
        await until(lambda: daemon.stages.jetstream_reader.subscribers == 1)


async def test_pings_of_a_slow_subscriber_are_answered_between_events(
    database: str, db: Database, tmp_path: Path
) -> None:
    """The daemon waits within an event until the subscriber has read more."""
    await write_events(db)
    async with feed(database, tmp_path, roles="feed") as (_, address), subscribed(address, ("cursor", 0)) as slow:
        pongs, received = [], []
        for _ in range(EVENTS // 10):
            pongs.append(await slow.connection.ping())
            received += await rkeys(slow, 10)
        assert received == expected()
        async with asyncio.timeout(TIMEOUT):
            await asyncio.gather(*pongs)


async def test_nothing_is_lost_in_an_outage_of_the_database(database: str, db: Database, tmp_path: Path) -> None:
    proxy = DatabaseProxy(database)
    async with (
        proxy.serve(),
        feed(proxy.dsn, tmp_path, roles="feed") as (daemon, address),
        subscribed(address) as client,
    ):
        await until(lambda: daemon.stages.jetstream_reader.window.end is not None)
        await write_events(db, 0, 5)
        assert await rkeys(client, 5) == expected(0, 5)
        proxy.refuse()
        await write_events(db, 5, 10)
        async with subscribed(address, ("cursor", 0)) as other:
            proxy.open()
            assert await rkeys(client, 10) == expected(5, 15)
            assert await rkeys(other, 15) == expected(0, 15)


async def test_subscriber_after_an_outage_that_the_others_did_not_wait_for_gets_only_new_events(
    database: str, db: Database, tmp_path: Path
) -> None:
    proxy = DatabaseProxy(database)
    async with proxy.serve(), feed(proxy.dsn, tmp_path, roles="feed") as (daemon, address):
        reader = daemon.stages.jetstream_reader
        async with subscribed(address):
            await until(lambda: reader.window.end is not None)
            proxy.refuse()
            await until(lambda: daemon.stages.db.failed_operations > 0)
        await until(lambda: not reader.subscribers)
        await write_events(db, 0, 5)
        proxy.open()
        async with subscribed(address) as client:
            newest = await db.changes.latest_seq()
            await until(lambda: reader.window.last == newest)
            await write_events(db, 5, 5)
            assert await rkeys(client, 5) == expected(5, 10)


async def test_subscriber_that_reads_nothing_does_not_delay_the_stop(
    database: str, db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SEND_SECONDS", 10 * TIMEOUT)
    async with AsyncExitStack() as daemon, AsyncExitStack() as clients:
        _, address = await daemon.enter_async_context(feed(database, tmp_path, roles="feed"))
        await clients.enter_async_context(subscribed(address, ("cursor", 0)))
        fast = await clients.enter_async_context(subscribed(address, ("cursor", 0)))
        received, _ = await asyncio.gather(rkeys(fast, EVENTS), write_events(db))
        assert received == expected()
        async with asyncio.timeout(TIMEOUT):
            await daemon.aclose()
