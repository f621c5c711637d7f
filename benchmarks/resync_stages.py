"""A resync, one stage after the other in this process: what each costs a core when nothing runs beside it."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from time import time

from benchmarks.clock import Clock
from benchmarks.stages import opened
from benchmarks.stand import BenchmarkError
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter
from indexer.identity import Identities, Resolver
from indexer.metrics import Metrics
from indexer.outbound import Outbound, Rates
from indexer.pds import PdsClient
from indexer.service.resync import Resync
from indexer.store import Store
from indexer.sync.planning import Policy
from indexer.sync.shard import BUCKETS

STAGES = {"fetch": "fetch", "verify-export": "verify", "diff": "diff", "apply-export": "apply"}
"""By the names that the daemon's metrics have for them."""

_AT_ONCE = 100
_LEASE = 3_600.0  # seconds
_FREELY = 100_000  # requests a second


class _Marked(Metrics):
    """Has the daemon's own marks of its stages move a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def stage(self, name: str) -> AbstractContextManager[object]:
        return self._clock(STAGES[name])


class Resyncs:
    """Resyncs as the daemon does them, but one at a time."""

    def __init__(self, store: Store, outbound: Outbound, plc_url: str, directory: Path, clock: Clock) -> None:
        metrics, policy = _Marked(clock), Policy(CollectionFilter(), DEFAULT_LIMITS)
        resolver = Resolver(outbound, (plc_url,), plc_rate=_FREELY, allow_private_hosts=True, clock=time)
        self._store = store
        self._identities = Identities(resolver, store, metrics, clock=time, refresh_rate=_FREELY)
        pds = PdsClient(outbound, policy.limits, directory)
        self._resync = Resync(store, self._identities, pds, policy, metrics, sources=(None,))
        self._clock = clock

    async def run(self) -> dict[str, float]:
        """Brings every repo that is due to the network's state; seconds by stage.

        "the rest" is what a resync does outside of them: it reads what we have, locks, and commits.
        """
        self._clock.used.clear()
        while claimed := await self._store.claim(_AT_ONCE, range(BUCKETS), _LEASE, time()):
            for repo in claimed:
                known = await self._identities.lookup(repo.did)
                with self._clock.database():
                    result = await self._resync.attempt(repo, known, lambda: None)
                if result != "synchronized":
                    raise BenchmarkError(f"{repo.did} is {result}")
        used = self._clock.used
        apart = {stage: used[stage] for stage in STAGES.values()}
        return apart | {"the rest": used["client"] - sum(apart.values()), "database": used["database"]}

    async def close(self) -> None:
        await self._identities.close()


@asynccontextmanager
async def resyncs(dsn: str, plc_url: str, directory: Path) -> AsyncIterator[Resyncs]:
    """With exports spooled in `directory`."""
    rates = Rates(host=_FREELY, host_concurrency=_FREELY, total=_FREELY)
    outbound = Outbound(user_agent="benchmark", allow_private_hosts=True, rates=rates)
    try:
        async with opened(dsn) as (store, clock):
            running = Resyncs(store, outbound, plc_url, directory, clock)
            yield running
            await running.close()
    finally:
        await outbound.close()
