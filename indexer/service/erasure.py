"""Erases what deleted accounts left, when their time of grace is over."""

import asyncio
from time import time

import structlog

from indexer.metrics import Metrics
from indexer.store import DatabaseError, Store
from indexer.sync.shard import Shard

log = structlog.get_logger(__name__)


class Erasure:
    """One look every `pause` seconds; then account by account, some records at a time, as long as any is due."""

    def __init__(self, store: Store, shard: Shard, metrics: Metrics, *, pause: float = 60.0) -> None:
        self._store = store
        self._shard = shard
        self._metrics = metrics
        self._pause = pause

    async def run(self) -> None:
        while True:
            try:
                while await self.erase_some():
                    pass
            except DatabaseError as error:
                log.warning("database.unavailable", error=str(error))
            await asyncio.sleep(self._pause)

    async def erase_some(self) -> bool:
        """Whether any account was due. Raises `DatabaseError`."""
        erased = await self._store.erase_some(self._shard.buckets, time())
        if erased is None:
            return False
        self._metrics.erased(erased.records)
        if erased.finished:
            log.info("repo.erased", did=erased.did)
        return True
