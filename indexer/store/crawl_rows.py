"""The table of crawl progress, and the comparison of a repo list with the table of repos."""

from collections.abc import Mapping

from indexer.store.columns import Connection, buckets_of, of_buckets, unnest
from indexer.sync.crawl_progress import CrawlProgress, Purpose
from indexer.sync.repo_state import TOMBSTONED, SyncStatus

_LOAD = """
    select purpose, source, collection, cursor, listed, found, date_part('epoch', began_at) as began_at,
        date_part('epoch', finished_at) as finished_at
    from indexer.crawl_progress where purpose = $1 and source = $2 and collection = $3
"""

_SAVE = """
    insert into indexer.crawl_progress (purpose, source, collection, cursor, listed, found, began_at, finished_at)
    values ($1, $2, $3, $4, $5, $6, to_timestamp($7), to_timestamp($8))
    on conflict (purpose, source, collection) do update
    set cursor = excluded.cursor, listed = excluded.listed, found = excluded.found, began_at = excluded.began_at,
        finished_at = excluded.finished_at
"""

_FIND_DIFFERENCES = f"""
    select r.did, r.active from {unnest({"did": "text", "rev": "text"}, "w", 2)}
    join indexer.repo r on r.did = w.did and {of_buckets("r")}
    where r.active and r.sync_status = '{SyncStatus.SYNCHRONIZED}' and r.rev < w.rev
        or not r.active and r.hosting_status is distinct from '{TOMBSTONED}'
"""


async def load_progress(connection: Connection, purpose: Purpose, source: str, collection: str) -> CrawlProgress | None:
    """Return the progress of the last crawl of this list; None if there was none."""
    row = await connection.fetchrow(_LOAD, purpose, source, collection)
    return None if row is None else CrawlProgress(**row)


async def save_progress(connection: Connection, progress: CrawlProgress) -> None:
    """Store the progress of a crawl."""
    await connection.execute(
        _SAVE,
        progress.purpose,
        progress.source,
        progress.collection,
        progress.cursor,
        progress.listed,
        progress.found,
        progress.began_at,
        progress.finished_at,
    )


async def find_differences(connection: Connection, revs: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Compare accounts that a relay lists as active, with their revs, to the stored repos.

    Returns:
        The DIDs of synchronized repos with an older rev, and the DIDs of accounts that are stored as inactive.
    """
    rows = await connection.fetch(_FIND_DIFFERENCES, buckets_of(revs), list(revs), list(revs.values()))
    return [did for did, active in rows if active], [did for did, active in rows if not active]
