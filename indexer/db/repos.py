"""The rows of repos: load, add and change them, and request resyncs and takedowns."""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import NamedTuple

from indexer.db.columns import Connection, buckets_of, repo_columns, repo_of
from indexer.db.connections import Area
from indexer.db.layout import estimate_rows
from indexer.db.write import write
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.repo import CHOSEN, OUT_OF_SCOPE, Repo, SyncStatus, named

BATCH_SIZE = 1_000
"""Repos that one statement adds or requests. The live path waits for the rows of an open transaction."""

_REQUEST_RESYNCS = "select count(*) filter (where atproto.request_resync(did)) from unnest($1::text[]) did"

LOAD_REPOS = f"""
    select {repo_columns("r")} from indexer.repo r where did = any($1::text[]) and bucket = any($2::smallint[])
"""
"""Takes DIDs and their buckets."""

_PAGE = f"""
    select did, not $3 or (sync_status = '{SyncStatus.DESYNCHRONIZED}' and last_failure is not null) as selected
    from indexer.repo where did > $1 order by did limit $2
"""

_REQUEST_TAKEDOWN = "select atproto.request_takedown($1, $2)"

_TO_NAME = f"""
    select {repo_columns("r")} from indexer.repo r
    where did = any($1::text[]) and bucket = any($2::smallint[]) and (
        tracked and wanted_in < $3 or from_stream and rev is null
        or not tracked and hosting_status = '{OUT_OF_SCOPE}'
    )
"""


class RequestedPage(NamedTuple):
    """A page of repos of which resyncs were requested.

    Attributes:
        repos: Number of repos in the page.
        requested: Number of those of which a resync was requested.
    """

    repos: int
    requested: int


class Repos(Area):
    """The rows of repos, and what commands request for them."""

    async def load(self, dids: Sequence[str]) -> dict[str, Repo]:
        """Return the rows of the repos by DID; unknown DIDs are left out."""
        rows = await self._fetch(LOAD_REPOS, list(dids), buckets_of(dids))
        return {row["did"]: repo_of(row) for row in rows}

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
        async with self._pool.connection() as connection:
            return await _request_resyncs(connection, dids)

    async def request_resyncs_of_all(self, *, errored: bool = False) -> AsyncGenerator[RequestedPage]:
        """Request a resync of all repos, or of those whose last resync failed; yield each page.

        Each page of `BATCH_SIZE` repos is one transaction.
        """
        async with self._pool.connection() as connection:
            page = await connection.fetch(_PAGE, "", BATCH_SIZE, errored)
            while page:
                requested = await _request_resyncs(connection, [did for did, selected in page if selected])
                yield RequestedPage(len(page), requested)
                page = await connection.fetch(_PAGE, page[-1]["did"], BATCH_SIZE, errored)

    async def estimate_count(self) -> int:
        """Return an estimate of the number of repos."""
        async with self._pool.connection() as connection:
            return await estimate_rows(connection, "indexer.repo")

    async def set_takedown(self, did: str, *, on: bool) -> bool:
        """Hide the repo locally, or show it again; return False if the repo does not exist."""
        known: bool = await self._fetchval(_REQUEST_TAKEDOWN, did, on)
        return known


async def add_repos(
    connection: Connection, dids: Iterable[str], *, wanted_in: int = CHOSEN, wanted_before: int = CHOSEN
) -> int:
    """Start tracking repos; return how many were not tracked yet.

    Repos that the stream added, and that were not fetched yet, no longer count as new accounts of their host. Repos
    that an operator untracked stay untracked.

    Args:
        connection: The connection, within a transaction.
        dids: The repos.
        wanted_in: The version of the scope that wants them; by default a command does.
        wanted_before: Also mark repos that are tracked already, if they were wanted only before this version.
    """
    repos = [Repo(did, version=1, wanted_in=wanted_in) for did in sorted(set(dids))]
    added = 0
    for start in range(0, len(repos), BATCH_SIZE):
        batch = repos[start : start + BATCH_SIZE]
        skipped = (await write(connection, Batch(tuple([RepoWrite(Repo(repo.did), repo) for repo in batch])))).skipped
        added += len(batch) - len(skipped) + await _name_known(connection, sorted(skipped), wanted_in, wanted_before)
    return added


async def _name_known(connection: Connection, dids: Sequence[str], wanted_in: int, wanted_before: int) -> int:
    """Mark repos that have a row as named; return how many were out of scope, and are tracked again."""
    tracked = 0
    while dids:
        rows = await connection.fetch(_TO_NAME, dids, buckets_of(dids), wanted_before)
        repos = [repo_of(row) for row in rows]
        writes = [RepoWrite(repo, named(repo, wanted_in, wanted_before)) for repo in repos]
        dids = sorted((await write(connection, Batch(tuple(writes)))).skipped)
        tracked += sum(repo.out_of_scope and repo.did not in dids for repo in repos)
    return tracked


async def _request_resyncs(connection: Connection, dids: Sequence[str]) -> int:
    requested: int = await connection.fetchval(_REQUEST_RESYNCS, list(dids))
    return requested
