"""The document of the status page, from the state of the stages and a few cheap queries."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from time import monotonic, time
from typing import NoReturn

from indexer import __version__
from indexer.db import DeliveryState, RejectionSummary, Store
from indexer.db.open_gaps import OpenGaps
from indexer.live.batch_writer import BatchWriter
from indexer.live.firehose_consumer import FirehoseConsumer
from indexer.live.inbox import Inbox
from indexer.live.key_lookups import KeyLookups
from indexer.live.stream_position import StreamPosition
from indexer.net.http import HostLimits
from indexer.net.relay.subscription import Subscription
from indexer.reasons import Rejection
from indexer.resync.admission import Slot
from indexer.resync.worker_pool import RunningResync, WorkerPool
from indexer.serve.account_status import AccountStatus, account_status
from indexer.serve.backfill import RepoCounts
from indexer.serve.database_monitor import DatabaseMonitor
from indexer.serve.readiness import ReadinessReason
from indexer.serve.recent_read import RecentRead
from indexer.serve.status_document import (
    MAX_ROWS,
    ConditionStatus,
    DeliveryStatus,
    HostStatus,
    RejectionStatus,
    RepoStatus,
    ResyncPoolStatus,
    ResyncStatus,
    StatusDocument,
    StreamStatus,
    short,
)
from indexer.serve.status_rows import (
    ConsumerStatus,
    GapStatus,
    LinkStatus,
    consumer_status,
    gap_status,
    link_status,
)
from indexer.serve.status_samples import SAMPLE_SECONDS, StageTotals, StatusSamples
from indexer.sync.identity import HostState
from indexer.tasks.reconcile import Reconciliation
from indexer.tasks.retention import ChangeLogRetention
from indexer.telemetry.conditions import Condition, Conditions

READ_SECONDS = 5.0
"""Interval at which the database is read, as long as the page is open in a browser."""
READ_TIMEOUT = 3.0
"""Seconds after which a read of the database is given up. The page then shows what was read before."""
_REJECTION_TEXTS = {str(reason): reason.text for reason in Rejection}


@dataclass(frozen=True, slots=True)
class ShownStages:
    """The stages that the status page shows."""

    subscription: Subscription
    stream_position: StreamPosition
    firehose_consumer: FirehoseConsumer
    inbox: Inbox
    key_lookups: KeyLookups
    batch_writer: BatchWriter
    resync_pool: WorkerPool
    reconciliation: Reconciliation
    open_gaps: OpenGaps
    change_log_retention: ChangeLogRetention
    hosts: HostLimits
    repo_counts: RepoCounts
    database_monitor: DatabaseMonitor
    conditions: Conditions


class DaemonStatus:
    """Reads the state of the daemon. It implements `indexer.serve.status_page.StatusSource`."""

    def __init__(
        self,
        store: Store,
        stages: ShownStages,
        not_ready_reasons: Callable[[], Sequence[ReadinessReason]],
        shard: str,
        roles: Sequence[str],
    ) -> None:
        self._store = store
        self._stages = stages
        self._not_ready_reasons = not_ready_reasons
        self._shard = shard
        self._roles = roles
        self._started_at = time()
        self._samples = StatusSamples(self._started_at)
        self._delivery = RecentRead(store.delivery_state, interval=READ_SECONDS, timeout=READ_TIMEOUT)

    async def run(self) -> NoReturn:
        """Take a sample every `SAMPLE_SECONDS`, forever."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.sample()

    def sample(self) -> None:
        """Add a sample to the history."""
        writer = self._stages.batch_writer
        totals = StageTotals(writer.lag, writer.totals.settled, self._stages.resync_pool.ended)
        self._samples.add(time(), totals)

    async def document(self) -> StatusDocument:
        """Return the present state. The database is read only if it answers, and the last read is not recent."""
        if self._stages.database_monitor.answering_since is not None:
            await self._delivery.refresh()
        return self.snapshot()

    def snapshot(self) -> StatusDocument:
        """Return the present state, with what was last read from the database."""
        now, stages = time(), self._stages
        reasons = list(self._not_ready_reasons())
        hosts = _paused_and_failing_hosts(stages.hosts)
        gaps = stages.open_gaps.gaps
        return StatusDocument(
            version=__version__,
            time=round(now, 1),
            started_at=round(self._started_at, 1),
            shard=self._shard,
            roles=list(self._roles),
            ready=not reasons,
            reasons=[replace(reason, message=short(reason.message)) for reason in reasons[:MAX_ROWS]],
            stream=self._stream(),
            history=self._samples.history(),
            repos=_repo_status(stages.repo_counts, now),
            links=_link_status(stages.repo_counts, now),
            scope_backfill=stages.repo_counts.scope(),
            resyncs=self._resyncs(now),
            hosts_in_trouble=len(hosts),
            hosts=[_host_status(host, now) for host in hosts[:MAX_ROWS]],
            conditions=[_condition_status(condition) for condition in stages.conditions.active()[:MAX_ROWS]],
            gaps_open=None if gaps is None else len(gaps),
            gaps=[_short_gap(gap_status(opened, now)) for opened in (gaps or ())[:MAX_ROWS]],
            delivery=self._delivery_status(now),
        )

    async def account(self, account: str) -> AccountStatus | None:
        """Return the state of a DID or of a verified handle; None if it is not in the database.

        Raises:
            DatabaseError: The database is unavailable.
        """
        row = await self._store.account_state(account)
        return None if row is None else account_status(row, time())

    def _stream(self) -> StreamStatus:
        stages, rates = self._stages, self._samples.latest_rates()
        connection, writer = stages.subscription.connection, stages.batch_writer
        last_message = max(stages.firehose_consumer.last_message.values(), default=None)
        return StreamStatus(
            relay=None if connection is None else short(connection.relay),
            seq=stages.stream_position.watermark.position,
            lag_seconds=writer.lag,
            silent_seconds=None if last_message is None else monotonic() - last_message,
            messages_per_second=rates and rates[0],
            unsettled_messages=stages.inbox.unsettled,
            unsettled_bytes=stages.inbox.unsettled_bytes,
            waiting_for_keys=len(stages.key_lookups),
            reconciliation=stages.reconciliation.progress and short(stages.reconciliation.progress),
        )

    def _resyncs(self, now: float) -> ResyncPoolStatus:
        pool, rates = self._stages.resync_pool, self._samples.latest_rates()
        longest = sorted(pool.running, key=lambda running: running.slot.started_at)
        return ResyncPoolStatus(
            workers_free=pool.free_workers if "resync" in self._roles else None,
            resyncs_per_second=rates and rates[1],
            running=len(longest),
            longest=[_resync_status(running, now) for running in longest[:MAX_ROWS]],
        )

    def _delivery_status(self, now: float) -> DeliveryStatus:
        read, database = self._delivery, self._stages.database_monitor
        state = read.value or DeliveryState([], [])
        error = "the database does not answer" if database.answering_since is None else read.error
        return DeliveryStatus(
            read_seconds_ago=None if read.read_at is None else max(0.0, now - read.read_at),
            error=error and short(error),
            rejections=[_rejection_status(rejection, now) for rejection in state.rejections[:MAX_ROWS]],
            consumers=[_short_consumer(consumer_status(consumer, now)) for consumer in state.consumers[:MAX_ROWS]],
            lagging=[short(name) for name in self._stages.change_log_retention.lagging[:MAX_ROWS]],
        )


def _repo_status(counted: RepoCounts, now: float) -> RepoStatus | None:
    counts, backfill = counted.counts, counted.backfill()
    if counts is None or backfill is None:
        return None
    return RepoStatus(
        counted_seconds_ago=max(0.0, now - counted.counted_at),
        counted_share=counts.counted_share,
        statuses={status.value: count for status, count in counts.statuses.items()},
        reasons=counts.reasons,
        failures={short(failure): count for failure, count in islice(counts.failures.items(), MAX_ROWS)},
        queued=counts.queued,
        parked=counts.parked,
        unproven=counts.unproven,
        records=counts.records,
        backfill=backfill,
    )


def _link_status(counted: RepoCounts, now: float) -> LinkStatus | None:
    return None if counted.counts is None else link_status(counted.counts.links, now)


def _resync_status(running: RunningResync, now: float) -> ResyncStatus:
    slot = running.slot
    download = slot.download
    return ResyncStatus(
        did=short(slot.did),
        host=short(slot.host),
        phase=slot.phase,
        phase_seconds=max(0.0, now - max(slot.phase_since, slot.started_at)),  # `phase_since` is 0 in the first phase
        seconds=max(0.0, now - slot.started_at),
        received_bytes=None if download is None else download.received,
        bytes_per_second=None if download is None else round(download.rate, 1),
        slot=_slot_name(slot),
    )


def _slot_name(slot: Slot) -> str:
    """Return what the resync occupies: a large-repo slot, a worker, or neither because it is written or set aside."""
    if slot.large:
        return "large"
    return "writing" if slot.writing else "aside" if slot.aside else "worker"


def _paused_and_failing_hosts(hosts: HostLimits) -> list[HostState]:
    """Return the hosts that are paused or failing, those with the most failures in a row first."""
    found = {state.host: state for state in (*hosts.paused(), *hosts.failing())}
    return sorted(found.values(), key=lambda state: (-state.consecutive_failures, state.host))


def _host_status(state: HostState, now: float) -> HostStatus:
    left = (state.paused_until or 0.0) - now
    return HostStatus(
        host=short(state.host),
        pause_reason=state.pause_reason if left > 0 else None,
        pause_seconds_left=left if left > 0 else None,
        failures_in_a_row=state.consecutive_failures,
        last_error=state.last_error and short(state.last_error),
        last_success_seconds_ago=None if state.last_success is None else max(0.0, now - state.last_success),
    )


def _condition_status(condition: Condition) -> ConditionStatus:
    return ConditionStatus(
        name=condition.kind.name,
        subject=short(condition.subject),
        message=short(condition.message),
        seconds=monotonic() - condition.began_at,
        count=condition.count,
        prevents_readiness=condition.kind.prevents_readiness,
    )


def _rejection_status(rejection: RejectionSummary, now: float) -> RejectionStatus:
    return RejectionStatus(
        reason=rejection.reason,
        meaning=_REJECTION_TEXTS.get(rejection.reason, ""),
        stored=rejection.stored,
        last_hour=rejection.last_hour,
        newest_seconds_ago=max(0.0, now - rejection.newest_at),
        relay=short(rejection.relay),
        seq=rejection.seq,
        did=rejection.did and short(rejection.did),
        detail=short(rejection.detail),
    )


def _short_consumer(consumer: ConsumerStatus) -> ConsumerStatus:
    return replace(consumer, name=short(consumer.name))


def _short_gap(gap: GapStatus) -> GapStatus:
    return replace(gap, relay=short(gap.relay))
