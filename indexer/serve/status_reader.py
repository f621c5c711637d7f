"""Read the database for the status document, and compute rates from what was read before."""

from collections import deque
from collections.abc import Iterator
from math import inf
from time import time
from typing import TypeVar

from indexer.db import Database
from indexer.db.links import LinkProgress
from indexer.db.reports import Counts, DatabaseState
from indexer.reasons import Rejection
from indexer.serve.status_document import (
    MAX_ROWS,
    Backfill,
    ConsumerStatus,
    CursorStatus,
    DaemonStatus,
    GapStatus,
    HostStatus,
    LinkStatus,
    ReadinessReason,
    RejectionStatus,
    RepoStatus,
    StatusDocument,
)
from indexer.sync.events import MAX_AHEAD, event_seconds
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import BUCKETS, Shard
from indexer.sync.stream import Cursor

RATE_SECONDS = 60.0
"""Time over which rates are averaged, or the time between two reads if that is longer."""
MAX_REPORT_AGE = 10.0
"""Seconds after which a daemon that has not reported its state counts as silent. It reports every two seconds."""
_REJECTION_TEXTS = {str(reason): reason.text for reason in Rejection}

T = TypeVar("T")


class StatusReader:
    """Reads the database and makes the status document of a shard.

    Counting reads many repos, so the daemon does it seldom; everything else is cheap to read.
    """

    def __init__(self, db: Database, shard: Shard) -> None:
        self._db = db
        self._shard = shard
        self._states: deque[tuple[float, DatabaseState]] = deque()
        self._counts: deque[tuple[float, Counts]] = deque()
        self._counted_since = inf

    async def read(self) -> None:
        """Read everything besides the numbers of repos.

        Raises:
            DatabaseError: The database does not answer.
        """
        now = time()
        _trim(self._states, now)
        self._states.append((now, await self._db.reports.state()))

    async def count(self) -> None:
        """Count the repos.

        Raises:
            DatabaseError: The database does not answer.
        """
        now = time()
        _trim(self._counts, now)
        since = self._counts[0][0] if self._counts else inf
        self._counts.append((now, await self._db.reports.counts(since)))
        self._counted_since = since

    def document(self) -> StatusDocument:
        """Return the document with what was read last. It says nothing of this process."""
        now = time()
        document = StatusDocument()
        if self._states:
            _show_state(document, self._shard, self._states[-1][1], now)
            (began, earlier), (read_at, latest) = self._states[0], self._states[-1]
            document.read_seconds_ago = max(0.0, now - read_at)
            if read_at > began:
                document.events_per_second = _new_events(earlier.cursors, latest.cursors) / (read_at - began)
        if self._counts:
            document.repos = self._repos(now)
        return document

    def _repos(self, now: float) -> RepoStatus:
        (began, earlier), (counted_at, counts) = self._counts[0], self._counts[-1]
        seconds = counted_at - began
        synchronized = counts.statuses[SyncStatus.SYNCHRONIZED]
        waiting = counts.queued + counts.statuses[SyncStatus.IN_PROGRESS]
        rate = counts.ended / (counted_at - self._counted_since) if counted_at > self._counted_since else None
        scope_rate = None
        if rate is not None and seconds > 0:
            scope_rate = min(max(0, earlier.incomplete - counts.incomplete) / seconds, rate)
        return RepoStatus(
            counted_seconds_ago=max(0.0, now - counted_at),
            counted_share=counts.counted_share,
            statuses=counts.statuses,
            reasons=counts.reasons,
            failures=dict(list(counts.failures.items())[:MAX_ROWS]),
            queued=counts.queued,
            parked=counts.parked,
            unproven=counts.unproven,
            records=counts.records,
            progress=synchronized / (synchronized + waiting) if synchronized + waiting else None,
            backfill=_backfill(waiting, rate),
            scope_backfill=_backfill(counts.incomplete, scope_rate),
        )


def _trim(samples: deque[tuple[float, T]], now: float) -> None:
    """Remove the samples that are older than `RATE_SECONDS`, except the newest one of them."""
    while len(samples) > 1 and samples[1][0] <= now - RATE_SECONDS:
        samples.popleft()


def _backfill(waiting: int, rate: float | None) -> Backfill:
    return Backfill(waiting, rate, waiting / rate if waiting and rate else None)


def _show_state(document: StatusDocument, shard: Shard, state: DatabaseState, now: float) -> None:
    def since(moment: float) -> float:
        return max(0.0, now - moment)

    document.reasons = list(_not_ready_reasons(shard, state))
    document.cursors = [
        CursorStatus(cursor.relay, cursor.shard, cursor.seq, cursor.event_time, _lag(cursor, now))
        for cursor in state.cursors
    ]
    document.links = _link_status(state.links, now)
    document.gaps_open = len(state.gaps)
    document.gaps = [
        GapStatus(gap.relay, gap.shard, gap.reason, gap.first_seq, gap.last_seq, since(opened.opened_at))
        for opened in state.gaps[:MAX_ROWS]
        for gap in [opened.gap]
    ]
    document.daemons = [
        DaemonStatus(
            _shard_name(report.positions),
            "owns" if report.owns else "waits",
            report.client,
            report.pid,
            since(report.since),
        )
        for report in state.reports
        if "live" in report.roles
    ]
    document.hosts = [
        HostStatus(
            host=host.host,
            reason=host.pause_reason or "",
            seconds_left=max(0.0, (host.paused_until or 0.0) - now),
            failures_in_a_row=host.consecutive_failures,
            last_error=host.last_error,
            last_success_seconds_ago=None if host.last_success is None else since(host.last_success),
        )
        for host in state.hosts
    ]
    document.rejections = [
        RejectionStatus(
            reason=one.reason,
            meaning=_REJECTION_TEXTS.get(one.reason, ""),
            stored=one.stored,
            last_hour=one.last_hour,
            newest_seconds_ago=since(one.newest_at),
            relay=one.relay,
            seq=one.seq,
            did=one.did,
            detail=one.detail,
        )
        for one in state.rejections[:MAX_ROWS]
    ]
    document.consumers = [
        ConsumerStatus(one.name, one.seq, one.behind, one.lag(now), since(one.seen_at), one.cut_off)
        for one in state.consumers[:MAX_ROWS]
    ]
    document.set_aside_events = state.set_aside_events


def _lag(cursor: Cursor, now: float) -> float | None:
    """Return the age of what is stored. The time of a single event counts only if nothing better is known."""
    if cursor.caught_up_at is not None:
        return max(0.0, now - cursor.caught_up_at)
    at = event_seconds(cursor.event_time)
    return None if at is None or at > now + MAX_AHEAD else max(0.0, now - at)


def _new_events(earlier: list[Cursor], latest: list[Cursor]) -> int:
    """Return the number of events between two reads. All shards consume the same stream of a relay."""
    before = {(cursor.relay, cursor.shard): cursor.seq for cursor in earlier}
    advanced: dict[str, int] = {}
    for cursor in latest:
        events = cursor.seq - before.get((cursor.relay, cursor.shard), cursor.seq)
        advanced[cursor.relay] = max(advanced.get(cursor.relay, 0), events)
    return sum(advanced.values())


def _link_status(links: LinkProgress, now: float) -> LinkStatus:
    """Return the status of links at `now` (Unix seconds)."""
    left = None
    if links.state == "backfill" and links.progress > 0 and links.enabled_at is not None:
        left = max(0.0, now - links.enabled_at) * (1 - links.progress) / links.progress
    progress = None if links.state == "off" else links.progress
    return LinkStatus(links.state, progress, links.repos_done, left, links.open_recounts)


def _shard_name(positions: range) -> str:
    """Return the shard with these positions as i/n."""
    for count in sorted(range(1, BUCKETS + 1), key=lambda count: abs(count * len(positions) - BUCKETS)):
        index = -(-positions[0] * count // BUCKETS)  # of the first shard that does not begin before
        if index < count and Shard(index, count).positions == positions:
            return f"{index}/{count}"
    return f"positions {positions[0]}-{positions[-1]}"


def _not_ready_reasons(shard: Shard, state: DatabaseState) -> Iterator[ReadinessReason]:
    """Yield what `/readyz` of the processes of this shard answers, and a reason if one of them is missing or silent."""
    positions = shard.positions
    reports = [
        report
        for report in state.reports
        if report.positions[0] <= positions[-1] and positions[0] <= report.positions[-1]
    ]
    live = [report for report in reports if "live" in report.roles and report.owns]
    missing = set(positions).difference(*(report.positions for report in live))
    for report in reports:
        if not report.owns and missing.isdisjoint(report.positions):
            continue  # it waits for a process that is at work
        name = f"daemon {_shard_name(report.positions)} ({','.join(report.roles)}): "
        name = name if len(reports) > 1 else ""
        if report.age > MAX_REPORT_AGE:
            message = f"{name}the daemon has not reported its state for {report.age:.0f} s"
            yield ReadinessReason("not-reported", message, round(report.age, 1))
        for reason in report.reasons:
            yield ReadinessReason(reason["code"], f"{name}{reason['message']}", reason["value"])
    missing.difference_update(*(report.positions for report in reports if not report.owns))
    part = "" if missing == set(positions) else f" for {len(missing)} of {len(positions)} buckets of the shard"
    if missing:
        yield ReadinessReason("no-daemon", f"no daemon with the role live runs{part}", len(missing))
