"""Erase the records of deleted accounts when their grace period is over."""

from time import time

import structlog

from indexer.monitoring.metrics import Metrics
from indexer.service.periodic import run_periodically
from indexer.store import Store
from indexer.sync.shard import Shard

log = structlog.get_logger(__name__)


class AccountErasure:
    """Looks for accounts that are due every `interval` seconds, and erases them in batches of records."""

    def __init__(self, store: Store, shard: Shard, metrics: Metrics, *, interval: float = 60.0) -> None:
        self._store = store
        self._shard = shard
        self._metrics = metrics
        self._interval = interval

    async def run(self) -> None:
        """Erase accounts forever. Only an exception that is a bug ends it."""
        await run_periodically(self._erase_all_due, self._interval)

    async def erase_batch(self) -> bool:
        """Erase one batch of records of one account; return False if no account is due.

        Raises:
            DatabaseError: The database is unavailable.
        """
        erased = await self._store.erase_batch(self._shard.buckets, time())
        if erased is None:
            return False
        self._metrics.erased(erased.records)
        if erased.finished:
            log.info("repo.erased", did=erased.did)
        return True

    async def _erase_all_due(self) -> None:
        while await self.erase_batch():
            pass
