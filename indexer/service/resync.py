"""One resync: fetch a repo's export outside every lock, prove it, write the difference.

Nothing is changed before the export is proven whole; then one transaction holds the difference, the events kept
meanwhile, and the repo's new state. Readers see the old state until it commits.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice
from time import time

import structlog

from indexer.atproto.record import Problem
from indexer.errors import UnavailableError, UpstreamError
from indexer.identity import Identities, Known
from indexer.metrics import Metrics
from indexer.pds import LARGE_BYTES, PdsClient, Spool
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.store import DatabaseError, ResyncTransaction, Store
from indexer.sync.diff import Diff, Difference, without_value
from indexer.sync.plan import RecordChange
from indexer.sync.planning import DOUBTS, Ground, Policy, Signer, is_future, record_change
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.resync import plan_completion
from indexer.sync.verify import Snapshot, VerifiedChange, verify_snapshot

CHUNK = 2_000  # records of a statement

log = structlog.get_logger(__name__)


class ClaimLostError(Exception):
    """Somebody else holds the repo now, or it needs no resync any more: leave it alone."""


class Resync:
    """How one claimed repo is brought to the network's state.

    `sources` are asked for an export in order: the base URL of a relay, or None for the repo's own PDS.
    """

    def __init__(
        self,
        store: Store,
        identities: Identities,
        pds: PdsClient,
        policy: Policy,
        metrics: Metrics,
        sources: Sequence[str | None],
    ) -> None:
        self._store = store
        self._identities = identities
        self._pds = pds
        self._policy = policy
        self._metrics = metrics
        self._sources = sources
        # Threads keep the event loop free; more of them would only fight for the interpreter's lock. What takes long
        # has one of its own.
        self._thread = ThreadPoolExecutor(1, "resync")
        self._thread_of_large = ThreadPoolExecutor(1, "resync of a large repo")

    async def attempt(self, claimed: Repo, known: Known, large: Callable[[], None]) -> str:
        """Gives what came of it, for the metrics: "synchronized", "unchanged", or why the repo still isn't.

        `large` is called when the export turns out to be large, and may raise. Raises `UnavailableError` or
        `UpstreamError` for an export that can't be had or is refused, `DatabaseError`, and `ClaimLostError`; then
        nothing has changed.
        """
        if await self._unchanged(claimed, known):
            return await self._complete(claimed, None, known)
        failure: UpstreamError | UnavailableError = UnavailableError(FetchFailure.UNREACHABLE, "no source to ask")
        for source in self._sources:
            host = source or known.pds or ""
            try:
                async with AsyncExitStack() as stack:
                    with self._metrics.stage("fetch"):
                        spool = await stack.enter_async_context(self._pds.fetch_repo(claimed.did, host, large))
                    snapshot, known = await self._verify(claimed, spool, known)
                    self._judge(claimed, snapshot, last=source is self._sources[-1])
                    return await self._complete(claimed, snapshot, known)
            except DatabaseError:
                raise
            except (UpstreamError, UnavailableError) as error:
                failure = error
                log.debug("resync.source", did=claimed.did, source=host, error=str(error))
        raise failure

    async def _unchanged(self, claimed: Repo, known: Known) -> bool:
        """Whether the PDS says that our head is its latest commit: nothing to fetch then."""
        if claimed.head is None or known.pds is None or claimed.reason in DOUBTS:
            return False
        try:
            latest = await self._pds.latest_commit(claimed.did, known.pds)
        except UnavailableError as error:
            if error.reason.parks or error.reason.spares:
                raise
            return False
        return latest == (claimed.head.commit, claimed.head.rev)

    async def _verify(self, claimed: Repo, spool: Spool, known: Known) -> tuple[Snapshot, Known]:
        try:
            return await self._prove(claimed, spool, known), known
        except UpstreamError as error:
            if error.reason is not Rejection.SIGNATURE_INVALID:
                raise
        known = await self._identities.lookup(claimed.did, refresh=True)
        return await self._prove(claimed, spool, known), known

    def _judge(self, claimed: Repo, snapshot: Snapshot, *, last: bool) -> None:
        """Refuses a proven export for its revision. Of two states with one revision, the last source has the say."""
        rev = snapshot.head.rev
        if is_future(rev, time(), self._policy.limits):
            raise UpstreamError(Rejection.FUTURE_REV, rev)
        if not last:
            _refuse_stale(snapshot, claimed.seen_rev)
            _refuse_stale(snapshot, claimed.heard_rev)
        if claimed.head is None:
            return
        _refuse_stale(snapshot, claimed.head.rev)
        if rev == claimed.head.rev and snapshot.head.data != claimed.head.data:
            if not last:
                raise UnavailableError(FetchFailure.EXPORT_STALE, f"another state than ours at {rev}")
            log.warning("resync.equivocation", did=claimed.did, rev=rev)
            self._metrics.desynchronized(Desync.EQUIVOCATION)

    async def _prove(self, claimed: Repo, spool: Spool, known: Known) -> Snapshot:
        if known.key is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, known.problem or "no key")
        thread = self._thread_of_large if spool.size > LARGE_BYTES else self._thread
        proof = partial(verify_snapshot, claimed.did, spool.root, spool.block, known.key, self._policy.limits)
        with self._metrics.stage("verify-export"):
            return await asyncio.get_running_loop().run_in_executor(thread, proof)

    async def _complete(self, claimed: Repo, snapshot: Snapshot | None, known: Known) -> str:
        """Writes the difference to `snapshot` (None: our head stands), drains the kept events, ends the resync."""
        async with self._store.resync(claimed) as transaction:
            counts = await self._write(claimed, transaction, snapshot) if snapshot else Counter[str]()
            locked = await transaction.lock()
            head = snapshot.head if snapshot else claimed.head
            if locked is None or head is None:
                raise ClaimLostError("claimed by another worker, or desynchronized again")
            ground = Ground(self._policy, "", time())
            batch = plan_completion(locked, head, await transaction.kept(), Signer(known.key), ground)
            await transaction.finish(batch)
        [write] = batch.writes
        for action, count in counts.items():
            self._metrics.record_changes(action, live=False, count=count)
        for change in write.changes:
            self._metrics.record_changes(change.action, live=True)
        for letter in batch.dead_letters:
            self._metrics.rejected(letter.reason)
        if write.repo.status is not SyncStatus.SYNCHRONIZED and write.repo.reason is not None:
            self._metrics.desynchronized(write.repo.reason)
            return write.repo.reason
        return "synchronized" if snapshot else "unchanged"

    async def _write(self, claimed: Repo, transaction: ResyncTransaction, snapshot: Snapshot) -> Counter[str]:
        """Writes what differs.

        Records whose blocks the export lacks are taken without values at the second time in a row only: at the first,
        it may be an export that was cut behind its last tree node (spec RP-8).
        """
        diff, counts, missing = Diff(self._chosen(snapshot)), Counter[str](), 0
        async for chunk in transaction.stored():
            missing += await self._write_all(transaction, diff.against(chunk), snapshot, counts)
        missing += await self._write_all(transaction, diff.rest(), snapshot, counts)
        if missing and not _lacked_records(claimed):
            raise UnavailableError(FetchFailure.EXPORT_LACKS_RECORDS, f"{missing} records")
        if missing:
            log.warning("resync.values-missing", did=claimed.did, records=missing)
        return counts

    def _chosen(self, snapshot: Snapshot) -> Iterator[tuple[bytes, bytes]]:
        """Of the collections that are to be kept. What we still have of others is deleted, as if it weren't there."""
        matches = self._policy.collections.matches
        return (entry for entry in snapshot.records() if matches(entry[0].partition(b"/")[0].decode(errors="replace")))

    async def _write_all(
        self,
        transaction: ResyncTransaction,
        differences: Iterator[Difference],
        snapshot: Snapshot,
        counts: Counter[str],
    ) -> int:
        """Gives how many records came without their blocks."""
        loop, missing = asyncio.get_running_loop(), 0
        while True:
            with self._metrics.stage("diff"):
                exhausted, changes = await loop.run_in_executor(self._thread, self._changes, differences, snapshot)
            if changes:
                with self._metrics.stage("apply-export"):
                    await self._write_chunk(transaction, changes)
            counts.update(change.action for change in changes)
            missing += sum(change.problem == Problem.MISSING for change in changes)
            if exhausted:
                return missing

    async def _write_chunk(self, transaction: ResyncTransaction, changes: Sequence[RecordChange]) -> None:
        """Nothing more is written once the claim is lost: whoever has the repo now would wait for our end."""
        if not await transaction.holds():
            raise ClaimLostError("claimed by another worker, or desynchronized again")
        await transaction.write(changes)

    def _changes(self, differences: Iterator[Difference], snapshot: Snapshot) -> tuple[bool, list[RecordChange]]:
        """The next chunk of differences as changes, and whether it is the last."""
        chunk = list(islice(differences, CHUNK))
        changes = [self._change(difference, snapshot) for difference in chunk]
        return len(chunk) < CHUNK, [change for change in changes if change]

    def _change(self, difference: Difference, snapshot: Snapshot) -> RecordChange | None:
        path, old, new = difference
        if new is None:
            collection, _, rkey = path.decode().partition("/")
            return RecordChange("delete", collection, rkey, snapshot.head.rev)
        block = snapshot.block_of(new)
        if block is None and old == without_value(new):
            return None  # its value is missing here, and there as well
        return record_change(VerifiedChange(path, old, new, block), snapshot.head.rev, self._policy)


def _refuse_stale(snapshot: Snapshot, rev: str | None) -> None:
    """A mirror may be behind: another source may not be."""
    if rev is not None and snapshot.head.rev < rev:
        raise UnavailableError(FetchFailure.EXPORT_STALE, f"{snapshot.head.rev} < {rev}")


def _lacked_records(claimed: Repo) -> bool:
    """Whether the last export did, whole as its tree was; one that was cut says nothing of what the host has."""
    return (claimed.last_error or "").partition(":")[0] == FetchFailure.EXPORT_LACKS_RECORDS
