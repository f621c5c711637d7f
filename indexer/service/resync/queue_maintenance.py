"""Maintain the resync queue: expire leases of workers that died, request missing values, and unpark repos."""

import asyncio
from dataclasses import dataclass
from time import time

import structlog

from indexer.monitoring.metrics import Metrics
from indexer.reasons import Desync
from indexer.service.periodic import run_periodically
from indexer.store import Store
from indexer.sync.shard import Shard

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MaintenanceSettings:
    """Intervals in seconds.

    Attributes:
        unpark_after: How long a repo stays parked; 0: until an event unparks it.
        missing_values_after: How long after its resync a repo without all record values gets another one.
        lease_interval: Pause between two searches for expired leases.
        search_interval: Pause between two searches for parked repos and missing values.
        batch_pause: Pause between two batches of one search, which leaves the database to others.
    """

    unpark_after: float = 86_400.0
    missing_values_after: float = 86_400.0
    lease_interval: float = 1.0
    search_interval: float = 600.0
    batch_pause: float = 0.1


class QueueMaintenance:
    """Changes repos that no worker holds. `run` ends only with an exception that is a bug."""

    def __init__(
        self, store: Store, shard: Shard, metrics: Metrics, settings: MaintenanceSettings | None = None
    ) -> None:
        self._store = store
        self._buckets = shard.buckets
        self._metrics = metrics
        self._settings = settings or MaintenanceSettings()

    async def run(self) -> None:
        """Run both searches at their intervals."""
        async with asyncio.TaskGroup() as group:
            group.create_task(run_periodically(self._expire_leases, self._settings.lease_interval), name="lease expiry")
            group.create_task(
                run_periodically(self._request_resyncs, self._settings.search_interval, wait_first=True),
                name="parked repos and missing values",
            )

    async def _expire_leases(self) -> None:
        # In a transaction of its own: expiry waits for row locks, claims skip locked rows.
        expired = await self._store.expire_leases(self._buckets, time())
        self._metrics.desynchronized(Desync.LEASE_EXPIRED, expired)

    async def _request_resyncs(self) -> None:
        """Work in batches, each a short transaction, until no repo is left that was due at the start.

        Repos that become due meanwhile wait for the next search. Otherwise the first could fail and be parked again
        before the others had their turn.
        """
        started, settings = time(), self._settings
        while found := await self._store.request_missing_values(self._buckets, settings.missing_values_after, started):
            self._metrics.desynchronized(Desync.RECORD_MISSING, found)
            await asyncio.sleep(settings.batch_pause)
        while settings.unpark_after and (
            found := await self._store.unpark(self._buckets, settings.unpark_after, started)
        ):
            log.debug("repos.unparked", repos=found)
            await asyncio.sleep(settings.batch_pause)
