"""The second step of a resync: verify the export, and write the differences to the stored records.

It needs a database connection; so few exports are written at a time, and the others wait for their turn. Nothing
changes before the whole export is verified. Then one transaction writes the differences, the effects of the events that
were buffered meanwhile, and the new row of the repo. Consumers see the old state until it commits.

The records of a repo of which nothing is stored are not compared. If it is small as well, it shares a transaction with
others of its part of the layout: all that became ready while the last one ran. On one Postgres, two such transactions
run side by side, so that one uses the processor while the other waits for its next rows or for the disk.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from time import time
from typing import TypeVar

import structlog

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.record import Problem
from indexer.concurrency.shared_calls import SharedCalls
from indexer.crash_points import crash_point
from indexer.db import Database, DatabaseError
from indexer.db.resync_transaction import ResyncTransaction
from indexer.db.write import NewRepoRecords, RecordsExistError
from indexer.errors import BrokenInvariantError, RefusedWriteError, UnavailableError
from indexer.net.pds.pds_client import LARGE_BYTES
from indexer.reasons import FetchFailure
from indexer.resync.queue import ClaimLostError
from indexer.resync.shares import Phase, PostponedError, Resync
from indexer.resync.sparse import SparseDownload
from indexer.sync.changes import Action, Batch, RecordChange, RecordConverter
from indexer.sync.export import CHUNK_BYTES, CHUNK_RECORDS, ExportReader, NewRecords, RecordChunk, Snapshot
from indexer.sync.policy import KeyState, PlanContext, Policy
from indexer.sync.repo import Head, Repo, SyncStatus, is_follow_up
from indexer.sync.resync import Completion, Difference, SnapshotDiff, without_value
from indexer.sync.shard import bucket_of
from indexer.sync.verify import VerifiedChange
from indexer.telemetry.conditions import VALUES_MISSING, Conditions
from indexer.telemetry.metrics import Metrics

TURNS = 16
"""Exports that are written at a time, or that wait for a shared transaction with their converted records in memory."""
LARGE_TURNS = 2
"""Large exports that are written at a time besides: each may take minutes."""
SHARED_BYTES = 1 << 20
"""Size up to which the export of a repo of which nothing is stored shares a transaction with others."""
SHARED_RECORDS = 8_000
"""Records of a shared transaction, unless its first repo has more."""
SHARED_RECORD_BYTES = 8 << 20
"""Bytes of records of a shared transaction, unless its first repo has more."""
MAX_SIDE_BY_SIDE = 2
"""Shared transactions that run side by side, each for one part of the layout, or for half of the buckets of the only
part. More of them would have fewer repos each, and each transaction costs some milliseconds of CPU besides those of its
records."""
MAX_STORED = 20_000
"""Maximum number of stored records of a repo from which a sparse resync rebuilds parts of the tree."""
COSTLY_BYTES = 1 << 20
"""Bytes of blocks above which a resync is costly: then the next one waits, although a newer rev is known."""
LOCKED_BYTES = 256 << 10
"""Frames of buffered events, in bytes, that are planned and written while the row of the repo is locked. One batch of
the live path may add more just before the lock."""

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class NewRepo:
    """A claimed repo of which nothing is stored, and all its selected records; None if there are none."""

    claimed: Repo
    head: Head
    key: KeyState
    policy: Policy
    chunk: RecordChunk | None


class _Differences:
    """Turns the differences between stored records and an export into record changes, one chunk at a time."""

    def __init__(self, export: Snapshot, policy: Policy) -> None:
        self._export = export
        self.proof = export.proof
        self._converter = RecordConverter(policy, export.did, export.head.rev, export.size)
        self._collections = policy.scope.collections
        self._removed = policy.scope.removed.get(export.did)

    def selected(self) -> Iterator[tuple[bytes, bytes]]:
        """Return the entries of the selected records. The comparison deletes other stored records."""
        entries = self._export.records()
        if removed := self._removed:
            entries = (entry for entry in entries if entry[0] not in removed)
        if self._collections.matches_all and not self._collections.excluded:
            return entries
        collections = groupby(entries, lambda entry: entry[0].partition(b"/")[0])
        return chain.from_iterable(
            entries for name, entries in collections if self._collections.matches(name.decode(errors="replace"))
        )

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


class Applies:
    """Verifies exports in threads, and writes them."""

    def __init__(self, db: Database, metrics: Metrics, conditions: Conditions, turns: int = TURNS) -> None:
        self._db = db
        self._metrics = metrics
        self._conditions = conditions
        # Threads keep the event loop responsive; more of them would only contend for the GIL
        # (docs/decisions/0008-threads-and-processes.md). The second one verifies large exports, so that small ones do
        # not wait for them.
        self._thread = ThreadPoolExecutor(1, "resync")
        self._large_thread = ThreadPoolExecutor(1, "resync of a large repo")
        self._turns = asyncio.Semaphore(turns)
        self._large_turns = asyncio.Semaphore(LARGE_TURNS)
        running = asyncio.Semaphore(MAX_SIDE_BY_SIDE)
        groups = max(db.layout.parts, MAX_SIDE_BY_SIDE)
        self._shared = [SharedCalls(self._write_group, _may_share, running) for _ in range(groups)]

    async def stored(self, did: str) -> dict[bytes, bytes]:
        """Return the stored records of a repo for `sparse.Stored`; none of them if there are too many."""
        entries = await self._db.resyncs.entries(did, MAX_STORED + 1)
        return {} if len(entries) > MAX_STORED else entries

    async def verify(self, did: str, blocks: ExportReader | SparseDownload, key: PublicKey, limits: Limits) -> Snapshot:
        """Verify an export, or the chosen records; raise the errors of their `verify`."""
        thread = self._large_thread if blocks.size > LARGE_BYTES else self._thread
        with self._metrics.batch_seconds["verify-export"].time():
            return await asyncio.get_running_loop().run_in_executor(thread, partial(blocks.verify, did, key, limits))

    async def write(
        self, resync: Resync, policy: Policy, key: PublicKey | None, export: Snapshot | None, *, failed: bool = False
    ) -> str:
        """Write a verified export, which `key` has signed; None: the stored head is current, or `failed` to be fetched.

        Return "synchronized", "unchanged", or the reason why the repo is still desynchronized.

        Raises:
            PostponedError: The scope changed since `policy` was read.
            UnavailableError: The export lacks records.
            ClaimLostError: The claim is lost. As with the other errors, nothing has changed.
            RefusedWriteError: The database cannot store the values.
            DatabaseError: The database is unavailable.
        """
        claimed, key_state = resync.claimed, KeyState(key, available=key is not None)
        resync.enter(Phase.QUEUE)
        async with self._large_turns if resync.large else self._turns:
            resync.enter(Phase.WRITE)
            alone = claimed.head is not None or resync.subscribed is not None
            if export is not None and not alone and export.size <= SHARED_BYTES:
                whole, chunk = await self._in_thread(_whole_chunk, export, policy)
                if whole and not (chunk is not None and chunk.missing):
                    repo = NewRepo(claimed, export.head, key_state, policy, chunk)
                    if batch := await self.write_shared(repo):
                        return self._result(Counter(create=chunk.count if chunk else 0), Counter(), batch)
            return await self._write_alone(policy, resync, export, key_state, failed=failed)

    async def write_shared(self, repo: NewRepo) -> Batch | None:
        """Write the repo together with others; return its batch, or None if it needs a transaction of its own."""
        layout, bucket = self._db.layout, bucket_of(repo.claimed.did)
        calls = self._shared[layout.part_of(bucket) if layout.parts > 1 else bucket % MAX_SIDE_BY_SIDE]
        return (await calls.add([repo])).get(repo)

    async def _write_group(self, group: Sequence[NewRepo]) -> dict[NewRepo, Batch]:
        """Write the repos in one transaction; return the batches of those that are written."""
        try:
            claimed, scope_version = [repo.claimed for repo in group], group[0].policy.scope.version
            async with self._db.resyncs.transaction(*claimed, scope_version=scope_version) as transaction:
                # Once for all of them, without the time that they waited.
                with self._metrics.batch_seconds["apply-export"].time():
                    return await _write_new_repos(transaction, group)
        except (RefusedWriteError, RecordsExistError, DatabaseError) as error:
            # One repo may be the cause, for example if another session has locked its rows. In transactions of their
            # own, the others succeed, and each repo has the error that is its own.
            log.debug("resync.group-failed", repos=len(group), error=str(error))
            return {}

    async def _write_alone(
        self, policy: Policy, resync: Resync, export: Snapshot | None, key: KeyState, *, failed: bool
    ) -> str:
        """Write the differences, drain the buffer, and end the resync, in a transaction of its own."""
        claimed = resync.claimed
        head = export.head if export else claimed.head
        if head is None:
            raise BrokenInvariantError(f"{claimed.did}: no export, and no stored head")
        async with self._db.resyncs.transaction(claimed, scope_version=policy.scope.version) as transaction:
            written, live = Counter[str](), is_follow_up(claimed, policy.scope)
            if export is not None:
                missing = await self._write_export(policy, transaction, export, written, live=live)
                self._accept_missing(claimed, missing)
            completion = Completion(claimed, head, key, PlanContext(policy, time()))
            drained = await self._drain(transaction, completion)
            subscribed = await transaction.is_subscribed(resync.subscribed)
            costly = failed if export is None else export.size > COSTLY_BYTES
            batch = completion.end(subscribed=subscribed, costly=costly)
            if not await transaction.finish(batch):
                raise BrokenInvariantError(f"{claimed.did}: the row changed while it was locked")
            crash_point("resync.finished")
        result = self._result(written, drained, batch, live=live)
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
            raise PostponedError
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
                drained += await transaction.write(completion.changes, "commit", live=True)
        return drained

    def _result(self, written: Counter[str], drained: Counter[Action], batch: Batch, *, live: bool = False) -> str:
        """Count what was written; return "synchronized", or the reason why the repo is still desynchronized."""
        [write] = batch.writes
        for action, count in written.items():
            self._metrics.record_changes[action, "true" if live else "false"].inc(count)
        for action, count in drained.items():
            self._metrics.record_changes[action, "true"].inc(count)
        for dead_letter in batch.dead_letters:
            self._metrics.rejected[dead_letter.reason].inc()
        if write.repo.sync_status is SyncStatus.SYNCHRONIZED or write.repo.sync_reason is None:
            return "synchronized"
        self._metrics.desynchronized[write.repo.sync_reason].inc()
        return write.repo.sync_reason

    async def _write_export(
        self, policy: Policy, transaction: ResyncTransaction, export: Snapshot, written: Counter[str], *, live: bool
    ) -> int:
        """Write all differences, and count in `written` how many records were created, updated and deleted.

        Return how many records lack their block.
        """
        if not await transaction.stores_records():
            return await self._create_all(transaction, export.new_records(policy), written, export.head.rev)
        differences = _Differences(export, policy)
        diff, missing = SnapshotDiff(differences.selected()), 0
        async for chunk in transaction.stored():
            missing += await self._write_all(transaction, diff.compare(chunk), differences, written, live=live)
        return missing + await self._write_all(transaction, diff.remaining(), differences, written, live=live)

    def _accept_missing(self, claimed: Repo, missing: int) -> None:
        """Decide about an export without the blocks of some records (docs/protocol.md#exports).

        It fails the first time, since it may have been cut off after its last tree node. The second time in a row, the
        records are stored without their values.
        """
        if missing and claimed.last_failure is not FetchFailure.EXPORT_LACKS_RECORDS:
            raise UnavailableError(FetchFailure.EXPORT_LACKS_RECORDS, f"{missing} records")
        if missing:
            log.debug("resync.values-missing", did=claimed.did, records=missing)
            message = f"{claimed.did} lacks the values of {missing} records; they are fetched again later"
            self._conditions.report(VALUES_MISSING, message=message)

    async def _create_all(
        self, transaction: ResyncTransaction, records: NewRecords, written: Counter[str], rev: str
    ) -> int:
        """Write all records of a repo of which nothing is stored; return how many lack their block.

        The next chunk is converted while one is written.
        """
        missing, chunk, first_of = 0, await self._in_thread(records.next_chunk), rev or None
        while chunk is not None:
            following = asyncio.ensure_future(self._in_thread(records.next_chunk))
            try:
                with self._metrics.batch_seconds["apply-export"].time():
                    await transaction.create([NewRepoRecords(transaction.claimed[0].did, chunk, first_of)])
                    crash_point("resync.copied")
                first_of = None
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

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        with self._metrics.batch_seconds["diff"].time():
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _write_all(
        self,
        transaction: ResyncTransaction,
        differences: Iterator[Difference],
        export: _Differences,
        written: Counter[str],
        *,
        live: bool,
    ) -> int:
        """Write the differences in chunks; return how many records lack their block."""
        missing = 0
        while True:
            exhausted, changes = await self._in_thread(export.next_changes, differences)
            if changes:
                with self._metrics.batch_seconds["apply-export"].time():
                    await self._check_claim(transaction)
                    await transaction.write(changes, export.proof, live=live)
            written.update(change.action for change in changes)
            missing += sum(change.problem == Problem.MISSING for change in changes)
            if exhausted:
                return missing

    async def _check_claim(self, transaction: ResyncTransaction) -> None:
        """Raise ClaimLostError if the claim is lost: its new owner would wait for the locks of this transaction."""
        if not await transaction.holds_claim():
            raise ClaimLostError("claimed by another worker, or desynchronized again")


def _whole_chunk(export: Snapshot, policy: Policy) -> tuple[bool, RecordChunk | None]:
    """Return whether the first chunk holds all selected records, and this chunk (None: no records).

    A full chunk is taken for one of several: to convert the next one only to find out would cost more.
    """
    records = export.new_records(policy)
    chunk = records.next_chunk()
    full = chunk is not None and (chunk.count >= CHUNK_RECORDS or chunk.size >= CHUNK_BYTES)
    return not full and records.next_chunk() is None, chunk


def _may_share(repos: Sequence[NewRepo]) -> bool:
    """Return True if the repos have the same scope and are within the limits of one transaction."""
    chunks = [repo.chunk for repo in repos if repo.chunk]
    return (
        len({repo.policy.scope.version for repo in repos}) == 1
        and sum(chunk.count for chunk in chunks) <= SHARED_RECORDS
        and sum(chunk.size for chunk in chunks) <= SHARED_RECORD_BYTES
    )


async def _write_new_repos(transaction: ResyncTransaction, group: Sequence[NewRepo]) -> dict[NewRepo, Batch]:
    """Write those repos of the group that can share a transaction; return their batches."""
    rows = await transaction.eligible()
    # A late attempt may share the group with the worker that claimed its repo again: only the lease tells them apart.
    claims = [(repo, rows.get(repo.claimed.did)) for repo in group]
    written = {repo: _complete(repo, row) for repo, row in claims if row and row.lease == repo.claimed.lease}
    if not written:
        return {}
    await transaction.create(
        [NewRepoRecords(repo.claimed.did, repo.chunk, repo.head.rev) for repo in written if repo.chunk]
    )
    crash_point("new-repos.copied")
    batch = Batch(tuple([write for completed in written.values() for write in completed.writes]))
    if not (await transaction.holds_scope() and await transaction.finish(batch)):
        return {}
    crash_point("new-repos.finished")
    return written


def _complete(repo: NewRepo, row: Repo) -> Batch:
    """Return the end of the resync of a repo for which no event is buffered."""
    completion = Completion(repo.claimed, repo.head, repo.key, PlanContext(repo.policy, time()))
    completion.lock(row)
    return completion.end()
