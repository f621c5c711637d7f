"""What is kept of the change log: the plan, held to its promises, and the real ring of segments."""

import asyncio
from dataclasses import replace

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.store import Keep, Store
from indexer.store.retention import SEGMENTS, Log, ReaderState, Segment, Upkeep, load_log, plan_upkeep, upkeep
from tests.store.following import NEXT, after, change, connected, log, rkeys

NOW = 1_000_000.0
DAY = 86_400.0
KEEP = Keep(7 * DAY, 6_000, 14 * DAY)
EMPTY = [Segment(number, 100, None, None) for number in range(SEGMENTS)]


def reader(name: str = "one", seq: int = 0, since: float | None = NOW) -> ReaderState:
    return ReaderState(name, seq, 5, since, NOW, cut_off=False)


def log_of(*segments: Segment, readers: tuple[ReaderState, ...] = (), opened_at: float = NOW) -> Log:
    """The last one named is the one that is written."""
    named = {segment.number: segment for segment in segments}
    return Log(segments[-1].number, opened_at, [named.get(s.number, s) for s in EMPTY], readers)


def test_what_is_young_and_small_stays() -> None:
    log = log_of(Segment(3, 500, 10, NOW - 6 * DAY), Segment(0, 500, 20, NOW))
    assert plan_upkeep(log, KEEP, NOW) == Upkeep((), (), None)


def test_the_old_goes() -> None:
    log = log_of(Segment(3, 500, 10, NOW - 8 * DAY), Segment(4, 500, 15, NOW - 7 * DAY - 1), Segment(0, 500, 20, NOW))
    assert plan_upkeep(log, KEEP, NOW).empty == (3, 4)
    assert plan_upkeep(log, replace(KEEP, seconds=0), NOW).empty == ()


def test_of_too_much_the_oldest_goes() -> None:
    log = log_of(Segment(5, 3_000, 10, NOW - 3), Segment(1, 3_000, 15, NOW - 2), Segment(0, 500, 20, NOW))
    assert plan_upkeep(log, KEEP, NOW).empty == (5,)
    assert plan_upkeep(log, replace(KEEP, bytes=10_000), NOW).empty == ()


def test_the_segment_that_is_written_stays_whatever_its_age_and_size() -> None:
    log = log_of(Segment(0, 50_000, 20, NOW - 70 * DAY))
    assert plan_upkeep(log, KEEP, NOW) == Upkeep((), (), 1)


@pytest.mark.parametrize(
    ("size", "age", "expected"),
    [(999, DAY, None), (1_000, 0.0, 1), (10, 7 / 6 * DAY + 1, 1), (10, 7 / 6 * DAY - 1, None)],
)
def test_a_sixth_of_what_is_kept_is_a_segment(size: int, age: float, expected: int | None) -> None:
    log = log_of(Segment(0, size, 20, NOW), opened_at=NOW - age)
    assert plan_upkeep(log, KEEP, NOW).write == expected


def test_an_empty_segment_is_written_on_and_a_full_ring_too() -> None:
    assert plan_upkeep(log_of(Segment(2, 10, None, None), opened_at=0), KEEP, NOW).write is None
    full = [Segment(number, 1, number + 1, NOW) for number in range(SEGMENTS)]
    assert plan_upkeep(log_of(*full, opened_at=0), KEEP, NOW).write is None


def test_a_reader_holds_what_it_lacks_until_it_is_too_far_behind() -> None:
    old = (Segment(3, 500, 10, NOW - 9 * DAY), Segment(4, 500, 20, NOW - 8 * DAY), Segment(0, 500, 30, NOW))
    for seq, since, expected in (
        (9, NOW - 9 * DAY, Upkeep((), (), None)),
        (10, NOW - 8 * DAY, Upkeep((), (3,), None)),
        (20, NOW - DAY, Upkeep((), (3, 4), None)),
        (9, NOW - 15 * DAY, Upkeep(("one",), (3, 4), None)),
    ):
        log = log_of(*old, readers=(reader(seq=seq, since=since), reader("two", 30, None)))
        assert plan_upkeep(log, KEEP, NOW) == expected
    forgotten = log_of(*old, readers=(reader(seq=9, since=NOW - 900 * DAY),))
    assert plan_upkeep(forgotten, replace(KEEP, reader_seconds=0), NOW).cut_off == ()


def test_a_forgotten_reader_does_not_fill_the_disk() -> None:
    readers = (reader("behind", 9, NOW - 60), reader("ahead", 20, NOW - 50))
    log = log_of(
        Segment(3, 5_000, 10, NOW - 9), Segment(4, 5_000, 20, NOW - 8), Segment(0, 500, 30, NOW), readers=readers
    )
    assert plan_upkeep(log, KEEP, NOW).cut_off == ()
    more = replace(log, segments=[*log.segments[:-1], Segment(7, 2_000, 25, NOW)])
    assert plan_upkeep(more, KEEP, NOW) == Upkeep(("behind",), (3, 4), None)


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.floats(0, 30)), min_size=1, max_size=SEGMENTS),
    st.lists(st.tuples(st.integers(0, 90), st.floats(0, 30), st.booleans()), max_size=4),
)
def test_no_live_reader_loses_anything(sizes: list[tuple[int, float]], readers: list[tuple[int, float, bool]]) -> None:
    segments = [Segment(n, size, 10 * (n + 1), NOW - days * DAY) for n, (size, days) in enumerate(sizes)]
    states = [ReaderState(str(n), seq, 1, NOW - days * DAY, NOW, cut) for n, (seq, days, cut) in enumerate(readers)]
    log = log_of(*segments, readers=tuple(states))
    plan = plan_upkeep(log, KEEP, NOW)
    for state in states:
        if not state.cut_off and state.name not in plan.cut_off:
            assert all(state.seq >= (log.segments[number].last_seq or 0) for number in plan.empty)
            assert state.lag(NOW) <= KEEP.reader_seconds
    if not states:
        left = sum(segment.bytes for segment in log.segments if segment.number not in plan.empty)
        assert left <= max(KEEP.bytes, segments[-1].bytes) + 100 * SEGMENTS
    assert log.written not in plan.empty


async def fill(sql: asyncpg.Connection, *, segments: int) -> None:
    """One change a segment, the rkey its number; the last segment is written on."""
    for segment in range(segments):
        await log(sql, change(segment, segment))
        if segment + 1 < segments:
            await upkeep(sql, Upkeep((), (), segment + 1))


async def test_emptied_segments_are_gone_loudly(store: Store, sql: asyncpg.Connection) -> None:
    await fill(sql, segments=3)
    done = await upkeep(sql, Upkeep((), (0, 2), None))
    assert done.empty == (0,), "the segment that is written isn't emptied"
    assert rkeys(await after(sql, None)) == rkeys(await after(sql, 1)) == ["1", "2"]
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="up to 1 are kept no longer"):
        await after(sql, 0)
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError):
        await sql.execute("select atproto.register_reader('late', 0)")
    assert await sql.fetchval("select atproto.latest_seq()") == 3
    await upkeep(sql, Upkeep((), (), 3))
    assert (await upkeep(sql, Upkeep((), (1, 2), None))).empty == (1, 2)
    assert await after(sql, 3) == []
    assert await sql.fetchval("select atproto.latest_seq()") == 3


async def test_an_older_snapshot_is_told_as_well(database: str, sql: asyncpg.Connection) -> None:
    """A truncated table is empty for every snapshot; a reader must not take that for nothing new."""
    await fill(sql, segments=2)
    async with connected(database) as old:
        await old.execute("begin isolation level repeatable read")
        await old.execute("select count(*) from pg_class")
        assert (await upkeep(sql, Upkeep((), (0,), None))).empty == (0,)
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError):
            await after(old, 0)


async def test_a_reader_registered_meanwhile_loses_nothing(sql: asyncpg.Connection) -> None:
    await fill(sql, segments=2)
    plan = plan_upkeep(await load_log(sql), Keep(0.001, 2**40, 0), 2e9)
    assert plan.empty == (0,)
    await sql.execute("select atproto.register_reader('one', 0)")
    assert (await upkeep(sql, plan)).empty == ()
    assert rkeys(await sql.fetch(NEXT, "one", 10)) == ["0", "1"]
    assert (await upkeep(sql, plan)).empty == (0,)


async def test_nobody_is_waited_for_long_and_no_writer_waits(
    store: Store, database: str, sql: asyncpg.Connection
) -> None:
    """A backup that has touched everything, and a writer that has not committed."""
    await fill(sql, segments=2)
    async with connected(database) as backup, connected(database) as slow:
        await backup.execute("begin; select count(*) from atproto.changes")
        emptying = asyncio.create_task(upkeep(sql, Upkeep((), (0,), None)))
        while not emptying.done():
            await log(slow, change("more"))
        assert (await emptying).empty == ()
        await backup.execute("rollback")
        await slow.execute("begin; insert into indexer.batch (segment, size) values (0, 1)")
        assert (await upkeep(sql, Upkeep((), (0,), None))).empty == ()
        await slow.execute("rollback")
    assert (await upkeep(sql, Upkeep((), (0,), None))).empty == (0,)


async def test_a_reader_that_was_cut_off_is_told_until_it_starts_anew(store: Store, sql: asyncpg.Connection) -> None:
    await sql.execute("select atproto.register_reader('one'), atproto.register_reader('two')")
    await fill(sql, segments=2)
    assert rkeys(await sql.fetch(NEXT, "two", 10)) == ["0", "1"]
    await sql.execute("update indexer.batch set time = now() - interval '15 days'")
    _, done = await store.tend_log(KEEP, await sql.fetchval("select date_part('epoch', now())"))
    assert (done.cut_off, done.empty) == (("one",), (0,))
    for _ in range(2):
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="'one' was cut off"):
            await sql.fetch(NEXT, "one", 10)
    await sql.execute("select atproto.unregister_reader('one'), atproto.register_reader('one')")
    assert await sql.fetch(NEXT, "one", 10) == []


async def test_how_far_readers_are_behind(store: Store, sql: asyncpg.Connection) -> None:
    await sql.execute("select atproto.register_reader('one')")
    await log(sql, change(1), change(1), change(1))
    await log(sql, change(2))
    times = [row[0] for row in await sql.fetch("select time from atproto.changes order by seq")]
    for count, behind, since in ((0, 4, times[0]), (2, 2, times[0]), (1, 1, times[3]), (5, 0, None)):
        await sql.fetch(NEXT, "one", count)
        row = await sql.fetchrow("select behind, behind_since from atproto.readers")
        assert tuple(row or ()) == (behind, since)
    [state] = (await store.counts()).readers
    assert (state.name, state.seq, state.behind, state.cut_off, state.lag(0.0)) == ("one", 4, 0, False, 0.0)


async def test_the_ring_goes_round(store: Store, sql: asyncpg.Connection) -> None:
    """As a slow clock would see it: many rounds, at most so many segments at once, and the newest always there."""
    keep, now = Keep(60.0, 2**40, 0), await sql.fetchval("select date_part('epoch', now())")
    written = []
    for number in range(40):
        await log(sql, change(1, number))
        now += 11
        await sql.execute("update indexer.batch set time = to_timestamp($1) where first_seq = $2", now, number + 1)
        await sql.execute("update indexer.feed set opened_at = to_timestamp($1)", now - 11)
        state, _ = await store.tend_log(keep, now)
        written.append(state.written)
        kept = rkeys(await after(sql, None))
        assert kept == [str(n) for n in range(number - len(kept) + 1, number + 1)]
        assert 6 <= len(kept) <= 8 or number < 6
    assert len(set(written)) >= 7
