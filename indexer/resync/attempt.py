"""One attempt to resync a repo: fetch its export outside every lock, verify it, and write the differences.

Nothing changes before the whole export is verified. Then one transaction writes the differences, the effects of the
events that were buffered meanwhile, and the new row of the repo. Consumers see the old state until it commits.

The records of a repo of which nothing is stored are not compared. If it is small as well, it shares the transaction
with others (`new_repo_writer.NewRepoWriter`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from time import time
from typing import Protocol

import structlog

from indexer.atproto.record import Problem
from indexer.crash_points import crash_point
from indexer.db import DatabaseError, RecordsExistError, ResyncTransaction, Store
from indexer.errors import BrokenInvariantError, UnavailableError, UpstreamError
from indexer.net.identity import CachedIdentity, IdentityCache
from indexer.net.pds import LARGE_BYTES, ExportDownload, PdsClient
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.resync.admission import Postponed
from indexer.resync.lease import ClaimLostError
from indexer.resync.new_repo_writer import NewRepo, NewRepoWriter
from indexer.resync.phase import Phase
from indexer.sync.changes import Action, Batch, RecordChange, RecordConverter
from indexer.sync.export import CHUNK_BYTES, CHUNK_RECORDS, ExportReader, NewRecords, RecordChunk, VerifiedExport
from indexer.sync.policy import KeyState, PlanContext, Policy, is_future
from indexer.sync.repo import Head, Repo, SyncStatus, needs_export
from indexer.sync.resync import Completion, Difference, SnapshotDiff, without_value
from indexer.sync.verify import VerifiedChange
from indexer.telemetry.conditions import EQUIVOCATIONS, VALUES_MISSING, Conditions
from indexer.telemetry.metrics import Metrics

SMALL_BYTES = 1 << 20
"""Size up to which the export of a repo of which nothing is stored shares a transaction with others."""
LOCKED_BYTES = 256 << 10
"""Frames of buffered events, in bytes, that are planned and written while the row of the repo is locked. One batch of
the live path may add more just before the lock."""

log = structlog.get_logger(__name__)


class ScopeChangedError(Exception):
    """The scope changed during the attempt: nothing is written, and the repo is claimed again."""


class AccountMovedError(Exception):
    """The account has another PDS than the identity of the attempt: the repo is claimed again, for the new PDS."""


class ExportSlots(Protocol):
    """The slots of the resync that an attempt belongs to. If a method returns `Postponed`, so does the attempt."""

    def open_export(self, download: ExportDownload) -> Postponed | None:
        """Note that the host answers, before the export is fetched."""
        ...

    def enlarge(self) -> Postponed | None:
        """Note that the export turned out to be large."""
        ...

    def start_writing(self) -> None:
        """Note that the attempt only waits for a shared transaction from now on: it needs neither host nor worker."""
        ...

    def enter(self, phase: Phase) -> None:
        """Note that the attempt enters this phase."""
        ...


class ResyncAttempts:
    """Brings claimed repos to the state of the network, one attempt per call of `attempt`.

    `sources` are asked for an export in this order: the base URL of a relay, or None for the repo's own PDS. `policy`
    returns the policy with the present scope.
    """

    def __init__(
        self,
        store: Store,
        identities: IdentityCache,
        pds: PdsClient,
        policy: Callable[[], Policy],
        metrics: Metrics,
        sources: Sequence[str | None],
        conditions: Conditions,
    ) -> None:
        self._store = store
        self._identities = identities
        self._pds = pds
        self._policy = policy
        self._metrics = metrics
        self._sources = sources
        self._conditions = conditions
        # Threads keep the event loop responsive; more of them would only contend for the GIL
        # (docs/decisions/0008-threads-and-processes.md). The second one verifies large exports, so that small ones do
        # not wait for them.
        self._thread = ThreadPoolExecutor(1, "resync")
        self._large_thread = ThreadPoolExecutor(1, "resync of a large repo")
        self._new_repos = NewRepoWriter(store, metrics)

    async def attempt(self, claimed: Repo, identity: CachedIdentity, slots: ExportSlots) -> str | Postponed:
        """Resync one repo; return "synchronized", "unchanged", or the reason why the repo is still desynchronized.

        Args:
            claimed: The row as the worker claimed it.
            identity: Its identity, with a key and a PDS.
            slots: The slots of this resync.

        Raises:
            UnavailableError: No source has a usable export.
            UpstreamError: The last export was rejected.
            DatabaseError: The database is unavailable.
            ClaimLostError: The claim is lost. As with the other errors, nothing has changed, except that a
                DatabaseError at COMMIT may hide a success.
        """
        try:
            return await self._attempt(claimed, identity, slots)
        except (ScopeChangedError, AccountMovedError):
            return Postponed()

    async def _attempt(self, claimed: Repo, identity: CachedIdentity, slots: ExportSlots) -> str | Postponed:
        slots.enter(Phase.LATEST_COMMIT)
        policy = self._policy()
        if await self._is_unchanged(claimed, identity, policy):
            slots.enter(Phase.WRITE)
            return await self._complete(policy, claimed, None, identity)
        failure: UpstreamError | UnavailableError = UnavailableError(FetchFailure.UNREACHABLE, "no source configured")
        for source in self._sources:
            try:
                return await self._attempt_from(source, claimed, identity, slots)
            except DatabaseError:
                raise
            except (UpstreamError, UnavailableError) as error:
                failure = error
                log.debug("resync.source-failed", did=claimed.did, source=source or identity.pds, error=str(error))
        permanent = isinstance(failure, UnavailableError) and failure.reason.is_permanent
        if permanent and None in self._sources and not await self._is_host(claimed.did, identity):
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, f"the account may have moved: {failure}")
        raise failure

    async def _attempt_from(
        self,
        source: str | None,
        claimed: Repo,
        identity: CachedIdentity,
        slots: ExportSlots,
    ) -> str | Postponed:
        async with AsyncExitStack() as stack:
            slots.enter(Phase.DOWNLOAD)
            with self._metrics.stage("fetch"):
                download = self._pds.open_export(claimed.did, source or identity.pds or "")
                fetched = await _fetch(await stack.enter_async_context(download), slots)
            if isinstance(fetched, Postponed):
                return fetched
            slots.enter(Phase.VERIFY)
            export, verified_by = await self._verify(claimed, fetched, identity)
            crash_point("export.verified")
            last = source is self._sources[-1]
            if last and source is None and export.head.rev < _newest_known(claimed):
                last = await self._is_host(claimed.did, identity)
            self._check_rev(claimed, export.head, last=last)
            slots.enter(Phase.WRITE)
            policy = self._policy()
            sized = _SizedExport(export, fetched.size)
            written = await self._write_shared(policy, claimed, sized, verified_by, slots)
            return written or await self._complete(policy, claimed, sized, verified_by)

    async def _is_unchanged(self, claimed: Repo, identity: CachedIdentity, policy: Policy) -> bool:
        """Return True if the PDS reports the stored head as its latest commit, so that no export is needed.

        If a newer rev is known, this may be a former PDS of the account.
        """
        if claimed.head is None or identity.pds is None or needs_export(claimed, policy.scope):
            return False
        try:
            latest = await self._pds.fetch_latest_commit(claimed.did, identity.pds)
        except UnavailableError as error:
            if not error.reason.counts_as_attempt:
                raise
            return False
        if latest != (claimed.head.commit, claimed.head.rev):
            return False
        doubtful = identity.stale or claimed.head.rev < _newest_known(claimed)
        return not doubtful or await self._is_host(claimed.did, identity)

    async def _is_host(self, did: str, identity: CachedIdentity) -> bool:
        """Return True if it is certain that the account has the PDS of this identity: the directory said so just now.

        Raises:
            AccountMovedError: The account has another PDS.
            UnavailableError: As `IdentityCache.lookup` raises it.
        """
        if not identity.is_recent(time()):
            before, identity = identity, await self._identities.lookup(did, refresh=True)
            if identity.pds != before.pds:
                raise AccountMovedError
        return identity.is_recent(time())

    async def _verify(
        self, claimed: Repo, reader: ExportReader, identity: CachedIdentity
    ) -> tuple[VerifiedExport, CachedIdentity]:
        """Verify the export, with a newer key if the cached one does not verify its signature."""
        try:
            return await self._verify_with(claimed, reader, identity), identity
        except UpstreamError as error:
            if error.reason is not Rejection.SIGNATURE_INVALID:
                raise
        identity = await self._identities.lookup(claimed.did, refresh=True)
        return await self._verify_with(claimed, reader, identity), identity

    async def _verify_with(self, claimed: Repo, reader: ExportReader, identity: CachedIdentity) -> VerifiedExport:
        if identity.key is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, identity.problem or "no key")
        thread = self._large_thread if reader.size > LARGE_BYTES else self._thread
        verify = partial(reader.verify, claimed.did, identity.key, self._policy().limits)
        with self._metrics.stage("verify-export"):
            return await asyncio.get_running_loop().run_in_executor(thread, verify)

    def _check_rev(self, claimed: Repo, exported: Head, *, last: bool) -> None:
        """Reject a verified export because of its rev. Of two states with one rev, the last source's is accepted."""
        rev = exported.rev
        if is_future(rev, time(), self._policy().limits):
            raise UpstreamError(Rejection.FUTURE_REV, rev)
        if not last:
            _reject_stale(exported, _newest_known(claimed))
        if claimed.head is None:
            return
        _reject_stale(exported, claimed.head.rev)
        if rev == claimed.head.rev and exported.data != claimed.head.data:
            if not last:
                raise UnavailableError(FetchFailure.EXPORT_STALE, f"differs from the stored state at {rev}")
            log.debug("resync.equivocation", did=claimed.did, rev=rev)
            message = f"{claimed.did} has another tree at {rev} than before; it was applied"
            self._conditions.report(EQUIVOCATIONS, message=message)
            self._metrics.desynchronized(Desync.EQUIVOCATION)

    async def _write_shared(
        self, policy: Policy, claimed: Repo, export: "_SizedExport", identity: CachedIdentity, slots: ExportSlots
    ) -> str | None:
        """Write a small repo of which nothing is stored together with others; None if it needs its own transaction."""
        if claimed.head is not None or export.size > SMALL_BYTES:
            return None
        with self._metrics.stage("diff"):
            convert = partial(_whole_chunk, export, policy)
            whole, chunk = await asyncio.get_running_loop().run_in_executor(self._thread, convert)
        if not whole or (chunk is not None and chunk.missing):
            return None
        slots.start_writing()
        batch = await self._new_repos.write(NewRepo(claimed, export.export.head, KeyState(identity.key), policy, chunk))
        return None if batch is None else self._result(Counter(create=chunk.count if chunk else 0), Counter(), batch)

    async def _complete(
        self, policy: Policy, claimed: Repo, export: "_SizedExport | None", identity: CachedIdentity
    ) -> str:
        """Write the differences to `export` (None: the stored head is current), drain the buffer, end the resync."""
        head = export.export.head if export else claimed.head
        if head is None:
            raise BrokenInvariantError(f"{claimed.did}: no export, and no stored head")
        async with self._store.resync(claimed, policy.scope.version) as transaction:
            written = Counter[str]()
            if export is not None:
                missing = await self._write(policy, transaction, export, written)
                self._accept_missing(claimed, missing)
            completion = Completion(claimed, head, KeyState(identity.key), PlanContext(policy, "", time()))
            drained = await self._drain(transaction, completion)
            batch = completion.end()
            await transaction.finish(batch)
        result = self._result(written, drained, batch)
        return "unchanged" if export is None and result == "synchronized" else result

    async def _drain(self, transaction: ResyncTransaction, completion: Completion) -> Counter[Action]:
        """Write the effects of the buffered events, and lock the row; return how many records they changed.

        The batch writer waits for a locked row, and with it all repos of the shard. So the row is locked only when few
        bytes are left. The buffer is bounded, so this moment comes, however fast events arrive.
        """
        drained = Counter[Action]()
        completion.add(await transaction.buffered())
        while completion.waiting_bytes > LOCKED_BYTES and not completion.stuck:
            drained += await self._drain_waiting(transaction, completion)
            completion.add(await transaction.buffered())
        locked = await transaction.lock()
        if locked is None:
            raise ClaimLostError("claimed by another worker, or desynchronized again")
        if not await transaction.holds_scope():
            raise ScopeChangedError
        completion.lock(locked)
        completion.add(await transaction.buffered())
        return drained + await self._drain_waiting(transaction, completion)

    async def _drain_waiting(self, transaction: ResyncTransaction, completion: Completion) -> Counter[Action]:
        """Plan the events that are waiting, and write their effects in slices; return how many records they changed."""
        loop, drained, more = asyncio.get_running_loop(), Counter[Action](), completion.waiting_bytes > 0
        while more:
            more = await loop.run_in_executor(self._thread, completion.plan_slice)
            if completion.changes:
                await self._check_claim(transaction)
                drained += await transaction.write_drained(completion.changes)
        return drained

    def _result(self, written: Counter[str], drained: Counter[Action], batch: Batch) -> str:
        """Count what was written; return "synchronized", or the reason why the repo is still desynchronized."""
        [write] = batch.writes
        for action, count in written.items():
            self._metrics.record_changes(action, live=False, count=count)
        for action, count in drained.items():
            self._metrics.record_changes(action, live=True, count=count)
        self._metrics.lenient_commits(write.lenient_commits)
        for dead_letter in batch.dead_letters:
            self._metrics.rejected(dead_letter.reason)
        if write.repo.sync_status is SyncStatus.SYNCHRONIZED or write.repo.sync_reason is None:
            return "synchronized"
        self._metrics.desynchronized(write.repo.sync_reason)
        return write.repo.sync_reason

    async def _write(
        self, policy: Policy, transaction: ResyncTransaction, export: "_SizedExport", written: Counter[str]
    ) -> int:
        """Write all differences, and count in `written` how many records were created, updated and deleted.

        Return how many records lack their block.
        """
        if not await transaction.stores_records():
            return await self._create_all(transaction, export.export.new_records(policy, export.size), written)
        differences = _Differences(export, policy)
        diff, missing = SnapshotDiff(differences.selected()), 0
        async for chunk in transaction.stored():
            missing += await self._write_all(transaction, diff.compare(chunk), differences, written)
        return missing + await self._write_all(transaction, diff.remaining(), differences, written)

    def _accept_missing(self, claimed: Repo, missing: int) -> None:
        """Decide about an export without the blocks of some records (docs/protocol.md#exports).

        It fails the first time, since it may have been cut off after its last tree node. The second time in a row, the
        records are stored without their values.
        """
        if missing and not _lacked_records(claimed):
            raise UnavailableError(FetchFailure.EXPORT_LACKS_RECORDS, f"{missing} records")
        if missing:
            log.debug("resync.values-missing", did=claimed.did, records=missing)
            message = f"{claimed.did} lacks the values of {missing} records; they are fetched again later"
            self._conditions.report(VALUES_MISSING, message=message)

    async def _create_all(self, transaction: ResyncTransaction, records: NewRecords, written: Counter[str]) -> int:
        """Write all records of a repo of which nothing is stored; return how many lack their block.

        The next chunk is converted while one is written.
        """
        missing, chunk = 0, await self._next_chunk(records)
        while chunk is not None:
            following = asyncio.ensure_future(self._next_chunk(records))
            try:
                with self._metrics.stage("apply-export"):
                    await transaction.create(chunk)
                written["create"] += chunk.count
                missing += chunk.missing
                chunk = await following
            except RecordsExistError as error:
                raise ClaimLostError("its records were written by another worker") from error
            finally:
                following.cancel()
            if chunk is not None:
                await self._check_claim(transaction)
        return missing

    async def _next_chunk(self, records: NewRecords) -> RecordChunk | None:
        with self._metrics.stage("diff"):
            return await asyncio.get_running_loop().run_in_executor(self._thread, records.next_chunk)

    async def _write_all(
        self,
        transaction: ResyncTransaction,
        differences: Iterator[Difference],
        export: "_Differences",
        written: Counter[str],
    ) -> int:
        """Write the differences in chunks; return how many records lack their block."""
        loop, missing = asyncio.get_running_loop(), 0
        while True:
            with self._metrics.stage("diff"):
                exhausted, changes = await loop.run_in_executor(self._thread, export.next_changes, differences)
            if changes:
                with self._metrics.stage("apply-export"):
                    await self._check_claim(transaction)
                    await transaction.write(changes)
            written.update(change.action for change in changes)
            missing += sum(change.problem == Problem.MISSING for change in changes)
            if exhausted:
                return missing

    async def _check_claim(self, transaction: ResyncTransaction) -> None:
        """Raise ClaimLostError if the claim is lost: its new owner would wait for the locks of this transaction."""
        if not await transaction.holds_claim():
            raise ClaimLostError("claimed by another worker, or desynchronized again")


@dataclass(frozen=True, slots=True)
class _SizedExport:
    """A verified export and the total size of its blocks in bytes."""

    export: VerifiedExport
    size: int


def _whole_chunk(export: _SizedExport, policy: Policy) -> tuple[bool, RecordChunk | None]:
    """Return whether the first chunk holds all selected records, and this chunk (None: no records).

    A full chunk is taken for one of several: to convert the next one only to find out would cost more.
    """
    records = export.export.new_records(policy, export.size)
    chunk = records.next_chunk()
    full = chunk is not None and (chunk.count >= CHUNK_RECORDS or chunk.size >= CHUNK_BYTES)
    return not full and records.next_chunk() is None, chunk


class _Differences:
    """Turns the differences between stored records and an export into record changes, one chunk at a time."""

    def __init__(self, export: _SizedExport, policy: Policy) -> None:
        self._export = export.export
        self._converter = RecordConverter(policy, export.export.head.rev, export.size)
        self._collections = policy.scope.collections

    def selected(self) -> Iterator[tuple[bytes, bytes]]:
        """Return the entries of the selected collections. The comparison deletes stored records of others."""
        if self._collections.matches_all:
            return self._export.records()

        @lru_cache(maxsize=256)  # the paths are in order: those of a collection follow each other
        def is_selected(collection: bytes) -> bool:
            return self._collections.matches(collection.decode(errors="replace"))

        return (entry for entry in self._export.records() if is_selected(entry[0].partition(b"/")[0]))

    def next_changes(self, differences: Iterator[Difference]) -> tuple[bool, list[RecordChange]]:
        """Return True if `differences` is exhausted, and the changes for its next chunk."""
        self._converter.forget_values()
        changes, end = [], self._converter.bytes_converted + CHUNK_BYTES
        for count, difference in enumerate(differences, 1):
            change = self._change(difference)
            if change is not None:
                changes.append(change)
            if count == CHUNK_RECORDS or self._converter.bytes_converted >= end:
                return False, changes
        return True, changes

    def _change(self, difference: Difference) -> RecordChange | None:
        path, old, new = difference
        if new is None:
            collection, _, rkey = path.decode().partition("/")
            return RecordChange("delete", collection, rkey, self._export.head.rev)
        block = self._export.block_of(new)
        if block is None and old == without_value(new):
            return None  # the stored record and the export both lack the value
        return self._converter.convert(VerifiedChange(path, old, new, block))


async def _fetch(download: ExportDownload, slots: ExportSlots) -> ExportReader | Postponed:
    """Fetch the whole export, or only its beginning if it is large and `slots` postpone the repo."""
    if postponed := slots.open_export(download):
        return postponed
    if not await download.fetch(LARGE_BYTES):
        if postponed := slots.enlarge():
            return postponed
        await download.fetch()
    return download.reader


def _newest_known(claimed: Repo) -> str:
    """Return the newest rev that was received or listed, or "". An unverified one may be made up."""
    return max(claimed.latest_verified_rev or "", claimed.latest_unverified_rev or "")


def _reject_stale(exported: Head, rev: str) -> None:
    """Raise EXPORT_STALE for an export before `rev`. Another source may be newer than this mirror."""
    if exported.rev < rev:
        raise UnavailableError(FetchFailure.EXPORT_STALE, f"{exported.rev} < {rev}")


def _lacked_records(claimed: Repo) -> bool:
    """Return True if the last attempt failed because a complete tree lacked record blocks."""
    return claimed.last_failure is FetchFailure.EXPORT_LACKS_RECORDS
