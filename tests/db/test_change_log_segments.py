"""Retention of the change log: the plan of a trim, and its execution on the real segments."""

import asyncio
from dataclasses import replace

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.db import Database
from indexer.db.change_log_segments import (
    SEGMENTS,
    ChangeLogState,
    ConsumerState,
    RetentionPolicy,
    Segment,
    TrimPlan,
    load_state,
    plan_trim,
    trim,
)
from tests.db.change_log_helpers import NEXT, after, change, connected, fill_segments, log, rkeys

pytestmark = pytest.mark.slow

NOW = 1_000_000.0
DAY = 86_400.0
POLICY = RetentionPolicy(7 * DAY, 6_000, 14 * DAY)
EMPTY = [Segment(number, 100, None, None) for number in range(SEGMENTS)]
OLD = (Segment(3, 500, 10, NOW - 8 * DAY), Segment(4, 500, 15, NOW - 7 * DAY - 1), Segment(0, 500, 20, NOW))
LARGE = (Segment(5, 3_000, 10, NOW - 3), Segment(1, 3_000, 15, NOW - 2), Segment(0, 500, 20, NOW))


def consumer(name: str = "one", seq: int = 0, since: float | None = NOW) -> ConsumerState:
    return ConsumerState(name, seq, 5, since, cut_off=False)


def log_of(*segments: Segment, consumers: tuple[ConsumerState, ...] = (), opened_at: float = NOW) -> ChangeLogState:
    """Return a log with these segments. The last one is the current segment."""
    named = {segment.number: segment for segment in segments}
    return ChangeLogState(segments[-1].number, opened_at, [named.get(s.number, s) for s in EMPTY], consumers)


@pytest.mark.parametrize(
    ("segments", "policy", "expected"),
    [
        ((Segment(3, 500, 10, NOW - 6 * DAY), Segment(0, 500, 20, NOW)), POLICY, TrimPlan((), (), None)),
        (OLD, POLICY, TrimPlan((), (3, 4), None)),
        (OLD, replace(POLICY, max_age=0), TrimPlan((), (), None)),
        (LARGE, POLICY, TrimPlan((), (5,), None)),
        (LARGE, replace(POLICY, max_bytes=10_000), TrimPlan((), (), None)),
        ((Segment(0, 50_000, 20, NOW - 70 * DAY),), POLICY, TrimPlan((), (), 1)),
    ],
    ids=["within limits", "old", "no age limit", "large", "higher limit", "current segment"],
)
def test_segments_beyond_the_limits_of_age_and_size_are_truncated_but_never_the_current_one(
    segments: tuple[Segment, ...], policy: RetentionPolicy, expected: TrimPlan
) -> None:
    assert plan_trim(log_of(*segments), policy, NOW) == expected


@pytest.mark.parametrize(
    ("size", "age", "expected"),
    [(749, DAY, None), (750, 0.0, 1), (10, 7 / 6 * DAY + 1, 1), (10, 7 / 6 * DAY - 1, None)],
)
def test_a_segment_holds_an_eighth_of_the_size_or_a_sixth_of_the_time(
    size: int, age: float, expected: int | None
) -> None:
    log = log_of(Segment(0, size, 20, NOW), opened_at=NOW - age)
    assert plan_trim(log, POLICY, NOW).next_segment == expected


def test_an_empty_segment_and_the_last_of_a_full_ring_stay_current() -> None:
    assert plan_trim(log_of(Segment(2, 10, None, None), opened_at=0), POLICY, NOW).next_segment is None
    full = [Segment(number, 1, number + 1, NOW) for number in range(SEGMENTS)]
    assert plan_trim(log_of(*full, opened_at=0), POLICY, NOW).next_segment is None


def test_a_consumer_retains_its_changes_until_it_is_too_far_behind() -> None:
    old = (Segment(3, 500, 10, NOW - 9 * DAY), Segment(4, 500, 20, NOW - 8 * DAY), Segment(0, 500, 30, NOW))
    for seq, since, expected in (
        (9, NOW - 9 * DAY, TrimPlan((), (), None)),
        (10, NOW - 8 * DAY, TrimPlan((), (3,), None)),
        (20, NOW - DAY, TrimPlan((), (3, 4), None)),
        (9, NOW - 15 * DAY, TrimPlan(("one",), (3, 4), None)),
    ):
        log = log_of(*old, consumers=(consumer(seq=seq, since=since), consumer("two", 30, None)))
        assert plan_trim(log, POLICY, NOW) == expected
    stopped = log_of(*old, consumers=(consumer(seq=9, since=NOW - 900 * DAY),))
    assert plan_trim(stopped, replace(POLICY, max_consumer_lag=0), NOW).disconnect == ()


def test_a_consumer_that_stopped_does_not_fill_the_disk() -> None:
    consumers = (consumer("behind", 9, NOW - 60), consumer("ahead", 20, NOW - 50))
    log = log_of(
        Segment(3, 5_000, 10, NOW - 9), Segment(4, 5_000, 20, NOW - 8), Segment(0, 500, 30, NOW), consumers=consumers
    )
    assert plan_trim(log, POLICY, NOW).disconnect == ()
    more = replace(log, segments=[*log.segments[:-1], Segment(7, 2_000, 25, NOW)])
    assert plan_trim(more, POLICY, NOW) == TrimPlan(("behind",), (3, 4), None)


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.floats(0, 30)), min_size=1, max_size=SEGMENTS),
    st.lists(st.tuples(st.integers(0, 90), st.floats(0, 30), st.booleans()), max_size=4),
)
def test_no_connected_consumer_loses_changes(
    sizes: list[tuple[int, float]], consumers: list[tuple[int, float, bool]]
) -> None:
    segments = [Segment(n, size, 10 * (n + 1), NOW - days * DAY) for n, (size, days) in enumerate(sizes)]
    states = [ConsumerState(str(n), seq, 1, NOW - days * DAY, cut) for n, (seq, days, cut) in enumerate(consumers)]
    log = log_of(*segments, consumers=tuple(states))
    plan = plan_trim(log, POLICY, NOW)
    for state in states:
        if not state.cut_off and state.name not in plan.disconnect:
            assert all(state.seq >= (log.segments[number].last_seq or 0) for number in plan.truncate)
            assert state.lag(NOW) <= POLICY.max_consumer_lag
    if not states:
        left = sum(segment.bytes for segment in log.segments if segment.number not in plan.truncate)
        assert left <= max(POLICY.max_bytes, segments[-1].bytes) + 100 * SEGMENTS
    assert log.current not in plan.truncate


def test_after_a_consumer_was_disconnected_the_one_large_segment_waits_for_the_others() -> None:
    """The one that stopped kept all segments, so the current one grew. The other one is a few changes behind."""
    full = [Segment(number, 750, number + 1, NOW - 60) for number in range(SEGMENTS - 1)]
    current = Segment(SEGMENTS - 1, 6_200, 90, NOW)
    stopped, other = consumer("stopped", 0, NOW - 60), consumer("other", 85, NOW - 1)
    first = plan_trim(log_of(*full, current, consumers=(stopped, other)), POLICY, NOW)
    assert first == TrimPlan(("stopped",), tuple(range(SEGMENTS - 1)), None)
    trimmed = log_of(current, consumers=(replace(stopped, cut_off=True), other))
    assert plan_trim(trimmed, POLICY, NOW) == TrimPlan((), (), 0)
    switched = log_of(current, Segment(0, 100, 95, NOW), consumers=(other,))
    assert plan_trim(switched, POLICY, NOW) == TrimPlan((), (), None)
    caught_up = replace(switched, consumers=(replace(other, seq=90),))
    assert plan_trim(caught_up, POLICY, NOW).truncate == (SEGMENTS - 1,)


async def test_a_request_for_trimmed_changes_fails(sql: asyncpg.Connection) -> None:
    await fill_segments(sql, 3)
    done = await trim(sql, TrimPlan((), (0, 2), None))
    assert done.truncate == (0,), "the current segment is not truncated"
    assert rkeys(await after(sql, None)) == rkeys(await after(sql, 1)) == ["1", "2"]
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="up to 1 have been trimmed"):
        await after(sql, 0)
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError):
        await sql.execute("select atproto.register_reader('late', 0)")
    assert await sql.fetchval("select atproto.latest_seq()") == 3
    await trim(sql, TrimPlan((), (), 3))
    assert (await trim(sql, TrimPlan((), (1, 2), None))).truncate == (1, 2)
    assert await after(sql, 3) == []
    assert await sql.fetchval("select atproto.latest_seq()") == 3


async def test_a_request_for_trimmed_changes_fails_in_an_older_snapshot(database: str, sql: asyncpg.Connection) -> None:
    """A truncated table is empty for every snapshot, which must not look like a log without new changes."""
    await fill_segments(sql, 2)
    async with connected(database) as old:
        await old.execute("begin isolation level repeatable read")
        await old.execute("select count(*) from pg_class")
        assert (await trim(sql, TrimPlan((), (0,), None))).truncate == (0,)
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError):
            await after(old, 0)


async def test_a_consumer_registered_before_the_truncation_loses_nothing(sql: asyncpg.Connection) -> None:
    await fill_segments(sql, 2)
    plan = plan_trim(await load_state(sql), RetentionPolicy(0.001, 2**40, 0), 2e9)
    assert plan.truncate == (0,)
    await sql.execute("select atproto.register_reader('one', 0)")
    assert (await trim(sql, plan)).truncate == ()
    assert rkeys(await sql.fetch(NEXT, "one", 10)) == ["0", "1"]
    assert (await trim(sql, plan)).truncate == (0,)


async def test_a_truncation_gives_up_on_locks_and_blocks_no_writer(database: str, sql: asyncpg.Connection) -> None:
    """The locks are those of a backup that has read everything, and of a writer that has not committed."""
    await fill_segments(sql, 2)
    async with connected(database) as backup, connected(database) as slow:
        await backup.execute("begin; select count(*) from atproto.changes")
        trimming = asyncio.create_task(trim(sql, TrimPlan((), (0,), None)))
        while not trimming.done():
            await log(slow, change("more"))
        assert (await trimming).truncate == ()
        await backup.execute("rollback")
        await slow.execute("begin; insert into indexer.change_batch (segment, size) values (0, 1)")
        assert (await trim(sql, TrimPlan((), (0,), None))).truncate == ()
        await slow.execute("rollback")
    assert (await trim(sql, TrimPlan((), (0,), None))).truncate == (0,)


async def test_a_disconnected_consumer_gets_errors_until_it_registers_again(
    db: Database, sql: asyncpg.Connection
) -> None:
    await sql.execute("select atproto.register_reader('one'), atproto.register_reader('two')")
    await fill_segments(sql, 2)
    assert rkeys(await sql.fetch(NEXT, "two", 10)) == ["0", "1"]
    await sql.execute("update indexer.change_batch set time = now() - interval '15 days'")
    _, done = await db.segments.trim(POLICY, await sql.fetchval("select date_part('epoch', now())"))
    assert (done.disconnect, done.truncate) == (("one",), (0,))
    for _ in range(2):
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="'one' was disconnected"):
            await sql.fetch(NEXT, "one", 10)
    await sql.execute("select atproto.unregister_reader('one'), atproto.register_reader('one')")
    assert await sql.fetch(NEXT, "one", 10) == []


async def test_the_lag_of_a_consumer(db: Database, sql: asyncpg.Connection) -> None:
    await sql.execute("select atproto.register_reader('one')")
    await log(sql, change(1), change(1), change(1))
    await log(sql, change(2))
    times = [row[0] for row in await sql.fetch("select time from atproto.changes order by seq")]
    for count, behind, since in ((0, 4, times[0]), (2, 2, times[0]), (1, 1, times[3]), (5, 0, None)):
        await sql.fetch(NEXT, "one", count)
        row = await sql.fetchrow("select behind, behind_since from atproto.readers")
        assert tuple(row or ()) == (behind, since)
    [state] = (await db.reports.state())[0]["consumers"]
    assert 0 <= state.pop("silent_seconds") < 60
    assert state == {"name": "one", "seq": 4, "behind": 0, "lag_seconds": 0.0, "cut_off": False}


async def test_segments_are_reused_in_turn(db: Database, sql: asyncpg.Connection) -> None:
    """Trim the log through several rounds of the ring: the newest changes are always there, and only those."""
    policy, now = RetentionPolicy(60.0, 2**40, 0), await sql.fetchval("select date_part('epoch', now())")
    current = []
    for number in range(40):
        await log(sql, change(1, number))
        now += 11
        await sql.execute(
            "update indexer.change_batch set time = to_timestamp($1) where first_seq = $2", now, number + 1
        )
        await sql.execute("update indexer.change_log set opened_at = to_timestamp($1)", now - 11)
        state, _ = await db.segments.trim(policy, now)
        current.append(state.current)
        retained = rkeys(await after(sql, None))
        assert retained == [str(n) for n in range(number - len(retained) + 1, number + 1)]
        assert 6 <= len(retained) <= 8 or number < 6
    assert len(set(current)) >= 7
