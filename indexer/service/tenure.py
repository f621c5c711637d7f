"""A process writes its buckets only while no other one does: overlapping shards wait for each other."""

import asyncio

import structlog

from indexer.store import DatabaseError, Store
from indexer.sync.shard import Shard

PAUSE = 1.0  # seconds between attempts

log = structlog.get_logger(__name__)


class Tenure:
    """`run` keeps the buckets of `shard`; `held` is set as long as they are ours."""

    def __init__(self, store: Store, shard: Shard) -> None:
        self._store = store
        self._shard = shard
        self.held = asyncio.Event()
        self.trouble: str | None = None

    async def run(self) -> None:
        while True:
            try:
                await self._hold()
            except DatabaseError as error:
                self.trouble = str(error)
                log.warning("database.unavailable", error=self.trouble)
            await asyncio.sleep(PAUSE)

    async def _hold(self) -> None:
        async with self._store.hold(self._shard.buckets) as lost:
            if lost is None:
                if self.trouble is None:
                    log.warning("shard.waiting", shard=str(self._shard))
                self.trouble = f"another process holds buckets of shard {self._shard}"
                return
            self.trouble = None
            self.held.set()
            await lost.wait()
            self.held.clear()
            self.trouble = f"the session that held the buckets of shard {self._shard} has ended"
            log.warning("shard.lost", shard=str(self._shard))
