"""The queue of resyncs: keep the leases of claimed repos alive, and maintain the repos that no worker holds."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, TypeVar

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.crash_points import crash_point
from indexer.db import Database
from indexer.db.periodic import DatabaseAttempt, run_periodically
from indexer.reasons import Desync
from indexer.sync.repo import STABLE_SECONDS, Repo
from indexer.sync.shard import Shard
from indexer.telemetry.metrics import Metrics

RENEWALS_PER_LEASE = 3
LONGEST_WAIT_SECONDS = 7_200.0
"""No repo waits for longer until its next attempt, unless the clock was set back. Back-offs are up to 75 minutes."""
MIN_PARKED_SECONDS = 120.0
"""Seconds that a repo is parked at least before its row is deleted: longer than processes use a cached row."""

log = structlog.get_logger(__name__)

T = TypeVar("T")
Search = Callable[[Sequence[int], float, float], Awaitable[int]]
"""Changes repos of these buckets that are in a state for so many seconds at this time; returns how many."""


class ClaimLostError(Exception):
    """Another worker holds the repo, or it needs no resync any more: change nothing."""


async def run_under_lease(db: Database, claimed: Repo, seconds: float, attempt: Coroutine[Any, Any, T]) -> T:
    """Run `attempt`, renewing the lease of `seconds` meanwhile; return its result or raise its exception.

    Raises:
        ClaimLostError: The lease could not be renewed. The attempt has been cancelled.
    """
    running = asyncio.create_task(attempt, name=f"resync attempt of {claimed.did}")
    heartbeat = asyncio.create_task(_renew(db, claimed, seconds), name=f"lease heartbeat of {claimed.did}")
    try:
        await asyncio.wait({running, heartbeat}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            heartbeat.result()
            raise ClaimLostError("the lease could not be renewed")
        return running.result()
    finally:
        running.cancel()
        heartbeat.cancel()
        await asyncio.gather(running, heartbeat, return_exceptions=True)


async def _renew(db: Database, claimed: Repo, seconds: float) -> None:
    """Renew the lease until the claim is lost."""
    held = True
    while held:
        await asyncio.sleep(seconds / RENEWALS_PER_LEASE)
        with DatabaseAttempt():
            held = await db.resyncs.renew(claimed.did, claimed.lease, seconds)
            crash_point("lease.renewed")


@dataclass(frozen=True, slots=True)
class MaintenanceSettings:
    """Intervals in seconds.

    Attributes:
        forget_after: How long a repo without stored records is kept that cannot be fetched and that no repo list has
            named, or whose account is inactive; 0: for ever. If it is parked, it is forgotten instead of being unparked
            for the first time.
        unpark_after: How long a repo stays parked; 0: until an event unparks it.
        missing_values_after: How long after its resync a repo without all record values gets another one.
        lease_interval: Pause between two searches for expired leases.
        search_interval: Pause between two searches for parked repos and missing values.
        unproven_after: How long a repo that broke before is synchronized before its undecidable commits cause a resync.
            So each repo gets at most one per interval, and it is due at once: its back-off starts from the beginning.
        unproven_interval: Pause between two searches for repos with undecidable commits.
        unproven_per_search: Repos that one such search desynchronizes. The others wait, synchronized, so that many such
            commits cause few exports at a time.
        batch_pause: Pause between two batches of one search, which leaves the database to others.
    """

    forget_after: float = 86_400.0
    unpark_after: float = 86_400.0
    missing_values_after: float = 86_400.0
    lease_interval: float = 1.0
    search_interval: float = 600.0
    unproven_after: float = STABLE_SECONDS
    unproven_interval: float = 60.0
    unproven_per_search: int = 60
    batch_pause: float = 0.1


@dataclass(eq=False)
class QueueMaintenance:
    """Changes repos that no worker holds. `run` ends only with an exception that is a bug."""

    db: Database
    shard: Shard
    metrics: Metrics
    settings: MaintenanceSettings = field(default_factory=MaintenanceSettings)
    may_forget: Callable[[], bool] = lambda: True  # returns False while the operator chooses the repos

    def __post_init__(self) -> None:
        self.lease_expiry = StageProgress("lease expiry")
        self.parked_repos = StageProgress("parked repos")  # and missing values
        self.unproven_repos = StageProgress("unproven repos")

    async def run(self) -> None:
        """Run the searches at their intervals."""
        settings = self.settings
        async with asyncio.TaskGroup() as group:
            for search, interval, progress in (
                (self._expire_leases, settings.lease_interval, self.lease_expiry),
                (self._request_resyncs, settings.search_interval, self.parked_repos),
                (self._request_unproven, settings.unproven_interval, self.unproven_repos),
            ):
                wait_first = progress is not self.lease_expiry
                group.create_task(run_periodically(search, interval, progress, wait_first=wait_first))

    async def _expire_leases(self) -> None:
        # In a transaction of its own: expiry waits for row locks, claims skip locked rows.
        expired = await self.db.resyncs.expire_leases(self.shard.buckets, time())
        self.metrics.desynchronized[Desync.LEASE_EXPIRED].inc(expired)

    async def _request_unproven(self) -> None:
        """Work in one batch: the rest waits for the next search."""
        settings = self.settings
        found = await self.db.resyncs.request_unproven(
            self.shard.buckets, settings.unproven_after, time(), settings.unproven_per_search
        )
        self.metrics.desynchronized[Desync.LENIENT_COMMIT].inc(found)

    async def _request_resyncs(self) -> None:
        """End waits that are too long, then work in batches until no repo is left that was due at the start.

        Repos that become due meanwhile wait for the next search. Otherwise the first could fail and be parked again
        before the others had their turn.
        """
        started, settings, resyncs = time(), self.settings, self.db.resyncs
        forget_hidden_after = settings.forget_after if self.may_forget() else 0.0
        unpark_after = max(settings.unpark_after, MIN_PARKED_SECONDS) if settings.unpark_after else forget_hidden_after
        if found := await self._repeat(resyncs.end_long_waits, LONGEST_WAIT_SECONDS, started):
            log.warning("clock.set-back", repos=found)
        found = await self._repeat(resyncs.request_missing_values, settings.missing_values_after, started)
        self.metrics.desynchronized[Desync.RECORD_MISSING].inc(found)
        await self._repeat(resyncs.forget_denied, min(forget_hidden_after, unpark_after), started)
        await self._repeat(resyncs.forget_hidden, forget_hidden_after, started)
        await self._repeat(resyncs.unpark, settings.unpark_after, started)

    async def _repeat(self, search: Search, seconds: float, started: float) -> int:
        """Repeat a search until it finds nothing more; return how many repos it found. 0 seconds: do not search."""
        total = 0
        while seconds and (found := await search(self.shard.buckets, seconds, started)):
            total += found
            self.parked_repos.moved()
            await asyncio.sleep(self.settings.batch_pause)
        return total
