"""The transactions that end resyncs: compare, write the differences, drain the resync buffer, update the repo.

A resync has a fixed cost: the statements of its transaction, and the commit. So small repos of which nothing is stored
share a transaction.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from indexer.atproto.record import Problem
from indexer.crash_points import crash_point
from indexer.db import subscribed_hosts
from indexer.db.columns import Connection, buckets_of, of_buckets, repo_columns, repo_of
from indexer.db.exports import PATH, SORT_TIMEOUT, in_chunks
from indexer.db.scope import holds
from indexer.db.write import NewRepoRecords, create_records, write, write_changes
from indexer.errors import BrokenInvariantError
from indexer.sync.changes import Action, Batch, BufferedEvent, Proof, RecordChange
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import bucket_of

CHUNK_SIZE = 5_000
"""Stored records in memory at a time."""

_STORES_RECORDS = "select exists (select from indexer.record where did = $1 and bucket = $2)"

_CLAIMED = f"""
    from indexer.repo r where did = $1 and bucket = $2 and lease = $3 and sync_status = '{SyncStatus.IN_PROGRESS}'
"""
# A lost claim is recognized without the lock: its new owner may hold the lock, and wait for a record that this
# transaction has written.
_LOCK = f"select {repo_columns('r')} {_CLAIMED} for update"

# A transaction that buffers an event locks the row of its repo, so the events of a repo are committed in the order of
# their IDs.
_BUFFERED = """
    select id, relay, seq, frame from indexer.buffered_event where did = $1 and bucket = $2 and id > $3 order by id
"""

# The CID of a record without its value gets a zero byte appended, so that it differs from every CID of an export.
# Earlier releases stored no value for the other two problems.
_ENTRIES = f"""
    select {PATH} as path, case
        when value_problem = '{Problem.MISSING}'
            or value is null and value_problem in ('{Problem.NUL}', '{Problem.RESERVED_KEY}')
        then cid || '\\x00' else cid end
    from indexer.record where did = $1 and bucket = $2
"""
_STORED = f"{_ENTRIES} order by path"
SOME_STORED = f"select * from ({_ENTRIES} limit $3) c order by path"

STORED = "select true from indexer.record c where c.did = r.did and c.bucket = r.bucket"
"""For a scalar subquery with LIMIT: the planner looks into the index for each repo, and does not read all records."""
ELIGIBLE = f"""
    select {repo_columns("r")}, ({STORED} and {of_buckets("c")} limit 1) as stored from indexer.repo r
    where r.bucket = any($1::smallint[]) and r.did = any($2::text[])
        and sync_status is not distinct from '{SyncStatus.IN_PROGRESS}' and buffered_events = 0
"""
"""Takes buckets and DIDs."""


@dataclass
class ResyncTransaction:
    """The writes of the resync of one repo: the differences to the export, then the buffered events, then the row.

    Several repos of which nothing is stored may share it. Then only `eligible`, `create`, `holds_scope` and `finish`
    are called. No row is locked before `finish`, which writes each row only at the version that `eligible` returned.

    `Resyncs.transaction` begins the transaction, and commits it if it is `finished`. The isolation level is READ
    COMMITTED, so that `lock` and `buffered` see events that were buffered meanwhile. No other process writes the
    records of a repo that is in progress.
    """

    connection: Connection
    claimed: Sequence[Repo]
    scope_version: int
    finished: bool = False
    _last_buffered: int = 0

    def __post_init__(self) -> None:
        self._did, self._lease = self.claimed[0].did, self.claimed[0].lease
        self._key = (self._did, bucket_of(self._did))

    async def eligible(self) -> dict[str, Repo]:
        """Return the present rows of those repos that can share this transaction, by DID.

        A claim of them holds, no record of them is stored, and no event is buffered for them. Of two attempts of one
        repo, the row has the lease of the one that holds the claim.
        """
        claims = {(repo.did, repo.lease) for repo in self.claimed}
        dids = sorted({did for did, _ in claims})
        rows = await self.connection.fetch(ELIGIBLE, buckets_of(dids), dids)
        repos = [repo_of(row) for row in rows if not row["stored"]]
        return {repo.did: repo for repo in repos if (repo.did, repo.lease) in claims}

    async def create(self, parts: Sequence[NewRepoRecords]) -> None:
        """Write records of repos that had no stored records before this transaction, without a comparison; log them.

        Raises:
            RecordsExistError: One of them is stored. The claim has been lost, and the transaction has failed.
        """
        await create_records(self.connection, parts)

    async def stores_records(self) -> bool:
        """Return True if a record of the repo is stored. While the claim holds, only this transaction adds records."""
        return bool(await self.connection.fetchval(_STORES_RECORDS, *self._key))

    async def stored(self) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Yield the stored records as (path, CID) in path order, in chunks; one chunk is in memory at a time.

        Records that this transaction writes meanwhile are not among them.
        """
        rows = self.connection.cursor(_STORED, *self._key, prefetch=CHUNK_SIZE, timeout=SORT_TIMEOUT)
        async for chunk in in_chunks(rows, CHUNK_SIZE):
            yield [tuple(row) for row in chunk]

    async def holds_claim(self) -> bool:
        """Return True if the claim still holds at this moment."""
        return bool(await self.connection.fetchval(f"select exists (select {_CLAIMED})", *self._key, self._lease))

    async def write(self, changes: Sequence[RecordChange], proof: Proof, *, live: bool = False) -> Counter[Action]:
        """Write differences between the stored records and the export, or changes of buffered events (`commit`).

        Return how many records were created, updated and deleted. If the claim is lost, another worker may have changed
        the records. Then `lock` returns None, and the transaction is rolled back.

        Raises:
            BrokenInvariantError: The records are not those that were compared, although the claim holds.
        """
        effective = await write_changes(self.connection, self._did, changes, proof, live=live)
        if proof == "commit":
            crash_point("resync.drained")
            return Counter([change.action for change in effective])
        crash_point("resync.written")
        if effective != tuple(changes) and await self.lock() is not None:
            unexpected = next(change for change in changes if change not in effective)
            raise BrokenInvariantError(
                f"{self._did}: the stored records changed since they were compared: "
                f"{unexpected.action} of {unexpected.collection}/{unexpected.rkey}"
            )
        return Counter([change.action for change in changes])

    async def lock(self) -> Repo | None:
        """Lock and return the row until the end of the transaction; None if the claim is lost."""
        row = await self.connection.fetchrow(_LOCK, *self._key, self._lease)
        crash_point("resync.locked")
        return None if row is None else repo_of(row)

    async def holds_scope(self) -> bool:
        """Return True if the scope is the one that this resync was planned with; it stays until the transaction ends.

        Otherwise records of collections that are no longer selected could be written after the others were deleted.
        """
        return await holds(self.connection, self.scope_version, [repo.did for repo in self.claimed])

    async def is_subscribed(self, subscribed: int | None) -> bool:
        """Return True if the account's host is still subscribed, as this row says; it is until the transaction ends."""
        return subscribed is not None and await subscribed_hosts.holds(self.connection, subscribed)

    async def buffered(self) -> list[BufferedEvent]:
        """Return the events that were buffered since the last call, in order of arrival."""
        rows = await self.connection.fetch(_BUFFERED, *self._key, self._last_buffered)
        if rows:
            self._last_buffered = rows[-1]["id"]
        return [BufferedEvent(self._did, relay, seq, frame) for _, relay, seq, frame in rows]

    async def finish(self, batch: Batch) -> bool:
        """Write the new rows, and dead letters of buffered events; return False if a row has changed.

        Then nothing is committed.
        """
        self.finished = not (await write(self.connection, batch)).skipped
        return self.finished
