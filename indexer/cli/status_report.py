"""The state of the indexer as the database shows it: the data of `indexer status`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from indexer.cli.output import duration_text
from indexer.monitoring.readiness import MAX_READY_LAG_SECONDS
from indexer.store import Counts
from indexer.sync.plans import Cursor
from indexer.sync.repo_state import SyncStatus
from indexer.sync.shard import Shard


@dataclass(frozen=True, slots=True)
class CursorStatus:
    """The stored cursor of one relay and shard.

    Attributes:
        event_time: Time of the event at the cursor, as the relay wrote it.
        lag_seconds: Age of the event at the cursor, or seconds since the stream had no more events, whichever is less.
            None if both are unknown, because the relay's time cannot be read.
    """

    relay: str
    shard: str
    seq: int
    event_time: str | None
    lag_seconds: float | None


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A registered consumer of the change log.

    Attributes:
        seq: The last change that it was given.
        behind: Number of changes that it has not been given.
        lag_seconds: Age of the oldest of those changes.
        silent_seconds: Seconds since it last asked for changes.
        cut_off: True if it was disconnected and has to register again.
    """

    name: str
    seq: int
    behind: int
    lag_seconds: float
    silent_seconds: float
    cut_off: bool


@dataclass(frozen=True, slots=True)
class PausedHost:
    """A host that gets no requests for `seconds_left`."""

    host: str
    reason: str
    seconds_left: float
    failures_in_a_row: int
    last_error: str | None


@dataclass(frozen=True, slots=True)
class Sample:
    """The counts at one time, in Unix seconds."""

    at: float
    counts: Counts


@dataclass(frozen=True, slots=True)
class Status:
    """The state of one shard. Rates are averages between two samples; events are counted by sequence numbers.

    Attributes:
        database: The URL of the database, without a password.
        not_ready: The reason why the indexer is not ready; None if it is ready.
        reasons: Number of repos by the reason why they are not synchronized.
        failures: Number of repos by the reason why their last fetch failed.
        records: Estimated number of records.
        resync_queue: Number of repos that wait for a resync.
        parked: Number of repos that are not tried again until an event unparks them.
        resyncs_per_second: Rate at which repos leave the queue, synchronized or parked. Repos that enter the queue in
            the meantime do not reduce it.
        progress: Share of synchronized repos among those that are synchronized or waiting; None if there are none.
        seconds_left: Time for all waiting repos at the present rate; None if none waits or the rate is zero.
    """

    database: str
    not_ready: str | None
    cursors: list[CursorStatus]
    repos: dict[str, int]
    reasons: dict[str, int]
    failures: dict[str, int]
    records: int
    resync_queue: int
    parked: int
    events_per_second: float
    resyncs_per_second: float
    progress: float | None
    seconds_left: float | None
    consumers: list[ConsumerStatus]
    paused_hosts: list[PausedHost]

    def to_dict(self) -> dict[str, Any]:
        """Return the status as the JSON object that `indexer status --json` prints."""
        return {"ready": self.not_ready is None, **asdict(self)}


def status_of(database: str, shard: Shard, earlier: Sample, now: Sample) -> Status:
    """Return the status of a shard from two samples. `now.counts.ended` must be counted since the earlier sample."""
    counts, seconds = now.counts, max(now.at - earlier.at, 0.001)
    cursors = [
        CursorStatus(cursor.relay, cursor.shard, cursor.seq, cursor.event_time, _lag(cursor, now.at))
        for cursor in counts.cursors
    ]
    synchronized = counts.statuses[SyncStatus.SYNCHRONIZED]
    waiting = counts.queued + counts.statuses[SyncStatus.IN_PROGRESS]
    resync_rate = counts.ended / seconds
    return Status(
        database=database,
        not_ready=_not_ready(shard, cursors),
        cursors=cursors,
        repos={status.value: count for status, count in counts.statuses.items()},
        reasons=counts.reasons,
        failures=counts.failures,
        records=counts.records,
        resync_queue=counts.queued,
        parked=counts.parked,
        events_per_second=_new_events(earlier.counts, counts) / seconds,
        resyncs_per_second=resync_rate,
        progress=synchronized / (synchronized + waiting) if synchronized + waiting else None,
        seconds_left=waiting / resync_rate if waiting and resync_rate else None,
        consumers=_consumers(counts, now.at),
        paused_hosts=_paused_hosts(counts, now.at),
    )


def _consumers(counts: Counts, now: float) -> list[ConsumerStatus]:
    return [
        ConsumerStatus(
            consumer.name,
            consumer.seq,
            consumer.behind,
            consumer.lag(now),
            max(0.0, now - consumer.seen_at),
            consumer.cut_off,
        )
        for consumer in counts.consumers
    ]


def _paused_hosts(counts: Counts, now: float) -> list[PausedHost]:
    return [
        PausedHost(
            host.host,
            host.pause_reason or "",
            max(0.0, (host.paused_until or 0.0) - now),
            host.consecutive_failures,
            host.last_error,
        )
        for host in counts.hosts
    ]


def _lag(cursor: Cursor, now: float) -> float | None:
    lags = [_age(cursor.event_time, now), None if cursor.caught_up_at is None else now - cursor.caught_up_at]
    return min((lag for lag in lags if lag is not None), default=None)


def _age(event_time: str | None, now: float) -> float | None:
    try:
        return None if event_time is None else now - datetime.fromisoformat(event_time).timestamp()
    except (ValueError, OverflowError):
        return None


def _not_ready(shard: Shard, cursors: Sequence[CursorStatus]) -> str | None:
    """Return the reason why the shard is not ready; None if every bucket has a cursor with a small lag.

    A bucket may have cursors of several relays, and of shards that existed before. The one with the least lag counts.
    """
    of_buckets = [[c for c in cursors if bucket in Shard.parse(c.shard).buckets] for bucket in shard.buckets]
    if not any(of_buckets):
        return "no event is stored yet"
    if not all(of_buckets):
        return "some buckets of the shard have not stored an event yet"
    lags = [[c.lag_seconds for c in candidates if c.lag_seconds is not None] for candidates in of_buckets]
    if not all(lags):
        return "the lag is unknown: the events of the relay have no valid time"
    if (lag := max(min(candidates) for candidates in lags)) > MAX_READY_LAG_SECONDS:
        return f"the newest stored event is {duration_text(lag)} old"
    return None


def _new_events(earlier: Counts, now: Counts) -> int:
    """Return the number of events between two samples. All shards consume the same stream of a relay."""
    before = {(cursor.relay, cursor.shard): cursor.seq for cursor in earlier.cursors}
    advanced: dict[str, int] = {}
    for cursor in now.cursors:
        events = cursor.seq - before.get((cursor.relay, cursor.shard), cursor.seq)
        advanced[cursor.relay] = max(advanced.get(cursor.relay, 0), events)
    return sum(advanced.values())
