"""Shorten the waits of the daemon in a forked process, as if time passed faster."""

from functools import partial

from indexer import clients, daemon_scope
from indexer import daemon as composition
from indexer.identity import IdentityCache, IdentityLifetimes
from indexer.outbound import Timeouts, host_limits
from indexer.relay.subscription import ConnectionSettings, Subscription
from indexer.service.background import shard_ownership
from indexer.service.background.account_erasure import AccountErasure
from indexer.service.background.identity_refresh import IdentityRefresh
from indexer.service.background.scope_narrowing import ScopeNarrowing
from indexer.service.crawl.reconcile import ReconciliationSettings
from indexer.service.crawl.scope_backfill import ScopeBackfill
from indexer.service.current_scope import CurrentScope
from indexer.service.live import stream_continuity
from indexer.service.live.batch_writer import WriterSettings
from indexer.service.live.stream_continuity import StreamContinuity
from indexer.service.resync import worker_pool
from indexer.service.resync.queue_maintenance import MaintenanceSettings
from indexer.service.resync.worker_pool import WorkerPoolSettings
from indexer.store import store
from indexer.sync.backoff import backoff_seconds
from tests.changed_names import change_names

RETRY = 0.05
LIFETIMES = IdentityLifetimes(missing_max_age=1.0, refresh_interval=0.3, changed_interval=0.1, timeout=10.0)
PROOF_SECONDS = 3.0


def hurry_with_silent_relays() -> None:
    """Shorten the waits of this process, also that for a relay that does not say that its sequence is a new one.

    On a slow machine, an honest relay may not answer in this time, so this opens gaps without a reason.
    """
    hurry()
    change_names(composition, StreamContinuity=partial(StreamContinuity, proof_timeout=PROOF_SECONDS))


def hurry() -> None:
    """Shorten the waits of this process.

    Intervals and pauses are short. Times after which another server counts as unavailable are so long that they are
    over only for a server that really does not answer, however slow the machine is.
    """
    change_names(
        composition,
        AccountErasure=partial(AccountErasure, interval=0.1),
        CurrentScope=partial(CurrentScope, poll=0.1),
        IdentityCache=partial(IdentityCache, lifetimes=LIFETIMES),
        IdentityRefresh=partial(IdentityRefresh, interval=0.1),
        MaintenanceSettings=partial(MaintenanceSettings, lease_interval=0.1),
        ReconciliationSettings=partial(ReconciliationSettings, settle=0.3, poll=RETRY, first_retry=0.1),
        Subscription=partial(Subscription, settings=ConnectionSettings(first_delay=RETRY, max_delay=0.2)),
        WriterSettings=partial(WriterSettings, retry_interval=RETRY, idle_after=0.3),
    )
    change_names(
        daemon_scope,
        ScopeBackfill=partial(ScopeBackfill, interval=0.1, settle=0.3),
        ScopeNarrowing=partial(ScopeNarrowing, interval=0.1),
    )
    change_names(worker_pool, WorkerPoolSettings=partial(WorkerPoolSettings, idle_interval=RETRY, lease=10.0))
    change_names(clients, TIMEOUTS=Timeouts(read=5.0, rate_grace=1.0))
    change_names(host_limits, FIRST_PAUSE=0.2, MAX_PAUSE=0.5, MAX_PAUSE_CONFIGURED=0.5)
    change_names(shard_ownership, RETRY_SECONDS=RETRY)
    change_names(stream_continuity, RETRY_SECONDS=RETRY)
    change_names(store, SMALL_BATCH_PAUSE=RETRY)
    backoff_seconds.__kwdefaults__ = {"first": 0.1, "maximum": 0.5}
