"""Untrack the repos that the scope does not want any more, page by page."""

from collections.abc import Sequence
from dataclasses import replace
from time import time
from typing import NamedTuple

from indexer.atproto.syntax import is_nsid
from indexer.crash_points import crash_point
from indexer.db import crawls, scope_row
from indexer.db.columns import Connection, buckets_of, of_buckets, repo_columns, repo_of
from indexer.db.connections import Area
from indexer.db.crawls import CrawlProgress
from indexer.db.write import write
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.repo import CHOSEN, OUT_OF_SCOPE, untrack
from indexer.sync.scope import Scope, Track
from indexer.sync.shard import Shard

# Repos that no list of a signal collection has named, and no command. Pages follow the primary key.
NOT_WANTED = f"""
    select {repo_columns("r")} from indexer.repo r
    where did > $1 and bucket = any($2::smallint[]) and tracked and wanted_in < $3
    order by did limit $4
"""

# Each pattern that is no NSID is a range of collections.
SIGNALS = f"""
    select r.did,
        exists (
            select from indexer.record c
            where c.did = r.did and c.bucket = r.bucket and {of_buckets("c", 7)} and c.collection = any($3::text[])
        ) or exists (
            select from unnest($4::text[], $5::text[]) p(first, after), indexer.record c
            where c.did = r.did and c.bucket = r.bucket and {of_buckets("c", 7)}
                and c.collection >= p.first and c.collection < p.after
        ) as stored,
        r.rev is not null and r.sync_status = 'synchronized' and r.scope_version >= $6 as complete
    from indexer.repo r where r.did = any($1::text[]) and r.bucket = any($2::smallint[])
"""

_LISTS_READ = "select collection from indexer.crawl_progress where purpose = 'signal' and finished_at is not null"
_COUNT_NOT_CHOSEN = f"select count(*) from indexer.repo where tracked and wanted_in < {CHOSEN}"
# Citus needs a column in the inner query.
_COUNT_THEIR_RECORDS = f"""
    select count(*) from (
        select c.did from indexer.record c join indexer.repo r on r.did = c.did and r.bucket = c.bucket
        where r.tracked and r.wanted_in < {CHOSEN} limit $1
    ) found
"""


class NotChosen(NamedTuple):
    """The tracked repos that no command has named, and the number of their records, at most a limit."""

    repos: int
    records: int


class UntrackedPage(NamedTuple):
    """A page of repos that may be out of scope.

    Attributes:
        untracked: The number of repos that were untracked.
        progress: The progress of the search after the page.
    """

    untracked: int
    progress: CrawlProgress


class OutOfScope(Area):
    """The search for repos that are out of scope."""

    async def begin(self, shard: Shard) -> CrawlProgress:
        """Return the progress of the search for repos out of scope, or that of a new search."""
        async with self._pool.connection() as connection:
            stored = await crawls.load_progress(connection, "untrack", "", "", str(shard))
            return stored or CrawlProgress("untrack", "", shard=str(shard), began_at=time())

    async def unread_lists(self, scope: Scope) -> list[str]:
        """Return the signal collections whose list has not been read since the scope changed."""
        async with self._pool.connection() as connection:
            read = {row["collection"] for row in await connection.fetch(_LISTS_READ)}
            return [pattern for pattern in scope.signal_patterns if is_nsid(pattern) and pattern not in read]

    async def untrack_page(
        self, scope: Scope, shard: Shard, progress: CrawlProgress, limit: int
    ) -> UntrackedPage | None:
        """Untrack those of the next `limit` repos that are out of scope, and store the progress.

        Return None if the scope has changed. A repo is out of scope if no command, no list and no message has wanted it
        since the scope wanted fewer repos, and if no record of a signal collection is stored. A signal pattern that
        ends in `.*` has no list. So a repo is looked at again later whose records of it are not complete yet, and one
        whose row changes meanwhile: a command may have named it, or the live path may have written a signal record.
        """
        async with self._pool.transaction() as connection:
            if not await scope_row.holds(connection, scope.version):
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
            await crawls.save_progress(connection, after)
            if untracked:
                crash_point("scope.untracked")
            return UntrackedPage(untracked, after)

    async def count_not_chosen(self, limit: int) -> NotChosen:
        """Count the tracked repos that no command has named, and at most `limit` of their records. Reads all repos."""
        async with self._pool.connection() as connection:
            repos = await connection.fetchval(_COUNT_NOT_CHOSEN)
            return NotChosen(repos, await connection.fetchval(_COUNT_THEIR_RECORDS, limit) if repos else 0)


async def _without_signal(connection: Connection, scope: Scope, dids: Sequence[str]) -> tuple[list[str], int]:
    """Return the repos without a record of a signal collection, and the number of those of which it is not known."""
    if scope.track is not Track.SIGNAL or not dids:
        return list(dids), 0
    exact = [pattern for pattern in scope.signal_patterns if is_nsid(pattern)]
    # In ASCII, the character after "." is "/". NSIDs have only letters, digits, "-" and ".".
    prefixes = [pattern.removesuffix("*") for pattern in scope.signal_patterns if not is_nsid(pattern)]
    ends = [prefix[:-1] + "/" if prefix else "~" for prefix in prefixes]
    buckets = buckets_of(dids)
    rows = await connection.fetch(SIGNALS, dids, buckets, exact, prefixes, ends, scope.complete_from, buckets)
    without = [row for row in rows if not row["stored"]]
    decided = sorted(row["did"] for row in without if row["complete"] or not prefixes)
    return decided, len(without) - len(decided)
