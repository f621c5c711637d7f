"""Shorten the waits of a daemon process, so that work is done within the life of a process that is killed soon."""

from functools import partial

from indexer import daemon as composition
from indexer.outbound import host_limits
from indexer.relay.subscription import ConnectionSettings, Subscription
from indexer.service.background import shard_ownership
from indexer.service.background.link_maintenance import LinkMaintenance
from indexer.service.crawl.reconcile import ReconciliationSettings
from indexer.service.live import stream_continuity
from indexer.service.live.batch_writer import WriterSettings
from indexer.service.resync import worker_pool
from indexer.service.resync.queue_maintenance import MaintenanceSettings
from indexer.service.resync.worker_pool import WorkerPoolSettings
from indexer.store import erase_records, store
from tests.changed_names import change_names
from tests.daemon.impatient_daemon import wait_less

LEASE_SECONDS = 3.0


def wait_little() -> None:
    """Shorten the intervals of all stages."""
    wait_less()
    change_names(
        composition,
        ReconciliationSettings=partial(ReconciliationSettings, settle=0.1, poll=0.1, first_retry=0.1),
        MaintenanceSettings=partial(MaintenanceSettings, lease_interval=0.1, search_interval=0.2, batch_pause=0.0),
        Subscription=partial(Subscription, settings=ConnectionSettings(first_delay=0.05, max_delay=0.2)),
        WriterSettings=partial(WriterSettings, retry_interval=0.1),
        LinkMaintenance=partial(LinkMaintenance, interval=0.1),
        HOST_SAVE_SECONDS=0.2,
    )
    change_names(worker_pool, WorkerPoolSettings=partial(WorkerPoolSettings, idle_interval=0.1, lease=LEASE_SECONDS))
    change_names(erase_records, BATCH_SIZE=2)
    change_names(shard_ownership, RETRY_SECONDS=0.05)
    change_names(stream_continuity, RETRY_SECONDS=0.05)
    change_names(store, SMALL_BATCH_PAUSE=0.1)
    change_names(host_limits, FIRST_PAUSE=0.05, MAX_PAUSE=0.2, MAX_PAUSE_CONFIGURED=0.2)


def forget_soon() -> None:
    """Also forget repos soon of which nothing is stored."""
    wait_little()
    change_names(composition, FORGET_SECONDS=0.1)
