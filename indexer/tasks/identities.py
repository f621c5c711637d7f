"""Refresh identities that are known to have changed, and verify the handles that DID documents claim."""

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from operator import itemgetter
from time import time
from typing import TypeVar

import structlog
from aiolimiter import AsyncLimiter

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database, DatabaseError
from indexer.db.periodic import DatabaseAttempt, run_periodically
from indexer.errors import UnavailableError
from indexer.net.http.host_limits import registered_domain
from indexer.net.http.http_client import host_of
from indexer.net.identity.did_resolver import METHODS, Method, web_host
from indexer.net.identity.handle_verifier import HandleVerifier
from indexer.net.identity.identity_cache import IdentityCache
from indexer.sync.account import plan_existence
from indexer.sync.backoff import backoff_seconds
from indexer.sync.identity import INVALID_HANDLE, DueIdentity, HandleCheck, HandleClaim
from indexer.sync.shard import Shard

BATCH_SIZE = 100
MAX_PER_HOST = 20
"""Identities of one host in a batch."""
WINDOW = 1_000
"""Due identities or handles from which the next ones are chosen: this number of the oldest, and of the newest."""
CONCURRENCY = 16
"""Concurrent lookups per DID method."""
LIMITED_SECONDS = 30.0
"""Pause of an identity that the limits of the identity cache did not allow to look up."""
MAX_CONCURRENT_CHECKS = 64
VALID_SECONDS = 7 * 86_400.0
"""When a valid handle is checked again."""
MAX_ATTEMPTS = 8
"""Failed attempts, over about half a day, after which the handle of an account counts as unknown."""

T = TypeVar("T")
log = structlog.get_logger(__name__)


@dataclass(eq=False)
class IdentityRefresh:
    """Refreshes identities that are due, in batches with a pause of `interval` seconds between two of them.

    This also reaches accounts that send no commits, whose keys nothing else looks up. did:plc and did:web have batches
    of their own, because hosts of did:web can be slow on purpose.

    Attributes:
        stage: Its progress. Each batch is work; it moves with each identity.
    """

    db: Database
    identities: IdentityCache
    deletion_grace: float
    shard: Shard
    interval: float = 10.0

    def __post_init__(self) -> None:
        self.stage = StageProgress("identity refresh")
        self._batches = {method: self.stage.add() for method in METHODS}

    async def run(self) -> None:
        """Refresh identities forever. Only an exception that is a bug ends it."""
        async with asyncio.TaskGroup() as group:
            for method in METHODS:
                work = partial(self.refresh_batch, method)
                batches = run_periodically(work, self.interval, self._batches[method])
                group.create_task(batches, name=f"identity refresh of did:{method}")

    async def refresh(self, did: str, failures: int = 0) -> None:
        """Look up the identity and update the repo. After a failure, the identity is due again after a back-off.

        `failures` says how often in a row that failed before.
        """
        try:
            identity = await self.identities.refresh(did)
        except DatabaseError:
            raise
        except UnavailableError as error:
            failures += 1
            log.debug("identity.refresh-postponed", did=did, failures=failures, error=str(error))
            await self.db.identities.postpone_refresh(did, time() + backoff_seconds(failures, did), failures)
            return
        if identity is None:
            await self.db.identities.postpone_refresh(did, time() + LIMITED_SECONDS, failures)
        elif not (identity.stale or identity.doubtful):
            exists, grace = not identity.gone, self.deletion_grace
            await self.db.repos.update(did, lambda repo: plan_existence(repo, time(), grace, exists=exists))

    async def refresh_batch(self, method: Method) -> None:
        """Refresh identities of one DID method that are due, several at a time."""
        due = await self.db.identities.due(self.shard.buckets, WINDOW, time(), web=method == "web")
        slots = asyncio.Semaphore(CONCURRENCY)

        async def refresh(identity: DueIdentity) -> None:
            async with slots:
                with DatabaseAttempt():
                    await self.refresh(identity.did, identity.failures)
                self._batches[method].moved()

        async with asyncio.TaskGroup() as group:
            for identity in fair_batch(due):
                group.create_task(refresh(identity), name=f"identity refresh of {identity.did}")


@dataclass(eq=False)
class HandleChecks:
    """Verifies handles that are due, at most `rate` per second.

    Registered domains take turns, because one domain has as many handles as its owner likes. If more handles are due
    than the window has, every second look is at the next older ones, so that each handle is in the window once. Times
    are seconds.

    Attributes:
        idle: Pause between two looks for due handles if there are none.
        check: The longest duration of one check.
        first_retry: When a handle that is not valid is checked again for the first time.
        max_retry: The longest pause between two checks of a handle that is not valid.
        stage: Its progress. Each look for due handles, and each check of a handle, is an activity of its own.
    """

    db: Database
    handles: HandleVerifier
    shard: Shard
    rate: float
    idle: float = 2.0
    check: float = 8.0
    first_retry: float = 300.0
    max_retry: float = 86_400.0

    def __post_init__(self) -> None:
        self._limiter = AsyncLimiter(1, 1 / self.rate)
        # Enough slots to reach the rate although every check takes its longest duration.
        self._concurrency = min(ceil(self.rate * self.check), MAX_CONCURRENT_CHECKS)
        self._slots = asyncio.Semaphore(self._concurrency)
        self._checking = set[str]()
        self.stage = StageProgress("handle checks")

    async def run(self) -> None:
        """Verify handles forever. Only an exception that is a bug ends it."""
        older: float | None = None  # the time at which the next look at older handles begins
        at_newest = True
        async with asyncio.TaskGroup() as group:
            while True:
                due, end = list[HandleClaim](), older
                with DatabaseAttempt(self.stage):
                    before = time() if at_newest or older is None else older
                    due, end = await self.db.identities.due_handles(self.shard.buckets, WINDOW, before)
                if not at_newest or older is None:
                    older = end
                at_newest = not at_newest or older is None
                waiting = [claim for claim in due if claim.did not in self._checking]
                for claim in in_turn(waiting, _domain)[: self._concurrency]:
                    await self._limiter.acquire()
                    await self._slots.acquire()
                    self._checking.add(claim.did)
                    group.create_task(self._check_and_save(claim), name=f"handle of {claim.did}")
                if not waiting:
                    await asyncio.sleep(self.idle)

    async def _check_and_save(self, claim: HandleClaim) -> None:
        with self.stage.task() as work:
            check = await self._check(claim)
            with DatabaseAttempt(work) as attempt:  # if this fails, the handle is still due
                await self.db.identities.save_handle_check(check)
        self._slots.release()
        if attempt.error is None:
            self._checking.discard(claim.did)
        else:  # the database may refuse writes for hours, and hosts are not asked all the time
            asyncio.get_running_loop().call_later(self.first_retry, self._checking.discard, claim.did)

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
        pause = backoff_seconds(attempts, claim.did, first=self.first_retry, maximum=self.max_retry)
        return HandleCheck(claim, handle, attempts, time() + pause)


def fair_batch(due: Iterable[DueIdentity]) -> list[DueIdentity]:
    """Return the identities to refresh next, the hosts in turn."""
    return in_turn(due, _host, MAX_PER_HOST)[:BATCH_SIZE]


def in_turn(items: Iterable[T], key: Callable[[T], Hashable], most: float = inf) -> list[T]:
    """Return the first item of each key, then the second one of each key, …, at most so many of one key."""
    seen, turns = Counter[Hashable](), list[tuple[int, T]]()
    for item in items:
        name = key(item)
        turns.append((seen[name], item))
        seen[name] += 1
    return [item for turn, item in sorted(turns, key=itemgetter(0)) if turn < most]


def _host(identity: DueIdentity) -> str:
    """Return the host. The owner of a domain can create any number of subdomains, so for did:web it is the domain."""
    host = web_host(identity.did)
    return host_of(identity.pds or "") if host is None else registered_domain(host)


def _domain(claim: HandleClaim) -> str:
    return registered_domain((claim.claimed or "").lower())
