"""Records, accounts and collections that are redacted or hidden: note them, and delete what is stored of them.

The scope leaves them out (`Scope.removed`, `CollectionFilter.excluded`), so nothing stores them again. A redacted
account is untracked, and stays so.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from time import monotonic, time
from typing import Any

from indexer.crash_points import crash_point
from indexer.db import identities
from indexer.db.columns import buckets_of, columns_of, of_buckets, repo_of, unnest
from indexer.db.connections import Area
from indexer.db.database_errors import DatabaseError
from indexer.db.repos import LOAD_REPOS
from indexer.db.scope import holds, invalid_arguments
from indexer.db.write import change_repos, write
from indexer.reasons import Desync, FetchFailure
from indexer.sync.changes import Batch, RecordKey
from indexer.sync.plan import plan_removal
from indexer.sync.repo import Repo, SyncStatus, Trigger, desynchronize
from indexer.sync.scope import Scope
from indexer.sync.shard import bucket_of

BATCH_SIZE = 1_000
"""Records of one transaction, or their repos. The live path waits for the rows of their repos."""
PAUSE = 5.0
"""Seconds until a repo may be claimed again whose resync was ended, so that its records can be deleted."""
RETRY_SECONDS = 0.1
"""Pause between two looks at whether other transactions have ended."""
WRITERS_SECONDS = 120.0
"""Maximum time to wait for other transactions. Those of the indexer are shorter."""

_KEY = {"did": "text", "collection": "text", "rkey": "text"}
_STORED = f"""
    select r.did, r.collection, r.rkey from indexer.record r join {unnest(_KEY, "w", 2)}
        on r.did = w.did and r.collection = w.collection and r.rkey = w.rkey
    where {of_buckets("r")}
"""
_OF_COLLECTION = "select did, rkey from indexer.record where collection = $1 limit $2"
_REMOVED = "select target, action, role, reason, at from indexer.removed where target = any($1::text[])"
_BUFFERING = "select distinct did from indexer.buffered_event where position(convert_to($1, 'UTF8') in frame) > 0"
# All dead letters of an account are deleted: a frame that was cut off may name no record.
_DELETE_DEAD_LETTERS = """
    delete from indexer.dead_letter
    where did = $1 or ($1 is null or did is null) and position(convert_to($2, 'UTF8') in frame) > 0 returning true
"""
_DELETE_SET_ASIDE = """
    delete from indexer.feed_set_aside
    where did = coalesce($1, did) and collection = coalesce($2, collection) and rkey = coalesce($3, rkey)
"""
_DELETE_IDENTITY = "delete from indexer.identity where did = $1 and bucket = $2"
# A statement locks its table before it sees which removals are committed, and its transaction holds the lock.
_WRITING = """
    select pid, virtualtransaction from pg_locks
    where mode = 'RowExclusiveLock' and relation in ('indexer.dead_letter'::regclass, 'indexer.identity'::regclass)
        and database = (select oid from pg_database where datname = current_database())
"""


class Removals(Area):
    """Reads and writes of what operators have redacted or hidden."""

    async def add(self, target: str, action: str, reason: str | None = None) -> bool:
        """Note that a target is redacted (`redact`), hidden (`hide`) or shown again (`show`); False if it was before.

        A hidden account is not a target: `Repos.set_takedown`.

        Raises:
            InvalidScopeError: The target is invalid, it is redacted and cannot be shown, or there are too many.
        """
        with invalid_arguments():
            return bool(await self._fetchval("select indexer.remove($1, $2, $3)", target, action, reason))

    async def of(self, *targets: str) -> list[dict[str, Any]]:
        """Return those of the targets that are redacted or hidden, as rows of `indexer.removed`."""
        return [dict(row) for row in await self._fetch(_REMOVED, targets)]

    async def stored(self, scope: Scope, buckets: Iterable[int]) -> AsyncIterator[list[RecordKey]]:
        """Yield the keys of stored records that are redacted or hidden one by one."""
        owned, dids = set(buckets), list(scope.removed)
        for start in range(0, len(dids), BATCH_SIZE):
            some = [did for did in dids[start : start + BATCH_SIZE] if bucket_of(did) in owned]
            keys = [(did, *path.decode().partition("/")[::2]) for did in some for path in scope.removed[did]]
            if rows := await self._fetch(_STORED, buckets_of(some), *columns_of(keys, _KEY)):
                yield [(did, collection, rkey) for did, collection, rkey in rows]

    async def delete(self, scope: Scope, keys: Sequence[RecordKey]) -> int | None:
        """Delete records, and log that; return how many were stored, or None if something has changed meanwhile.

        From then on, no process writes the repos by an earlier scope. A resync in progress would write them again, and
        has buffered messages, so it is ended first, in a transaction of its own: it may wait for the row of the repo,
        and have locked records.
        """
        async with self._pool.transaction() as connection:
            dids = sorted({did for did, *_ in keys})
            if not await holds(connection, scope.version, dids):
                return None
            found = {row["did"]: repo_of(row) for row in await connection.fetch(LOAD_REPOS, dids, buckets_of(dids))}
            leased = [repo for repo in found.values() if repo.sync_status is SyncStatus.IN_PROGRESS]
            if leased:
                await change_repos(connection, leased, _end_resync)
                return None
            written = await write(connection, Batch(plan_removal(found, keys, scope)))
            crash_point("scope.removed")
            return None if written.skipped else written.changes["delete"]

    async def of_collection(self, collection: str) -> list[RecordKey]:
        """Return the keys of some stored records of a collection."""
        rows = await self._fetch(_OF_COLLECTION, collection, BATCH_SIZE)
        return [(did, collection, rkey) for did, rkey in rows]

    async def delete_messages(self, did: str | None, collection: str | None, rkey: str | None) -> int:
        """Delete messages that may have the content of a target; return the number of dead letters.

        The parts that the target does not name are None. With a whole account, its identity is deleted, too. Resyncs
        end that have buffered messages with records of a collection. First, this waits for the end of transactions that
        may not have seen the removal: what they store is not visible before.

        Raises:
            DatabaseError: The database is unavailable, or such a transaction takes longer than `WRITERS_SECONDS`.
        """
        writing, end = set(await self._fetch(_WRITING)), monotonic() + WRITERS_SECONDS
        while writing := writing.intersection(await self._fetch(_WRITING)):
            if monotonic() > end:
                pids = ", ".join([str(pid) for pid, _ in writing])
                text = f"the transactions of these sessions (pids) do not end: {pids}; end them, and repeat the command"
                raise DatabaseError(FetchFailure.TIMEOUT, text)
            await asyncio.sleep(RETRY_SECONDS)
        text = did or f"{collection}/"
        for (buffering,) in () if did else await self._fetch(_BUFFERING, text):
            await self._fetchval("select atproto.request_resync($1)", buffering)
        async with self._pool.transaction() as connection:
            deleted = await connection.fetch(_DELETE_DEAD_LETTERS, did, text)
            await connection.execute(_DELETE_SET_ASIDE, did, collection, rkey)
            if did and not collection:
                await connection.execute(_DELETE_IDENTITY, did, bucket_of(did))
                await identities.notify(connection, [did])
            return len(deleted)


def _end_resync(repo: Repo) -> Repo:
    now = time()
    return desynchronize(repo, Trigger.REQUESTED, Desync.REQUESTED, now)._replace(next_attempt_at=now + PAUSE)
