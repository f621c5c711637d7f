"""The rows of repos: load, add and change them, erase their records, and request resyncs and takedowns."""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass

import asyncpg

from indexer.crash_points import crash_point
from indexer.db.columns import Connection, buckets_of, repo_columns, repo_of
from indexer.db.connections import Area
from indexer.db.database_errors import DatabaseError
from indexer.db.layout import estimate_rows
from indexer.db.scope import invalid_arguments
from indexer.db.write import write
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from indexer.sync.repo import CHOSEN, OUT_OF_SCOPE, TOMBSTONED, Repo, SyncStatus, erase, named
from indexer.sync.shard import bucket_of

BATCH_SIZE = 1_000
"""Repos that one statement adds or requests. The live path waits for the rows of an open transaction."""

ERASED_RECORDS = 10_000
"""Records that one transaction erases."""

_REQUEST_RESYNCS = "select count(*) filter (where atproto.request_resync(did)) from unnest($1::text[]) did"

LOAD_REPOS = f"""
    select {repo_columns("r")} from indexer.repo r where did = any($1::text[]) and bucket = any($2::smallint[])
"""
"""Takes DIDs and their buckets."""

_TRACKED = "select did from indexer.repo where did = any($1::text[]) and bucket = any($2::smallint[]) and tracked"

_PAGE = f"""
    select did, not $3 or (sync_status = '{SyncStatus.DESYNCHRONIZED}' and last_failure is not null) as selected
    from indexer.repo where did > $1 order by did limit $2
"""

_TAKE_DOWN = "select indexer.take_down($1, $2, $3)"

_TO_NAME = f"""
    select {repo_columns("r")} from indexer.repo r
    where did = any($1::text[]) and bucket = any($2::smallint[]) and (
        tracked and wanted_in < $3 or from_stream and rev is null
        or not tracked and hosting_status = '{OUT_OF_SCOPE}'
    )
"""

# An account whose DID is gone is checked before its first batch (`due_gone`). After that batch it has no rev.
_IS_GONE = f"hosting_status is not distinct from '{TOMBSTONED}' and rev is not null"
_DUE = "from indexer.repo where erase_at <= to_timestamp($1) and not active and bucket = any($2::smallint[])"
_ERASE_NEXT = f"select did {_DUE} and not ({_IS_GONE}) order by erase_at limit 1"
_ERASE_GONE = f"select did {_DUE} and {_IS_GONE} order by erase_at limit $3"

# The account may have become active since it was found.
_ERASED_REPO = f"""
    select {repo_columns("r")} from indexer.repo r
    where did = $2 and bucket = $3 and erase_at <= to_timestamp($1) and not active
"""

_SOME_RECORDS = "select collection, rkey from indexer.record where did = $1 and bucket = $2 limit $3"


@dataclass(frozen=True, slots=True)
class ErasedBatch:
    """The result of one erasure.

    Attributes:
        records: The number of erased records; 0 if the account has just become active again.
        finished: True if the repo has no records left.
    """

    did: str
    records: int
    finished: bool


class Repos(Area):
    """The rows of repos, and what commands request for them."""

    async def load(self, dids: Sequence[str]) -> dict[str, Repo]:
        """Return the rows of the repos by DID; unknown DIDs are left out."""
        rows = await self._fetch(LOAD_REPOS, list(dids), buckets_of(dids))
        return {row["did"]: repo_of(row) for row in rows}

    async def tracked(self, dids: Sequence[str]) -> set[str]:
        """Return the DIDs among these whose repos are tracked."""
        return {did for (did,) in await self._fetch(_TRACKED, list(dids), buckets_of(dids))}

    async def update(self, did: str, plan: Callable[[Repo], Repo]) -> Repo | None:
        """Replace the row by `plan(row)`, which is called again if the row changes meanwhile; return the written row.

        Nothing is written, and None is returned, if there is no row or if `plan` returns the same object.
        """
        while True:
            repo = (await self.load([did])).get(did)
            if repo is None or (after := plan(repo)) is repo:
                return None
            async with self._pool.transaction() as connection:
                written = await write(connection, Batch((RepoWrite(repo, after),)))
            if not written.skipped:
                return after

    async def add(self, dids: Iterable[str]) -> int:
        """Add the repos that have no row; return how many. Repos that were untracked stay untracked."""
        async with self._pool.connection() as connection:
            return await add_repos(connection, dids)

    async def request_resyncs(self, dids: Sequence[str]) -> int:
        """Request a resync of each repo; return how many of the repos exist."""
        return int(await self._fetchval(_REQUEST_RESYNCS, list(dids)))

    async def request_resyncs_of_all(self, *, errored: bool = False) -> AsyncGenerator[tuple[int, int]]:
        """Request a resync of all repos, or of those whose last resync failed.

        Yields the numbers of repos that were read, and that were requested, for each transaction.
        """
        async with self._pool.connection() as connection:
            page = await connection.fetch(_PAGE, "", BATCH_SIZE, errored)
            while page:
                dids = [did for did, selected in page if selected]
                yield len(page), int(await connection.fetchval(_REQUEST_RESYNCS, dids))
                page = await connection.fetch(_PAGE, page[-1]["did"], BATCH_SIZE, errored)

    async def estimate_count(self) -> int:
        """Return an estimate of the number of repos."""
        async with self._pool.connection() as connection:
            return await estimate_rows(connection, "indexer.repo")

    async def set_takedown(self, target: str, *, on: bool, reason: str | None = None) -> bool:
        """Hide a repo, or the record with this AT-URI, or show it again; return False if the repo does not exist.

        Raises:
            InvalidScopeError: The record is redacted, and cannot be shown, or there are too many.
        """
        with invalid_arguments():
            try:
                return bool(await self._fetchval(_TAKE_DOWN, target, on, reason))
            except DatabaseError as error:
                # Tasks that hold the scope wait for the repo; the others take both in the order of a resync.
                if not isinstance(error.__cause__, asyncpg.DeadlockDetectedError):
                    raise
                return bool(await self._fetchval(_TAKE_DOWN, target, on, reason))

    async def due_gone(self, buckets: Sequence[int], limit: int, now: float) -> list[str]:
        """Return DIDs that are gone from their directory, and whose records are due to be erased after a last check."""
        return [row["did"] for row in await self._fetch(_ERASE_GONE, now, list(buckets), limit)]

    async def erase_batch(self, buckets: Sequence[int], now: float, *, did: str | None = None) -> ErasedBatch | None:
        """Erase records of one account that is due; return None if no account is due.

        `did` names the account. Without it, one is chosen, but none whose DID is gone from its directory.

        Each record is logged as deleted. The repo loses its head first. If the account becomes active again in between,
        a resync fetches all its records. If its row changes meanwhile, nothing is erased.
        """
        async with self._pool.transaction() as connection:
            did = did or await connection.fetchval(_ERASE_NEXT, now, list(buckets))
            if did is None:
                return None
            row = await connection.fetchrow(_ERASED_REPO, now, did, bucket_of(did))
            if row is None:
                return ErasedBatch(did, 0, finished=False)
            repo = repo_of(row)
            records = await connection.fetch(_SOME_RECORDS, did, bucket_of(did), ERASED_RECORDS)
            finished = len(records) < ERASED_RECORDS
            after = erase(repo)._replace(erase_at=None if finished else repo.erase_at)
            deletes = tuple([RecordChange("delete", collection, rkey, None) for collection, rkey in records])
            written = await write(connection, Batch((RepoWrite(repo, after, deletes),)))
            crash_point("erasure.written")
            return ErasedBatch(did, written.changes["delete"], finished and not written.skipped)


async def add_repos(
    connection: Connection,
    dids: Iterable[str],
    *,
    wanted_in: int = CHOSEN,
    wanted_before: int = CHOSEN,
    from_stream: bool = False,
) -> int:
    """Start tracking repos; return how many were not tracked yet.

    Repos that the stream added, and that were not fetched yet, no longer count as new accounts of their host, unless
    `from_stream`. Repos that an operator untracked stay untracked.

    Args:
        connection: The connection, within a transaction.
        dids: The repos.
        wanted_in: The version of the scope that wants them; by default a command does.
        wanted_before: Also mark repos that are tracked already, if they were wanted only before this version.
        from_stream: Only their own host has named them, which proves as little as a message of the stream.
    """
    repos = [Repo(did, version=1, wanted_in=wanted_in, from_stream=from_stream) for did in sorted(set(dids))]
    added = 0
    for start in range(0, len(repos), BATCH_SIZE):
        batch = repos[start : start + BATCH_SIZE]
        skipped = (await write(connection, Batch(tuple([RepoWrite(Repo(repo.did), repo) for repo in batch])))).skipped
        known = await _name_known(connection, sorted(skipped), wanted_in, wanted_before, from_stream=from_stream)
        added += len(batch) - len(skipped) + known
    return added


async def _name_known(
    connection: Connection, dids: Sequence[str], wanted_in: int, wanted_before: int, *, from_stream: bool
) -> int:
    """Mark repos that have a row as named; return how many were out of scope, and are tracked again."""
    tracked = 0
    while dids:
        rows = await connection.fetch(_TO_NAME, dids, buckets_of(dids), wanted_before)
        repos = [repo for repo in map(repo_of, rows) if repo.out_of_scope or not from_stream]
        writes = [RepoWrite(repo, named(repo, wanted_in, wanted_before, from_stream=from_stream)) for repo in repos]
        dids = sorted((await write(connection, Batch(tuple(writes)))).skipped)
        tracked += sum(repo.out_of_scope and repo.did not in dids for repo in repos)
    return tracked
