"""Where a connection enters a stream, and what its first messages say about the stored cursor."""

import asyncio

import pytest

from indexer.db import Database
from indexer.db.gaps import OpenGaps
from indexer.live.firehose_consumer import Start, StreamContinuity, StreamEntry
from indexer.net.relay.subscription import Subscription
from indexer.reasons import GapReason, Rejection
from indexer.sync.changes import Batch
from indexer.sync.events import IdentityEvent, MalformedEvent, UnknownEvent
from indexer.sync.shard import Shard
from indexer.sync.stream import Cursor, Gap, Position
from indexer.telemetry.metrics import Metrics
from tests.waiting import until

RELAY, OTHER = "wss://relay.test", "wss://other.test"
TIME = "2024-05-01T12:00:00Z"
RESUMED_AT = Position(50, TIME)


async def entered(
    db: Database, relay: str, *cursors: Cursor, start: Start = "live", oversized: str = ""
) -> StreamContinuity:
    for cursor in cursors:
        await db.write(Batch(cursors=(cursor,)))
    subscription = Subscription([relay], 1, "tests")
    subscription.oversized.add(oversized)
    gaps = OpenGaps(db.gaps, Shard(), Metrics())
    continuity = StreamContinuity(db, gaps, subscription, Shard(), start)
    await continuity.begin(relay)
    return continuity


async def entry_of(
    db: Database, relay: str, *cursors: Cursor, start: Start = "live", oversized: str = ""
) -> StreamEntry:
    return (await entered(db, relay, *cursors, start=start, oversized=oversized)).entry


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


async def test_first_start_with_two_relays_opens_no_gap_because_one_is_faster(db: Database) -> None:
    gaps, entries = OpenGaps(db.gaps, Shard(), Metrics()), asyncio.Barrier(2)
    one, two = (
        StreamContinuity(db, gaps, Subscription([relay], 1, "tests"), Shard(), "live", first_entries=entries)
        for relay in (RELAY, OTHER)
    )

    async def begin_and_store() -> None:
        await one.begin(RELAY)
        await db.write(Batch(cursors=(Cursor(RELAY, "0/1", 50, TIME),)))

    faster = asyncio.create_task(begin_and_store())
    await until(lambda: entries.n_waiting == 1)
    assert await two.begin(OTHER) == StreamEntry(OTHER, 0, None)
    await faster
    assert (await two.begin(OTHER)).gap == Gap(OTHER, "0/1", GapReason.NO_CURSOR), "one has stored messages before"


@pytest.mark.parametrize(
    ("seq", "event_time", "expected"),
    [
        (48, TIME, "restarted"),
        (49, TIME, "replayed"),
        (50, TIME, "proven"),
        (50, "2024-05-01T14:00:00.000+02:00", "proven"),
        (50, "no time", "proven"),
        (50, "2024-05-01T12:00:00.001Z", "restarted"),
        (51, TIME, "broken"),
        (53, TIME, "broken"),
    ],
)
async def test_message_proves_that_none_is_missing_only_if_it_is_the_stored_one(
    db: Database, seq: int, event_time: str, expected: str
) -> None:
    continuity = await entered(db, RELAY, Cursor(RELAY, "0/1", 50, TIME))
    is_new = await continuity.is_new(IdentityEvent(seq, "did:web:a.test", event_time))
    gaps = [opened.gap for opened in await db.gaps.load_open()]
    missing = [Gap(RELAY, "0/1", GapReason.CURSOR_OUTDATED, 51, seq - 1)] if seq > 50 else []
    assert (is_new, continuity.checked, gaps) == (seq > 50, seq > 50 or expected == "proven", missing)
    entry = await continuity.begin(RELAY)
    assert entry.epoch == (expected == "restarted")


@pytest.mark.parametrize(
    "event", [UnknownEvent("#later", 99), MalformedEvent(Rejection.FIELD_INVALID, "", "#commit", 99, None)]
)
async def test_unproven_number_shows_nothing(db: Database, event: UnknownEvent | MalformedEvent) -> None:
    continuity = await entered(db, RELAY, Cursor(RELAY, "0/1", 50, TIME))
    assert not await continuity.is_new(event)
    assert (continuity.checked, await db.gaps.load_open()) == (False, [])
