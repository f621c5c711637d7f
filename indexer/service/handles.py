"""Claimed handles, checked beside everything else: no key, host or record waits for them."""

import asyncio
from dataclasses import dataclass
from math import ceil
from time import time

import structlog
from aiolimiter import AsyncLimiter

from indexer.errors import UnavailableError
from indexer.identity import Handles
from indexer.store import DatabaseError, Store
from indexer.sync.backoff import backoff_seconds
from indexer.sync.identity import INVALID_HANDLE, HandleCheck, HandleClaim
from indexer.sync.shard import Shard

MOST_AT_ONCE = 64
GIVEN_UP = 8  # attempts, about half a day, after which a handle that can't be checked any more is not known any more

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: between looks at an empty queue, of one check at most, until a claim that nobody finished is taken
    again, until a handle that holds is checked again, and the first and longest wait for one that doesn't.
    """

    idle: float = 2.0
    check: float = 8.0
    lease: float = 600.0
    holds: float = 7 * 86_400.0
    first: float = 300.0
    most: float = 86_400.0


class HandleChecks:
    """Checks `rate` handles a second, as they become due. `run` ends only with an error that is ours."""

    def __init__(self, store: Store, handles: Handles, shard: Shard, *, rate: float, pace: Pace | None = None) -> None:
        self._store = store
        self._handles = handles
        self._shard = shard
        self._pace = pace or Pace()
        self._rate = AsyncLimiter(1, 1 / rate)
        # So many that the rate can be held though every check takes its longest.
        self._at_once = min(ceil(rate * self._pace.check), MOST_AT_ONCE)
        self._places = asyncio.Semaphore(self._at_once)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                claims = await self._claim()
                for claim in claims:
                    await self._rate.acquire()
                    await self._places.acquire()
                    task = group.create_task(self._settle(claim), name=f"handle of {claim.did}")
                    task.add_done_callback(lambda _done: self._places.release())
                if not claims:
                    await asyncio.sleep(self._pace.idle)

    async def _claim(self) -> list[HandleClaim]:
        try:
            return await self._store.claim_handles(self._at_once, self._shard.buckets, self._pace.lease, time())
        except DatabaseError as error:
            log.warning("database.unavailable", error=str(error))
            return []

    async def _settle(self, claim: HandleClaim) -> None:
        try:
            await self._store.save_check(await self._check(claim))
        except DatabaseError as error:  # it becomes due once more
            log.warning("database.unavailable", error=str(error))

    async def _check(self, claim: HandleClaim) -> HandleCheck:
        if claim.claimed is None:
            return HandleCheck(claim, INVALID_HANDLE, 0, None)
        attempts = claim.attempts + 1
        try:
            handle: str | None = await self._handles.verify_handle(claim.did, claim.claimed)
        except UnavailableError as error:
            log.debug("handle.unchecked", did=claim.did, handle=claim.claimed, error=str(error))
            handle = claim.known if attempts < GIVEN_UP else None
        else:
            if handle == claim.claimed:
                return HandleCheck(claim, handle, 0, time() + self._pace.holds)
        pause = backoff_seconds(attempts, claim.did, first=self._pace.first, most=self._pace.most)
        return HandleCheck(claim, handle, attempts, time() + pause)
