"""Pages of replays: networks take turns, and a page of which nothing is wanted is not read."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from indexer.db import Database
from indexer.db.change_log_reads import FeedPage, LoggedChange
from indexer.readers.jetstream import log_reading
from indexer.readers.jetstream.events import ALL_EVENTS, EVENT_BYTES, EventChunk, EventFilter, LogPosition, v1_message
from indexer.readers.jetstream.log_reading import PAGE_CHANGES, ReplayPages
from tests.readers.test_jetstream_events import ADA, record_change, value

NOTHING = EventFilter(dids=frozenset({"did:plc:nobody"}))


class FakeDatabase:
    """A log of endless changes of one account."""

    def __init__(self) -> None:
        self.changes = self
        self.read = list[int]()

    async def page(
        self, after: int, max_changes: int, _max_bytes: int, wanted: Callable[[LoggedChange], bool]
    ) -> FeedPage:
        self.read.append(after)
        await asyncio.sleep(0)
        changes = [record_change(after + number + 1) for number in range(max_changes)]
        if not any(map(wanted, changes)):
            return FeedPage(changes, {}, {}, skipped=True)
        return FeedPage(changes, dict.fromkeys(range(max_changes), value()), {})


def pages() -> tuple[ReplayPages, FakeDatabase]:
    db = FakeDatabase()
    return ReplayPages(cast(Database, db)), db


async def test_replays_of_one_network_delay_those_of_others_by_one_page() -> None:
    loaded, db = pages()
    many = [loaded.load("8.8.8.8", LogPosition(number * PAGE_CHANGES), NOTHING) for number in range(8)]
    tasks = [asyncio.create_task(loading) for loading in many]
    await asyncio.sleep(0)
    await loaded.load("9.9.9.9", LogPosition(99_000), ALL_EVENTS)
    await asyncio.gather(*tasks)
    assert db.read.index(99_000) <= 2
    assert len(db.read) == 9


async def test_skipped_page_has_its_end_and_is_read_again_for_one_that_wants_it() -> None:
    loaded, db = pages()
    for nobody in ("a", "b"):
        skipped = await loaded.load("8.8.8.8", LogPosition(0), EventFilter(dids=frozenset({f"did:plc:{nobody}"})))
    assert db.read == [0]
    assert skipped is not None
    assert skipped.end.seq == PAGE_CHANGES
    assert skipped.size > PAGE_CHANGES * EVENT_BYTES
    for _ in range(2):
        whole = await loaded.load("8.8.8.8", LogPosition(0), EventFilter(dids=frozenset({ADA})))
        assert whole is not None
        assert whole.end == skipped.end
        assert whole.select(ALL_EVENTS, 0, v1_message, compress=False)[1] == PAGE_CHANGES
    assert db.read == [0, 0]


async def test_pages_that_are_kept_are_bounded_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, db = pages()

    async def load(number: int) -> EventChunk:
        page = await loaded.load("8.8.8.8", LogPosition(number * PAGE_CHANGES), ALL_EVENTS)
        assert page is not None
        return page

    size = (await load(0)).size
    monkeypatch.setattr(log_reading, "WINDOW_BYTES", 2 * size)
    for number in (1, 0, 1):
        page = await load(number)
    assert db.read == [0, 1_000]
    page.select(ALL_EVENTS, 0, v1_message, compress=False)
    assert page.size > size
    for number in (1, 0, 1):
        await load(number)
    assert db.read == [0, 1_000, 0, 1_000], "the frames of a page count"
