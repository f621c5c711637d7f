"""The pool of resync workers: claim repos that are due, run their attempts, and write how each attempt ended."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, time

import structlog

from indexer.errors import UnavailableError, UpstreamError
from indexer.identity import IdentityCache
from indexer.monitoring.metrics import Metrics
from indexer.reasons import FetchFailure
from indexer.service.periodic import DatabaseAttempt
from indexer.service.resync.admission import UNKNOWN_HOST, Admission, Postponed, Slot
from indexer.service.resync.attempt import ResyncAttempts
from indexer.service.resync.lease import ClaimLostError, run_under_lease
from indexer.store import DatabaseError, Store
from indexer.sync.plan_event import plan_existence
from indexer.sync.plan_resync import plan_failure
from indexer.sync.plans import Batch, RepoWrite
from indexer.sync.policy import Policy
from indexer.sync.repo_state import Repo, SyncStatus
from indexer.sync.repo_transitions import release
from indexer.sync.shard import Shard

MAX_CLAIM = 256

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerPoolSettings:
    """Settings of the pool; times are seconds.

    Attributes:
        workers: Concurrent resyncs, not counting those of large repos.
        idle_interval: Pause between two looks at an empty queue.
        lease: How long a claim lasts without a renewal.
        attempt_timeout: The longest duration of one attempt.
    """

    workers: int = 8
    idle_interval: float = 1.0
    lease: float = 120.0
    attempt_timeout: float = 3_600.0


@dataclass(slots=True, eq=False)
class RunningResync:
    """A claimed repo and the slots that it occupies."""

    claimed: Repo
    slot: Slot


class WorkerPool:
    """Runs resyncs of the repos of one shard. `run` ends only with an exception that is a bug.

    Attributes:
        running: The resyncs in progress.
        last_error: The database error of the last claim; None if it succeeded.
        last_progress: When the pool last claimed repos, or found none (monotonic seconds).
    """

    def __init__(
        self,
        store: Store,
        identities: IdentityCache,
        attempts: ResyncAttempts,
        policy: Policy,
        shard: Shard,
        metrics: Metrics,
        settings: WorkerPoolSettings | None = None,
    ) -> None:
        self._store = store
        self._identities = identities
        self._attempts = attempts
        self._policy = policy
        self._buckets = shard.buckets
        self._metrics = metrics
        self._settings = settings or WorkerPoolSettings()
        self._admission = Admission(self._settings.workers)
        self._slot_freed = asyncio.Event()
        self._claiming: asyncio.Task[list[Repo]] | None = None
        self.running: list[RunningResync] = []
        self.last_error: str | None = None
        self.last_progress = monotonic()

    @property
    def free_workers(self) -> int:
        """The number of workers without a resync."""
        return self._admission.free_workers

    async def run(self) -> None:
        """Claim repos and start their resyncs, as long as workers are free."""
        claim_size = 1
        async with asyncio.TaskGroup() as group:
            while True:
                while self.free_workers <= 0:
                    await self._wait_for_slot(None)
                self._slot_freed.clear()
                claimed = await self._claim(max(claim_size, self.free_workers))
                started = await self._start(group, claimed)
                self.last_progress = monotonic()
                # If none was admitted, claim more next time: many repos of one busy host may be first in the queue.
                claim_size = 1 if started else min(2 * len(claimed), MAX_CLAIM)
                if not started:
                    await self._wait_for_slot(self._settings.idle_interval / (4 if claimed else 1))

    async def give_back(self) -> None:
        """End the claims of resyncs that were cancelled or not started, so that nobody waits for their leases."""
        claimed = [running.claimed for running in self.running]
        self.running.clear()
        with DatabaseAttempt():
            for repo in claimed:
                await self._update_claimed(repo, release)
            for repo in await self._claiming if self._claiming else ():
                await self._update_claimed(repo, release)

    async def close(self) -> None:
        """Cancel a claim that `give_back` has not waited for. Its repos are claimed again when their leases expire."""
        if self._claiming is not None:
            self._claiming.cancel()
            await asyncio.gather(self._claiming, return_exceptions=True)

    async def _wait_for_slot(self, seconds: float | None) -> None:
        """Wait until a slot has become free, at most for `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._slot_freed.wait()
        except TimeoutError:
            return
        self._slot_freed.clear()

    async def _claim(self, count: int) -> list[Repo]:
        """Claim repos. A claim completes even if this task is cancelled; `give_back` returns its repos."""
        claim = self._store.claim(count, self._buckets, self._settings.lease, time())
        self._claiming = asyncio.create_task(claim, name="claim of repos")
        claimed: list[Repo] = []
        with DatabaseAttempt() as claiming:
            claimed = await asyncio.shield(self._claiming)
        self.last_error = claiming.error
        with DatabaseAttempt():  # without the identities, each attempt looks up its own
            await self._identities.preload([repo.did for repo in claimed])
        return claimed

    async def _start(self, group: asyncio.TaskGroup, claimed: Sequence[Repo]) -> int:
        """Start the repos that find free slots and postpone the others; return how many were started."""
        now, postponed = time(), []
        for repo in claimed:
            identity = self._identities.peek(repo.did)
            slot = self._admission.admit(repo.did, (identity and identity.host) or UNKNOWN_HOST, now)
            if isinstance(slot, Postponed):
                postponed.append((repo, slot))
            else:
                running = RunningResync(repo, slot)
                self.running.append(running)
                group.create_task(self._resync(running), name=f"resync of {repo.did}")
        self._metrics.postponed(len(postponed))
        with DatabaseAttempt():  # if this fails, their leases expire
            await self._postpone(postponed)
        return len(claimed) - len(postponed)

    async def _postpone(self, repos: Sequence[tuple[Repo, Postponed]]) -> None:
        writes = [RepoWrite(repo.version, release(repo, postponed.until)) for repo, postponed in repos]
        changed = await self._store.apply(Batch(tuple(writes)))
        for repo in [repo for repo, _ in repos if repo.did in changed]:
            await self._update_claimed(repo, release)

    async def _resync(self, running: RunningResync) -> None:
        started = monotonic()
        try:
            result = await self._attempt_and_record(running)
        except (ClaimLostError, DatabaseError) as error:
            result = "lost"  # the lease expires, and the repo is claimed again
            log.warning("resync.claim-lost", did=running.claimed.did, error=str(error))
        self._admission.release(running.slot, time())
        self.running.remove(running)
        self._slot_freed.set()
        self._metrics.resync(result, monotonic() - started)
        log.debug("resync.done", did=running.claimed.did, result=result)

    async def _attempt_and_record(self, running: RunningResync) -> str:
        """Run one attempt and write a failure or a postponement to the repo's row; return the result for metrics."""
        claimed = running.claimed
        try:
            result = await run_under_lease(self._store, claimed, self._settings.lease, self._attempt(running))
        except DatabaseError:
            raise
        except UnavailableError as error:
            return await self._record_failure(claimed, error)
        except UpstreamError as error:
            failure = UnavailableError(FetchFailure.EXPORT_REJECTED, str(error))
            return await self._record_failure(claimed, failure)
        if isinstance(result, Postponed):
            until = result.until
            await self._update_claimed(claimed, lambda repo: release(repo, until))
            return "postponed"
        return result

    async def _attempt(self, running: RunningResync) -> str | Postponed:
        claimed, slot, seconds = running.claimed, running.slot, self._settings.attempt_timeout
        try:
            async with asyncio.timeout(seconds):
                identity = await self._identities.lookup(claimed.did, refresh=claimed.attempts > 0)
                if identity.gone:
                    raise UnavailableError(FetchFailure.IDENTITY_GONE, identity.problem or "")
                if identity.key is None or identity.host is None:
                    raise UnavailableError(FetchFailure.IDENTITY_MISSING, identity.problem or "no key or no PDS")
                if postponed := self._admission.change_host(slot, identity.host, time()):
                    return postponed
                return await self._attempts.attempt(claimed, identity, lambda: self._enlarge(slot))
        except TimeoutError:
            raise UnavailableError(FetchFailure.TIMEOUT, f"no result after {seconds:.0f} s") from None

    def _enlarge(self, slot: Slot) -> Postponed | None:
        postponed = self._admission.enlarge(slot, time())
        if postponed is None:
            self._slot_freed.set()  # the resync no longer occupies a worker
        return postponed

    async def _record_failure(self, claimed: Repo, failure: UnavailableError) -> str:
        if failure.host is not None and failure.retry_after is not None:
            self._admission.pause_host(failure.host, time() + failure.retry_after)
        await self._update_claimed(claimed, lambda repo: self._failed(repo, claimed, failure))
        log.info("resync.failed", did=claimed.did, error=str(failure), attempts=claimed.attempts + 1)
        return failure.reason

    def _failed(self, repo: Repo, claimed: Repo, failure: UnavailableError) -> Repo:
        after = plan_failure(repo, claimed, failure, time())
        gone = failure.reason is FetchFailure.IDENTITY_GONE
        return plan_existence(after, time(), self._policy, exists=False) if gone else after

    async def _update_claimed(self, claimed: Repo, change: Callable[[Repo], Repo]) -> None:
        """Write the changed row, unless the claim is lost."""

        def if_claimed(repo: Repo) -> Repo:
            holds = repo.lease == claimed.lease and repo.sync_status is SyncStatus.IN_PROGRESS
            return change(repo) if holds else repo

        await self._store.update_repo(claimed.did, if_claimed)
