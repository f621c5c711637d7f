"""Resync workers: claim a repo, fetch its export outside every lock, prove it, write the difference.

Nothing is changed before the export is proven whole; then one transaction holds the difference, the events kept
meanwhile, and the repo's new state. Readers see the old state until it commits.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from time import monotonic, time

import structlog

from indexer.errors import UnavailableError, UpstreamError
from indexer.identity import Identities, Known
from indexer.metrics import Metrics
from indexer.pds import PdsClient, Spool
from indexer.reasons import FetchFailure, Rejection
from indexer.store import DatabaseError, ResyncTransaction, Store
from indexer.sync.diff import Diff, Difference
from indexer.sync.plan import Batch, RecordChange, RepoWrite
from indexer.sync.planning import Ground, Policy, Signer, record_change
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.resync import plan_completion, plan_failure, plan_release
from indexer.sync.shard import Shard
from indexer.sync.verify import Snapshot, VerifiedChange, verify_snapshot

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between looks at an empty queue, seconds of a lease, records of a statement."""

    idle: float = 1.0
    lease: float = 120.0
    chunk: int = 2_000


class ClaimLostError(Exception):
    """Somebody else holds the repo now, or it needs no resync any more: leave it alone."""


class Resyncs:
    """A pool of resyncs, `workers` at once. `run` ends only with an error that is ours.

    `sources` are asked for an export in order: the base URL of a relay, or None for the repo's own PDS.
    """

    def __init__(
        self,
        store: Store,
        identities: Identities,
        pds: PdsClient,
        policy: Policy,
        shard: Shard,
        metrics: Metrics,
        *,
        workers: int,
        sources: Sequence[str | None],
        pace: Pace | None = None,
    ) -> None:
        self._store = store
        self._identities = identities
        self._pds = pds
        self._policy = policy
        self._shard = shard
        self._metrics = metrics
        self._workers = workers
        self._sources = sources
        self._pace = pace or Pace()
        self.claimed: dict[str, Repo] = {}
        self.running: dict[str, float] = {}
        self.trouble: str | None = None
        self.progress = monotonic()

    async def run(self) -> None:
        slots = asyncio.Semaphore(self._workers)
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                claimed = await self._claim()
                self.progress = monotonic()
                if claimed is None:
                    slots.release()
                    await asyncio.sleep(self._pace.idle)
                    continue
                task = group.create_task(self._resync(claimed), name=f"resync of {claimed.did}")
                task.add_done_callback(lambda _: slots.release())

    async def _claim(self) -> Repo | None:
        try:
            await self._store.expire_leases(time())
            claimed = await self._store.claim(1, self._shard.buckets, self._pace.lease, time())
        except DatabaseError as error:
            self.trouble = str(error)
            log.warning("database.unavailable", error=self.trouble)
            return None
        self.trouble = None
        return claimed[0] if claimed else None

    async def _resync(self, claimed: Repo) -> None:
        started = monotonic()
        self.running[claimed.did] = time()
        self.claimed[claimed.did] = claimed
        try:
            result = await self._held(claimed)
        except (ClaimLostError, DatabaseError) as error:
            result = "lost"  # the lease runs out, and the repo is claimed again
            log.warning("resync.lost", did=claimed.did, error=str(error))
        finally:
            del self.running[claimed.did]
        del self.claimed[claimed.did]
        self._metrics.resync(result, monotonic() - started)
        log.debug("resync.done", did=claimed.did, result=result)

    async def _held(self, claimed: Repo) -> str:
        """One attempt under a lease that is renewed as long as it lasts."""
        renewal = asyncio.create_task(self._renew(claimed))
        try:
            return await self._attempt(claimed)
        except UpstreamError as error:
            failure = UnavailableError(FetchFailure.EXPORT_REJECTED, str(error))
        except DatabaseError:
            raise
        except UnavailableError as error:
            failure = error
        finally:
            renewal.cancel()
            with suppress(asyncio.CancelledError):
                await renewal
        await self._fail(claimed, failure)
        log.info("resync.failed", did=claimed.did, error=str(failure), attempts=claimed.attempts + 1)
        return failure.reason

    async def _renew(self, claimed: Repo) -> None:
        while True:
            await asyncio.sleep(self._pace.lease / 3)
            try:
                if not await self._store.renew(claimed.did, claimed.lease, self._pace.lease):
                    return
            except DatabaseError as error:
                log.warning("database.unavailable", error=str(error))

    async def _attempt(self, claimed: Repo) -> str:
        known = await self._identities.lookup(claimed.did, refresh=claimed.attempts > 0)
        if known.key is None or known.pds is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, known.problem or "no key or no PDS")
        if await self._unchanged(claimed, known):
            return await self._complete(claimed, None, known)
        failure: UpstreamError | UnavailableError | None = None
        for source in self._sources:
            try:
                async with self._pds.fetch_repo(claimed.did, source or known.pds) as spool:
                    snapshot, known = await self._verify(claimed, spool, known)
                    return await self._complete(claimed, snapshot, known)
            except DatabaseError:
                raise
            except (UpstreamError, UnavailableError) as error:
                failure = error
                log.debug("resync.source", did=claimed.did, source=source or known.pds, error=str(error))
        raise failure or UnavailableError(FetchFailure.UNREACHABLE, "no source to ask")

    async def _unchanged(self, claimed: Repo, known: Known) -> bool:
        """Whether the PDS says that our head is its latest commit: nothing to fetch then."""
        if claimed.head is None or known.pds is None:
            return False
        try:
            latest = await self._pds.latest_commit(claimed.did, known.pds)
        except UnavailableError as error:
            if error.reason.parks or error.reason is FetchFailure.THROTTLED:
                raise
            return False
        return latest == (claimed.head.commit, claimed.head.rev)

    async def _verify(self, claimed: Repo, spool: Spool, known: Known) -> tuple[Snapshot, Known]:
        try:
            snapshot = await self._prove(claimed, spool, known)
        except UpstreamError as error:
            if error.reason is not Rejection.SIGNATURE_INVALID:
                raise
            known = await self._identities.lookup(claimed.did, refresh=True)
            snapshot = await self._prove(claimed, spool, known)
        if claimed.head is not None and snapshot.head.rev < claimed.head.rev:
            raise UnavailableError(FetchFailure.EXPORT_STALE, f"{snapshot.head.rev} < {claimed.head.rev}")
        return snapshot, known

    async def _prove(self, claimed: Repo, spool: Spool, known: Known) -> Snapshot:
        if known.key is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, known.problem or "no key")
        with self._metrics.stage("verify-export"):
            return await asyncio.to_thread(
                verify_snapshot, claimed.did, spool.root, spool.block, known.key, self._policy.limits
            )

    async def _complete(self, claimed: Repo, snapshot: Snapshot | None, known: Known) -> str:
        """Writes the difference to `snapshot` (None: our head stands), drains the kept events, ends the resync."""
        async with self._store.resync(claimed) as transaction:
            counts = await self._write(transaction, snapshot) if snapshot else {}
            locked = await transaction.lock()
            if locked is None:
                raise ClaimLostError
            head = snapshot.head if snapshot else claimed.head
            if head is None:
                raise ClaimLostError
            ground = Ground(self._policy, "", time())
            write = plan_completion(locked, head, await transaction.kept(), Signer(known.key), ground)
            await transaction.finish(write)
        for action, count in counts.items():
            self._metrics.record_changes(action, live=False, count=count)
        for change in write.changes:
            self._metrics.record_changes(change.action, live=True)
        if write.repo.status is not SyncStatus.SYNCHRONIZED and write.repo.reason is not None:
            self._metrics.desynchronized(write.repo.reason)
            return write.repo.reason
        return "synchronized" if snapshot else "unchanged"

    async def _write(self, transaction: ResyncTransaction, snapshot: Snapshot) -> dict[str, int]:
        diff = Diff(snapshot.records())
        counts = {"create": 0, "update": 0, "delete": 0}
        async for chunk in transaction.stored():
            await self._write_all(transaction, diff.against(chunk), snapshot, counts)
        await self._write_all(transaction, diff.rest(), snapshot, counts)
        return counts

    async def _write_all(
        self,
        transaction: ResyncTransaction,
        differences: Iterator[Difference],
        snapshot: Snapshot,
        counts: dict[str, int],
    ) -> None:
        while True:
            with self._metrics.stage("diff"):
                exhausted, changes = await asyncio.to_thread(self._changes, differences, snapshot)
            if changes:
                with self._metrics.stage("apply-export"):
                    await transaction.write(changes)
            for change in changes:
                counts[change.action] += 1
            if exhausted:
                return

    def _changes(self, differences: Iterator[Difference], snapshot: Snapshot) -> tuple[bool, list[RecordChange]]:
        """The next chunk of differences as changes, and whether it is the last."""
        chunk = list(islice(differences, self._pace.chunk))
        changes = [
            record_change(
                VerifiedChange(path, old, new, snapshot.block_of(new) if new else None),
                snapshot.head.rev,
                self._policy,
            )
            for path, old, new in chunk
        ]
        return len(chunk) < self._pace.chunk, [change for change in changes if change]

    async def give_back(self) -> None:
        """Ends the claims of resyncs that were cancelled, so that nobody has to wait for their leases."""
        for claimed in list(self.claimed.values()):
            try:
                await self._end(claimed, plan_release)
            except DatabaseError as error:
                log.warning("database.unavailable", error=str(error))
                return
            del self.claimed[claimed.did]

    async def _fail(self, claimed: Repo, failure: UnavailableError) -> None:
        await self._end(claimed, lambda repo: plan_failure(repo, failure, time()))

    async def _end(self, claimed: Repo, plan: Callable[[Repo], Repo]) -> None:
        """Writes the row that `plan` makes of the present one, as long as the claim stands."""
        while True:
            repo = (await self._store.repos([claimed.did])).get(claimed.did)
            if repo is None or repo.lease != claimed.lease or repo.status is not SyncStatus.IN_PROGRESS:
                return
            write = RepoWrite(repo.version, plan(repo))
            if not await self._store.apply(Batch((write,))):
                return
