"""The state of the running daemon, read from its stages: for the health checks, the metrics and the status page."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import monotonic, time
from typing import NoReturn

from indexer import __version__
from indexer.app.stages import Stage
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.periodic import DatabaseAttempt
from indexer.live.batch_writer import BatchWriter
from indexer.resync.pool import WorkerPool
from indexer.serve.account_status import AccountStatus, account_status
from indexer.serve.backfill import RepoCounts
from indexer.serve.database_monitor import DatabaseMonitor
from indexer.serve.health import not_ready_reasons
from indexer.serve.readiness import ReadinessReason
from indexer.serve.recent_read import RecentRead
from indexer.serve.status_document import (
    MAX_ROWS,
    StatusDocument,
    consumer_status,
    link_status,
    rejection_status,
    short,
    short_consumer,
)
from indexer.serve.status_samples import SAMPLE_SECONDS, StageTotals, StatusSamples
from indexer.tasks.shard_ownership import ShardOwnership
from indexer.telemetry.metrics import Metrics, Reading

READ_SECONDS = 5.0
"""Interval at which the database is read, as long as the page is open in a browser."""
READ_TIMEOUT = 3.0
"""Seconds after which a read of the database is given up. The page then shows what was read before."""


class DaemonProbe:
    """Reads the stages of this process. It implements `indexer.serve.health.Probe`.

    Attributes:
        stages: The progress of everything that is watched, by its name.
    """

    def __init__(
        self, stages: Sequence[Stage], database: DatabaseMonitor, ownership: ShardOwnership, started_at: float
    ) -> None:
        """Create it for a daemon that was started at `started_at` (monotonic seconds)."""
        self._stages = stages
        self._database = database
        self._ownership = ownership
        self._started_at = started_at
        self.stages = {progress.name: progress for stage in stages for progress in stage.progress}

    def stalled(self) -> list[ReadinessReason]:
        """Return a reason for each stage that has work and made no progress for longer than its limit.

        No stage counts as stalled because of a database that does not answer, or because another process owns the
        shard: a restart of this process would not help.
        """
        return [reason for stage in self.stages.values() for reason in self._stall(stage)]

    def _stall(self, stage: StageProgress) -> Iterator[ReadinessReason]:
        seconds = self._seconds_without_progress(stage)
        if seconds > stage.limit:
            message = f"{stage.name} stalled: it has work and made no progress for {seconds:.0f} s"
            yield ReadinessReason("stage-stalled", message, round(seconds, 1))

    def _seconds_without_progress(self, stage: StageProgress) -> float:
        """Return for how long the stage has made no progress although it has work and is able to work, else 0."""
        database = self._database.answering_since if stage.needs_database else self._started_at
        shard = self._ownership.owned_since if stage.needs_shard else self._started_at
        return 0.0 if database is None or shard is None else stage.seconds_without_progress(max(database, shard))

    def ready(self) -> list[ReadinessReason]:
        """Return all reasons why the database is not up to date; none if the daemon is ready."""
        return [reason for stage in self._stages for reason in stage.not_ready()]

    def gauges(self) -> dict[str, Callable[[], Reading]]:
        """Return the functions that read the gauges of readiness, by the name of the gauge."""
        return {
            "indexer_ready": lambda: float(not not_ready_reasons(self)),
            "indexer_not_ready": lambda: {(reason.code,): 1.0 for reason in not_ready_reasons(self)},
            "indexer_stage_seconds_without_progress": lambda: {
                (name,): self._seconds_without_progress(stage) for name, stage in self.stages.items()
            },
        }


class DaemonCounts:
    """The counts of the repos of all shards.

    Attributes:
        newest: The newest counts.
        stage: The progress of counting.
    """

    def __init__(self, db: Database, metrics: Metrics, interval: float, max_share: float) -> None:
        """Create it.

        Args:
            db: The database.
            metrics: The metrics.
            interval: The minimum time between two counts, in seconds.
            max_share: The maximum share of the time that is spent on counting, because it reads many repos.
        """
        self._db = db
        self._metrics = metrics
        self._interval = interval
        self._max_share = max_share
        self.newest = RepoCounts()
        self.stage = StageProgress("repo counts")

    async def run(self) -> NoReturn:
        """Count all repos again and again, without using more than a small share of the time for it."""
        while True:
            began = monotonic()
            with DatabaseAttempt(self.stage) as attempt:
                await self.count()
            # A failed attempt is repeated soon: even a slow database can read one page, so it waited for a lock.
            duration = 0.0 if attempt.error else monotonic() - began
            await asyncio.sleep(max(self._interval, duration / self._max_share))

    async def count(self) -> None:
        """Count all repos once; raise `DatabaseError` if the database is unavailable."""
        now = time()
        since = self.newest.since(now)
        counts = await self._db.reports.counts(since)
        self.newest.set(counts, since, now)
        for status, gauge in self._metrics.repos.items():
            gauge.set(counts.statuses.get(status, 0))
        for reason, gauge in self._metrics.repos_desynchronized.items():
            gauge.set(counts.reasons.get(reason, 0))
        self._metrics.resync_queue.set(counts.queued)
        self._metrics.scope_incomplete_repos.set(counts.incomplete)
        progress = link_status(counts.links, now).progress
        self._metrics.links_progress.set(1 if progress is None else progress)


class SampledHistory:
    """Takes samples of the lag and of the rates, for the charts of the status page."""

    def __init__(self, writer: BatchWriter, pool: WorkerPool) -> None:
        self._writer = writer
        self._pool = pool
        self._samples = StatusSamples(time())

    async def run(self) -> NoReturn:
        """Take a sample every `SAMPLE_SECONDS`, forever."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.sample()

    def sample(self) -> None:
        """Add a sample to the history."""
        totals = StageTotals(self._writer.lag, self._writer.totals.settled, self._pool.ended)
        self._samples.add(time(), totals)

    def show(self, document: StatusDocument) -> None:
        """Show the history, and the rates of its newest sample."""
        document.history = self._samples.history()
        if rates := self._samples.latest_rates():
            document.stream.messages_per_second, document.resyncs.resyncs_per_second = rates


class StatusReader:
    """Reads the document of the status page. It implements `indexer.serve.status_page.StatusSource`."""

    def __init__(
        self,
        db: Database,
        stages: Sequence[Stage],
        probe: DaemonProbe,
        database: DatabaseMonitor,
        shard: str,
        roles: Sequence[str],
    ) -> None:
        self._db = db
        self._stages = stages
        self._probe = probe
        self._database = database
        self._shard = shard
        self._roles = roles
        self._started_at = time()
        self._delivery = RecentRead(db.reports.delivery_state, interval=READ_SECONDS, timeout=READ_TIMEOUT)

    async def document(self) -> StatusDocument:
        """Return the present state. The database is read only if it answers, and the last read is not recent."""
        if self._database.answering_since is not None:
            await self._delivery.refresh()
        return self.snapshot()

    def snapshot(self) -> StatusDocument:
        """Return the present state, with what was last read from the database."""
        now = time()
        reasons = not_ready_reasons(self._probe)
        document = StatusDocument(
            version=__version__,
            time=now,
            started_at=round(self._started_at, 1),
            shard=self._shard,
            roles=list(self._roles),
            ready=not reasons,
            reasons=[replace(reason, message=short(reason.message)) for reason in reasons[:MAX_ROWS]],
        )
        self._show_delivery(document)
        for stage in self._stages:
            stage.show(document)
        document.time = round(now, 1)
        return document

    async def account(self, account: str) -> AccountStatus | None:
        """Return the state of a DID or of a verified handle; None if it is not in the database.

        Raises:
            DatabaseError: The database is unavailable.
        """
        row = await self._db.reports.account_state(account)
        return None if row is None else account_status(row, time())

    def _show_delivery(self, document: StatusDocument) -> None:
        """Show what was last read from the database."""
        read, delivery = self._delivery, document.delivery
        error = "the database does not answer" if self._database.answering_since is None else read.error
        delivery.error = error and short(error)
        if read.value is not None and read.read_at is not None:
            delivery.read_seconds_ago = max(0.0, document.time - read.read_at)
            rejections, consumers = read.value.rejections[:MAX_ROWS], read.value.consumers[:MAX_ROWS]
            delivery.rejections = [rejection_status(rejection, document.time) for rejection in rejections]
            delivery.consumers = [short_consumer(consumer_status(state, document.time)) for state in consumers]
