"""The state of the running daemon, for the health checks and the status page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

from indexer.monitoring.readiness import MAX_READY_LAG_SECONDS
from indexer.outbound import HostLimits
from indexer.relay.subscription import Subscription
from indexer.service.background.change_log_retention import ChangeLogRetention
from indexer.service.background.shard_ownership import ShardOwnership
from indexer.service.crawl.reconcile import Reconciliation
from indexer.service.live.batch_writer import BatchWriter
from indexer.service.live.firehose_consumer import FirehoseConsumer
from indexer.service.live.inbox import Inbox
from indexer.service.live.key_lookups import KeyLookups
from indexer.service.live.stream_position import StreamPosition
from indexer.service.resync.worker_pool import WorkerPool

STALL_SECONDS = 120.0
"""A stage that has work and makes no progress for longer counts as stalled."""
MAX_LISTED_HOSTS = 10
"""Paused hosts on the status page."""


@dataclass(frozen=True, slots=True)
class DaemonProbe:
    """Reads the state of the stages. It implements `indexer.monitoring.health.Probe`."""

    roles: Sequence[str]
    subscription: Subscription
    stream_position: StreamPosition
    firehose_consumer: FirehoseConsumer
    inbox: Inbox
    key_lookups: KeyLookups
    batch_writer: BatchWriter
    shard_ownership: ShardOwnership
    resync_pool: WorkerPool
    reconciliation: Reconciliation
    change_log_retention: ChangeLogRetention
    hosts: HostLimits

    def alive(self) -> str | None:
        """Return None while the batch writer and the resync pool make progress or are idle, else which one stalled."""
        return self._stalled_writer() or self._stalled_resync_pool()

    def _stalled_writer(self) -> str | None:
        only_waiting_for_keys = self.inbox.unsettled == len(self.key_lookups)
        idle = only_waiting_for_keys or not self.shard_ownership.owned.is_set()
        seconds = monotonic() - self.batch_writer.last_progress
        if idle or self.batch_writer.last_error is not None or seconds <= STALL_SECONDS:
            return None
        return f"batch writer stalled: no batch written for {seconds:.0f} s"

    def _stalled_resync_pool(self) -> str | None:
        has_free_workers = "resync" in self.roles and self.resync_pool.free_workers > 0
        seconds = monotonic() - self.resync_pool.last_progress
        if not has_free_workers or self.resync_pool.last_error is not None or seconds <= STALL_SECONDS:
            return None
        return f"resync pool stalled: no claim for {seconds:.0f} s"

    def ready(self) -> str | None:
        """Return None if the database answers, the stream is open and the lag is small, else the reason."""
        stage_error = self.batch_writer.last_error or self.resync_pool.last_error or self.firehose_consumer.last_error
        if stage_error or "live" not in self.roles:
            return stage_error
        if self.shard_ownership.last_error:
            return self.shard_ownership.last_error
        if self.subscription.connection is None:
            error = self.subscription.last_error
            return f"no relay is connected; last error: {error}" if error else "no relay is connected"
        if self.batch_writer.lag is not None and self.batch_writer.lag > MAX_READY_LAG_SECONDS:
            return f"the newest stored event is {self.batch_writer.lag:.0f} s old"
        return None

    def status(self) -> Mapping[str, Any]:
        """Return the rows of the status page in their order."""
        now = time()
        return {
            "relay": self.subscription.connection.relay if self.subscription.connection else None,
            "cursor": self.stream_position.watermark.position,
            "lag in seconds": self.batch_writer.lag,
            "gaps in the stream": self.firehose_consumer.gaps,
            "reconciliation": self.reconciliation.progress,
            "unsettled messages": self.inbox.unsettled,
            "unsettled bytes": self.inbox.unsettled_bytes,
            "messages waiting for a key": len(self.key_lookups),
            "lagging consumers": self.change_log_retention.lagging,
            "paused hosts": {
                state.host: f"{state.pause_reason} for {(state.paused_until or now) - now:.0f} s"
                for state in self.hosts.paused()[:MAX_LISTED_HOSTS]
            },
            "running resyncs": {
                run.claimed.did: f"{now - run.slot.started_at:.0f} s" for run in self.resync_pool.running
            },
        }
