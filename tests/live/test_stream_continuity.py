"""Where a connection enters a stream, and what its first messages say about the stored cursor."""

import pytest

from indexer.db import Database
from indexer.db.gaps import OpenGaps
from indexer.live.stream_continuity import (
    Continuity,
    Start,
    StreamContinuity,
    StreamEntry,
    continuity,
)
from indexer.net.relay.subscription import Subscription
from indexer.reasons import GapReason
from indexer.sync.changes import Batch
from indexer.sync.shard import Shard
from indexer.sync.stream import Cursor, Gap, ResumePoint
from indexer.telemetry.metrics import Metrics

RELAY, OTHER = "wss://relay.test", "wss://other.test"
TIME = "2024-05-01T12:00:00Z"
RESUMED_AT = ResumePoint(0, 50, TIME)


async def entry_of(
    db: Database, relay: str, *cursors: Cursor, start: Start = "live", oversized: str = ""
) -> StreamEntry:
    for cursor in cursors:
        await db.write(Batch(cursor=cursor))
    subscription = Subscription([relay], 1, "tests")
    subscription.oversized.add(oversized)
    gaps = OpenGaps(db.gaps, Shard(), Metrics())
    return await StreamContinuity(db, gaps, subscription, Shard(), start).begin(relay)


async def test_message_over_the_size_limit_is_not_requested_again(db: Database) -> None:
    entry = await entry_of(db, RELAY, Cursor(RELAY, "0/1", 50, TIME), start="oldest", oversized=RELAY)
    assert entry == StreamEntry(RELAY, 0, None, gap=Gap(RELAY, "0/1", GapReason.NO_CURSOR))


@pytest.mark.parametrize(("start", "cursor"), [("live", None), ("oldest", 0), (7, 7)])
async def test_first_start_begins_where_the_setting_says(db: Database, start: Start, cursor: int | None) -> None:
    assert await entry_of(db, RELAY, start=start) == StreamEntry(RELAY, 0, cursor, from_oldest=start == "oldest")


async def test_stored_cursor_is_resumed_one_message_early(db: Database) -> None:
    assert await entry_of(db, RELAY, Cursor(RELAY, "0/1", 50, TIME)) == StreamEntry(RELAY, 0, 49, RESUMED_AT)


async def test_relay_to_which_the_stream_returns_is_resumed_at_its_own_cursor(db: Database) -> None:
    later = Cursor(OTHER, "0/1", 9, "2024-05-02T12:00:00Z")
    entry = await entry_of(db, RELAY, Cursor(RELAY, "0/1", 50, TIME), later)
    assert entry == StreamEntry(RELAY, 0, 49, RESUMED_AT)


@pytest.mark.parametrize(("start", "cursor"), [("live", None), ("oldest", 0), (7, None)])
async def test_other_relay_is_entered_where_the_setting_says_with_a_gap(
    db: Database, start: Start, cursor: int | None
) -> None:
    entry = await entry_of(db, OTHER, Cursor(RELAY, "0/1", 50, TIME), start=start)
    gap = Gap(OTHER, "0/1", GapReason.NO_CURSOR)
    assert entry == StreamEntry(OTHER, 0, cursor, gap=gap, from_oldest=start == "oldest")


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
