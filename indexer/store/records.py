"""A repo's records as they are stored, in path order, chunk by chunk."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import NamedTuple

from asyncpg import Record as Row

from indexer.store.errors import database_errors
from indexer.store.rows import Connection, repo_columns, repo_of
from indexer.sync.repo import Repo
from indexer.sync.shard import bucket_of

AT_ONCE = 100  # whole records in memory, of up to a mebibyte each, mostly of a few hundred bytes

# A jump from each collection to the next one, whatever the number of records between.
_COLLECTIONS = """
    with recursive c as (
        (select collection from indexer.record where did = $1 and bucket = $2 order by collection limit 1)
        union all
        select (
            select r.collection from indexer.record r
            where r.did = $1 and r.bucket = $2 and r.collection > c.collection order by r.collection limit 1
        ) from c where c.collection is not null
    )
    select collection from c where collection is not null order by collection
"""

_REPO = f"select {repo_columns('r')} from indexer.repo r where did = $1 and bucket = $2"

_RECORDS = """
    select collection, rkey, cid, value, value_problem, original from indexer.record
    where did = $1 and bucket = $2 and collection >= $3 and collection <= $4 order by collection, rkey
"""


class StoredRecord(NamedTuple):
    """`value` is JSON text as Postgres writes it, which is not the text that was stored; see `RecordChange`."""

    path: bytes
    cid: bytes
    value: str | None
    problem: str | None
    original: bytes | None


class Reading:
    """A repo as of one moment, within a transaction that sees no other; `Store.reading` begins and ends it."""

    def __init__(self, connection: Connection, did: str) -> None:
        self._connection = connection
        self._key = (did, bucket_of(did))

    async def repo(self) -> Repo | None:
        """The row; None if there is none. Raises `DatabaseError`."""
        with database_errors():
            row = await self._connection.fetchrow(_REPO, *self._key)
        return None if row is None else repo_of(row)

    async def records(self) -> AsyncIterator[list[StoredRecord]]:
        """In path order, in chunks; one of them in memory at a time. Raises `DatabaseError`."""

        def rows(first: str, last: str) -> AsyncIterable[Row]:
            return self._connection.cursor(_RECORDS, *self._key, first, last, prefetch=AT_ONCE)

        async for chunk in in_chunks(self._connection, self._key, rows, AT_ONCE):
            yield [StoredRecord(f"{row[0]}/{row[1]}".encode(), *row[2:]) for row in chunk]


async def in_chunks(
    connection: Connection, key: tuple[str, int], rows: Callable[[str, str], AsyncIterable[Row]], size: int
) -> AsyncIterator[list[Row]]:
    """All rows of a repo (DID and bucket) in path order; `rows` gives those from one collection to another one, in the
    order of collection and record key. Raises `DatabaseError`.
    """
    chunk: list[Row] = []
    with database_errors():
        collections = [row[0] for row in await connection.fetch(_COLLECTIONS, *key)]
        for first, last in in_path_order(collections):
            async for row in rows(first, last):
                chunk.append(row)
                if len(chunk) == size:
                    yield chunk
                    chunk = []
    if chunk:
        yield chunk


def in_path_order(collections: Sequence[str]) -> list[tuple[str, str]]:
    """Collections, sorted by name, as ranges from first to last.

    Path order is bytewise over `collection/rkey`, and `-` and `.` sort before `/`: it is not the order of the pair
    if one name continues another one. Records in the order of the pair, range after range, are in path order.
    """
    places = {collection: place for place, collection in enumerate(collections)}
    ranges: list[tuple[str, str]] = []
    for collection in sorted(collections, key=lambda collection: f"{collection}/"):
        if ranges and places[collection] == places[ranges[-1][1]] + 1:
            ranges[-1] = (ranges[-1][0], collection)
        else:
            ranges.append((collection, collection))
    return ranges
