"""The queue of resyncs in the table `repo`, and the transaction that ends one."""

from collections.abc import AsyncIterator, Sequence

from indexer.errors import BrokenInvariantError
from indexer.store.apply import apply, delete_kept, write_changes
from indexer.store.errors import database_errors
from indexer.store.rows import Connection, repo_columns, repo_of
from indexer.sync.plan import Batch, KeptEvent, RecordChange, RepoWrite
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import bucket_of

CHUNK = 5_000
EXPIRED_AT_ONCE = 500


def _due(condition: str, limit: str) -> str:
    """The repos that are due; each of the two conditions has an index in this order."""
    return f"""
        select did, bucket from indexer.repo
        where status = 'desynchronized' and active and {condition}
            and coalesce(next_attempt_at, '-infinity'::timestamptz) <= to_timestamp($4)
            and bucket >= $2 and bucket < $3
        order by coalesce(next_attempt_at, '-infinity'::timestamptz) limit {limit} for update skip locked
    """


# What we have shown before goes first: it is wrong by now, not just missing. Arrays, because the planner takes an
# unknown limit for a tenth of the table, and would then join by reading all of it.
_CLAIM = f"""
    with known as materialized ({_due("rev is not null", "$1::bigint")}),
        new as materialized ({_due("rev is null", "$1::bigint - (select count(*) from known)")}),
        due as (select * from known union all select * from new)
    update indexer.repo r
    set status = 'in-progress', lease = r.lease + 1, version = r.version + 1, lease_until = to_timestamp($5),
        updated_at = now()
    where r.did = any(array(select did from due)) and r.bucket = any(array(select bucket from due))
    returning {repo_columns("r")}
"""

_RENEW = """
    update indexer.repo set lease_until = to_timestamp($4)
    where did = $1 and bucket = $2 and lease = $3 and status = 'in-progress'
    returning true
"""

_EXPIRE = """
    with expired as materialized (
        select did, bucket from indexer.repo where status = 'in-progress' and lease_until < to_timestamp($1)
        order by lease_until limit $2 for update skip locked
    )
    update indexer.repo r
    set status = 'desynchronized', reason = coalesce(r.reason, 'lease-expired'), lease_until = null,
        buffered_events = 0, buffered_bytes = 0, version = r.version + 1, updated_at = now()
    from expired e where r.did = e.did and r.bucket = e.bucket
    returning r.did
"""

_LOCK = f"select {repo_columns('r')} from indexer.repo r where did = $1 and bucket = $2 for update"

_KEPT = "select seq, frame from indexer.kept_event where did = $1 and bucket = $2 order by seq"

# A jump from each collection to the next one, whatever the number of records between.
_COLLECTIONS = """
    with recursive c as (
        (select collection from indexer.record where did = $1 and bucket = $2 order by collection limit 1)
        union all
        select (
            select r.collection from indexer.record r
            where r.did = $1 and r.bucket = $2 and r.collection > c.collection order by r.collection limit 1
        ) from c where c.collection is not null
    )
    select collection from c where collection is not null order by (collection || '/') collate "C"
"""

_STORED = """
    select rkey, cid from indexer.record where did = $1 and collection = $2 and bucket = $3 order by rkey
"""


async def claim(connection: Connection, count: int, buckets: range, until: float, now: float) -> list[Repo]:
    rows = await connection.fetch(_CLAIM, count, buckets.start, buckets.stop, now, until)
    return [repo_of(row) for row in rows]


async def renew(connection: Connection, did: str, lease: int, until: float) -> bool:
    return await connection.fetchval(_RENEW, did, bucket_of(did), lease, until) is not None


async def expire_leases(connection: Connection, now: float) -> int:
    """Within a transaction; the events that were kept go in a statement of their own, which sees the latest."""
    dids = sorted([row["did"] for row in await connection.fetch(_EXPIRE, now, EXPIRED_AT_ONCE)])
    if dids:
        await delete_kept(connection, dids)
    return len(dids)


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

        The order of (collection, rkey) is not it: `-` and `.` sort before `/`. So collections are taken in the
        order of `collection/`.
        """
        with database_errors():
            collections = await self._connection.fetch(_COLLECTIONS, *self._key)
        for (collection,) in collections:
            prefix = f"{collection}/".encode()
            did, bucket = self._key
            with database_errors():
                cursor = await self._connection.cursor(_STORED, did, collection, bucket)
            while True:
                with database_errors():
                    rows = await cursor.fetch(CHUNK)
                if not rows:
                    break
                yield [(prefix + rkey.encode(), cid) for rkey, cid in rows]

    async def write(self, changes: Sequence[RecordChange]) -> None:
        """Differences that the export showed."""
        with database_errors():
            await write_changes(self._connection, [(self._claimed.did, change, False) for change in changes])

    async def lock(self) -> Repo | None:
        """The row, locked until the end; None if it isn't the claim's any more."""
        with database_errors():
            row = await self._connection.fetchrow(_LOCK, *self._key)
        repo = None if row is None else repo_of(row)
        if repo is None or repo.status is not SyncStatus.IN_PROGRESS or repo.lease != self._claimed.lease:
            return None
        return repo

    async def kept(self) -> list[KeptEvent]:
        """What was buffered, in the order of the stream."""
        with database_errors():
            rows = await self._connection.fetch(_KEPT, *self._key)
        return [KeptEvent(self._claimed.did, seq, frame) for seq, frame in rows]

    async def finish(self, write: RepoWrite) -> None:
        """The repo's new row and what the kept events change. Raises `BrokenInvariantError` if it wasn't locked."""
        with database_errors():
            if await apply(self._connection, Batch((write,))):
                raise BrokenInvariantError(f"{write.repo.did} moved while it was locked")
        self.finished = True
