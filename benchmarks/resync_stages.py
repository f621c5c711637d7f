"""Measure the stages of resyncs in this process, one resync at a time and with nothing else running."""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import cast

from prometheus_client import Histogram

from benchmarks.harness import BenchmarkError
from benchmarks.live_stages import connect_database
from benchmarks.stage_clock import StageClock
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.core.core import CoreChoice, load_core
from indexer.db import Database
from indexer.db.write import ROW_LAYOUT
from indexer.net.http.host_limits import RateLimits
from indexer.net.http.http_client import OutboundClient, OutboundSettings
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.identity_cache import IdentityCache
from indexer.net.pds.pds_client import PdsClient
from indexer.resync.apply import Applies
from indexer.resync.fetch import ResyncAttempts
from indexer.resync.shares import UNKNOWN_HOST, Shares
from indexer.resync.sparse import SparseFetch
from indexer.sync.policy import Policy
from indexer.sync.scope import Scope
from indexer.sync.shard import BUCKETS
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics

STAGES = {"fetch": "fetch", "verify-export": "verify", "diff": "diff", "apply-export": "apply"}
"""The stages by their names in the metric `indexer_batch_seconds`."""

_CLAIM_SIZE = 100
_LEASE_SECONDS = 3_600.0
_UNLIMITED = 100_000


@dataclass(frozen=True, slots=True)
class _Timer:
    """Measures a stage with a `StageClock`, in place of a histogram."""

    clock: StageClock
    stage: str

    def time(self) -> AbstractContextManager[None]:
        return self.clock(self.stage)


class TimedResyncs:
    """Performs resyncs as the daemon does, one at a time."""

    def __init__(
        self, db: Database, outbound: OutboundClient, plc_url: str, directory: Path, clock: StageClock, scope: Scope
    ) -> None:
        metrics, policy = Metrics(), Policy(scope, DEFAULT_LIMITS)
        metrics.batch_seconds |= {name: cast("Histogram", _Timer(clock, stage)) for name, stage in STAGES.items()}
        resolver = DidResolver(
            outbound, (plc_url,), plc_rate=_UNLIMITED, allow_private_hosts=True, clock=time, plc_lookup="document"
        )
        self._db = db
        self._identities = IdentityCache(resolver, db.identities, metrics, clock=time, refresh_rate=_UNLIMITED)
        core = load_core(cast("CoreChoice", os.environ.get("INDEXER_CORE", "auto")), 1)  # as the daemon's
        pds = PdsClient(
            outbound, policy.limits, directory, lambda folder, limits: core.open_export(folder, limits, ROW_LAYOUT)
        )
        applies = Applies(db, metrics, Conditions())
        self._resync = ResyncAttempts(
            applies, self._identities, pds, lambda: policy, metrics, (None,), Conditions(), SparseFetch(pds, "never")
        )
        self._clock = clock

    async def run(self) -> dict[str, float]:
        """Resync every repo that is due, and return the CPU seconds of each stage.

        "other" is the rest of a resync: reading the stored records, locking, and committing.

        Raises:
            BenchmarkError: A resync failed, or a stage was not measured.
        """
        self._clock.cpu.clear()
        while claimed := await self._db.resyncs.claim(_CLAIM_SIZE, range(BUCKETS), _LEASE_SECONDS, time()):
            for repo in claimed:
                known = await self._identities.lookup(repo.did)
                with self._clock.database():
                    shares = Shares(workers=1)
                    result = await self._resync.attempt(shares.admit(repo, UNKNOWN_HOST, time()), shares, known)
                if result != "synchronized":
                    raise BenchmarkError(f"{repo.did} is {result}")
        cpu = self._clock.cpu
        stages = {stage: cpu[stage] for stage in STAGES.values()}
        if missing := [stage for stage, seconds in stages.items() if not seconds]:
            raise BenchmarkError(f"not measured: {', '.join(missing)}")
        return stages | {"other": cpu["client"] - sum(stages.values()), "database": cpu["database"]}

    async def close(self) -> None:
        """Close the identity cache."""
        await self._identities.close()


@asynccontextmanager
async def timed_resyncs(dsn: str, plc_url: str, directory: Path) -> AsyncIterator[TimedResyncs]:
    """Connect the parts of resyncs. Exports are spooled in `directory`."""
    rates = RateLimits(host=_UNLIMITED, host_concurrency=_UNLIMITED, total=_UNLIMITED)
    outbound = OutboundClient(OutboundSettings("benchmark", allow_private_hosts=True, rates=rates))
    try:
        async with connect_database(dsn) as (db, clock):
            scope = await db.scope.begin(Scope())
            resyncs = TimedResyncs(db, outbound, plc_url, directory, clock, scope)
            try:
                yield resyncs
            finally:
                await resyncs.close()
    finally:
        await outbound.close()
