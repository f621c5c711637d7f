"""The pool of resync workers: claim repos that are due, run their attempts, and write how each attempt ended."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, time

import structlog

from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.stage_progress import StageProgress
from indexer.crash_points import crash_point
from indexer.db import Database, DatabaseError
from indexer.db.periodic import DatabaseAttempt
from indexer.errors import RefusedWriteError, UnavailableError, UpstreamError
from indexer.net.http.host_limits import registered_domain
from indexer.net.identity.did_resolver import web_host
from indexer.net.identity.identity_cache import IdentityCache
from indexer.net.new_accounts import NewAccounts
from indexer.reasons import FetchFailure
from indexer.resync.fetch import ResyncAttempts
from indexer.resync.queue import ClaimLostError, run_under_lease
from indexer.resync.shares import LARGE_EXPORTS_BYTES, UNKNOWN_HOST, PostponedError, Resync, Shares
from indexer.sync.account import plan_existence
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.repo import PARKED, Repo, SyncStatus, Trigger, end_claim
from indexer.sync.resync import plan_failure
from indexer.sync.shard import Shard
from indexer.telemetry.conditions import NEW_ACCOUNTS_LIMITED, RESYNCS_FAILING, RESYNCS_SLOW, Conditions
from indexer.telemetry.metrics import Metrics

MAX_CLAIM = 256
OTHER_TIME = 2_400.0
"""Seconds of an attempt besides the downloads: to verify and write a large repo."""
_REPORTED_BY_HOST = frozenset({FetchFailure.HOST_PAUSED, FetchFailure.THROTTLED})
"""With these reasons no request was sent. The failures before the pause were reported, and so was the host."""
_NOT_STARTED = PostponedError()

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerPoolSettings:
    """Settings of the pool; times are seconds."""

    workers: int = 32  # concurrent resyncs, not counting those of large exports
    large_bytes: int = LARGE_EXPORTS_BYTES  # the bytes of large exports, together
    fair_time: float = 10.0  # how long a resync may occupy a worker if most workers are occupied by slow exports
    idle_interval: float = 1.0  # pause between two looks at an empty queue
    gathering_time: float = 0.0  # to wait for more free workers: a claim of several repos costs little more than one
    lease: float = 120.0  # how long a claim lasts without a renewal
    attempt_timeout: float = 3_600.0  # the longest duration of one attempt
    streamed: bool = True  # False if the upstream is a Jetstream, so that each change has to be fetched


@dataclass(eq=False)
class WorkerPool:
    """Runs resyncs of the repos of one shard. `run` ends only with an exception that is a bug.

    Attributes:
        stage: Its progress. While all workers are occupied, the pool has work, and moves when a resync receives a part
            of its export, or ends.
        ended: The number of resyncs that have ended, with whatever result.
    """

    db: Database
    identities: IdentityCache
    attempts: ResyncAttempts
    deletion_grace: float
    shard: Shard
    metrics: Metrics
    conditions: Conditions
    settings: WorkerPoolSettings = field(default_factory=WorkerPoolSettings)
    new_accounts: NewAccounts = field(default_factory=lambda: NewAccounts(0))

    def __post_init__(self) -> None:
        self.shares = Shares(self.settings.workers, self.settings.fair_time, self.settings.large_bytes)
        self._slot_freed = asyncio.Event()
        self._claiming: asyncio.Task[list[Repo]] | None = None
        self.stage = StageProgress("resync pool")
        self.claims = self.stage.add()
        self.ended = 0

    async def run(self) -> None:
        """Claim repos and start their resyncs, as long as workers are free."""
        claim_size = 1
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wait_for_a_worker()
                await self._gather_workers()
                self._slot_freed.clear()
                count = max(claim_size, self.shares.free_workers)
                claimed = await self._claim(count)
                started, busy = await self._start(group, claimed)
                # If most wait for their hosts, claim more next time: many repos of one busy host may be first in the
                # queue. They are postponed, and the repos of other hosts behind them are reached without a wait.
                claim_size = min(2 * (started + busy), MAX_CLAIM) if busy > started else 1
                if not started and len(claimed) < count:
                    await self._wait_for_slot(self.settings.idle_interval / (4 if claimed else 1))

    def wake(self) -> None:
        """Look at the queue now: a repo has become due."""
        self._slot_freed.set()

    async def give_back(self) -> None:
        """End the claims of resyncs that were cancelled or not started, so that no process waits for their leases."""
        claimed = [resync.claimed for resync in self.shares.running]
        self.shares.running.clear()
        with DatabaseAttempt():
            for repo in claimed:
                await self._update_claimed(repo, _released)
                crash_point("claim.returned")
            for repo in await self._claiming if self._claiming else ():
                await self._update_claimed(repo, _released)

    async def close(self) -> None:
        """Cancel a claim that `give_back` has not waited for. Its repos are claimed again when their leases expire."""
        if self._claiming is not None:
            self._claiming.cancel()
            await asyncio.gather(self._claiming, return_exceptions=True)

    async def _wait_for_a_worker(self) -> None:
        """Wait until a worker is free. The stage has stalled if all workers are occupied and no resync moves."""
        received = -1
        while self.shares.free_workers <= 0:
            # Each resync that begins or ends changes the sum.
            sizes = [resync.download.received for resync in self.shares.running if resync.download is not None]
            if received != (received := sum(sizes)):
                self.stage.moved()
            await self._wait_for_slot(self.settings.idle_interval)
            self.shares.make_room(time())
        self.stage.idle()

    async def _gather_workers(self) -> None:
        """Wait until all workers are free, at most for the gathering time."""
        end = monotonic() + self.settings.gathering_time
        while self.shares.free_workers < self.settings.workers and (left := end - monotonic()) > 0:
            await self._wait_for_slot(left)

    async def _wait_for_slot(self, seconds: float | None) -> None:
        """Wait until a slot has become free, at most for `seconds`."""
        if await wait_for_event(self._slot_freed, seconds):
            self._slot_freed.clear()

    async def _claim(self, count: int) -> list[Repo]:
        """Claim repos. A claim completes even if this task is cancelled; `give_back` returns its repos."""
        claim = self.db.resyncs.claim(count, self.shard.buckets, self.settings.lease, time())
        self._claiming = asyncio.create_task(claim, name="claim of repos")
        with DatabaseAttempt(self.claims):
            return await asyncio.shield(self._claiming)
        return []

    async def _start(self, group: asyncio.TaskGroup, claimed: Sequence[Repo]) -> tuple[int, int]:
        """Start the repos that find free slots and postpone the others.

        Return how many were started, and how many wait for their hosts. The rest found no free worker.
        """
        with DatabaseAttempt() as preload:  # without the identities, each attempt looks up its own
            await self.identities.preload([repo.did for repo in claimed])
        now, postponed = time(), []
        for repo in claimed:
            try:
                resync = self._admit(repo, now)
            except PostponedError as error:
                self.metrics.resyncs[error.result].inc()
                postponed.append((repo, error.with_traceback(None)))  # a traceback would keep this list in memory
            else:
                resync.preloaded = preload.error is None
                group.create_task(self._resync(resync), name=f"resync of {repo.did}")
        with DatabaseAttempt():  # if this fails, their leases expire
            await self._postpone(postponed)
        return len(claimed) - len(postponed), sum(error.until is not None for _, error in postponed)

    def _admit(self, repo: Repo, now: float) -> Resync:
        """Occupy slots for a claimed repo. The host of a did:web counts until that of the PDS is known."""
        identity = self.identities.peek(repo.did)
        host = identity.host if identity else None
        if host and self.new_accounts.is_limited(host, now):
            self._count_as_new(repo, host, now)
        return self.shares.admit(repo, host or web_host(repo.did) or UNKNOWN_HOST, now)

    def _count_as_new(self, repo: Repo, host: str, now: float) -> None:
        """Count a new account. Raise PostponedError if its first fetch waits, because its host has too many."""
        until = self.new_accounts.add(host, now) if repo.counts_as_new else None
        if until is not None:
            domain = registered_domain(host)
            message = f"{domain} added too many accounts; the repo is fetched later"
            self.conditions.report(NEW_ACCOUNTS_LIMITED, domain, message=f"{repo.did}: {message}")
            raise PostponedError(until, UnavailableError(FetchFailure.NEW_ACCOUNTS, message))

    async def _postpone(self, repos: Sequence[tuple[Repo, PostponedError]]) -> None:
        writes = [RepoWrite(repo, _released(repo, postponed)) for repo, postponed in repos]
        changed = (await self.db.write(Batch(tuple(writes)))).skipped
        for repo in [repo for repo, _ in repos if repo.did in changed]:
            await self._update_claimed(repo, _released)

    async def _resync(self, resync: Resync) -> None:
        started = monotonic()
        try:
            result = await self._attempt_and_record(resync)
        except (ClaimLostError, DatabaseError) as error:
            result = "lost"  # the lease expires, and the repo is claimed again
            log.debug("resync.claim-lost", did=resync.claimed.did, error=str(error))
        self.shares.release(resync, time())
        self.ended += 1
        if self.shares.free_workers <= 0:  # it was large
            self.stage.moved()
        self._slot_freed.set()
        self.metrics.resyncs[result].inc()
        self.metrics.resync_seconds.observe(monotonic() - started)
        log.debug("resync.done", did=resync.claimed.did, result=result)

    async def _attempt_and_record(self, resync: Resync) -> str:
        """Run one attempt and write a failure or a postponement to the repo's row; return the result for metrics."""
        claimed = resync.claimed
        try:
            return await run_under_lease(self.db, claimed, self.settings.lease, self._attempt(resync))
        except DatabaseError:
            raise
        except PostponedError as error:
            postponed = error
            await self._update_claimed(claimed, lambda repo: _released(repo, postponed))
            return postponed.result
        except UnavailableError as error:
            return await self._record_failure(resync, error)
        except RefusedWriteError as error:
            return await self._record_failure(resync, UnavailableError(FetchFailure.NOT_STORABLE, str(error)))
        except UpstreamError as error:
            failure = UnavailableError(FetchFailure.EXPORT_REJECTED, str(error))
            return await self._record_failure(resync, failure)

    async def _attempt(self, resync: Resync) -> str:
        seconds = self.settings.attempt_timeout
        try:
            async with asyncio.timeout(seconds) as resync.deadline:
                return await self._attempt_in_time(resync)
        except TimeoutError:
            if resync.ended is None:
                raise UnavailableError(FetchFailure.TIMEOUT, f"no result after {seconds:.0f} s") from None
            log.debug("resync.slow", did=resync.claimed.did, host=resync.host, bytes_per_second=f"{resync.rate:.0f}")
            message = f"{resync.claimed.did}: {resync.rate:.0f} bytes per second; the resync starts again later"
            self.conditions.report(RESYNCS_SLOW, resync.host, message=message)
            raise resync.ended from None
        finally:
            resync.deadline = None

    async def _attempt_in_time(self, resync: Resync) -> str:
        claimed = resync.claimed
        identity = await self.identities.lookup(claimed.did, refresh=claimed.has_failed, preloaded=resync.preloaded)
        if identity.doubtful and claimed.head is not None:
            raise UnavailableError(FetchFailure.IDENTITY_DOUBTFUL, identity.problem or "")
        if identity.denied:
            raise UnavailableError(FetchFailure.IDENTITY_GONE, identity.problem or "")
        if identity.key is None or identity.host is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, identity.problem or "no key or no PDS")
        now = time()
        if identity.host != resync.host:
            self.shares.count_for(resync, identity.host, now)
        self._count_as_new(claimed, identity.host, now)
        if claimed.withheld_since is not None and identity.pds is not None:
            resync.subscribed = await self.db.subscribed_hosts.find(claimed.did, identity.pds)
        return await self.attempts.attempt(resync, self.shares, identity)

    async def _record_failure(self, resync: Resync, failure: UnavailableError) -> str:
        claimed = resync.claimed
        crash_point("resync.failed")
        if self.settings.streamed and not failure.reason.is_permanent and await self.attempts.keep_stored(resync):
            log.debug("resync.failed", did=claimed.did, error=str(failure), attempts=claimed.attempts)
            return failure.reason

        def failed(repo: Repo) -> Repo:
            after = plan_failure(repo, claimed, failure, time())
            gone = failure.reason is FetchFailure.IDENTITY_GONE
            return plan_existence(after, time(), self.deletion_grace, exists=False) if gone else after

        written = await self._update_claimed(claimed, failed)
        self._report(claimed, failure, written)
        return failure.reason

    def _report(self, claimed: Repo, failure: UnavailableError, written: Repo | None) -> None:
        """Report the failure as one of many with the same reason and host: a broken host has thousands of repos."""
        log.debug("resync.failed", did=claimed.did, error=str(failure), attempts=claimed.attempts + 1)
        if failure.reason in _REPORTED_BY_HOST:
            return
        identity = self.identities.peek(claimed.did)
        subject = f"{failure.reason} at {identity.host}" if identity and identity.host else str(failure.reason)
        self.conditions.report(RESYNCS_FAILING, subject, message=f"{claimed.did}: {failure}; {_what_follows(written)}")

    async def _update_claimed(self, claimed: Repo, change: Callable[[Repo], Repo]) -> Repo | None:
        """Write the changed row and return it; return None if the claim is lost."""

        def if_claimed(repo: Repo) -> Repo:
            holds = repo.lease == claimed.lease and repo.sync_status is SyncStatus.IN_PROGRESS
            return change(repo) if holds else repo

        return await self.db.repos.update(claimed.did, if_claimed)


def _what_follows(written: Repo | None) -> str:
    """Return what happens to the repo after a resync that failed. `written` is its row; None if the claim was lost."""
    if written is None:
        return "another worker has the repo"
    if written.next_attempt_at == PARKED:
        return "it is parked until a message about the account arrives, or for INDEXER_SWEEP_INTERVAL"
    return f"it is tried again in {max(0.0, (written.next_attempt_at or 0.0) - time()):.0f} s"


def _released(repo: Repo, postponed: PostponedError = _NOT_STARTED) -> Repo:
    return end_claim(repo, Trigger.RELEASED, postponed.until, postponed.failure)
