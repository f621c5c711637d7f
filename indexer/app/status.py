"""The state of the running daemon, read from its stages: for the health checks, the metrics and the status page."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic, time
from typing import Any, NoReturn

from indexer.app.monitor import DatabaseMonitor
from indexer.app.stages import Stage
from indexer.atproto.syntax import is_did
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.periodic import DatabaseAttempt
from indexer.db.reports import MAX_ROWS
from indexer.live.batch_writer import BatchWriter
from indexer.resync.pool import WorkerPool
from indexer.serve.account_status import MAX_COUNTED_RECORDS, account_status
from indexer.serve.status_document import ReadinessReason, StatusDocument
from indexer.serve.status_reader import StatusReader
from indexer.sync.shard import Shard
from indexer.tasks.shard_ownership import ShardOwnership
from indexer.telemetry.metrics import Metrics, Reading

SAMPLE_SECONDS = 10.0
"""Interval between two samples of the history."""
MAX_SAMPLES = 360
"""Samples of the history: an hour."""


@dataclass(eq=False)
class DaemonProbe:
    """Reads the stages of this process. No method does I/O.

    Attributes:
        started_at: When the daemon was started (monotonic seconds).
        stages: The progress of everything that is watched, by its name.
    """

    listed: Sequence[Stage]
    database: DatabaseMonitor
    ownership: ShardOwnership
    started_at: float

    def __post_init__(self) -> None:
        self.stages = {progress.name: progress for stage in self.listed for progress in stage.progress}

    def stalled(self) -> list[ReadinessReason]:
        """Return a reason for each stage that has work and made no progress for longer than its limit.

        No stage counts as stalled because of a database that does not answer, or because another process owns the
        shard: a restart of this process would not help.
        """
        message = "{} stalled: it has work and made no progress for {:.0f} s"
        return [
            ReadinessReason("stage-stalled", message.format(stage.name, seconds), round(seconds, 1))
            for stage in self.stages.values()
            if (seconds := self._seconds_without_progress(stage)) > stage.limit
        ]

    def _seconds_without_progress(self, stage: StageProgress) -> float:
        """Return for how long the stage has made no progress although it has work and is able to work, else 0."""
        database = self.database.answering_since if stage.needs_database else self.started_at
        shard = self.ownership.owned_since if stage.needs_shard else self.started_at
        return 0.0 if database is None or shard is None else stage.seconds_without_progress(max(database, shard))

    def not_ready(self) -> list[ReadinessReason]:
        """Return all reasons why the daemon is not ready, stalled stages first."""
        return self.stalled() + [reason for stage in self.listed for reason in stage.not_ready()]

    def gauges(self) -> dict[str, Callable[[], Reading]]:
        """Return the functions that read the gauges of readiness, by the name of the gauge."""
        return {
            "indexer_ready": lambda: float(not self.not_ready()),
            "indexer_not_ready": lambda: {(reason.code,): 1.0 for reason in self.not_ready()},
            "indexer_stage_seconds_without_progress": lambda: {
                (name,): self._seconds_without_progress(stage) for name, stage in self.stages.items()
            },
        }


class StatusReading(StatusReader):
    """Reads the database for the status page and the metrics, and counts the repos of all shards."""

    def __init__(self, db: Database, shard: Shard, metrics: Metrics, interval: float, max_share: float) -> None:
        """Create it, with the seconds between two reads and the maximum share of the time that counting may take."""
        super().__init__(db, shard)
        self._metrics = metrics
        self._interval = interval
        self._max_share = max_share
        self.stage = StageProgress("repo counts")

    async def run(self) -> NoReturn:
        """Read again and again, without using more than a small share of the time for counting."""
        count_at = monotonic()
        while True:
            # A failed count is repeated soon: even a slow database can read one page, so it waited for a lock.
            with DatabaseAttempt(self.stage):
                await self.read()
                if (began := monotonic()) >= count_at:
                    await self.count()
                    count_at = began + (monotonic() - began) / self._max_share
            await asyncio.sleep(self._interval)

    async def count(self) -> None:
        """Count all repos, and set the metrics."""
        await super().count()
        metrics, document = self._metrics, self.document()
        if (repos := document.repos) is not None:
            for status, gauge in metrics.repos.items():
                gauge.set(repos["statuses"].get(status, 0))
            for reason, gauge in metrics.repos_desynchronized.items():
                gauge.set(repos["reasons"].get(reason, 0))
            metrics.resync_queue.set(repos["queued"])
            metrics.scope_incomplete_repos.set(repos["scope_backfill"]["waiting"])
        if (links := document.links) is not None:
            metrics.links_progress.set(1 if links["progress"] is None else links["progress"])


class SampledHistory:
    """Takes samples of the lag and of the rates, for the charts of the status page.

    Attributes:
        columns: The newest `MAX_SAMPLES` samples, oldest first. `times` are Unix seconds. The rates are means since the
            previous sample: of settled messages, and of resyncs that ended.
    """

    def __init__(self, writer: BatchWriter, pool: WorkerPool) -> None:
        self._writer = writer
        self._pool = pool
        self._last = time(), 0, 0
        names = ("times", "lag_seconds", "messages_per_second", "resyncs_per_second")
        self.columns: dict[str, list[float | None]] = {name: [] for name in names}

    async def run(self) -> NoReturn:
        """Take a sample every `SAMPLE_SECONDS`, forever."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.sample(time())

    def sample(self, now: float) -> None:
        """Add a sample at `now` (Unix seconds). Nothing is added if the clock was set back."""
        (last_at, *before), lag = self._last, self._writer.lag
        totals = self._writer.totals.settled, self._pool.ended
        if (seconds := now - last_at) > 0:
            rates = [round((total - earlier) / seconds, 2) for total, earlier in zip(totals, before, strict=True)]
            sample = round(now, 1), None if lag is None else round(lag, 3), *rates
            for column, value in zip(self.columns.values(), sample, strict=True):
                column.append(value)
                del column[:-MAX_SAMPLES]
        self._last = now, *totals


@dataclass(eq=False)
class StatusPage:
    """The document and the accounts that the status page of this process shows. `stages` are those of all roles."""

    db: Database
    reader: StatusReader
    probe: DaemonProbe
    stages: Sequence[Stage]
    history: SampledHistory
    shard: str
    roles: Sequence[str]
    started_at: float = field(default_factory=time)

    def document(self) -> StatusDocument:
        """Return the present state, with what was last read from the database. Times are Unix seconds."""
        document = self.reader.document()
        document.reasons = self.probe.not_ready()[:MAX_ROWS]
        document.process = {
            "time": round(time(), 1),
            "started_at": round(self.started_at, 1),
            "shard": self.shard,
            "roles": list(self.roles),
            "history": self.history.columns,
        }
        for stage in self.stages:
            document.process |= stage.show()
        return document

    async def account(self, account: str) -> dict[str, Any] | None:
        """Return the state of a DID or of a verified handle; None if it is not in the database.

        Raises:
            DatabaseError: The database is unavailable.
        """
        did = account if is_did(account) else await self.db.identities.did_of_handle(account)
        report = await self.db.reports.repo(did, MAX_COUNTED_RECORDS + 1) if did else None
        return None if report is None else account_status(report, datetime.now(UTC))
