"""How much of the change log is kept: whole segments of its ring are emptied, never past a registered reader.

The segments exist from the migration on, so nothing has to be made ahead of time, and no clock of ours decides where a
change goes: if nobody looks after the log, its present segment grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from indexer.store.rows import Connection

SEGMENTS = 8
PARTS = SEGMENTS - 2  # one segment is being written and one is empty, the others share what is kept
LOCK_WAIT = "200ms"  # readers that come later wait for us as long


@dataclass(frozen=True, slots=True)
class Keep:
    """What is kept of the log: seconds (0: for ever) and bytes, whichever is less.

    A registered reader's changes are kept beyond that: until it is `reader_seconds` behind (0: for ever), or the log
    has twice the bytes. Then it is cut off.
    """

    seconds: float
    bytes: int
    reader_seconds: float


@dataclass(frozen=True, slots=True)
class Segment:
    """Its bytes, and number and time of its newest change: None for an empty one. Times are Unix seconds."""

    number: int
    bytes: int
    last_seq: int | None
    last_time: float | None


@dataclass(frozen=True, slots=True)
class ReaderState:
    """A registered reader: the last number it was given, how many it is behind, and since when (Unix seconds)."""

    name: str
    seq: int
    behind: int
    behind_since: float | None
    seen_at: float
    cut_off: bool

    def lag(self, now: float) -> float:
        """Age in seconds of the oldest change that it has not been given."""
        return 0.0 if self.behind_since is None else max(0.0, now - self.behind_since)


@dataclass(frozen=True, slots=True)
class Log:
    """The log as it stands: `opened_at` is when the segment `written` became the one that is written."""

    written: int
    opened_at: float
    segments: Sequence[Segment]
    readers: Sequence[ReaderState]

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What is to be done: readers to be cut off, segments to be emptied, the segment to be written from now on."""

    cut_off: tuple[str, ...]
    empty: tuple[int, ...]
    write: int | None


def plan_upkeep(log: Log, keep: Keep, now: float) -> Upkeep:
    """Pure. What goes is the oldest; what a reader that stays has not been given doesn't go."""
    surplus = _surplus(log, keep, now)
    overfull = log.bytes > 2 * keep.bytes
    cut_off = [
        reader.name
        for reader in log.readers
        if not reader.cut_off
        and (
            0 < keep.reader_seconds < reader.lag(now)
            or (overfull and any(reader.seq < (segment.last_seq or 0) for segment in surplus))
        )
    ]
    places = [reader.seq for reader in log.readers if not reader.cut_off and reader.name not in cut_off]
    empty = [
        segment.number
        for segment in surplus
        if segment.last_seq is not None and all(place >= segment.last_seq for place in places)
    ]
    return Upkeep(tuple(cut_off), tuple(empty), _next_segment(log, keep, now))


def _surplus(log: Log, keep: Keep, now: float) -> list[Segment]:
    """The segments over the limits, oldest first."""
    rest = log.bytes
    surplus: list[Segment] = []
    for segment in sorted(log.segments, key=lambda segment: segment.last_seq or 0):
        if segment.number == log.written or segment.last_time is None:
            continue
        if rest > keep.bytes or 0 < keep.seconds < now - segment.last_time:
            surplus.append(segment)
            rest -= segment.bytes
    return surplus


def _next_segment(log: Log, keep: Keep, now: float) -> int | None:
    [written] = [segment for segment in log.segments if segment.number == log.written]
    full = written.bytes * PARTS >= keep.bytes or 0 < keep.seconds <= (now - log.opened_at) * PARTS
    if written.last_seq is None or not full:
        return None
    return min((segment.number for segment in log.segments if segment.last_seq is None), default=None)


_WRITTEN = "select segment, date_part('epoch', opened_at) from indexer.feed"

_SEGMENT = """
    select s.number, pg_total_relation_size(format('indexer.change_%s', s.number)::regclass)
            + pg_total_relation_size(format('indexer.batch_%s', s.number)::regclass) as bytes,
        b.last_seq, date_part('epoch', b.time) as last_time
    from generate_series(0, $1::integer - 1) as s(number) left join lateral (
        select first_seq + size - 1 as last_seq, time from indexer.batch
        where segment = s.number and first_seq is not null order by first_seq desc limit 1
    ) b on true
    order by s.number
"""

_READERS = """
    select name, seq, behind, date_part('epoch', behind_since) as behind_since,
        date_part('epoch', seen_at) as seen_at, cut_off_at is not null as cut_off
    from atproto.readers order by name
"""

# A reader or a registration that is under way is not waited for.
_CUT_OFF = """
    update indexer.reader set cut_off_at = now()
    where name in (select name from indexer.reader where name = any($1::text[]) for update skip locked)
    returning name
"""

_GOES_ON = """
    update indexer.feed set segment = $1, opened_at = now()
    where one in (select one from indexer.feed for update skip locked)
"""

_LAST_SEQ = """
    select first_seq + size - 1 from indexer.batch where segment = $1 and first_seq is not null
    order by first_seq desc limit 1
"""

_NEEDED = "select exists (select from indexer.reader where cut_off_at is null and seq < $1)"


async def readers(connection: Connection) -> list[ReaderState]:
    return [ReaderState(**row) for row in await connection.fetch(_READERS)]


async def load_log(connection: Connection) -> Log:
    [(written, opened_at)] = await connection.fetch(_WRITTEN)
    segments = [Segment(**row) for row in await connection.fetch(_SEGMENT, SEGMENTS)]
    return Log(written, opened_at, segments, await readers(connection))


async def upkeep(connection: Connection, plan: Upkeep) -> Upkeep:
    """Does what is planned, and gives what of it could be done; the rest is for the next time."""
    cut_off = [name for (name,) in await connection.fetch(_CUT_OFF, plan.cut_off)] if plan.cut_off else []
    if plan.write is not None:
        await connection.execute(_GOES_ON, plan.write)
    emptied = [segment for segment in plan.empty if await _empty(connection, segment)]
    return Upkeep(tuple(cut_off), tuple(emptied), plan.write)


async def _empty(connection: Connection, segment: int) -> bool:
    """Whether the segment is empty now. Looks again at all that counts once it has the locks.

    A writer that is still at it, or a reader or a backup whose transaction has touched the log, is not waited for.
    """
    try:
        async with connection.transaction():
            await connection.execute(f"set local lock_timeout = '{LOCK_WAIT}'")
            written = await connection.fetchval("select segment from indexer.feed for update")
            tables = f"indexer.batch_{segment}, indexer.change_{segment}"
            await connection.execute(f"lock table {tables} in access exclusive mode")
            last = await connection.fetchval(_LAST_SEQ, segment)
            if written == segment or last is None or await connection.fetchval(_NEEDED, last):
                return False
            await connection.execute("select setval('indexer.gone', greatest(last_value, $1)) from indexer.gone", last)
            await connection.execute(f"truncate {tables}")
    except asyncpg.LockNotAvailableError:
        return False
    return True
