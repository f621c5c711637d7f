"""The table of crawl progress, and the comparison of a repo list with the table of repos."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from indexer.db.columns import Connection, buckets_of, of_buckets, unnest
from indexer.db.crawl_progress import CrawlProgress, Purpose
from indexer.sync.repo import OUT_OF_SCOPE, TOMBSTONED, SyncStatus
from indexer.sync.shard import Shard

_LOAD = """
    select purpose, source, collection, cursor, listed, found, date_part('epoch', began_at) as began_at,
        date_part('epoch', finished_at) as finished_at, shard, last_gap
    from indexer.crawl_progress where purpose = $1 and source = $2 and collection = $3 and shard = $4
"""

_RECHECKS = """
    select purpose, source, collection, cursor, listed, found, date_part('epoch', began_at) as began_at,
        date_part('epoch', finished_at) as finished_at, shard, last_gap
    from indexer.crawl_progress where purpose = 'recheck' order by collection
"""

_SAVE = """
    insert into indexer.crawl_progress
        (purpose, source, collection, cursor, listed, found, began_at, finished_at, shard, last_gap)
    values ($1, $2, $3, $4, $5, $6, to_timestamp($7), to_timestamp($8), $9, $10)
    on conflict (purpose, source, collection, shard) do update
    set cursor = excluded.cursor, listed = excluded.listed, found = excluded.found, began_at = excluded.began_at,
        finished_at = excluded.finished_at, last_gap = excluded.last_gap
"""

_FIND_DIFFERENCES = f"""
    select r.did,
        r.active and r.sync_status <> '{SyncStatus.DESYNCHRONIZED}' and (r.rev is null or r.rev < w.rev) as behind,
        r.withheld_since is not null
            or not r.active and r.tracked and r.hosting_status is distinct from '{TOMBSTONED}' as hidden,
        r.from_stream and r.rev is null and r.tracked as only_from_stream,
        not r.tracked and r.hosting_status is not distinct from '{OUT_OF_SCOPE}' as unknown
    from {unnest({"did": "text", "rev": "text"}, "w", 2)}
    join indexer.repo r on r.did = w.did and {of_buckets("r")}
"""


_ACTIVE = """
    select did from indexer.repo where did > $1 and active and rev is not null and bucket = any($2::smallint[])
    order by did limit $3
"""


class ListDifferences(NamedTuple):
    """The differences between a page of a repo list and the stored repos, as DIDs.

    Attributes:
        behind: Repos with an older rev that are synchronized or being fetched.
        hidden: Accounts that are stored as inactive, or as withheld by the relay.
        unknown: Accounts without a stored repo, and those that were out of scope.
        only_from_stream: Repos that the stream added, that no list has named before, and that were not fetched yet.
    """

    behind: list[str]
    hidden: list[str]
    unknown: list[str]
    only_from_stream: list[str]


def join_differences(parts: Iterable[ListDifferences]) -> ListDifferences:
    """Return the differences of a page from those of its parts."""
    return ListDifferences(*[list(chain.from_iterable(lists)) for lists in zip(*parts, strict=True)])


async def load_progress(
    connection: Connection, purpose: Purpose, source: str, collection: str, shard: str
) -> CrawlProgress | None:
    """Return the progress of the last crawl of this list; None if there was none."""
    row = await connection.fetchrow(_LOAD, purpose, source, collection, shard)
    return None if row is None else CrawlProgress(**row)


async def rechecks(connection: Connection, shard: Shard) -> list[CrawlProgress]:
    """Return the lists of added collections that are to be compared again with the repos of this shard.

    After a change of the number of shards, the lists of former shards with some of these repos are among them, until
    this shard has a progress of its own that began at the same time or later.
    """
    stored = [CrawlProgress(**row) for row in await connection.fetch(_RECHECKS)]
    own = {progress.collection: progress for progress in stored if progress.shard == str(shard)}
    for progress in stored:
        present = own.get(progress.collection)
        is_left = progress.finished_at is None and Shard.parse(progress.shard).overlaps(shard)
        if is_left and (present is None or present.began_at < progress.began_at):
            own[progress.collection] = replace(progress, shard=str(shard), found=0)
    return [progress for progress in own.values() if progress.finished_at is None]


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
        progress.shard,
        progress.last_gap,
    )


async def find_differences(connection: Connection, revs: Mapping[str, str]) -> ListDifferences:
    """Compare accounts that a relay lists as active, with their revs, to the stored repos."""
    rows = await connection.fetch(_FIND_DIFFERENCES, buckets_of(revs), list(revs), list(revs.values()))
    known = {row["did"] for row in rows if not row["unknown"]}
    return ListDifferences(
        behind=[row["did"] for row in rows if row["behind"]],
        hidden=[row["did"] for row in rows if row["hidden"]],
        unknown=[did for did in revs if did not in known],
        only_from_stream=[row["did"] for row in rows if row["only_from_stream"]],
    )


async def active_repos(connection: Connection, after: str, buckets: Sequence[int], limit: int) -> list[str]:
    """Return the next DIDs after `after`, at most `limit`, of active repos that were fetched before."""
    return [did for (did,) in await connection.fetch(_ACTIVE, after, list(buckets), limit)]
