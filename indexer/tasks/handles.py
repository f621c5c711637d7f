"""Verify the handles that DID documents claim, independently of keys, hosts and records."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil
from time import time

import structlog
from aiolimiter import AsyncLimiter

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.periodic import DatabaseAttempt
from indexer.errors import UnavailableError
from indexer.net.http.host_limits import registered_domain
from indexer.net.identity.handle_verifier import HandleVerifier
from indexer.sync.backoff import backoff_seconds
from indexer.sync.identity import INVALID_HANDLE, HandleCheck, HandleClaim
from indexer.sync.shard import Shard

MAX_CONCURRENCY = 64
LEASE_SECONDS = 600.0
"""How long a claim lasts; then another process may claim the handle."""
VALID_SECONDS = 7 * 86_400.0
"""When a valid handle is checked again."""
MAX_DOMAINS = 10_000
"""Registered domains whose postponed handles are spaced."""
MAX_POSTPONED_SECONDS = 3_600.0
CLAIMS_PER_CHECK = 8
"""Handles that are claimed for each one that is checked at the same time, to find those of other domains."""
DOMAIN_SHARE = 0.5
"""Share of the rate at which the postponed handles of one registered domain become due again."""
MAX_ATTEMPTS = 8
"""Failed attempts, over about half a day, after which the handle of an account counts as unknown."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HandleCheckIntervals:
    """Times in seconds.

    Attributes:
        idle: Pause between two looks at an empty queue.
        check: The longest duration of one check.
        first_retry: When a handle that is not valid is checked again for the first time.
        max_retry: The longest pause between two checks of a handle that is not valid.
    """

    idle: float = 2.0
    check: float = 8.0
    first_retry: float = 300.0
    max_retry: float = 86_400.0


@dataclass(eq=False)
class HandleChecks:
    """Verifies handles that are due, at most `rate` per second.

    Registered domains take turns, because one domain has as many handles as its owner likes. Handles beyond those that
    are checked next are postponed, one behind the other, so that they do not stay ahead of those of other domains.

    Attributes:
        stage: Its progress. Each claim of handles, and each check of a handle, is an activity of its own.
    """

    db: Database
    handles: HandleVerifier
    shard: Shard
    rate: float
    intervals: HandleCheckIntervals = HandleCheckIntervals()

    def __post_init__(self) -> None:
        self._limiter = AsyncLimiter(1, 1 / self.rate)
        self._domain_interval = 1 / (self.rate * DOMAIN_SHARE)
        self._next_due = BoundedDict[str, float](MAX_DOMAINS)
        # Enough slots to reach the rate although every check takes its longest duration.
        self._concurrency = min(ceil(self.rate * self.intervals.check), MAX_CONCURRENCY)
        self.stage = StageProgress("handle checks")
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
                    await asyncio.sleep(self.intervals.idle)

    async def _claim(self) -> list[HandleClaim]:
        """Claim the handles to check next, the domains in turn, and give the other ones back."""
        count, now, claims = self._concurrency * CLAIMS_PER_CHECK, time(), list[HandleClaim]()
        with DatabaseAttempt(self.stage):
            claims = await self.db.identities.claim_handles(count, self.shard.buckets, LEASE_SECONDS, now)
        in_turn = _in_turn(claims)
        checked, others = in_turn[: self._concurrency], in_turn[self._concurrency :]
        is_alone = len({_domain(claim) for claim in claims}) == 1 and len(claims) < count
        due = [now if is_alone else self._schedule(_domain(claim), now) for claim in others]
        with DatabaseAttempt():  # if this fails, they are due again when their leases expire
            await self.db.identities.postpone_handles(others, due, now + LEASE_SECONDS)
        return checked

    def _schedule(self, domain: str, now: float) -> float:
        """Return when to check the next postponed handle of a domain; each call schedules one handle."""
        due_at = max(now, self._next_due.get(domain, 0.0)) + self._domain_interval
        self._next_due[domain] = min(due_at, now + MAX_POSTPONED_SECONDS)
        return self._next_due[domain]

    async def _check_and_save(self, claim: HandleClaim) -> None:
        with self.stage.task() as work:
            check = await self._check(claim)
            with DatabaseAttempt(work):  # if this fails, the handle is due again when the claim's lease expires
                await self.db.identities.save_handle_check(check)

    async def _check(self, claim: HandleClaim) -> HandleCheck:
        if claim.claimed is None:
            return HandleCheck(claim, INVALID_HANDLE, 0, None)
        attempts = claim.attempts + 1
        try:
            handle: str | None = await self.handles.verify_handle(claim.did, claim.claimed)
        except UnavailableError as error:
            log.debug("handle.check-failed", did=claim.did, handle=claim.claimed, error=str(error))
            handle = claim.known if attempts < MAX_ATTEMPTS else None
        else:
            if handle == claim.claimed:
                return HandleCheck(claim, handle, 0, time() + VALID_SECONDS)
        first, maximum = self.intervals.first_retry, self.intervals.max_retry
        pause = backoff_seconds(attempts, claim.did, first=first, maximum=maximum)
        return HandleCheck(claim, handle, attempts, time() + pause)


def _domain(claim: HandleClaim) -> str:
    return registered_domain((claim.claimed or "").lower())


def _in_turn(claims: Sequence[HandleClaim]) -> list[HandleClaim]:
    """Return the claims in an order in which their registered domains take turns."""
    by_domain = defaultdict[str, list[HandleClaim]](list)
    for claim in claims:
        by_domain[_domain(claim)].append(claim)
    return [claim for turn in zip_longest(*by_domain.values()) for claim in turn if claim is not None]
