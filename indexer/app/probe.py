"""The state of the running daemon, for the health checks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from indexer.concurrency.stage_progress import StageProgress
from indexer.db.open_gaps import OpenGaps
from indexer.live.batch_writer import BatchWriter
from indexer.live.firehose_consumer import FirehoseConsumer
from indexer.live.inbox import Inbox
from indexer.live.key_lookups import KeyLookups
from indexer.net.relay.subscription import Subscription
from indexer.resync.worker_pool import WorkerPool
from indexer.serve.database_monitor import DatabaseMonitor
from indexer.serve.readiness import MAX_LISTED_GAPS, MAX_READY_LAG_SECONDS, ReadinessReason, describe_gap
from indexer.tasks.reconcile import Reconciliation
from indexer.tasks.shard_ownership import ShardOwnership
from indexer.telemetry.conditions import Conditions


@dataclass(frozen=True, slots=True)
class DaemonProbe:
    """Reads the state of the stages. It implements `indexer.serve.health.Probe`.

    Attributes:
        stages: The progress of every stage of this process, by its name.
        started_at: When the process started (monotonic seconds).
    """

    roles: Sequence[str]
    stages: Mapping[str, StageProgress]
    subscription: Subscription
    firehose_consumer: FirehoseConsumer
    inbox: Inbox
    key_lookups: KeyLookups
    batch_writer: BatchWriter
    shard_ownership: ShardOwnership
    resync_pool: WorkerPool
    reconciliation: Reconciliation
    open_gaps: OpenGaps
    database_monitor: DatabaseMonitor
    conditions: Conditions
    started_at: float = field(default_factory=monotonic)

    def stalled(self) -> list[ReadinessReason]:
        """Return a reason for each stage that has work and made no progress for longer than its limit.

        No stage counts as stalled because of a database that does not answer, or because another process owns the
        shard: a restart of this process would not help.
        """
        return [reason for stage in self.stages.values() for reason in self._stall(stage)]

    def _stall(self, stage: StageProgress) -> Iterator[ReadinessReason]:
        seconds = self.seconds_without_progress(stage)
        if seconds > stage.limit:
            message = f"{stage.name} stalled: it has work and made no progress for {seconds:.0f} s"
            yield ReadinessReason("stage-stalled", message, round(seconds, 1))

    def seconds_without_progress(self, stage: StageProgress) -> float:
        """Return for how long the stage has made no progress although it has work and is able to work, else 0."""
        able_since = self._able_since(stage)
        return 0.0 if able_since is None else stage.seconds_without_progress(able_since)

    def _able_since(self, stage: StageProgress) -> float | None:
        """Return since when the stage is able to work (monotonic seconds); None if it is not able to."""
        database = self.database_monitor.answering_since if stage.needs_database else self.started_at
        shard = self.shard_ownership.owned_since if stage.needs_shard else self.started_at
        return None if database is None or shard is None else max(database, shard)

    def ready(self) -> list[ReadinessReason]:
        """Return all reasons why the database is not up to date; none if the daemon is ready."""
        reasons = [*self._active_conditions(), *self._stage_errors()]
        if "live" in self.roles:
            reasons += [*self._shard_lock(), *self._relay(), *self._stream_error(), *self._lag(), *self._open_gaps()]
        return reasons

    def _active_conditions(self) -> Iterator[ReadinessReason]:
        for condition in self.conditions.active():
            if condition.kind.prevents_readiness:
                seconds = _seconds_since(condition.began_at)
                value = seconds if condition.value is None else condition.value
                yield ReadinessReason(condition.kind.name, condition.message, value)

    def _stage_errors(self) -> Iterator[ReadinessReason]:
        if self.database_monitor.answering_since is None:
            return  # one reason says it
        for what, work in (
            ("the last batch was not written", self.batch_writer.stage),
            ("the last claim of repos failed", self.resync_pool.claims),
        ):
            if work.failing_since is not None:
                message = f"{what} and is retried: {work.last_error}"
                yield ReadinessReason("database-errors", message, _seconds_since(work.failing_since))

    def _shard_lock(self) -> Iterator[ReadinessReason]:
        if self.shard_ownership.last_error:
            seconds = _seconds_since(self.shard_ownership.waits_since)
            yield ReadinessReason("shard-lock", self.shard_ownership.last_error, seconds)

    def _relay(self) -> Iterator[ReadinessReason]:
        if self.subscription.connection is None:
            error = self.subscription.last_error
            message = "no relay is connected"
            yield ReadinessReason(
                "relay-disconnected",
                f"{message}; last error: {error}" if error else message,
                _seconds_since(self.subscription.disconnected_since),
            )

    def _stream_error(self) -> Iterator[ReadinessReason]:
        consumer = self.firehose_consumer
        if consumer.last_error and consumer.failing_since is not None:
            yield ReadinessReason("stream-error", consumer.last_error, _seconds_since(consumer.failing_since))

    def _lag(self) -> Iterator[ReadinessReason]:
        settled = self.batch_writer.totals.settled
        lag = self.batch_writer.lag if settled else self.batch_writer.cursor_age
        if lag is None and settled:
            yield ReadinessReason(
                "lag-unknown", "the lag is unknown: no event of the relay has a possible time", settled
            )
        elif lag is not None and lag > MAX_READY_LAG_SECONDS:
            yield ReadinessReason("lag", f"the newest stored event is {lag:.0f} s old", round(lag, 1))

    def _open_gaps(self) -> Iterator[ReadinessReason]:
        gaps = self.open_gaps.gaps
        if gaps is None:
            message = "it is not known yet whether gaps are open"
            yield ReadinessReason("gaps-unknown", message, _seconds_since(self.started_at))
        elif gaps:
            listed = "; ".join([describe_gap(gap) for gap in gaps[:MAX_LISTED_GAPS]])
            progress = self.reconciliation.progress or "waiting for a relay"
            message = f"repos may be outdated: {listed}; reconciliation: {progress}"
            yield ReadinessReason("open-gaps", message, len(gaps))


def _seconds_since(moment: float) -> float:
    return round(monotonic() - moment, 1)
