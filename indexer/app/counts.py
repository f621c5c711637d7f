"""Count the repos in the database again and again, for the metrics and the status page."""

import asyncio
from time import monotonic, time
from typing import NoReturn

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Store
from indexer.db.periodic import DatabaseAttempt
from indexer.serve.backfill import RepoCounts
from indexer.serve.status_document import link_status
from indexer.telemetry.metrics import Metrics


class DaemonCounts:
    """The counts of the repos of all shards.

    Attributes:
        newest: The newest counts.
        stage: The progress of counting.
    """

    def __init__(self, store: Store, metrics: Metrics, interval: float, max_share: float) -> None:
        """Create it.

        Args:
            store: The store.
            metrics: The metrics.
            interval: The minimum time between two counts, in seconds.
            max_share: The maximum share of the time that is spent on counting, because it reads many repos.
        """
        self._store = store
        self._metrics = metrics
        self._interval = interval
        self._max_share = max_share
        self.newest = RepoCounts()
        self.stage = StageProgress("repo counts")

    async def run(self) -> NoReturn:
        """Count all repos again and again, without using more than a small share of the time for it."""
        while True:
            began = monotonic()
            with DatabaseAttempt(self.stage) as attempt:
                await self._count()
            # A failed attempt is repeated soon: even a slow database can read one page, so it waited for a lock.
            duration = 0.0 if attempt.error else monotonic() - began
            await asyncio.sleep(max(self._interval, duration / self._max_share))

    async def _count(self) -> None:
        now = time()
        since = self.newest.since(now)
        counts = await self._store.counts(since)
        self.newest.set(counts, since, now)
        self._metrics.repos(counts.statuses, counts.reasons, counts.queued, counts.incomplete)
        self._metrics.links(link_status(counts.links, now).progress)
