"""The window of the newest events: its bounds, and what a subscriber at any position finds in it."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from indexer.db.change_log_reads import LoggedChange, StoredRecord
from indexer.readers.events import FeedEvent
from indexer.readers.jetstream.events import EventChunk, LogPosition
from indexer.readers.jetstream.log_reading import EventWindow

DID = "did:plc:ada"


def chunk(before: int, events: int, size: int = 10) -> EventChunk:
    """Return a chunk of events that follow the number `before`, with values of this size."""
    changes = [
        LoggedChange(before + number, DID, "a.b.c", "x", "create", None, None, live=True, batch_time=0)
        for number in range(1, events + 1)
    ]
    record = StoredRecord(b"", "", "x" * size)
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


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 12_000))
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

    window = opened()
    window.add(record(101, "a", "create", "3l"))
    window.add(record(102, "b", "delete", None))
    window.add(record(103, "a", "delete", "3m"))
    assert window.first == 100
    window.add(record(104, "a", "delete", None))
    assert (window.first, window.last) == (103, 104)
    assert window.after(103) is not None
