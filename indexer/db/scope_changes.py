"""The effects of a changed scope: delete records, untrack repos that it does not want any more, request resyncs."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from time import time
from typing import NamedTuple

from indexer.atproto.syntax import is_nsid
from indexer.crash_points import crash_point
from indexer.db.columns import Connection, buckets_of, of_buckets, repo_columns, repo_of
from indexer.db.connections import Area
from indexer.db.crawls import LISTS_READ, CrawlProgress, Crawls, save_progress
from indexer.db.repos import LOAD_REPOS
from indexer.db.scope import holds
from indexer.db.write import change_repos, write
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.plan import plan_narrowing
from indexer.sync.repo import CHOSEN, OUT_OF_SCOPE, Repo, SyncStatus, amend, untrack, widen
from indexer.sync.scope import Scope, Track
from indexer.sync.shard import Shard

# One step along the index for each collection: there are some thousands at most.
NEXT_COLLECTION = "select collection from indexer.record where collection > $1 order by collection limit 1"

# The index has collection and indexed_at. The rest orders records that were written by one statement.
UNSELECTED = """
    select indexed_at, did, rkey from indexer.record
    where collection = $1 and bucket = any($2::smallint[]) and indexed_at >= coalesce($3, '-infinity'::timestamptz)
        and ($3::timestamptz is null or (indexed_at, did, rkey) > ($3, $4, $5))
    order by indexed_at, did, rkey limit $6
"""

# A list may lack an inactive account, so its repo keeps its version, and needs an export when it is active again.
_INCOMPLETE = f"""
    select {repo_columns("r")} from indexer.repo r
    where r.bucket = any($1::smallint[]) and r.scope_version < $2 and r.sync_status = '{SyncStatus.SYNCHRONIZED}'
        and r.active
"""
INCOMPLETE = f"{_INCOMPLETE} order by r.bucket, r.scope_version limit $3"
# Rows leave the set when they are marked, and the others stay. So the pages follow the primary key.
INCOMPLETE_AFTER = f"{_INCOMPLETE} and r.did > $3 order by r.did limit $4"

# Repos that were not fetched since then, and of which no record of the collection is stored.
NOT_FETCHED = f"""
    select {repo_columns("r")} from indexer.repo r
    where r.did = any($1::text[]) and r.bucket = any($2::smallint[]) and r.active and r.scope_version >= $3
        and r.sync_status = '{SyncStatus.SYNCHRONIZED}' and r.synchronized_at < to_timestamp($4)
        and not exists (
            select from indexer.record c
            where c.did = r.did and c.bucket = r.bucket and {of_buckets("c", 6)} and c.collection = $5
        )
"""

WAITING = f"""
    select count(*) from (
        select 1 from indexer.repo
        where bucket = any($1::smallint[]) and sync_status = '{SyncStatus.DESYNCHRONIZED}' and active and priority = 0
            and coalesce(next_attempt_at, '-infinity'::timestamptz) <= to_timestamp($2)
        limit $3
    ) waiting
"""

# Repos that no list of a signal collection has named, and no command. Pages follow the primary key.
NOT_WANTED = f"""
    select {repo_columns("r")} from indexer.repo r
    where did > $1 and bucket = any($2::smallint[]) and tracked and wanted_in < $3
    order by did limit $4
"""

# Each pattern is a range of collections.
SIGNALS = f"""
    select r.did,
        exists (
            select from unnest($3::text[], $4::text[]) p(first, after), indexer.record c
            where c.did = r.did and c.bucket = r.bucket and {of_buckets("c", 6)}
                and c.collection >= p.first and c.collection < p.after
        ) as stored,
        r.rev is not null and r.sync_status = 'synchronized' and r.scope_version >= $5 as complete
    from indexer.repo r where r.did = any($1::text[]) and r.bucket = any($2::smallint[])
"""

RecordPosition = tuple[datetime, str, str]
"""The position of a record among those of its collection, in the order in which they were written: time, DID, key."""


class NarrowedPage(NamedTuple):
    """A page of records that the scope does not select.

    Attributes:
        deleted: The number of records that were deleted.
        skipped: The number of records of repos that change at the moment; a later pass deletes them.
        last: The last record of the page; None if it was the last page.
    """

    deleted: int
    skipped: int
    last: RecordPosition | None


class ScopeChanges(Area):
    """The effects of changes of the scope on stored repos."""

    async def collections(self) -> list[str]:
        """Return the collections of all stored records."""
        async with self._pool.connection() as connection:
            found = [""]
            while (following := await connection.fetchval(NEXT_COLLECTION, found[-1])) is not None:
                found.append(following)
            return found[1:]

    async def delete_unselected(
        self, scope: Scope, collection: str, buckets: Sequence[int], after: RecordPosition | None, limit: int
    ) -> NarrowedPage | None:
        """Delete at most `limit` records of a collection that the scope does not select.

        Return None if the scope has changed: it may select the collection again.
        """
        async with self._pool.transaction() as connection:
            if not await holds(connection, scope.version):
                return None
            position = after or (None, None, None)
            rows = await connection.fetch(UNSELECTED, collection, list(buckets), *position, limit)
            keys = [(did, collection, rkey) for _, did, rkey in rows]
            dids = sorted({did for did, *_ in keys})
            found = [repo_of(row) for row in await connection.fetch(LOAD_REPOS, dids, list(buckets))]
            written = await write(connection, Batch(plan_narrowing({repo.did: repo for repo in found}, keys)))
            deleted = written.changes["delete"]
            if deleted:
                crash_point("scope.narrowed")
            return NarrowedPage(deleted, len(rows) - deleted, tuple(rows[-1]) if len(rows) == limit else None)

    async def incomplete_repos(self, scope: Scope, buckets: Sequence[int], after: str, limit: int) -> list[Repo]:
        """Return the next synchronized repos of active accounts after this DID that may lack records of the scope."""
        rows = await self._fetch(INCOMPLETE_AFTER, list(buckets), scope.complete_from, after, limit)
        return [repo_of(row) for row in rows]

    async def mark_complete(self, repos: Sequence[Repo], scope: Scope) -> int:
        """Note that these repos lack no records; return how many did not change meanwhile."""
        async with self._pool.transaction() as connection:
            marked = await change_repos(connection, repos, lambda repo: amend(repo, scope_version=scope.version))
            crash_point("scope.marked")
            return marked

    async def mark_incomplete(self, dids: Sequence[str], collection: str, added_in: int, fetched_before: float) -> int:
        """Note that listed repos lack records of an added collection; return how many.

        Repos with such a record, and those that were fetched since `fetched_before`, lack none.
        """
        async with self._pool.transaction() as connection:
            buckets = buckets_of(dids)
            rows = await connection.fetch(NOT_FETCHED, dids, buckets, added_in, fetched_before, collection, buckets)
            repos = map(repo_of, rows)
            return await change_repos(connection, repos, lambda repo: amend(repo, scope_version=added_in - 1))

    async def request_incomplete(self, scope: Scope, buckets: Sequence[int], max_waiting: int, now: float) -> int:
        """Desynchronize repos that may lack records, while fewer than `max_waiting` are due; return how many.

        The others wait, synchronized: their commits are applied until their turn comes.
        """
        async with self._pool.transaction() as connection:
            waiting = await connection.fetchval(WAITING, list(buckets), now, max_waiting)
            if waiting >= max_waiting:
                return 0
            rows = await connection.fetch(INCOMPLETE, list(buckets), scope.complete_from, max_waiting - waiting)
            requested = await change_repos(connection, map(repo_of, rows), widen)
            if rows:
                crash_point("scope.requested")
            return requested

    async def begin_untracking(self, shard: Shard) -> CrawlProgress:
        """Return the progress of the search for repos out of scope, or that of a new search."""
        stored = await Crawls(self._pool).progress("untrack", "", shard=str(shard))
        return stored or CrawlProgress("untrack", "", shard=str(shard), began_at=time())

    async def unread_lists(self, scope: Scope) -> list[str]:
        """Return the signal collections whose list has not been read since the scope changed."""
        read = {row["collection"] for row in await self._fetch(LISTS_READ)}
        return [pattern for pattern in scope.signal_patterns if is_nsid(pattern) and pattern not in read]

    async def untrack_page(
        self, scope: Scope, shard: Shard, progress: CrawlProgress, limit: int
    ) -> tuple[int, CrawlProgress] | None:
        """Untrack those of the next `limit` repos that are out of scope; return how many, and the stored progress.

        Return None if the scope has changed. A repo is out of scope if no command, no list and no message has wanted it
        since the scope wanted fewer repos, and if no record of a signal collection is stored. A signal pattern that
        ends in `.*` has no list. So a repo is looked at again later whose records of it are not complete yet, and one
        whose row changes meanwhile: a command may have named it, or the live path may have written a signal record.
        """
        async with self._pool.transaction() as connection:
            if not await holds(connection, scope.version):
                return None
            buckets, since = list(shard.buckets), scope.repos_narrowed_in
            rows = await connection.fetch(NOT_WANTED, progress.cursor or "", buckets, since, limit)
            page = {row["did"]: repo_of(row) for row in rows}
            found, incomplete = await _without_signal(connection, scope, list(page))
            writes = [RepoWrite(page[did], untrack(page[did], OUT_OF_SCOPE, time())) for did in found]
            skipped = (await write(connection, Batch(tuple(writes)))).skipped
            untracked, incomplete = len(writes) - len(skipped), incomplete + len(skipped)
            after = progress.after_page(rows[-1]["did"] if len(rows) == limit else None, len(page), incomplete, time())
            if after.finished_at is not None and after.found:
                after = replace(after, finished_at=None, found=0)
            await save_progress(connection, after)
            if untracked:
                crash_point("scope.untracked")
            return untracked, after

    async def count_not_chosen(self) -> int:
        """Return the number of tracked repos that no command has named. Reads all repos."""
        return int(await self._fetchval(f"select count(*) from indexer.repo where tracked and wanted_in < {CHOSEN}"))


async def _without_signal(connection: Connection, scope: Scope, dids: Sequence[str]) -> tuple[list[str], int]:
    """Return the repos without a record of a signal collection, and the number of those of which it is not known."""
    if scope.track is not Track.SIGNAL or not dids:
        return list(dids), 0
    patterns, buckets = scope.signal_patterns, buckets_of(dids)
    first = [pattern.removesuffix("*") for pattern in patterns]
    # NSIDs have only letters, digits, "-" and ".". In ASCII, " " is before all of them, and "/" is the next after ".".
    after = ["~" if one == "*" else one + " " if is_nsid(one) else one[:-2] + "/" for one in patterns]
    rows = await connection.fetch(SIGNALS, dids, buckets, first, after, scope.complete_from, buckets)
    without = [row for row in rows if not row["stored"]]
    decided = sorted(row["did"] for row in without if row["complete"] or all(map(is_nsid, patterns)))
    return decided, len(without) - len(decided)
