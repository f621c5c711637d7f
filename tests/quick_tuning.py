"""Daemons that look for work, and try again, much more often."""

from dataclasses import replace

from indexer.app.tuning import Tuning
from indexer.live.batch_writer import WriterSettings
from indexer.net.http.host_limits import HostPauses
from indexer.net.relay.stream_socket import ConnectionSettings
from indexer.resync.pool import WorkerPoolSettings
from indexer.resync.queue import MaintenanceSettings
from indexer.tasks.reconcile import ReconciliationSettings
from indexer.tasks.repo_checks import RepoCheckSettings
from indexer.tasks.scope import ScopeSettings

QUICK = Tuning(
    connection=ConnectionSettings(first_delay=0.05, max_delay=0.2, switch_after=0.0),
    reconciliation=ReconciliationSettings(settle=0.3, poll=0.05, first_retry=0.1),
    repo_checks=RepoCheckSettings(retry=0.1, failure_pause=0.05),
    writer=WriterSettings(retry_interval=0.05),
    pool=WorkerPoolSettings(idle_interval=0.05),
    maintenance=MaintenanceSettings(lease_interval=0.1),
    retry=0.05,
    gap_refresh=0.1,
    scope=ScopeSettings(interval=0.1, settle=0.3, narrowing_batch=3, untracking_batch=3, untracking_retry=0.5),
    erasure_interval=0.1,
    operations_interval=0.1,
    count_interval=0.2,
    max_count_share=1.0,
    host_save_interval=0.2,
)
"""Intervals and pauses are short. Time limits are the usual ones, however slow the machine is."""
MORTAL = replace(
    QUICK,
    host_pauses=HostPauses(first=0.05, maximum=0.2, max_configured=0.2),
    pool=WorkerPoolSettings(idle_interval=0.1, lease=3.0),
    maintenance=MaintenanceSettings(lease_interval=0.1, search_interval=0.2, batch_pause=0.0),
)
"""For a process that is killed soon: it renews its leases, and repeats its searches, within its life."""
