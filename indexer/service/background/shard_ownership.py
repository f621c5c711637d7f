"""Hold the shard locks, so that at most one process writes the repos of a bucket."""

import asyncio

import structlog

from indexer.service.periodic import DatabaseAttempt
from indexer.store import Store
from indexer.sync.shard import Shard

RETRY_SECONDS = 1.0

log = structlog.get_logger(__name__)


class ShardOwnership:
    """Acquires the locks of all buckets of a shard, and acquires them again if they are lost.

    Processes with overlapping shards wait for each other.

    Attributes:
        owned: Set while this process holds the locks.
        last_error: Why it does not hold them; None if it does.
    """

    def __init__(self, store: Store, shard: Shard) -> None:
        self._store = store
        self._shard = shard
        self.owned = asyncio.Event()
        self.last_error: str | None = None

    async def run(self) -> None:
        """Acquire and hold the locks forever. Only an exception that is a bug ends it."""
        while True:
            with DatabaseAttempt() as attempt:
                await self._acquire_and_hold()
            self.last_error = attempt.error or self.last_error
            await asyncio.sleep(RETRY_SECONDS)

    async def _acquire_and_hold(self) -> None:
        """Hold the locks until the session ends; return at once if another session holds any of them."""
        async with self._store.hold_buckets(self._shard.buckets) as lost:
            if lost is None:
                if self.last_error is None:
                    log.warning("shard-lock.waiting", shard=str(self._shard))
                self.last_error = f"another process holds buckets of shard {self._shard}"
                return
            self.last_error = None
            self.owned.set()
            await lost.wait()
            self.owned.clear()
            self.last_error = f"the session that held the locks of shard {self._shard} has ended"
            log.warning("shard-lock.lost", shard=str(self._shard))
