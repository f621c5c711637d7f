"""The pool of resyncs: claims, places, leases, and what becomes of a repo whose resync failed."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, time

import structlog

from indexer.errors import UnavailableError, UpstreamError
from indexer.identity import Identities
from indexer.metrics import Metrics
from indexer.reasons import Desync, FetchFailure
from indexer.service.lane import Lane, places_of_large
from indexer.service.resync import ClaimLostError, Resync
from indexer.service.rota import Rota
from indexer.store import DatabaseError, Store
from indexer.sync.plan import Batch, RepoWrite
from indexer.sync.planning import Policy, plan_existence
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.resync import plan_failure, plan_release
from indexer.sync.shard import Shard

CLAIMED_AT_ONCE = 256
UNKNOWN_HOST = ""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: between looks at an empty queue, of a lease, of an attempt at most, between sweeps for repos to try
    again and between the batches of one, and how long after its resync a repo is fetched again for values that no
    export had.
    """

    idle: float = 1.0
    lease: float = 120.0
    attempt: float = 3_600.0
    sweep: float = 600.0
    breath: float = 0.1
    heal_after: float = 86_400.0


class PutOffError(Exception):
    """It is not this repo's turn yet: to be claimed again, at `at` (Unix seconds) if that is known, at no cost."""

    def __init__(self, at: float | None = None) -> None:
        super().__init__()
        self.at = at


@dataclass(slots=True, eq=False)
class Run:
    """A claimed repo, and the place that it has, at its host since it `came` to be known there."""

    claimed: Repo
    began: float
    host: str = UNKNOWN_HOST
    came: float = 0.0
    large: bool = False


class Pool:
    """`workers` resyncs at once, of which one host has three quarters at most, and some of large repos beside them.
    `run` ends only with an error that is ours.
    """

    def __init__(
        self,
        store: Store,
        identities: Identities,
        resync: Resync,
        policy: Policy,
        shard: Shard,
        metrics: Metrics,
        *,
        workers: int,
        sweep_interval: float = 86_400.0,
        pace: Pace | None = None,
    ) -> None:
        self._store = store
        self._identities = identities
        self._resync = resync
        self._policy = policy
        self._shard = shard
        self._metrics = metrics
        self._workers = workers
        self._sweep_interval = sweep_interval
        self._pace = pace or Pace()
        self._rota = Rota(max(1, workers - max(1, workers // 4)))
        self._lane = Lane(places_of_large(workers))
        self._moved = asyncio.Event()
        self._claiming: asyncio.Task[list[Repo]] | None = None
        self.running: list[Run] = []
        self.trouble: str | None = None
        self.progress = monotonic()

    async def run(self) -> None:
        asked = 1
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep(), name="repos to try again")
            group.create_task(self._expire(), name="leases that ran out")
            while True:
                while self.free <= 0:
                    self._moved.clear()
                    await self._rest(None)
                self._moved.clear()
                claimed = await self._claim(max(asked, self.free))
                begun = await self._begin(group, claimed)
                self.progress = monotonic()
                # Where none of them had its turn, look behind them; there may be many more of the same host.
                asked = 1 if begun else min(2 * len(claimed), CLAIMED_AT_ONCE)
                if not begun:
                    await self._rest(self._pace.idle / 4 if claimed else self._pace.idle)

    @property
    def free(self) -> int:
        """Places that no resync has."""
        return self._workers - sum(not run.large for run in self.running)

    async def _rest(self, seconds: float | None) -> None:
        """So long, or until a place has become free."""
        try:
            async with asyncio.timeout(seconds):
                await self._moved.wait()
        except TimeoutError:
            pass  # it was long enough

    async def _claim(self, count: int) -> list[Repo]:
        """A claim goes on to its end, though we be cancelled: what it brings can be given back."""
        claim = self._store.claim(count, self._shard.buckets, self._pace.lease, time())
        self._claiming = asyncio.create_task(claim, name="claim")
        try:
            claimed = await asyncio.shield(self._claiming)
        except DatabaseError as error:
            self.trouble = str(error)
            log.warning("database.unavailable", error=self.trouble)
            return []
        self.trouble = None
        try:
            await self._identities.warm([repo.did for repo in claimed])
        except UnavailableError as error:  # each one looks its own up, then
            log.warning("database.unavailable", error=str(error))
        return claimed

    async def _begin(self, group: asyncio.TaskGroup, claimed: Sequence[Repo]) -> int:
        """Begins those whose turn it is, and puts the others off; gives how many were begun."""
        now, put_off = time(), []
        for repo in claimed:
            known = self._identities.peek(repo.did)
            run = Run(repo, now, (known and known.host) or UNKNOWN_HOST, now)
            try:
                self._place(run)
            except PutOffError as error:
                put_off.append(RepoWrite(repo.version, plan_release(repo, error.at)))
            else:
                group.create_task(self._whole(run), name=f"resync of {repo.did}")
        self._metrics.put_off(len(put_off))
        try:
            moved = await self._store.apply(Batch(tuple(put_off)))
            for repo in (repo for repo in claimed if repo.did in moved):
                await self._end(repo, plan_release)
        except DatabaseError as error:  # their leases will run out
            log.warning("database.unavailable", error=str(error))
        return len(claimed) - len(put_off)

    def _place(self, run: Run) -> None:
        """Raises `PutOffError` if there is no place for it."""
        if not self._rota.admits(run.host, run.came):
            raise PutOffError(self._rota.later(run.host, run.came))
        if self._lane.knows(run.claimed.did):
            self._grow(run)
        elif self.free <= 0:
            raise PutOffError
        self._rota.begin(run.host, run.came)
        self.running.append(run)

    async def _whole(self, run: Run) -> None:
        started = monotonic()
        try:
            result = await self._held(run)
        except (ClaimLostError, DatabaseError) as error:
            result = "lost"  # the lease runs out, and the repo is claimed again
            log.warning("resync.lost", did=run.claimed.did, error=str(error))
        self._rota.end(run.host, run.came, time())
        if run.large:
            self._lane.leave(run.began, time())
        self.running.remove(run)
        self._moved.set()
        self._metrics.resync(result, monotonic() - started)
        log.debug("resync.done", did=run.claimed.did, result=result)

    async def _held(self, run: Run) -> str:
        """One attempt under a lease that is renewed as long as it lasts, and given up when that is lost."""
        attempt = asyncio.create_task(self._attempt(run))
        renewal = asyncio.create_task(self._renew(run.claimed))
        try:
            await asyncio.wait({attempt, renewal}, return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done():
                renewal.result()
                raise ClaimLostError("the lease ran out")
            return attempt.result()
        except PutOffError as error:
            at = error.at
            await self._end(run.claimed, lambda repo: plan_release(repo, at))
            return "put-off"
        except DatabaseError:
            raise
        except UnavailableError as error:
            return await self._fail(run, error)
        except UpstreamError as error:
            return await self._fail(run, UnavailableError(FetchFailure.EXPORT_REJECTED, str(error)))
        finally:
            attempt.cancel()
            renewal.cancel()
            await asyncio.gather(attempt, renewal, return_exceptions=True)

    async def _renew(self, claimed: Repo) -> None:
        """Returns when the claim is lost."""
        while True:
            await asyncio.sleep(self._pace.lease / 3)
            try:
                if not await self._store.renew(claimed.did, claimed.lease, self._pace.lease):
                    return
            except DatabaseError as error:
                log.warning("database.unavailable", error=str(error))

    async def _attempt(self, run: Run) -> str:
        try:
            async with asyncio.timeout(self._pace.attempt):
                known = await self._identities.lookup(run.claimed.did, refresh=run.claimed.attempts > 0)
                if known.gone:
                    raise UnavailableError(FetchFailure.IDENTITY_GONE, known.problem or "")
                if known.key is None or known.host is None:
                    raise UnavailableError(FetchFailure.IDENTITY_MISSING, known.problem or "no key or no PDS")
                self._move(run, known.host)
                return await self._resync.attempt(run.claimed, known, lambda: self._grow(run))
        except TimeoutError:
            raise UnavailableError(FetchFailure.TIMEOUT, f"no end after {self._pace.attempt:.0f} s") from None

    def _move(self, run: Run, host: str) -> None:
        """The host is known now, or has changed; raises `PutOffError` if it has its share."""
        if host == run.host:
            return
        now = time()
        if not self._rota.admits(host, now):
            raise PutOffError(self._rota.later(host, now))
        self._rota.end(run.host, run.came, now)
        self._rota.begin(host, now)
        run.host, run.came = host, now

    def _grow(self, run: Run) -> None:
        """The repo is large: it goes on among the large ones, or later, if their places are taken."""
        if run.large:
            return
        now = time()
        if not self._lane.enter(run.claimed.did, run.began, now):
            raise PutOffError(self._lane.later(now))
        run.large = True
        self._moved.set()

    async def _fail(self, run: Run, failure: UnavailableError) -> str:
        claimed = run.claimed
        if failure.host is not None and failure.retry_after is not None:
            self._rota.pause(failure.host, time() + failure.retry_after)
        await self._end(claimed, lambda repo: self._failed(repo, claimed, failure))
        log.info("resync.failed", did=claimed.did, error=str(failure), attempts=claimed.attempts + 1)
        return failure.reason

    def _failed(self, repo: Repo, claimed: Repo, failure: UnavailableError) -> Repo:
        after = plan_failure(repo, claimed, failure, time())
        gone = failure.reason is FetchFailure.IDENTITY_GONE
        return plan_existence(after, time(), self._policy, exists=False) if gone else after

    async def _end(self, claimed: Repo, plan: Callable[[Repo], Repo]) -> None:
        """Writes the row that `plan` makes of the present one, as long as the claim stands."""
        await self._store.amend(
            claimed.did,
            lambda repo: plan(repo) if repo.lease == claimed.lease and repo.status is SyncStatus.IN_PROGRESS else repo,
        )

    async def give_back(self) -> None:
        """Ends the claims of resyncs that were cancelled or not begun, so that nobody has to wait for their leases."""
        claimed = [run.claimed for run in self.running]
        self.running.clear()
        try:
            for repo in claimed:
                await self._end(repo, plan_release)
            for repo in await self._claiming if self._claiming else ():
                await self._end(repo, plan_release)
        except DatabaseError as error:
            log.warning("database.unavailable", error=str(error))

    async def _expire(self) -> None:
        """Not before each claim, which may not wait for a row that somebody has."""
        while True:
            try:
                expired = await self._store.expire_leases(self._shard.buckets, time())
                self._metrics.desynchronized(Desync.LEASE_EXPIRED, expired)
            except DatabaseError as error:
                log.warning("database.unavailable", error=str(error))
            await asyncio.sleep(self._pace.idle)

    async def _sweep(self) -> None:
        """Has those repos fetched again, at long intervals, that were given up on, or whose exports lacked records."""
        while True:
            await asyncio.sleep(self._pace.sweep)
            try:
                await self._sweep_once(time())
            except DatabaseError as error:
                log.warning("database.unavailable", error=str(error))

    async def _sweep_once(self, now: float) -> None:
        """In batches, each a short transaction, until none is left that was due at `now`: so that all have their turn,
        and not those in front again and again.
        """
        store, buckets, seconds = self._store, self._shard.buckets, self._sweep_interval
        while marked := await store.mark_missing(buckets, self._pace.heal_after, now):
            self._metrics.desynchronized(Desync.RECORD_MISSING, marked)
            await asyncio.sleep(self._pace.breath)
        while seconds and (woken := await store.wake_parked(buckets, seconds, now)):
            log.debug("sweep.woken", repos=woken)
            await asyncio.sleep(self._pace.breath)
