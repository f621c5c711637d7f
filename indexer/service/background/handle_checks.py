"""Verify the handles that DID documents claim, independently of keys, hosts and records."""

import asyncio
from dataclasses import dataclass
from math import ceil
from time import time

import structlog
from aiolimiter import AsyncLimiter

from indexer.errors import UnavailableError
from indexer.identity import HandleVerifier
from indexer.service.periodic import DatabaseAttempt
from indexer.store import Store
from indexer.sync.backoff import backoff_seconds
from indexer.sync.shard import Shard
from indexer.sync.stored_identity import INVALID_HANDLE, HandleCheck, HandleClaim

MAX_CONCURRENCY = 64
MAX_ATTEMPTS = 8
"""Failed attempts, over about half a day, after which the handle of an account counts as unknown."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HandleCheckIntervals:
    """Times in seconds.

    Attributes:
        idle: Pause between two looks at an empty queue.
        check: The longest duration of one check.
        lease: How long a claim lasts; then another process may claim the handle.
        valid: When a valid handle is checked again.
        first_retry: When a handle that is not valid is checked again for the first time.
        max_retry: The longest pause between two checks of a handle that is not valid.
    """

    idle: float = 2.0
    check: float = 8.0
    lease: float = 600.0
    valid: float = 7 * 86_400.0
    first_retry: float = 300.0
    max_retry: float = 86_400.0


class HandleChecks:
    """Verifies handles that are due, at most `rate` per second."""

    def __init__(
        self,
        store: Store,
        handles: HandleVerifier,
        shard: Shard,
        *,
        rate: float,
        intervals: HandleCheckIntervals | None = None,
    ) -> None:
        self._store = store
        self._handles = handles
        self._shard = shard
        self._intervals = intervals or HandleCheckIntervals()
        self._limiter = AsyncLimiter(1, 1 / rate)
        # Enough slots to reach the rate although every check takes its longest duration.
        self._concurrency = min(ceil(rate * self._intervals.check), MAX_CONCURRENCY)
        self._slots = asyncio.Semaphore(self._concurrency)

    async def run(self) -> None:
        """Verify handles forever. Only an exception that is a bug ends it."""
        async with asyncio.TaskGroup() as group:
            while True:
                claims = await self._claim()
                for claim in claims:
                    await self._limiter.acquire()
                    await self._slots.acquire()
                    task = group.create_task(self._check_and_save(claim), name=f"handle of {claim.did}")
                    task.add_done_callback(lambda _done: self._slots.release())
                if not claims:
                    await asyncio.sleep(self._intervals.idle)

    async def _claim(self) -> list[HandleClaim]:
        buckets, lease = self._shard.buckets, self._intervals.lease
        with DatabaseAttempt():
            return await self._store.claim_handles(self._concurrency, buckets, lease, time())
        return []

    async def _check_and_save(self, claim: HandleClaim) -> None:
        check = await self._check(claim)
        with DatabaseAttempt():  # if this fails, the handle is due again when the claim's lease expires
            await self._store.save_handle_check(check)

    async def _check(self, claim: HandleClaim) -> HandleCheck:
        if claim.claimed is None:
            return HandleCheck(claim, INVALID_HANDLE, 0, None)
        attempts = claim.attempts + 1
        try:
            handle: str | None = await self._handles.verify_handle(claim.did, claim.claimed)
        except UnavailableError as error:
            log.debug("handle.check-failed", did=claim.did, handle=claim.claimed, error=str(error))
            handle = claim.known if attempts < MAX_ATTEMPTS else None
        else:
            if handle == claim.claimed:
                return HandleCheck(claim, handle, 0, time() + self._intervals.valid)
        first, maximum = self._intervals.first_retry, self._intervals.max_retry
        pause = backoff_seconds(attempts, claim.did, first=first, maximum=maximum)
        return HandleCheck(claim, handle, attempts, time() + pause)
