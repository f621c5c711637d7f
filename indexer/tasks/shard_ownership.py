"""Hold the shard lock, so that at most one process writes the repos of a bucket."""

import asyncio
from dataclasses import dataclass, field
from time import monotonic

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.crash_points import crash_point
from indexer.db import Database
from indexer.db.periodic import DatabaseAttempt
from indexer.db.shard_lock import ShardLock
from indexer.sync.shard import Shard

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class ShardOwnership:
    """Acquires the locks of all buckets of a shard, and acquires them again if they are lost.

    Processes with overlapping shards wait for each other.

    Attributes:
        retry: Pause between two attempts, in seconds.
        stage: Its progress. An attempt to acquire the locks is work until the database answers.
        owned: Set while this process holds the locks.
        owned_since: When it acquired them (monotonic seconds); None while it does not hold them.
        waits_since: When it began to wait for them (monotonic seconds).
        last_error: Why it does not hold them; None if it does.
    """

    db: Database
    shard: Shard
    retry: float = 1.0
    owned: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    owned_since: float | None = field(default=None, init=False)
    waits_since: float = field(default_factory=monotonic, init=False)
    last_error: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.stage = StageProgress("shard lock")

    async def run(self) -> None:
        """Acquire and hold the locks forever. Only an exception that is a bug ends it.

        Raises:
            LayoutChangedError: The database was distributed while this process did not hold the locks.
        """
        while True:
            with DatabaseAttempt(self.stage) as attempt:
                await self._acquire_and_hold()
            self.last_error = attempt.error or self.last_error
            await asyncio.sleep(self.retry)

    async def _acquire_and_hold(self) -> None:
        """Wait until no other process holds a bucket of the shard; then hold the locks until the session ends."""
        async with self.db.shard_locks.open(self.shard.positions) as lock:
            waited = False
            while not await self._claim(lock):
                holders = "; ".join(await self.db.shard_locks.owners(self.shard.positions))
                if not waited:
                    log.warning("shard-lock.waiting", shard=str(self.shard), holders=holders)
                    waited = True
                self.last_error = f"another process holds buckets of shard {self.shard}, and this one waits: {holders}"
                await asyncio.sleep(self.retry)
            if self.last_error:
                log.info("shard-lock.acquired", shard=str(self.shard))
            self.last_error = None
            self.owned.set()
            self.owned_since = monotonic()
            await lock.lost.wait()
            self.owned.clear()
            self.owned_since, self.waits_since = None, monotonic()
            self.last_error = f"the session that held the locks of shard {self.shard} has ended"
            log.warning("shard-lock.lost", shard=str(self.shard))

    async def _claim(self, lock: ShardLock) -> bool:
        """Try to own the buckets. To wait for the other process afterwards is no work of this stage."""
        self.stage.begin()
        claimed = await lock.claim()
        crash_point("shard.claimed")
        self.stage.idle()
        self.stage.failed(None)
        return claimed
