"""Intervals, timeouts and sizes of the stages of the daemon that no setting changes. Tests pass others."""

from dataclasses import dataclass, field

from indexer.app.clients import KEY_LOOKUP_TIMEOUT
from indexer.live.batch_writer import WriterSettings
from indexer.live.firehose_consumer import PROOF_TIMEOUT
from indexer.live.host_streams import HostStreamSettings
from indexer.live.relay_comparison import ComparisonSettings
from indexer.net.http.host_limits import HostPauses
from indexer.net.http.http_client import Timeouts
from indexer.net.identity.identity_cache import IdentityLifetimes
from indexer.net.relay.stream_socket import ConnectionSettings
from indexer.resync.pool import WorkerPoolSettings
from indexer.resync.queue import MaintenanceSettings
from indexer.tasks.hosts import HostSettings
from indexer.tasks.reconcile import ReconciliationSettings
from indexer.tasks.repo_checks import RepoCheckSettings
from indexer.tasks.scope import ScopeSettings


@dataclass(frozen=True, slots=True)
class Tuning:
    """Intervals, timeouts and sizes. All times are seconds.

    Attributes:
        timeouts: Of outbound requests.
        host_pauses: Of hosts whose requests fail.
        connection: Of the stream.
        identities: Ages and intervals of identities.
        max_identities: Identities in memory.
        comparison: The times of the comparison of relays.
        reconciliation: Its times; shard and interval are those of the settings.
        repo_checks: The times of the comparison with hosts; shard, interval and lowest rate are those of the settings.
        writer: The times of the batch writer; its shard and its window are those of the settings.
        pool: The times of the resync pool; workers and the timeout of an attempt follow from the settings.
        maintenance: The times of the queue maintenance; `unpark_after` is that of the settings.
        hosts: The times of the reading of hosts' lists; shard and interval are those of the settings.
        host_streams: The times of the streams of hosts; shard and number are those of the settings.
        retry: Between two attempts to acquire the shard lock, to load the cursors, and to store a gap.
        proof_timeout: After the connection, for the relay to send the message at the cursor again.
        gap_refresh: Between two reads of the open gaps.
        key_lookup_timeout: For a key, from the message that needs it.
        scope: The times of the tasks that follow a change of the scope, and the sizes of their batches.
        erasure_interval: Between two searches for accounts to erase.
        identity_refresh_interval: Between two batches of refreshes.
        operations_interval: Between two readings of the PLC directory's operations, if it offers no stream.
        count_interval: Between two counts of the repos, at least.
        max_count_share: The share of the time that counting them may take.
        host_save_interval: Between two saves of the states of hosts, so that pauses survive a restart.
        garbage_interval: Between two collections of all garbage. With a full cache of identities, one takes some tenths
            of a second.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    host_pauses: HostPauses = field(default_factory=HostPauses)
    connection: ConnectionSettings = field(default_factory=ConnectionSettings)
    identities: IdentityLifetimes = field(default_factory=IdentityLifetimes)
    max_identities: int = 200_000
    comparison: ComparisonSettings = field(default_factory=ComparisonSettings)
    reconciliation: ReconciliationSettings = field(default_factory=ReconciliationSettings)
    repo_checks: RepoCheckSettings = field(default_factory=RepoCheckSettings)
    writer: WriterSettings = field(default_factory=WriterSettings)
    pool: WorkerPoolSettings = field(default_factory=WorkerPoolSettings)
    maintenance: MaintenanceSettings = field(default_factory=MaintenanceSettings)
    hosts: HostSettings = field(default_factory=HostSettings)
    host_streams: HostStreamSettings = field(default_factory=HostStreamSettings)
    retry: float = 1.0
    proof_timeout: float = PROOF_TIMEOUT
    gap_refresh: float = 5.0
    key_lookup_timeout: float = KEY_LOOKUP_TIMEOUT
    scope: ScopeSettings = field(default_factory=ScopeSettings)
    erasure_interval: float = 60.0
    identity_refresh_interval: float = 10.0
    operations_interval: float = 5.0
    count_interval: float = 10.0
    max_count_share: float = 0.01
    host_save_interval: float = 5.0
    garbage_interval: float = 1_800.0
