"""The state of the running daemon, read from its stages: for the health checks, the metrics and the status page."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic, time
from typing import Any, NoReturn

from indexer.app.stages import Stage
from indexer.atproto.syntax import is_did
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.periodic import DatabaseAttempt
from indexer.live.batch_writer import BatchWriter
from indexer.resync.pool import WorkerPool
from indexer.serve.account_status import MAX_COUNTED_RECORDS, account_status
from indexer.serve.database_monitor import DatabaseMonitor
from indexer.serve.health import not_ready_reasons
from indexer.serve.status_document import (
    MAX_ROWS,
    MAX_SAMPLES,
    SAMPLE_SECONDS,
    History,
    ProcessStatus,
    ReadinessReason,
    StatusDocument,
)
from indexer.serve.status_reader import StatusReader
from indexer.sync.shard import Shard
from indexer.tasks.shard_ownership import ShardOwnership
from indexer.telemetry.metrics import Metrics, Reading


@dataclass(eq=False)
class DaemonProbe:
    """Reads the stages of this process. It implements `indexer.serve.health.Probe`.

    Attributes:
        listed: The stages.
        started_at: When the daemon was started (monotonic seconds).
        stages: The progress of everything that is watched, by its name.
    """

    listed: Sequence[Stage]
    database: DatabaseMonitor
    ownership: ShardOwnership
    started_at: float

    def __post_init__(self) -> None:
        """Collect the progress of the stages."""
        self.stages = {progress.name: progress for stage in self.listed for progress in stage.progress}

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
        database = self.database.answering_since if stage.needs_database else self.started_at
        shard = self.ownership.owned_since if stage.needs_shard else self.started_at
        return 0.0 if database is None or shard is None else stage.seconds_without_progress(max(database, shard))

    def ready(self) -> list[ReadinessReason]:
        """Return all reasons why the database is not up to date; none if the daemon is ready."""
        return [reason for stage in self.listed for reason in stage.not_ready()]

    def gauges(self) -> dict[str, Callable[[], Reading]]:
        """Return the functions that read the gauges of readiness, by the name of the gauge."""
        return {
            "indexer_ready": lambda: float(not not_ready_reasons(self)),
            "indexer_not_ready": lambda: {(reason.code,): 1.0 for reason in not_ready_reasons(self)},
            "indexer_stage_seconds_without_progress": lambda: {
                (name,): self._seconds_without_progress(stage) for name, stage in self.stages.items()
            },
        }


class StatusReading:
    """Reads the database for the status page and the metrics, and counts the repos of all shards.

    Attributes:
        reader: Has what was read last.
        stage: The progress of reading.
    """

    def __init__(self, db: Database, shard: Shard, metrics: Metrics, interval: float, max_share: float) -> None:
        """Create it.

        Args:
            db: The database.
            shard: The shard of this process.
            metrics: The metrics.
            interval: The time between two reads, in seconds.
            max_share: The maximum share of the time that is spent on counting, because it reads many repos.
        """
        self._metrics = metrics
        self._interval = interval
        self._max_share = max_share
        self.reader = StatusReader(db, shard)
        self.stage = StageProgress("repo counts")

    async def run(self) -> NoReturn:
        """Read again and again, without using more than a small share of the time for counting."""
        count_at = monotonic()
        while True:
            # A failed count is repeated soon: even a slow database can read one page, so it waited for a lock.
            with DatabaseAttempt(self.stage):
                await self.reader.read()
                if (began := monotonic()) >= count_at:
                    await self.count()
                    count_at = began + (monotonic() - began) / self._max_share
            await asyncio.sleep(self._interval)

    async def count(self) -> None:
        """Count all repos once, and set the metrics; raise `DatabaseError` if the database is unavailable."""
        await self.reader.count()
        metrics, document = self._metrics, self.reader.document()
        if (repos := document.repos) is not None:
            for status, gauge in metrics.repos.items():
                gauge.set(repos.statuses.get(status, 0))
            for reason, gauge in metrics.repos_desynchronized.items():
                gauge.set(repos.reasons.get(reason, 0))
            metrics.resync_queue.set(repos.queued)
            metrics.scope_incomplete_repos.set(repos.scope_backfill.waiting)
        if document.links is not None:
            metrics.links_progress.set(1 if document.links.progress is None else document.links.progress)


class SampledHistory:
    """Takes samples of the lag and of the rates, for the charts of the status page.

    Attributes:
        history: The newest `MAX_SAMPLES` samples.
    """

    def __init__(self, writer: BatchWriter, pool: WorkerPool) -> None:
        self._writer = writer
        self._pool = pool
        self._last_at, self._messages, self._resyncs = time(), 0, 0
        self.history = History()

    async def run(self) -> NoReturn:
        """Take a sample every `SAMPLE_SECONDS`, forever."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.sample(time())

    def sample(self, now: float) -> None:
        """Add a sample at `now` (Unix seconds). Nothing is added if the clock was set back."""
        seconds, lag = now - self._last_at, self._writer.lag
        messages, resyncs = self._writer.totals.settled, self._pool.ended
        if seconds > 0:
            history = self.history
            history.times.append(round(now, 1))
            history.lag_seconds.append(None if lag is None else round(lag, 3))
            history.messages_per_second.append(round((messages - self._messages) / seconds, 2))
            history.resyncs_per_second.append(round((resyncs - self._resyncs) / seconds, 2))
            for column in (
                history.times,
                history.lag_seconds,
                history.messages_per_second,
                history.resyncs_per_second,
            ):
                del column[:-MAX_SAMPLES]
        self._last_at, self._messages, self._resyncs = now, messages, resyncs


@dataclass(eq=False)
class StatusPage:
    """The document and the accounts that the status page of this process shows."""

    db: Database
    reader: StatusReader
    probe: DaemonProbe
    history: History
    shard: str
    roles: Sequence[str]
    started_at: float = field(default_factory=time)

    def document(self) -> StatusDocument:
        """Return the present state, with what was last read from the database."""
        document = self.reader.document()
        document.reasons = not_ready_reasons(self.probe)[:MAX_ROWS]
        started_at, roles = round(self.started_at, 1), list(self.roles)
        process = ProcessStatus(time(), started_at, self.shard, roles, self.history)
        for stage in self.probe.listed:
            stage.show(process)
        process.time = round(process.time, 1)
        document.process = process
        return document

    async def account(self, account: str) -> dict[str, Any] | None:
        """Return the state of a DID or of a verified handle; None if it is not in the database.

        Raises:
            DatabaseError: The database is unavailable.
        """
        did = account if is_did(account) else await self.db.identities.did_of_handle(account)
        report = await self.db.reports.repo(did, MAX_COUNTED_RECORDS + 1) if did else None
        return None if report is None else account_status(report, datetime.now(UTC))
