"""Requests of commands: track repos, request resyncs, take repos down."""

from collections.abc import Iterable, Sequence

from indexer.store.apply_batch import INSERT_REPOS
from indexer.store.columns import Connection, repo_arrays
from indexer.sync.repo_state import Repo, SyncStatus

BATCH_SIZE = 1_000
"""Repos that one statement adds or requests. The live path waits for the rows of an open transaction."""

_REQUEST_RESYNCS = "select count(*) filter (where atproto.request_resync(did)) from unnest($1::text[]) did"

_PAGE = f"""
    select did, not $3 or (sync_status = '{SyncStatus.DESYNCHRONIZED}' and last_error is not null) as selected
    from indexer.repo where did > $1 order by did limit $2
"""

_REQUEST_TAKEDOWN = "select atproto.request_takedown($1, $2)"


async def add_repos(connection: Connection, dids: Iterable[str]) -> int:
    """Start to track repos; return how many were not tracked yet."""
    repos = [Repo(did, version=1) for did in sorted(set(dids))]
    added = 0
    for start in range(0, len(repos), BATCH_SIZE):
        added += len(await connection.fetch(INSERT_REPOS, *repo_arrays(repos[start : start + BATCH_SIZE])))
    return added


async def request_resyncs(connection: Connection, dids: Sequence[str]) -> int:
    """Request a resync of each repo; return how many of the repos exist."""
    requested: int = await connection.fetchval(_REQUEST_RESYNCS, list(dids))
    return requested


async def request_resyncs_of_all(connection: Connection, *, errored: bool) -> int:
    """Request a resync of all repos, or of those whose last resync failed; return of how many.

    Each page of `BATCH_SIZE` repos is one transaction.
    """
    requested, page = 0, await connection.fetch(_PAGE, "", BATCH_SIZE, errored)
    while page:
        requested += await request_resyncs(connection, [did for did, selected in page if selected])
        page = await connection.fetch(_PAGE, page[-1]["did"], BATCH_SIZE, errored)
    return requested


async def set_takedown(connection: Connection, did: str, *, on: bool) -> bool:
    """Hide the repo locally, or show it again; return False if the repo does not exist."""
    known: bool = await connection.fetchval(_REQUEST_TAKEDOWN, did, on)
    return known
