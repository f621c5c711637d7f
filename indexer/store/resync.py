"""The queue of resyncs in the table `repo`, and the transaction that ends one."""

from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from itertools import groupby
from random import randrange

from asyncpg import Record as Row
from asyncpg import UniqueViolationError

from indexer.atproto.record import Problem
from indexer.errors import BrokenInvariantError
from indexer.reasons import Desync
from indexer.store.apply import apply, create_records, write_records
from indexer.store.errors import database_errors
from indexer.store.feed import log_changes
from indexer.store.records import in_chunks
from indexer.store.rows import Connection, of_buckets, repo_columns, repo_of
from indexer.sync.feed import record_changes
from indexer.sync.plan import Batch, KeptEvent, RecordChange, RepoWrite
from indexer.sync.planning import desynchronize, woken
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import BUCKETS, bucket_of

CHUNK = 5_000
MARKED_AT_ONCE = 500


# The head of each queue, and no more of it than may be claimed: so the index is asked for a few rows and never read
# through, whatever waits in it for later or for other shards. Repos that broke go first: what we show of them is wrong
# by now, not just missing. The exclusive or gives each look an order of buckets of its own: those who look at the same
# moment rarely find the same.
_DUE_AT = "coalesce(next_attempt_at, '-infinity'::timestamptz)"
DUE = f"""
    select due.did, due.bucket
    from (
        select bucket, rank, bucket # $4::smallint as place from indexer.queue
        where bucket = any($2::smallint[]) order by rank, place
    ) q, lateral (
        select did, bucket, {_DUE_AT} as at from indexer.repo r
        where r.bucket = q.bucket and r.rank = q.rank
            and status = 'desynchronized' and active and {_DUE_AT} <= to_timestamp($3)
        order by {_DUE_AT} limit $1
    ) due
    order by q.rank, q.place, due.at limit $1
"""

# Of one bucket, as no more can be locked at once on a distributed database; most looks find what they want in one. Who
# has a row just now may have it for long. IS NOT DISTINCT, as an index of what is due would be read through for a DID.
CLAIM = f"""
    with held as materialized (
        select did from indexer.repo
        where bucket = $1 and did = any($2::text[]) and status is not distinct from 'desynchronized' and active
            and {_DUE_AT} <= to_timestamp($3)
        for update skip locked
    ), claimed as (
        update indexer.repo
        set status = 'in-progress', lease = lease + 1, version = version + 1, lease_until = to_timestamp($4),
            updated_at = now()
        where bucket = $1 and did = any(array(select did from held))
        returning *
    )
    select {repo_columns("claimed")} from claimed order by rank, next_attempt_at nulls first
"""

_RENEW = """
    update indexer.repo set lease_until = to_timestamp($4)
    where did = $1 and bucket = $2 and lease = $3 and status = 'in-progress'
    returning true
"""

# Nothing is locked here and in the next two: what is written is compared and set, so what has moved is passed over.
_EXPIRED = f"""
    select {repo_columns("r")} from indexer.repo r
    where status = 'in-progress' and lease_until < to_timestamp($1) and bucket = any($2::smallint[])
    order by lease_until limit $3
"""

# Few records lack a value, and an index has only these: it comes first, lest the planner reads through all repos.
INCOMPLETE = f"""
    select {repo_columns("r")}
    from (
        select distinct did, bucket from indexer.record
        where value_problem = '{Problem.MISSING}' and bucket = any($2::smallint[])
    ) c, indexer.repo r
    where r.did = c.did and r.bucket = c.bucket and {of_buckets("r", 4)}
        and r.status = 'synchronized' and r.synchronized_at < to_timestamp($1)
    order by r.synchronized_at limit $3
"""

# In the order of the index, so that no more is read than is given.
PARKED = f"""
    select {repo_columns("r")} from indexer.repo r
    where r.parked_at < to_timestamp($1) and r.bucket = any($2::smallint[])
    order by r.bucket, r.parked_at limit $3
"""

_HOLDS = """
    select exists (
        select from indexer.repo where did = $1 and bucket = $2 and lease = $3 and status = 'in-progress'
    )
"""

_LOCK = f"select {repo_columns('r')} from indexer.repo r where did = $1 and bucket = $2 for update"

_KEPT = "select relay, seq, frame from indexer.kept_event where did = $1 and bucket = $2 order by id"

# A CID whose value is missing is told apart by a byte behind it: it equals none in an export.
_STORED = f"""
    select collection, rkey, case when value_problem = '{Problem.MISSING}' then cid || '\\x00' else cid end
    from indexer.record
    where did = $1 and bucket = $2 and collection >= $3 and collection <= $4 order by collection, rkey
"""


async def claim(connection: Connection, count: int, buckets: range, until: float, now: float) -> list[Repo]:
    due = await connection.fetch(DUE, count, list(buckets), now, randrange(BUCKETS))  # noqa: S311 - spread, not secrecy
    claimed: list[Repo] = []
    for bucket, rows in groupby(due, lambda row: row["bucket"]):
        dids = [row["did"] for row in rows]
        claimed += [repo_of(row) for row in await connection.fetch(CLAIM, bucket, dids, now, until)]
    return claimed


async def renew(connection: Connection, did: str, lease: int, until: float) -> bool:
    return await connection.fetchval(_RENEW, did, bucket_of(did), lease, until) is not None


async def expire_leases(connection: Connection, buckets: range, now: float) -> int:
    """Within a transaction. As with any other break, a repo that breaks again and again waits longer each time.

    A renewal leaves the version as it is, so one that comes just now is in vain: its worker finds the claim lost.
    """
    rows = await connection.fetch(_EXPIRED, now, list(buckets), MARKED_AT_ONCE)
    return await _desynchronize(connection, rows, Desync.LEASE_EXPIRED, now)


async def mark_missing(connection: Connection, buckets: range, before: float, now: float) -> int:
    """Within a transaction: has repos fetched again that were synchronized `before`, and lack values."""
    rows = await connection.fetch(INCOMPLETE, before, list(buckets), MARKED_AT_ONCE, list(buckets))
    return await _desynchronize(connection, rows, Desync.RECORD_MISSING, now)


async def wake_parked(connection: Connection, buckets: range, before: float, now: float) -> int:
    """Within a transaction: has repos tried again that were given up on `before`."""
    parked = [repo_of(row) for row in await connection.fetch(PARKED, before, list(buckets), MARKED_AT_ONCE)]
    return await _write(connection, [RepoWrite(repo.version, woken(repo, now)) for repo in parked])


async def _desynchronize(connection: Connection, rows: Sequence[Row], reason: Desync, now: float) -> int:
    repos = [repo_of(row) for row in rows]
    writes = [RepoWrite(repo.version, desynchronize(repo, reason, now, seen_rev=repo.seen_rev)) for repo in repos]
    return await _write(connection, writes)


async def _write(connection: Connection, writes: Sequence[RepoWrite]) -> int:
    """How many were written; of the others somebody else was first."""
    return len(writes) - len(await apply(connection, Batch(tuple(writes))))


class ResyncTransaction:
    """What a resync does to its repo, in the order of these methods; `Store.resync` begins and ends it.

    READ COMMITTED, so that `lock` and `kept` see what was buffered meanwhile; nobody else writes the records of a
    repo in progress. Each method raises `DatabaseError`.
    """

    def __init__(self, connection: Connection, claimed: Repo) -> None:
        self._connection = connection
        self._claimed = claimed
        self._key = (claimed.did, bucket_of(claimed.did))
        self.finished = False

    async def stored(self) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Our records as (path, CID) in path order, in chunks; one of them in memory at a time.

        What is written meanwhile is not read: it lies before what was read, and a cursor shows what was there when it
        was opened.
        """

        def rows(first: str, last: str) -> AsyncIterable[Row]:
            return self._connection.cursor(_STORED, *self._key, first, last, prefetch=CHUNK)

        async for chunk in in_chunks(self._connection, self._key, rows, CHUNK):
            yield [(f"{collection}/{rkey}".encode(), cid) for collection, rkey, cid in chunk]

    async def holds(self) -> bool:
        """Whether the claim stands, at this moment."""
        with database_errors():
            held: bool = await self._connection.fetchval(_HOLDS, *self._key, self._claimed.lease)
        return held

    async def write(self, changes: Sequence[RecordChange]) -> None:
        """Differences that the export showed. Raises `BrokenInvariantError` if they differ from something else.

        If the claim is lost, somebody else may have changed the records: then `lock` will tell, and nothing stays.
        """
        with database_errors():
            found = await self._write(changes)
            await log_changes(self._connection, list(record_changes(self._claimed.did, changes, live=False)))
        if found != Counter(change.action for change in changes) and await self.lock() is not None:
            raise BrokenInvariantError(f"{self._claimed.did}: the records are not those that were compared: {found}")

    async def _write(self, changes: Sequence[RecordChange]) -> Counter[str]:
        did = self._claimed.did
        creates = [change for change in changes if change.action == "create"]
        try:
            await create_records(self._connection, did, creates)
        except UniqueViolationError:  # what it really finds, tells the one that can do either
            return await write_records(self._connection, [(did, change) for change in changes])
        found = await write_records(self._connection, [(did, other) for other in changes if other.action != "create"])
        return found + Counter(create=len(creates))

    async def lock(self) -> Repo | None:
        """The row, locked until the end; None if it isn't the claim's any more."""
        with database_errors():
            row = await self._connection.fetchrow(_LOCK, *self._key)
        repo = None if row is None else repo_of(row)
        if repo is None or repo.status is not SyncStatus.IN_PROGRESS or repo.lease != self._claimed.lease:
            return None
        return repo

    async def kept(self) -> list[KeptEvent]:
        """What was buffered, in the order in which it came: seqs of two relays say nothing of each other."""
        with database_errors():
            rows = await self._connection.fetch(_KEPT, *self._key)
        return [KeptEvent(self._claimed.did, relay, seq, frame) for relay, seq, frame in rows]

    async def finish(self, batch: Batch) -> None:
        """The repo's new row and what the kept events change. Raises `BrokenInvariantError` if it wasn't locked."""
        with database_errors():
            if await apply(self._connection, batch):
                raise BrokenInvariantError(f"{self._claimed.did} moved while it was locked")
        self.finished = True
