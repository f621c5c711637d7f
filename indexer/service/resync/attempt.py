"""One attempt to resync a repo: fetch its export outside every lock, verify it, and write the differences.

Nothing changes before the whole export is verified. Then one transaction writes the differences, the effects of the
events that were buffered meanwhile, and the new row of the repo. Consumers see the old state until it commits.
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
from indexer.identity import CachedIdentity, IdentityCache
from indexer.monitoring.metrics import Metrics
from indexer.pds import LARGE_BYTES, ExportDownload, PdsClient, Spool
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.service.resync.admission import Postponed
from indexer.service.resync.lease import ClaimLostError
from indexer.store import DatabaseError, ResyncTransaction, Store
from indexer.sync.plan_resync import plan_completion
from indexer.sync.plans import Batch, RecordChange
from indexer.sync.policy import KeyState, PlanContext, Policy, is_future
from indexer.sync.record_change import record_change
from indexer.sync.repo_state import Repo, SyncStatus
from indexer.sync.repo_transitions import UNPROVEN_REASONS
from indexer.sync.snapshot_diff import Difference, SnapshotDiff, without_value
from indexer.sync.verify import Snapshot, VerifiedChange, verify_snapshot

CHUNK = 2_000
"""Records that one statement writes."""

log = structlog.get_logger(__name__)


class ResyncAttempts:
    """Brings claimed repos to the state of the network, one attempt per call of `attempt`.

    `sources` are asked for an export in this order: the base URL of a relay, or None for the repo's own PDS.
    """

    def __init__(
        self,
        store: Store,
        identities: IdentityCache,
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
        # Threads keep the event loop responsive; more of them would only contend for the GIL
        # (docs/decisions/0008-threads-and-processes.md). The second one verifies large exports, so that small ones do
        # not wait for them.
        self._thread = ThreadPoolExecutor(1, "resync")
        self._large_thread = ThreadPoolExecutor(1, "resync of a large repo")

    async def attempt(
        self, claimed: Repo, identity: CachedIdentity, enlarge: Callable[[], Postponed | None]
    ) -> str | Postponed:
        """Resync one repo; return "synchronized", "unchanged", or the reason why the repo is still desynchronized.

        Args:
            claimed: The row as the worker claimed it.
            identity: Its identity, with a key and a PDS.
            enlarge: Called when the export turns out to be large. If it returns `Postponed`, so does the attempt.

        Raises:
            UnavailableError: No source has a usable export.
            UpstreamError: The last export was rejected.
            DatabaseError: The database is unavailable.
            ClaimLostError: The claim is lost. As with the other errors, nothing has changed, except that a
                DatabaseError at COMMIT may hide a success.
        """
        if await self._is_unchanged(claimed, identity):
            return await self._complete(claimed, None, identity)
        failure: UpstreamError | UnavailableError = UnavailableError(FetchFailure.UNREACHABLE, "no source configured")
        for source in self._sources:
            try:
                return await self._attempt_from(source, claimed, identity, enlarge)
            except DatabaseError:
                raise
            except (UpstreamError, UnavailableError) as error:
                failure = error
                log.debug("resync.source-failed", did=claimed.did, source=source or identity.pds, error=str(error))
        raise failure

    async def _attempt_from(
        self,
        source: str | None,
        claimed: Repo,
        identity: CachedIdentity,
        enlarge: Callable[[], Postponed | None],
    ) -> str | Postponed:
        async with AsyncExitStack() as stack:
            with self._metrics.stage("fetch"):
                download = self._pds.open_export(claimed.did, source or identity.pds or "")
                fetched = await _fetch(await stack.enter_async_context(download), enlarge)
            if isinstance(fetched, Postponed):
                return fetched
            snapshot, identity = await self._verify(claimed, fetched, identity)
            self._check_rev(claimed, snapshot, last=source is self._sources[-1])
            return await self._complete(claimed, snapshot, identity)

    async def _is_unchanged(self, claimed: Repo, identity: CachedIdentity) -> bool:
        """Return True if the PDS reports the stored head as its latest commit, so that no export is needed."""
        if claimed.head is None or identity.pds is None or claimed.sync_reason in UNPROVEN_REASONS:
            return False
        try:
            latest = await self._pds.fetch_latest_commit(claimed.did, identity.pds)
        except UnavailableError as error:
            if error.reason.is_permanent or not error.reason.counts_as_attempt:
                raise
            return False
        return latest == (claimed.head.commit, claimed.head.rev)

    async def _verify(self, claimed: Repo, spool: Spool, identity: CachedIdentity) -> tuple[Snapshot, CachedIdentity]:
        """Verify the export, with a newer key if the cached one does not verify its signature."""
        try:
            return await self._verify_with(claimed, spool, identity), identity
        except UpstreamError as error:
            if error.reason is not Rejection.SIGNATURE_INVALID:
                raise
        identity = await self._identities.lookup(claimed.did, refresh=True)
        return await self._verify_with(claimed, spool, identity), identity

    async def _verify_with(self, claimed: Repo, spool: Spool, identity: CachedIdentity) -> Snapshot:
        if identity.key is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, identity.problem or "no key")
        thread = self._large_thread if spool.size > LARGE_BYTES else self._thread
        verify = partial(verify_snapshot, claimed.did, spool.root, spool.block, identity.key, self._policy.limits)
        with self._metrics.stage("verify-export"):
            return await asyncio.get_running_loop().run_in_executor(thread, verify)

    def _check_rev(self, claimed: Repo, snapshot: Snapshot, *, last: bool) -> None:
        """Reject a verified export because of its rev. Of two states with one rev, the last source's is accepted."""
        rev = snapshot.head.rev
        if is_future(rev, time(), self._policy.limits):
            raise UpstreamError(Rejection.FUTURE_REV, rev)
        if not last:
            _reject_stale(snapshot, claimed.latest_verified_rev)
            _reject_stale(snapshot, claimed.latest_unverified_rev)
        if claimed.head is None:
            return
        _reject_stale(snapshot, claimed.head.rev)
        if rev == claimed.head.rev and snapshot.head.data != claimed.head.data:
            if not last:
                raise UnavailableError(FetchFailure.EXPORT_STALE, f"differs from the stored state at {rev}")
            log.warning("resync.equivocation", did=claimed.did, rev=rev)
            self._metrics.desynchronized(Desync.EQUIVOCATION)

    async def _complete(self, claimed: Repo, snapshot: Snapshot | None, identity: CachedIdentity) -> str:
        """Write the differences to `snapshot` (None: the stored head is current), drain the buffer, end the resync."""
        async with self._store.resync(claimed) as transaction:
            written = await self._write(claimed, transaction, snapshot) if snapshot else Counter[str]()
            locked = await transaction.lock()
            head = snapshot.head if snapshot else claimed.head
            if locked is None or head is None:
                raise ClaimLostError("claimed by another worker, or desynchronized again")
            context = PlanContext(self._policy, "", time())
            batch = plan_completion(locked, head, await transaction.buffered(), KeyState(identity.key), context)
            await transaction.finish(batch)
        self._count(written, batch)
        [write] = batch.writes
        if write.repo.sync_status is not SyncStatus.SYNCHRONIZED and write.repo.sync_reason is not None:
            return write.repo.sync_reason
        return "synchronized" if snapshot else "unchanged"

    def _count(self, written: Counter[str], batch: Batch) -> None:
        [write] = batch.writes
        for action, count in written.items():
            self._metrics.record_changes(action, live=False, count=count)
        for change in write.changes:
            self._metrics.record_changes(change.action, live=True)
        for dead_letter in batch.dead_letters:
            self._metrics.rejected(dead_letter.reason)
        if write.repo.sync_status is not SyncStatus.SYNCHRONIZED and write.repo.sync_reason is not None:
            self._metrics.desynchronized(write.repo.sync_reason)

    async def _write(self, claimed: Repo, transaction: ResyncTransaction, snapshot: Snapshot) -> Counter[str]:
        """Write all differences; return how many records were created, updated and deleted.

        An export without the blocks of some records fails the first time, since it may have been cut off after its last
        tree node. The second time in a row, the records are stored without their values
        (docs/protocol.md#exports).
        """
        diff, written, missing = SnapshotDiff(self._selected(snapshot)), Counter[str](), 0
        async for chunk in transaction.stored():
            missing += await self._write_all(transaction, diff.compare(chunk), snapshot, written)
        missing += await self._write_all(transaction, diff.remaining(), snapshot, written)
        if missing and not _lacked_records(claimed):
            raise UnavailableError(FetchFailure.EXPORT_LACKS_RECORDS, f"{missing} records")
        if missing:
            log.warning("resync.values-missing", did=claimed.did, records=missing)
        return written

    def _selected(self, snapshot: Snapshot) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries of the selected collections. Stored records of other collections are deleted thereby."""
        matches = self._policy.collections.matches
        return (entry for entry in snapshot.records() if matches(entry[0].partition(b"/")[0].decode(errors="replace")))

    async def _write_all(
        self,
        transaction: ResyncTransaction,
        differences: Iterator[Difference],
        snapshot: Snapshot,
        written: Counter[str],
    ) -> int:
        """Write the differences in chunks; return how many records lack their block."""
        loop, missing = asyncio.get_running_loop(), 0
        while True:
            with self._metrics.stage("diff"):
                exhausted, changes = await loop.run_in_executor(self._thread, self._next_changes, differences, snapshot)
            if changes:
                with self._metrics.stage("apply-export"):
                    await self._write_chunk(transaction, changes)
            written.update(change.action for change in changes)
            missing += sum(change.problem == Problem.MISSING for change in changes)
            if exhausted:
                return missing

    async def _write_chunk(self, transaction: ResyncTransaction, changes: Sequence[RecordChange]) -> None:
        """Write one chunk; raise ClaimLostError if the claim is lost: its new owner would wait for our locks."""
        if not await transaction.holds_claim():
            raise ClaimLostError("claimed by another worker, or desynchronized again")
        await transaction.write(changes)

    def _next_changes(self, differences: Iterator[Difference], snapshot: Snapshot) -> tuple[bool, list[RecordChange]]:
        """Return True if `differences` is exhausted, and the changes for its next chunk."""
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
            return None  # the stored record and the export both lack the value
        return record_change(VerifiedChange(path, old, new, block), snapshot.head.rev, self._policy)


async def _fetch(download: ExportDownload, enlarge: Callable[[], Postponed | None]) -> Spool | Postponed:
    """Fetch the whole export, or only its beginning if it is large and `enlarge` postpones the repo."""
    if not await download.fetch(LARGE_BYTES):
        if postponed := enlarge():
            return postponed
        await download.fetch()
    return download.spool


def _reject_stale(snapshot: Snapshot, rev: str | None) -> None:
    """Raise EXPORT_STALE for an export before `rev`. Another source may be newer than this mirror."""
    if rev is not None and snapshot.head.rev < rev:
        raise UnavailableError(FetchFailure.EXPORT_STALE, f"{snapshot.head.rev} < {rev}")


def _lacked_records(claimed: Repo) -> bool:
    """Return True if the last attempt failed because a complete tree lacked record blocks."""
    return (claimed.last_error or "").partition(":")[0] == FetchFailure.EXPORT_LACKS_RECORDS
