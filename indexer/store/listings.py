"""How far lists of accounts have been read, and what they say of the repos that we hold."""

from collections.abc import Mapping

from indexer.store.rows import Connection, buckets_of, of_buckets, unnest
from indexer.sync.listing import Listing, Purpose
from indexer.sync.planning import TOMBSTONED

_LOAD = """
    select purpose, source, collection, cursor, listed, found, date_part('epoch', began_at) as began_at,
        date_part('epoch', finished_at) as finished_at
    from indexer.listing where purpose = $1 and source = $2 and collection = $3
"""

_SAVE = """
    insert into indexer.listing (purpose, source, collection, cursor, listed, found, began_at, finished_at)
    values ($1, $2, $3, $4, $5, $6, to_timestamp($7), to_timestamp($8))
    on conflict (purpose, source, collection) do update
    set cursor = excluded.cursor, listed = excluded.listed, found = excluded.found, began_at = excluded.began_at,
        finished_at = excluded.finished_at
"""

DIFFERENT = f"""
    select r.did, r.active from {unnest({"did": "text", "rev": "text"}, "w", 2)}
    join indexer.repo r on r.did = w.did and {of_buckets("r")}
    where r.active and r.status = 'synchronized' and r.rev < w.rev
        or not r.active and r.hosting_status is distinct from '{TOMBSTONED}'
"""


async def load(connection: Connection, purpose: Purpose, source: str, collection: str) -> Listing | None:
    row = await connection.fetchrow(_LOAD, purpose, source, collection)
    return None if row is None else Listing(**row)


async def save(connection: Connection, listing: Listing) -> None:
    await connection.execute(
        _SAVE,
        listing.purpose,
        listing.source,
        listing.collection,
        listing.cursor,
        listing.listed,
        listing.found,
        listing.began_at,
        listing.finished_at,
    )


async def different(connection: Connection, revs: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Of active accounts at these revisions: the DIDs of repos that are synchronized at an older one, and of those that
    are hidden here by a relay's word.
    """
    rows = await connection.fetch(DIFFERENT, buckets_of(revs), list(revs), list(revs.values()))
    return [did for did, active in rows if active], [did for did, active in rows if not active]
