"""The transaction that ends a resync: compare, write the differences, drain the resync buffer, update the repo."""

from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Sequence

from asyncpg import Record as Row
from asyncpg import UniqueViolationError

from indexer.atproto.record import Problem
from indexer.errors import BrokenInvariantError
from indexer.store.apply_batch import apply, create_records, write_records
from indexer.store.change_log import log_changes
from indexer.store.columns import Connection, repo_columns, repo_of
from indexer.store.consistent_read import in_chunks
from indexer.store.database_errors import database_errors
from indexer.sync.changes import record_entries
from indexer.sync.plans import Batch, BufferedEvent, RecordChange
from indexer.sync.repo_state import Repo, SyncStatus
from indexer.sync.shard import bucket_of

CHUNK_SIZE = 5_000
"""Stored records in memory at a time."""

_HOLDS = f"""
    select exists (
        select from indexer.repo
        where did = $1 and bucket = $2 and lease = $3 and sync_status = '{SyncStatus.IN_PROGRESS}'
    )
"""

_LOCK = f"select {repo_columns('r')} from indexer.repo r where did = $1 and bucket = $2 for update"

_BUFFERED = "select relay, seq, frame from indexer.buffered_event where did = $1 and bucket = $2 order by id"

# The CID of a record without its value gets a zero byte appended, so that it differs from every CID of an export.
_STORED = f"""
    select collection, rkey, case when value_problem = '{Problem.MISSING}' then cid || '\\x00' else cid end
    from indexer.record
    where did = $1 and bucket = $2 and collection >= $3 and collection <= $4 order by collection, rkey
"""


class ResyncTransaction:
    """The writes of one resync. Call the methods in the order of their definition.

    `Store.resync` begins and ends the transaction. The isolation level is READ COMMITTED, so that `lock` and `buffered`
    see events that were buffered meanwhile. No other process writes the records of a repo that is in progress. Every
    method raises `DatabaseError`.

    Attributes:
        connection: The connection, within the transaction.
        finished: True after `finish`; then the transaction is committed.
    """

    def __init__(self, connection: Connection, claimed: Repo) -> None:
        self.connection = connection
        self._claimed = claimed
        self._key = (claimed.did, bucket_of(claimed.did))
        self.finished = False

    async def stored(self) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Yield the stored records as (path, CID) in path order, in chunks; one chunk is in memory at a time.

        Records that this transaction writes meanwhile are not returned: a cursor shows the state at its opening, and
        writes happen at paths that were read before.
        """

        def rows(first: str, last: str) -> AsyncIterable[Row]:
            return self.connection.cursor(_STORED, *self._key, first, last, prefetch=CHUNK_SIZE)

        async for chunk in in_chunks(self.connection, self._key, rows, CHUNK_SIZE):
            yield [(f"{collection}/{rkey}".encode(), cid) for collection, rkey, cid in chunk]

    async def holds_claim(self) -> bool:
        """Return True if the claim still holds at this moment."""
        with database_errors():
            held: bool = await self.connection.fetchval(_HOLDS, *self._key, self._claimed.lease)
        return held

    async def write(self, changes: Sequence[RecordChange]) -> None:
        """Write differences between the stored records and the export.

        If the claim is lost, another worker may have changed the records. Then `lock` returns None, and the transaction
        is rolled back.

        Raises:
            BrokenInvariantError: The records are not those that were compared, although the claim holds.
        """
        with database_errors():
            written = await self._write(changes)
            await log_changes(self.connection, list(record_entries(self._claimed.did, changes, live=False)))
        if written != Counter(change.action for change in changes) and await self.lock() is not None:
            raise BrokenInvariantError(
                f"{self._claimed.did}: the stored records changed since they were compared: {dict(written)}"
            )

    async def _write(self, changes: Sequence[RecordChange]) -> Counter[str]:
        did = self._claimed.did
        creates = [change for change in changes if change.action == "create"]
        try:
            await create_records(self.connection, did, creates)
        except UniqueViolationError:
            # Fall back to an upsert, which reports whether each row existed.
            return await write_records(self.connection, [(did, change) for change in changes])
        written = await write_records(self.connection, [(did, other) for other in changes if other.action != "create"])
        return written + Counter(create=len(creates))

    async def lock(self) -> Repo | None:
        """Lock and return the row until the end of the transaction; None if the claim is lost."""
        with database_errors():
            row = await self.connection.fetchrow(_LOCK, *self._key)
        repo = None if row is None else repo_of(row)
        if repo is None or repo.sync_status is not SyncStatus.IN_PROGRESS or repo.lease != self._claimed.lease:
            return None
        return repo

    async def buffered(self) -> list[BufferedEvent]:
        """Return the buffered events in order of arrival. Sequence numbers of different relays are not comparable."""
        with database_errors():
            rows = await self.connection.fetch(_BUFFERED, *self._key)
        return [BufferedEvent(self._claimed.did, relay, seq, frame) for relay, seq, frame in rows]

    async def finish(self, batch: Batch) -> None:
        """Write the new row of the repo and the effects of the buffered events.

        Raises:
            BrokenInvariantError: The row was not locked.
        """
        with database_errors():
            if await apply(self.connection, batch):
                raise BrokenInvariantError(f"{self._claimed.did}: the row changed while it was locked")
        self.finished = True
