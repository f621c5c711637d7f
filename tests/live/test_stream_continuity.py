"""Where a connection enters a stream, and what its first messages say about the stored cursor."""

from datetime import UTC, datetime
from typing import Any

import pytest

from indexer.db import Database
from indexer.db.gaps import OpenGaps
from indexer.live.stream_continuity import (
    OVERLAP_SECONDS,
    Continuity,
    ResumePoint,
    StreamContinuity,
    StreamEntry,
    continuity,
)
from indexer.net.relay.seek import Entry
from indexer.reasons import GapReason
from indexer.sync.changes import Batch
from indexer.sync.events import event_seconds
from indexer.sync.shard import Shard
from indexer.sync.stream import Cursor
from indexer.telemetry.metrics import Metrics

RELAY, OTHER = "wss://relay.test", "wss://other.test"
TIME = "2024-05-01T12:00:00Z"
SECONDS = event_seconds(TIME) or 0.0
RESUMED_AT = ResumePoint(0, 50, TIME)


class OneEntry:
    """Answers each search with the same entry, and remembers what it was asked for."""

    def __init__(self, oldest_time: float | None = None, cursor: int | None = 7) -> None:
        self.entry = Entry(cursor, oldest_time)
        self.asked: list[tuple[str, float]] = []

    async def __call__(self, relay: str, event_time: float) -> Entry:
        self.asked.append((relay, event_time))
        return self.entry


async def found_entry(db: Database, relay: str, seek: OneEntry) -> StreamEntry:
    unused: Any = None
    return await StreamContinuity(db, OpenGaps(db.gaps, Shard(), Metrics()), unused, seek, Shard(), "live").begin(relay)


async def entry_of(db: Database, relay: str, seek: OneEntry) -> StreamEntry:
    await db.write(Batch(cursor=Cursor(RELAY, "0/1", 50, TIME)))
    return await found_entry(db, relay, seek)


async def test_stored_cursor_is_resumed_one_message_early(db: Database) -> None:
    seek = OneEntry()
    assert await entry_of(db, RELAY, seek) == StreamEntry(RELAY, 0, 49, RESUMED_AT)
    assert seek.asked == []


async def test_other_relay_is_entered_some_minutes_before_the_last_stored_message(db: Database) -> None:
    seek = OneEntry(SECONDS)
    assert await entry_of(db, OTHER, seek) == StreamEntry(OTHER, 0, 7)
    assert seek.asked == [(OTHER, SECONDS - OVERLAP_SECONDS)]


async def entry_of_relay_after_other(db: Database, seconds: float, seek: OneEntry) -> StreamEntry:
    """Return the entry of `RELAY` with its cursor at `TIME`, when `OTHER` has sent messages until `seconds` later."""
    await db.write(Batch(cursor=Cursor(RELAY, "0/1", 50, TIME)))
    later = datetime.fromtimestamp(SECONDS + seconds, UTC).isoformat()
    await db.write(Batch(cursor=Cursor(OTHER, "0/1", 9, later)))
    return await found_entry(db, RELAY, seek)


async def test_relay_to_which_the_stream_returns_is_not_entered_hours_before_the_last_stored_message(
    db: Database,
) -> None:
    seek = OneEntry(SECONDS, cursor=700)
    assert await entry_of_relay_after_other(db, 36_000, seek) == StreamEntry(RELAY, 0, 700)
    assert seek.asked == [(RELAY, SECONDS + 36_000 - OVERLAP_SECONDS)]


@pytest.mark.parametrize(
    ("seconds", "found"), [(OVERLAP_SECONDS, 700), (36_000.0, 50), (36_000.0, None)], ids=["soon", "before", "silent"]
)
async def test_relay_to_which_the_stream_returns_is_resumed_at_its_cursor(
    db: Database, seconds: float, found: int | None
) -> None:
    assert await entry_of_relay_after_other(db, seconds, OneEntry(SECONDS, cursor=found)) == StreamEntry(
        RELAY, 0, 49, RESUMED_AT
    )


async def test_relay_to_which_the_stream_returns_without_the_messages_since_then_opens_a_gap(db: Database) -> None:
    entry = await entry_of_relay_after_other(db, 36_000, OneEntry(SECONDS + 36_001, cursor=700))
    assert entry.gap is not None
    assert (entry.cursor, entry.gap.relay, entry.gap.reason) == (700, RELAY, GapReason.NO_CURSOR)


@pytest.mark.parametrize("oldest_time", [None, SECONDS + 1])
async def test_other_relay_without_the_messages_since_then_opens_a_gap(db: Database, oldest_time: float | None) -> None:
    entry = await entry_of(db, OTHER, OneEntry(oldest_time))
    assert entry.gap is not None
    assert (entry.gap.relay, entry.gap.reason) == (OTHER, GapReason.NO_CURSOR)


@pytest.mark.parametrize(
    ("seq", "event_time", "expected"),
    [
        (None, TIME, Continuity.REPLAYED),
        (48, TIME, Continuity.RESTARTED),
        (49, TIME, Continuity.REPLAYED),
        (50, TIME, Continuity.PROVEN),
        (50, "2024-05-01T14:00:00.000+02:00", Continuity.PROVEN),
        (50, None, Continuity.PROVEN),
        (50, "2024-05-01T12:00:00.001Z", Continuity.RESTARTED),
        (51, TIME, Continuity.BROKEN),
    ],
)
def test_message_proves_that_none_is_missing_only_if_it_is_the_stored_one(
    seq: int | None, event_time: str | None, expected: Continuity
) -> None:
    assert continuity(RESUMED_AT, seq, event_time) is expected
