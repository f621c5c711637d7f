"""The window of the newest events: its bounds, and what a subscriber at any position finds in it."""

import asyncio
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.db.change_log_reads import LoggedChange, StoredRecord
from indexer.readers.events import FeedEvent
from indexer.readers.jetstream.events import ALL_EVENTS, EventChunk, LogPosition, v1_message, v2_message
from indexer.readers.jetstream.log_reading import EventWindow

DID = "did:plc:ada"


def chunk(before: int, events: int, size: int = 10) -> EventChunk:
    """Return a chunk of events that follow the number `before`, with values of this size."""
    changes = [
        LoggedChange(before + number, DID, "a.b.c", "x", "create", None, None, live=True, batch_time=0)
        for number in range(1, events + 1)
    ]
    record = StoredRecord(b"", "", b"x" * size)
    return EventChunk(
        before, LogPosition(before + events), [FeedEvent("commit", change, 0, record) for change in changes]
    )


def opened(max_bytes: int = 10_000, max_seconds: float = 60.0) -> EventWindow:
    window = EventWindow(max_bytes, max_seconds)
    window.open(LogPosition(100))
    return window


def test_closed_window_has_no_position() -> None:
    window = EventWindow(10_000, 60.0)
    assert window.end is None
    window.open(LogPosition(100))
    assert (window.first, window.last, window.after(100)) == (100, 100, None)
    window.add(chunk(100, 5))
    window.close()
    assert window.end is None


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 60_000))
def test_every_position_in_the_window_finds_the_chunk_that_follows(sizes: list[int], max_bytes: int) -> None:
    window, chunks, last = opened(max_bytes), list[EventChunk](), 100
    for size in sizes:
        chunks.append(chunk(last, size + 1))
        window.add(chunks[-1])
        last += size + 1
    assert window.last == last
    assert window.after(last) is None
    for seq in range(window.first, last):
        assert window.after(seq) is next(each for each in chunks if each.end.seq > seq)
    held = [each for each in chunks if each.before >= window.first]
    assert sum(each.size for each in held) <= max_bytes or len(held) == 1, "the newest chunk always stays"
    dropped = chunks[: len(chunks) - len(held)]
    assert not dropped or sum(each.size for each in [dropped[-1], *held]) > max_bytes, "nothing is dropped too early"


@pytest.mark.parametrize("events", [1, 50])
@pytest.mark.parametrize("text", ["x" * 100, "\U0001f98b" * 25 + "x" * 5_000], ids=["short", "long"])
def test_window_takes_no_more_memory_than_its_bound(events: int, text: str) -> None:
    """A subscriber that is behind may be the first one of its wire, so that frames are made much later."""
    max_bytes, wires = 2_000_000, [(wire, compress) for wire in (v1_message, v2_message) for compress in (False, True)]
    window, last = opened(max_bytes), 100

    def new_chunk() -> EventChunk:
        """Return a chunk without any part of another one, as the database gives them."""
        found = list[FeedEvent]()
        for seq in range(last + 1, last + 1 + events):
            did, rkey, rev, collection = f"did:plc:{seq:024}", f"{seq:013}", f"3l{seq:011}", f"app.bsky.feed.a{seq}"
            change = LoggedChange(seq, did, collection, rkey, "create", f"{seq:059}", rev, live=True, batch_time=0)
            record = StoredRecord(os.urandom(36), f"3m{seq:011}", f'{{"text": "{text}", "n": {seq}}}'.encode())
            found.append(FeedEvent("commit", change, 10**15 + seq, record))
        return EventChunk(last, LogPosition(last + events), found)

    for wire, compress in wires:
        new_chunk().select(ALL_EVENTS, 0, wire, compress=compress)
    tracemalloc.start()
    try:
        while window.first == 100:  # until the first chunk is dropped
            window.add(chunk := new_chunk())
            chunk.select(ALL_EVENTS, 0, v1_message, compress=False)
            last += events
        del chunk
        assert 0.6 * max_bytes < tracemalloc.get_traced_memory()[0] < 1.1 * max_bytes
        seq = window.first
        while found := window.after(seq):
            for wire, compress in wires:
                found.select(ALL_EVENTS, 0, wire, compress=compress)
            seq = max(found.end.seq, window.first)
        assert 0.6 * max_bytes < tracemalloc.get_traced_memory()[0] < 1.1 * max_bytes
    finally:
        tracemalloc.stop()


def test_old_events_leave_the_window() -> None:
    window = opened(max_seconds=-1.0)
    window.add(chunk(100, 5))
    assert (window.first, window.last) == (105, 105)


async def test_everybody_who_waits_is_woken_by_the_next_chunk() -> None:
    window = opened()
    waiting = [asyncio.create_task(window.wait(60.0)) for _ in range(3)]
    await asyncio.sleep(0)
    window.add(chunk(100, 1))
    assert await asyncio.gather(*waiting) == [True] * 3
    assert not await window.wait(0.0)


def test_window_with_a_record_that_is_erased_is_emptied() -> None:
    """A record that its account deletes stays for some seconds: then the log has the rev of the commit."""

    def record(seq: int, rkey: str, action: str, rev: str | None) -> EventChunk:
        change = LoggedChange(seq, DID, "a.b.c", rkey, action, None, rev, live=True, batch_time=0)
        return EventChunk(seq - 1, LogPosition(seq), [FeedEvent("commit", change, 0)])

    window = opened(20_000)
    window.add(record(101, "a", "create", "3l"))
    window.add(record(102, "b", "delete", None))
    window.add(record(103, "a", "delete", "3m"))
    assert window.first == 100
    window.add(record(104, "a", "delete", None))
    assert (window.first, window.last) == (103, 104)
    assert window.after(103) is not None
