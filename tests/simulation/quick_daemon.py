"""Intervals and timeouts of the simulated daemon.

Times after which another server counts as unavailable are so long that they are over only for a server that really does
not answer, however slow the machine is. Waits of repos and identities end by `tests.passed_time`.
"""

from dataclasses import replace

from indexer.live.batch_writer import WriterSettings
from indexer.net.http.host_limits import HostPauses
from indexer.net.http.http_client import Timeouts
from indexer.net.identity.identity_cache import IdentityLifetimes
from indexer.resync.pool import WorkerPoolSettings
from tests.quick_tuning import QUICK

RETRY = 0.05
TUNING = replace(
    QUICK,
    connection=replace(QUICK.connection, stable_after=2.0, switch_after=20.0),
    timeouts=Timeouts(read=5.0, rate_grace=1.0),
    host_pauses=HostPauses(first=0.2, maximum=0.5, max_configured=0.5),
    identities=IdentityLifetimes(missing_max_age=1.0, refresh_interval=0.3, changed_interval=0.1, timeout=10.0),
    writer=WriterSettings(retry_interval=RETRY, idle_after=0.3, hold=10.0),
    pool=WorkerPoolSettings(idle_interval=RETRY, lease=10.0),
    identity_refresh_interval=0.1,
)
SILENT_RELAYS = replace(TUNING, proof_timeout=3.0)
"""For a relay that does not say that its sequence is a new one.

On a slow machine, an honest relay may not answer in this time, so this opens gaps without a reason.
"""
