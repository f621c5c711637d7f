"""Keep the links of stored records, and exact counts of links by target (docs/decisions/0012-links.md).

A link is written in the transaction of its record. Its count is not: each transaction appends what it adds to a count
(`link_delta`), and a background task adds the deltas to the counts (`link_count`) in transactions of its own. So no
writer waits for another one that writes links to the same target, and count and open deltas are exact together.

Only links of visible repos count. A link says whether it is `counted`. When the visibility of a repo changes, a row in
`link_recount` says so, and a background task changes its links in small transactions. Until then, `atproto.link_count`
corrects the count by the links of these repos.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from asyncpg import UniqueViolationError

from indexer.atproto.links import RecordLink, links_of
from indexer.crash_points import crash_point
from indexer.store.columns import Columns, Connection, buckets_of, columns_of, of_buckets, unnest, visible
from indexer.sync.changes import RecordKey
from indexer.sync.plans import RecordChange
from indexer.sync.shard import bucket_of, bucket_of_target

_KEPT = "select exists (select from indexer.link_bucket where bucket = any($1::smallint[]) and off_at is null)"

_RECORD_KEY = {"did": "text", "collection": "text", "rkey": "text"}
_LINK: Columns = {
    **_RECORD_KEY,
    "number": "smallint",
    "bucket": "smallint",
    "target": "text",
    "kind": "text",
    "path": "text",
    "counted": "boolean",
}
_DELTA: Columns = {"target": "text", "collection": "text", "path": "text", "bucket": "smallint", "delta": "integer"}
_RECOUNT: Columns = {"did": "text", "bucket": "smallint"}

_DELETE_LINKS = f"""
    delete from indexer.link l using {unnest(_RECORD_KEY, "w", 2)}
    where l.did = w.did and l.collection = w.collection and l.rkey = w.rkey and {of_buckets("l")}
    returning l.target, l.collection, l.path, l.counted
"""

_ADD_MISSING_LINKS = f"""
    insert into indexer.link ({", ".join(_LINK)}) select {", ".join(_LINK)} from {unnest(_LINK, "w")}
    order by ordinal on conflict (did, collection, rkey, number, bucket) do nothing
    returning target, collection, path, counted
"""

# The deltas in any order, because they are added.
_FOLD = f"""
    with taken as (
        delete from indexer.link_delta d
        using (
            select bucket, id from indexer.link_delta where bucket = any($1::smallint[]) limit $2
        ) w
        where d.bucket = w.bucket and d.id = w.id and {of_buckets("d")}
        returning d.target, d.collection, d.path, d.bucket, d.delta
    ), folded as (
        insert into indexer.link_count as c (target, collection, path, bucket, count)
        select target, collection, path, bucket, sum(delta) from taken
        group by target, collection, path, bucket order by target, collection, path, bucket
        on conflict (target, collection, path, bucket) do update set count = c.count + excluded.count
        returning target, collection, path, bucket, count
    )
    select w.deltas, f.target, f.collection, f.path
    from (select count(*) as deltas from taken) w left join folded f on f.count = 0
"""

_COUNT_KEY = {"target": "text", "collection": "text", "path": "text"}
_DELETE_EMPTY_COUNTS = f"""
    delete from indexer.link_count c using {unnest(_COUNT_KEY, "w", 2)}
    where c.target = w.target and c.collection = w.collection and c.path = w.path and {of_buckets("c")} and c.count = 0
"""

_RECOUNTS_DUE = "select distinct did from indexer.link_recount where bucket = any($1::smallint[]) limit $2"
_RECOUNT_IDS = "select id from indexer.link_recount where did = $1 and bucket = $2"
_VISIBLE = f"select {visible('r')} from indexer.repo r where did = $1 and bucket = $2"

# A locked link belongs to a running resync. To wait for it with other links locked could be a deadlock.
_SET_COUNTED = """
    with changed as (
        select collection, rkey, number from indexer.link
        where did = $1 and bucket = $2 and counted <> $3 and (collection, rkey, number) > ($4, $5, $6)
        order by collection, rkey, number limit $7 for update skip locked
    )
    update indexer.link l set counted = $3 from changed w
    where l.did = $1 and l.bucket = $2 and l.collection = w.collection and l.rkey = w.rkey and l.number = w.number
    returning l.target, l.collection, l.path, l.rkey, l.number
"""
_OTHERS_LEFT = "select exists (select from indexer.link where did = $1 and bucket = $2 and counted <> $3)"
_RECOUNTED = "delete from indexer.link_recount where did = $1 and bucket = $2 and id = any($3::bigint[])"


class _Written(NamedTuple):
    """A link that was added to the table or removed from it."""

    target: str
    collection: str
    path: str


async def keeps_links(connection: Connection, dids: Iterable[str]) -> bool:
    """Return True if the links of these repos are kept.

    The answer holds for records that the open transaction writes, if the rows of their repos are locked or their claims
    hold: a backfill that begins later finds these records.
    """
    kept: bool = await connection.fetchval(_KEPT, buckets_of(dids))
    return kept


async def replace_links(
    connection: Connection,
    changes: Sequence[tuple[str, RecordChange]],
    existed: AbstractSet[RecordKey],
    is_counted: Callable[[str], bool],
) -> None:
    """Write the links of changed records. Of several changes of one record, the last one counts.

    Args:
        connection: The connection, within the transaction that wrote the records.
        changes: Changes of records, each with its DID.
        existed: The keys of records that were stored before.
        is_counted: Returns True if the links of the repo count, because it is visible.
    """
    last = {(did, change.collection, change.rkey): change for did, change in changes}
    deltas = Counter[_Written]()
    if removed := sorted(existed & last.keys()):
        deltas.subtract(await _delete_links(connection, removed))
    rows = [
        row
        for key in sorted(last)
        if last[key].action != "delete"
        for row in _rows(key, _links(last[key]), counted=is_counted(key[0]))
    ]
    if rows:
        deltas.subtract(await _insert_links(connection, rows))
        deltas.update([_Written(row[5], row[1], row[7]) for row in rows if row[8]])
    await _add_deltas(connection, deltas)


async def delete_links(connection: Connection, keys: Collection[RecordKey]) -> None:
    """Delete the links of deleted records."""
    deltas = Counter[_Written]()
    deltas.subtract(await _delete_links(connection, sorted(keys)))
    await _add_deltas(connection, deltas)


class RecordValue(NamedTuple):
    """The value of a stored record as JSON text; `counted` if its repo is visible."""

    key: RecordKey
    value: str
    counted: bool


async def add_missing_links(connection: Connection, values: Iterable[RecordValue]) -> int:
    """Add those links of stored records that are not stored yet; return their number.

    Run it in a transaction that keeps others from writing the records.
    """
    rows = [row for key, value, counted in values for row in _rows(key, links_of(value), counted=counted)]
    if not rows:
        return 0
    added = await connection.fetch(_ADD_MISSING_LINKS, *columns_of(rows, _LINK))
    await _add_deltas(connection, Counter(_Written(*row) for *row, counted in added if counted))
    return len(added)


async def request_recounts(connection: Connection, dids: Sequence[str]) -> None:
    """Let the links of repos be counted, or not counted any more, according to their visibility."""
    if dids:
        rows = [(did, bucket_of(did)) for did in dids]
        await connection.copy_records_to_table("link_recount", schema_name="indexer", columns=_RECOUNT, records=rows)


async def fold_deltas(connection: Connection, buckets: Sequence[int], limit: int) -> int:
    """Add at most `limit` deltas to the counts of targets in these buckets; return how many.

    Run it in a transaction.
    """
    rows = await connection.fetch(_FOLD, list(buckets), limit)
    if empty := sorted((target, collection, path) for _, target, collection, path in rows if target is not None):
        await connection.execute(_DELETE_EMPTY_COUNTS, list(buckets), *columns_of(empty, _COUNT_KEY))
    deltas: int = rows[0]["deltas"]
    if deltas:
        crash_point("links.folded")
    return deltas


async def recounts_due(connection: Connection, buckets: Sequence[int], limit: int) -> list[str]:
    """Return repos whose visibility changed."""
    return [row["did"] for row in await connection.fetch(_RECOUNTS_DUE, list(buckets), limit)]


class RecountPosition(NamedTuple):
    """The last link that a recount has changed."""

    collection: str = ""
    rkey: str = ""
    number: int = -1


async def recount(connection: Connection, did: str, after: RecountPosition, limit: int) -> RecountPosition | None:
    """Change whether links of a repo are counted: at most `limit`, after the position.

    Run it in a transaction. What is read first matters: a change of the visibility that follows adds a row to
    `link_recount` that is not deleted here.

    Returns:
        The position from which to continue; None if all links were visited.
    """
    key = did, bucket_of(did)
    ids = [row["id"] for row in await connection.fetch(_RECOUNT_IDS, *key)]
    visible = bool(await connection.fetchval(_VISIBLE, *key))
    rows = await connection.fetch(_SET_COUNTED, *key, visible, *after, limit)
    sign = 1 if visible else -1
    deltas = Counter[_Written]()
    for target, collection, path, *_ in rows:
        deltas[_Written(target, collection, path)] += sign
    await _add_deltas(connection, deltas)
    if len(rows) == limit:
        return max(RecountPosition(row["collection"], row["rkey"], row["number"]) for row in rows)
    if not await connection.fetchval(_OTHERS_LEFT, *key, visible):
        await connection.execute(_RECOUNTED, *key, ids)
    crash_point("links.recounted")
    return None


def _links(change: RecordChange) -> tuple[RecordLink, ...]:
    """Return the links of a change. A process that does not expect that links are kept has not found them yet."""
    return links_of(change.value) if change.links is None else change.links


def _rows(key: RecordKey, links: Sequence[RecordLink], *, counted: bool) -> list[tuple[Any, ...]]:
    """Return the values of `_LINK`."""
    bucket = bucket_of(key[0]) if links else 0
    return [(*key, number, bucket, link.target, link.kind, link.path, counted) for number, link in enumerate(links)]


async def _insert_links(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> list[_Written]:
    """Insert the links of records that have none; return the counted links of these records that existed after all.

    They existed if an earlier state of the database had links of records that are not stored. They are replaced.
    """
    try:
        async with connection.transaction():
            await connection.copy_records_to_table("link", schema_name="indexer", columns=_LINK, records=rows)
    except UniqueViolationError:
        replaced = await _delete_links(connection, sorted({(row[0], row[1], row[2]) for row in rows}))
        await connection.copy_records_to_table("link", schema_name="indexer", columns=_LINK, records=rows)
        return replaced
    return []


async def _delete_links(connection: Connection, keys: Sequence[RecordKey]) -> list[_Written]:
    """Delete the links of records; return those that were counted."""
    deleted = await connection.fetch(_DELETE_LINKS, buckets_of(did for did, *_ in keys), *columns_of(keys, _RECORD_KEY))
    return [_Written(target, collection, path) for target, collection, path, counted in deleted if counted]


async def _add_deltas(connection: Connection, deltas: Counter[_Written]) -> None:
    rows = [(*link, bucket_of_target(link.target), delta) for link, delta in deltas.items() if delta]
    if rows:
        await connection.copy_records_to_table("link_delta", schema_name="indexer", columns=_DELTA, records=rows)
