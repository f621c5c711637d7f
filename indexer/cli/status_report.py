"""The state of the indexer as the database shows it: the data of `indexer status`."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

from indexer.cli.output import duration_text
from indexer.db import Counts
from indexer.db.shard_lock import ShardSession
from indexer.live.event_clock import MAX_AHEAD
from indexer.serve.backfill import ScopeStatus, backfill_of, scope_status_of
from indexer.serve.readiness import ReadinessReason
from indexer.serve.status_document import (
    ConsumerStatus,
    GapStatus,
    LinkStatus,
    consumer_status,
    gap_status,
    link_status,
)
from indexer.sync.shard import BUCKETS, Shard
from indexer.sync.stream import Cursor

MAX_REPORT_AGE = 10.0
"""Seconds after which a daemon that has not reported its state counts as silent. It reports every two seconds."""


@dataclass(frozen=True, slots=True)
class CursorStatus:
    """The stored cursor of one relay and shard.

    Attributes:
        event_time: Time of the event at the cursor, as the relay wrote it.
        lag_seconds: Seconds since the moment up to which all events are stored, by the times of most accounts, or since
            the stream had no more events. None if it is unknown, because no event has a possible time.
    """

    relay: str
    shard: str
    seq: int
    event_time: str | None
    lag_seconds: float | None


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """A daemon with the role `live`.

    Attributes:
        shard: Its shard as i/n, or its range of positions (`indexer.sync.shard`).
        state: `owns` if it processes the shard, `waits` if another process holds a part of it.
        client: The network address of the process.
        pid: The process ID of its session in Postgres.
        seconds: Seconds since that session began.
    """

    shard: str
    state: Literal["owns", "waits"]
    client: str
    pid: int
    seconds: float


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
        not_ready_reasons: The reasons of `/readyz` of all processes of the shard, and those why a process gives none.
        reasons: Number of repos by the reason why they are not synchronized.
        failures: Number of repos by the reason why their last fetch failed.
        counted_share: Share of the table that was counted; below 1, the numbers of repos are estimates.
        records: Estimated number of records.
        resync_queue: Number of repos that wait for a resync.
        parked: Number of repos that are tried again only after an event, or after `INDEXER_SWEEP_INTERVAL`.
        unproven: Number of repos to which an undecidable commit was applied since their last complete export.
        resyncs_per_second: Rate at which repos leave the queue, synchronized or parked. Repos that enter the queue in
            the meantime do not reduce it.
        progress: Share of synchronized repos among those that are synchronized or waiting; None if there are none.
        seconds_left: Time for all waiting repos at the present rate; None if none waits or the rate is zero.
        set_aside_events: Number of events that clients of the feed refused for so long that they were set aside.
        scope_backfill: The backfill of collections that the scope added.
    """

    database: str
    not_ready_reasons: list[ReadinessReason]
    cursors: list[CursorStatus]
    repos: dict[str, int]
    reasons: dict[str, int]
    failures: dict[str, int]
    counted_share: float
    records: int
    resync_queue: int
    parked: int
    unproven: int
    events_per_second: float
    resyncs_per_second: float
    progress: float | None
    seconds_left: float | None
    consumers: list[ConsumerStatus]
    set_aside_events: int
    paused_hosts: list[PausedHost]
    gaps: list[GapStatus]
    daemons: list[DaemonStatus]
    links: LinkStatus
    scope_backfill: ScopeStatus

    @property
    def not_ready(self) -> str | None:
        """The message of the first reason; None if the indexer is ready."""
        return self.not_ready_reasons[0].message if self.not_ready_reasons else None

    def to_dict(self) -> dict[str, Any]:
        """Return the status as the JSON object that `indexer status --json` prints."""
        return {"ready": not self.not_ready_reasons, "not_ready": self.not_ready, **asdict(self)}


def status_of(database: str, shard: Shard, earlier: Sample, now: Sample) -> Status:
    """Return the status of a shard from two samples. `now.counts.ended` must be counted since the earlier sample."""
    counts, seconds = now.counts, max(now.at - earlier.at, 0.001)
    cursors = [
        CursorStatus(cursor.relay, cursor.shard, cursor.seq, cursor.event_time, _lag(cursor, now.at))
        for cursor in counts.cursors
    ]
    backfill = backfill_of(counts, seconds)
    return Status(
        database=database,
        not_ready_reasons=list(_not_ready_reasons(shard, counts)),
        cursors=cursors,
        repos={status.value: count for status, count in counts.statuses.items()},
        reasons=counts.reasons,
        failures=counts.failures,
        counted_share=counts.counted_share,
        records=counts.records,
        resync_queue=counts.queued,
        parked=counts.parked,
        unproven=counts.unproven,
        events_per_second=_new_events(earlier.counts, counts) / seconds,
        resyncs_per_second=backfill.repos_per_second or 0.0,
        progress=backfill.progress,
        seconds_left=backfill.seconds_left,
        consumers=[consumer_status(consumer, now.at) for consumer in counts.consumers],
        set_aside_events=counts.set_aside_events,
        paused_hosts=_paused_hosts(counts, now.at),
        gaps=[gap_status(opened, now.at) for opened in counts.gaps],
        daemons=[_daemon_status(session, now.at) for session in counts.sessions],
        links=link_status(counts.links, now.at),
        scope_backfill=scope_status_of(
            counts.incomplete, earlier.counts.incomplete, seconds, backfill.repos_per_second
        ),
    )


def _daemon_status(session: ShardSession, now: float) -> DaemonStatus:
    state: Literal["owns", "waits"] = "owns" if session.owns else "waits"
    shard = _shard_name(*session.positions)
    return DaemonStatus(shard, state, session.client, session.pid, max(0.0, now - session.since))


def _shard_name(first: int, last: int) -> str:
    """Return the shard with these positions as i/n; the positions if there is none: any session may name some."""
    size = last - first + 1
    for count in sorted(range(1, BUCKETS + 1), key=lambda count: abs(count * size - BUCKETS)):
        index = -(-first * count // BUCKETS)  # of the first shard that does not begin before
        if index < count and Shard(index, count).positions == range(first, last + 1):
            return f"{index}/{count}"
    return f"positions {first}-{last}"


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


def _not_ready_reasons(shard: Shard, counts: Counts) -> Iterator[ReadinessReason]:
    """Yield what `/readyz` of the processes of this shard answers, and a reason if one of them is missing or silent."""
    positions = shard.positions
    reports = [report for report in counts.reports if _overlap(report.positions, positions)]
    live = [report for report in reports if "live" in report.roles and report.owns]
    missing = set(positions).difference(*(report.positions for report in live))
    for report in reports:
        if not report.owns and missing.isdisjoint(report.positions):
            continue  # it waits for a process that is at work
        name = f"daemon {_shard_name(report.positions[0], report.positions[-1])} ({','.join(report.roles)}): "
        name = name if len(reports) > 1 else ""
        if report.age > MAX_REPORT_AGE:
            message = f"{name}the daemon has not reported its state for {duration_text(report.age)}"
            yield ReadinessReason("not-reported", message, round(report.age, 1))
        for reason in report.reasons:
            yield ReadinessReason(reason["code"], f"{name}{reason['message']}", reason["value"])
    missing.difference_update(*(report.positions for report in reports if not report.owns))
    owned = {position for session in counts.sessions if session.owns for position in _range_of(session)}
    part = "" if missing == set(positions) else f" for {len(missing)} of {len(positions)} buckets of the shard"
    if missing & owned:
        message = f"a daemon runs{part}, but has not reported its state; daemons of earlier releases do not"
        yield ReadinessReason("not-reported", message, len(missing))
    elif missing:
        yield ReadinessReason("no-daemon", f"no daemon with the role live runs{part}", len(missing))


def _overlap(one: range, other: range) -> bool:
    return one[0] <= other[-1] and other[0] <= one[-1]


def _range_of(session: ShardSession) -> range:
    first, last = session.positions
    return range(first, last + 1)


def _lag(cursor: Cursor, now: float) -> float | None:
    """Return the age of what is stored. The time of a single event counts only if nothing better is known."""
    if cursor.caught_up_at is not None:
        return max(0.0, now - cursor.caught_up_at)
    age = _age(cursor.event_time, now)
    return None if age is None or age < -MAX_AHEAD else max(0.0, age)


def _age(event_time: str | None, now: float) -> float | None:
    try:
        return None if event_time is None else now - datetime.fromisoformat(event_time).timestamp()
    except (ValueError, OverflowError):
        return None


def _new_events(earlier: Counts, now: Counts) -> int:
    """Return the number of events between two samples. All shards consume the same stream of a relay."""
    before = {(cursor.relay, cursor.shard): cursor.seq for cursor in earlier.cursors}
    advanced: dict[str, int] = {}
    for cursor in now.cursors:
        events = cursor.seq - before.get((cursor.relay, cursor.shard), cursor.seq)
        advanced[cursor.relay] = max(advanced.get(cursor.relay, 0), events)
    return sum(advanced.values())
