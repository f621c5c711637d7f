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

    The daemon replaces what follows from `Settings` in those of a stage, such as its shard.

    Attributes:
        timeouts: Of outbound requests.
        host_pauses: Of hosts whose requests fail.
        connection: Of the stream.
        max_identities: Identities in memory.
        retry: Between two attempts to acquire the shard lock, to load the cursors, and to store a gap.
        proof_timeout: After the connection, for the relay to send the message at the cursor again.
        gap_refresh: Between two reads of the open gaps.
        key_lookup_timeout: For a key, from the message that needs it.
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
