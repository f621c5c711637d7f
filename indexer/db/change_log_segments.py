"""Retention of the change log: eight segments that are reused. Whole segments are truncated, oldest first.

All changes are written into the current segment. A segment is not truncated while it has changes that a registered
consumer has not received, unless the consumer is disconnected for being too far behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import time

import asyncpg

from indexer.crash_points import COMMITTED, crash_point
from indexer.db.blocking_sessions import END_WHEN_STOPPED
from indexer.db.columns import Connection
from indexer.db.connections import Area

SEGMENTS = 8
"""The number of segments that the migration created."""
RETAINED_SEGMENTS = SEGMENTS - 2
"""Segments that share the retained time. Of the other two, one is the current segment and one is empty."""
MAX_GROWTH_RATE = 100 * 10**6
"""Bytes per second at which the change log is assumed to grow at most."""
MIN_CHECK_SECONDS, MAX_CHECK_SECONDS = 0.2, 60.0
LOCK_TIMEOUT = "200ms"
"""Maximum time that a truncation waits for its lock. Consumers that come after it wait as long."""


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The limits of the change log. Changes beyond `max_age` (seconds) or `max_bytes` (with indexes) are trimmed.

    A change that a registered consumer has not received is retained beyond these limits. The consumer is disconnected
    when its lag exceeds `max_consumer_lag` (seconds), or when the log reaches twice `max_bytes`. For times, 0 means no
    limit. A trim leaves a reserve of `segment_bytes` for what is written until the next one.
    """

    max_age: float
    max_bytes: int
    max_consumer_lag: float

    @property
    def segment_bytes(self) -> int:
        """The size at which the current segment is full."""
        return self.max_bytes // SEGMENTS

    @property
    def check_seconds(self) -> float:
        """The interval of trims, so that the log does not use up the reserve in between."""
        return min(max(self.segment_bytes / 2 / MAX_GROWTH_RATE, MIN_CHECK_SECONDS), MAX_CHECK_SECONDS)

    def is_overfull(self, size: int) -> bool:
        """Return True if a log of this size disconnects the consumers and sessions that prevent trimming."""
        return size > 2 * self.max_bytes - self.segment_bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """The state of one segment: number and Unix seconds of its newest change are None if it is empty."""

    number: int
    bytes: int
    last_seq: int | None
    last_time: float | None


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """The state of a registered consumer: a row of `atproto.readers`, with times in Unix seconds.

    Attributes:
        behind_since: When its first unreceived change was committed; None if there is none.
        cut_off: True if it was disconnected.
    """

    name: str
    seq: int
    behind: int
    behind_since: float | None
    cut_off: bool

    def lag(self, now: float) -> float:
        """Return the age in seconds of the oldest change that the consumer has not received."""
        return 0.0 if self.behind_since is None else max(0.0, now - self.behind_since)


@dataclass(frozen=True, slots=True)
class ChangeLogState:
    """The state of the change log. The segment `current` is written, since `opened_at` (Unix seconds)."""

    current: int
    opened_at: float
    segments: Sequence[Segment]
    consumers: Sequence[ConsumerState]

    @property
    def bytes(self) -> int:
        """The size of all segments."""
        return sum(segment.bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class TrimPlan:
    """The steps of one trim: consumers to disconnect, segments to truncate, and the next current segment.

    Segments are `locked` that were not truncated because an open transaction has used them.
    """

    disconnect: tuple[str, ...]
    truncate: tuple[int, ...]
    next_segment: int | None
    locked: tuple[int, ...] = ()


def plan_trim(log: ChangeLogState, policy: RetentionPolicy, now: float) -> TrimPlan:
    """Return the steps that bring the log within the policy."""
    surplus = _surplus(log, policy, now)
    overfull = policy.is_overfull(log.bytes)
    connected = [consumer for consumer in log.consumers if not consumer.cut_off]
    disconnect = [
        consumer.name
        for consumer in connected
        if 0 < policy.max_consumer_lag < consumer.lag(now)
        or (overfull and any(consumer.seq < (segment.last_seq or 0) for segment in surplus))
    ]
    positions = [consumer.seq for consumer in connected if consumer.name not in disconnect]
    truncate = [
        segment.number
        for segment in surplus
        if segment.last_seq is not None and all(position >= segment.last_seq for position in positions)
    ]
    return TrimPlan(tuple(disconnect), tuple(truncate), _next_segment(log, policy, now))


def _surplus(log: ChangeLogState, policy: RetentionPolicy, now: float) -> list[Segment]:
    """Return the segments beyond the limits, oldest first."""
    rest = log.bytes
    surplus: list[Segment] = []
    for segment in sorted(log.segments, key=lambda segment: segment.last_seq or 0):
        if segment.number == log.current or segment.last_time is None:
            continue
        if rest > policy.max_bytes - policy.segment_bytes or 0 < policy.max_age < now - segment.last_time:
            surplus.append(segment)
            rest -= segment.bytes
    return surplus


def _next_segment(log: ChangeLogState, policy: RetentionPolicy, now: float) -> int | None:
    """Return an empty segment if the current one is full, by age or size."""
    [current] = [segment for segment in log.segments if segment.number == log.current]
    old = 0 < policy.max_age <= (now - log.opened_at) * RETAINED_SEGMENTS
    large = current.bytes >= policy.segment_bytes
    if current.last_seq is None or not (old or large):
        return None
    return min((segment.number for segment in log.segments if segment.last_seq is None), default=None)


# The log has times of the database's clock. What is returned are the same times by the clock of this process, which it
# gives as $1: `_SINCE` is before it by their age.
_SINCE = "$1::float8 - date_part('epoch', clock_timestamp() - {})"

_CURRENT = f"select current_segment, {_SINCE.format('opened_at')} from indexer.change_log"

_NEWEST = "from indexer.change_batch where segment = {} and first_seq is not null order by first_seq desc limit 1"
_LAST_SEQ = f"select first_seq + size - 1 {_NEWEST.format('$1')}"
_SEGMENTS = f"""
    select s.number, pg_total_relation_size(format('indexer.change_%s', s.number)::regclass)
            + pg_total_relation_size(format('indexer.change_batch_%s', s.number)::regclass) as bytes,
        b.last_seq, {_SINCE.format("b.time")} as last_time
    from generate_series(0, $2::integer - 1) as s(number)
    left join lateral (select first_seq + size - 1 as last_seq, time {_NEWEST.format("s.number")}) b on true
    order by s.number
"""

_CONSUMERS = f"""
    select name, seq, behind, {_SINCE.format("behind_since")} as behind_since, cut_off_at is not null as cut_off
    from atproto.readers order by name
"""

# Consumers lock their own rows for as long as they like, so disconnecting them does not write these.
_DISCONNECT = """
    with disconnected as (
        insert into indexer.disconnected_consumer (id)
        select id from indexer.consumer where name = any($1::text[]) on conflict do nothing returning id
    )
    select name from disconnected join indexer.consumer using (id)
"""

_FORGET_REMOVED = """
    delete from indexer.disconnected_consumer d
    where not exists (select from indexer.consumer c where c.id = d.id)
"""

_SET_CURRENT = """
    update indexer.change_log set current_segment = $1, opened_at = now()
    where singleton in (select singleton from indexer.change_log for update skip locked)
"""

# Only a distributed database has unnumbered batches. Otherwise, COMMIT numbers them, and the lock waits for it.
_NEEDED = """
    select exists (
        select from indexer.consumer c
        where c.seq < $1 and not exists (select from indexer.disconnected_consumer d where d.id = c.id)
    ) or exists (select from indexer.unnumbered_batch where segment = $2)
"""


async def load_state(connection: Connection) -> ChangeLogState:
    """Return the state of the change log."""
    [(current, opened_at)] = await connection.fetch(_CURRENT, time())
    segments = [Segment(**row) for row in await connection.fetch(_SEGMENTS, time(), SEGMENTS)]
    consumers = [ConsumerState(**row) for row in await connection.fetch(_CONSUMERS, time())]
    return ChangeLogState(current, opened_at, segments, consumers)


class ChangeLogSegments(Area):
    """The segments of the change log."""

    async def trim(self, policy: RetentionPolicy, now: float) -> tuple[ChangeLogState, TrimPlan]:
        """Trim the change log; return its state before, and the steps that succeeded."""
        async with self._pool.connection() as connection:
            log = await load_state(connection)
            plan = plan_trim(log, policy, now)
            return log, await trim(connection, plan)


async def trim(connection: Connection, plan: TrimPlan) -> TrimPlan:
    """Execute the plan; return the steps that succeeded. A step that would have to wait for a lock is skipped."""
    disconnected = [name for (name,) in await connection.fetch(_DISCONNECT, plan.disconnect)]
    await connection.execute(_FORGET_REMOVED)
    if plan.next_segment is not None:
        await connection.execute(_SET_CURRENT, plan.next_segment)
        crash_point("change-log.segment")
    truncated, locked = list[int](), list[int]()
    for segment in plan.truncate:
        try:
            if await _truncate(connection, segment):
                truncated.append(segment)
        except asyncpg.LockNotAvailableError:
            locked.append(segment)
    return TrimPlan(tuple(disconnected), tuple(truncated), plan.next_segment, tuple(locked))


async def _truncate(connection: Connection, segment: int) -> bool:
    """Truncate a segment unless it is the current one, or has changes that a consumer has not received.

    The conditions are checked again under the locks. `LOCK_TIMEOUT` limits the wait for an open transaction that used
    the segment: a writer, a query of the view, or a backup.
    """
    async with connection.transaction():
        await connection.execute(f"set local lock_timeout = '{LOCK_TIMEOUT}'; {END_WHEN_STOPPED}")
        current = await connection.fetchval("select current_segment from indexer.change_log for update")
        tables = f"indexer.change_batch_{segment}, indexer.change_{segment}"
        await connection.execute(f"lock table {tables} in access exclusive mode")
        last = await connection.fetchval(_LAST_SEQ, segment)
        if current == segment or last is None or await connection.fetchval(_NEEDED, last, segment):
            return False
        await connection.execute(
            "select setval('indexer.trimmed_seq', greatest(last_value, $1)) from indexer.trimmed_seq", last
        )
        await connection.execute(f"truncate {tables}")
        crash_point("change-log.truncated")
    crash_point(COMMITTED)
    return True
