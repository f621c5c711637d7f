"""Read the database for the status document, and compute rates from what was read before."""

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf
from time import time
from typing import Any, TypeVar

from indexer.db import Database
from indexer.db.process_reports import ProcessReport
from indexer.db.reports import MAX_ROWS, Counts
from indexer.serve.status_document import ReadinessReason, Row, StatusDocument
from indexer.sync.hints import JETSTREAM
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import BUCKETS, Shard

RATE_SECONDS = 60.0
"""Time over which rates are averaged, or the time between two reads if that is longer."""
MAX_REPORT_AGE = 10.0
"""Seconds after which a daemon that has not reported its state counts as silent. It reports every two seconds."""
COUNTED = ("counted_share", "statuses", "reasons", "queued", "parked", "unproven", "records", "unlisted")
"""Numbers of `Counts` that the document has."""

T = TypeVar("T")


class StatusReader:
    """Reads the database and makes the status document of a shard.

    Counting reads many repos, so the daemon does it seldom; everything else is cheap to read.
    """

    def __init__(self, db: Database, shard: Shard) -> None:
        self._db = db
        self._shard = shard
        self._states: deque[tuple[float, dict[str, Any]]] = deque()
        self._reports: Sequence[ProcessReport] = ()
        self._counts: deque[tuple[float, Counts]] = deque()
        self._counted_since = inf

    async def read(self) -> None:
        """Read everything besides the numbers of repos.

        Raises:
            DatabaseError: The database does not answer.
        """
        now = time()
        _trim(self._states, now)
        state, self._reports = await self._db.reports.state()
        self._states.append((now, state))

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
            (began, earlier), (read_at, latest) = self._states[0], self._states[-1]
            daemons = [_daemon_row(report) for report in self._reports if "live" in report.roles]
            reasons = list(_not_ready_reasons(self._shard, self._reports))
            document = StatusDocument(
                reasons=reasons, daemons=daemons, read_seconds_ago=max(0.0, now - read_at), **latest
            )
            if read_at > began and all(cursor["relay"] != JETSTREAM for cursor in latest["cursors"]):
                document.events_per_second = _new_events(earlier["cursors"], latest["cursors"]) / (read_at - began)
        if self._counts:
            document.repos = self._repos(now)
        return document

    def _repos(self, now: float) -> Row:
        (began, earlier), (counted_at, counts) = self._counts[0], self._counts[-1]
        seconds = counted_at - began
        synchronized = counts.statuses[SyncStatus.SYNCHRONIZED]
        waiting = counts.queued + counts.statuses[SyncStatus.IN_PROGRESS]
        rate = counts.ended / (counted_at - self._counted_since) if counted_at > self._counted_since else None
        scope_rate = None
        if rate is not None and seconds > 0:
            scope_rate = min(max(0, earlier.incomplete - counts.incomplete) / seconds, rate)
        return {
            "counted_seconds_ago": max(0.0, now - counted_at),
            **{name: getattr(counts, name) for name in COUNTED},
            "failures": dict(list(counts.failures.items())[:MAX_ROWS]),
            "progress": synchronized / (synchronized + waiting) if synchronized + waiting else None,
            "backfill": _backfill(waiting, rate),
            "scope_backfill": _backfill(counts.incomplete, scope_rate),
        }


def _trim(samples: deque[tuple[float, T]], now: float) -> None:
    """Remove the samples that are older than `RATE_SECONDS`, except the newest one of them."""
    while len(samples) > 1 and samples[1][0] <= now - RATE_SECONDS:
        samples.popleft()


def _backfill(waiting: int, rate: float | None) -> Row:
    """Return the number of repos that wait, the rate at which they become fewer, and the time that this takes.

    The rate does not count those that begin to wait in the meantime. It is None if it is not known yet. The time is
    None if no repo waits, or the rate is zero or unknown.
    """
    left = waiting / rate if waiting and rate else None
    return {"waiting": waiting, "repos_per_second": rate, "seconds_left": left}


def _daemon_row(report: ProcessReport) -> Row:
    state = "owns" if report.owns else "waits"
    shard = _shard_name(report.positions)
    return {"shard": shard, "state": state, "client": report.client, "pid": report.pid, "seconds": report.seconds}


def _new_events(earlier: list[Row], latest: list[Row]) -> int:
    """Return the number of events between two reads. All shards consume the same stream of a relay."""
    before = {(cursor["relay"], cursor["shard"]): cursor["seq"] for cursor in earlier}
    advanced: dict[str, int] = {}
    for cursor in latest:
        events = cursor["seq"] - before.get((cursor["relay"], cursor["shard"]), cursor["seq"])
        advanced[cursor["relay"]] = max(advanced.get(cursor["relay"], 0), events)
    return sum(advanced.values())


def _shard_name(positions: range) -> str:
    """Return the shard with these positions as i/n."""
    for count in sorted(range(1, BUCKETS + 1), key=lambda count: abs(count * len(positions) - BUCKETS)):
        index = -(-positions[0] * count // BUCKETS)  # of the first shard that does not begin before
        if index < count and Shard(index, count).positions == positions:
            return f"{index}/{count}"
    return f"positions {positions[0]}-{positions[-1]}"


def _not_ready_reasons(shard: Shard, all_reports: Sequence[ProcessReport]) -> Iterator[ReadinessReason]:
    """Yield what `/readyz` of the processes of this shard answers, and a reason if one of them is missing or silent."""
    positions = shard.positions
    reports = [
        report
        for report in all_reports
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
