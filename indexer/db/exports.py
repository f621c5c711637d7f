"""Read whole repos, in the order of MST paths, and whole collections, each from one snapshot and in chunks."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import NamedTuple

from asyncpg import Record as Row

from indexer.db.columns import Connection, repo_columns, repo_of
from indexer.db.connections import Area
from indexer.db.database_errors import database_errors
from indexer.sync.repo import Repo
from indexer.sync.shard import bucket_of

CHUNK_SIZE = 100
"""Whole records in memory at a time. A record has up to a mebibyte, most have a few hundred bytes."""

# Jump from each collection to the next one, however many records are between them.
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


class RecordRow(NamedTuple):
    """A row of the table `record`; `RecordChange` describes the values.

    Attributes:
        value: JSON text as Postgres formats it, which differs from the text that was written.
    """

    path: bytes
    cid: bytes
    value: str | None
    problem: str | None
    original: bytes | None


class ConsistentRead:
    """Reads one repo from a single snapshot. `Exports.consistent_read` begins and ends the transaction.

    Attributes:
        connection: The connection, within a read-only transaction.
    """

    def __init__(self, connection: Connection, did: str) -> None:
        self.connection = connection
        self._key = (did, bucket_of(did))

    async def repo(self) -> Repo | None:
        """Return the row of the repo; None if there is none.

        Raises:
            DatabaseError: The database is unavailable.
        """
        with database_errors():
            row = await self.connection.fetchrow(_REPO, *self._key)
        return None if row is None else repo_of(row)

    async def records(self) -> AsyncIterator[list[RecordRow]]:
        """Yield the records in path order, in chunks; one chunk is in memory at a time.

        Raises:
            DatabaseError: The database is unavailable.
        """

        def rows(first: str, last: str) -> AsyncIterable[Row]:
            return self.connection.cursor(_RECORDS, *self._key, first, last, prefetch=CHUNK_SIZE)

        async for chunk in in_chunks(self.connection, self._key, rows, CHUNK_SIZE):
            yield [RecordRow(f"{row[0]}/{row[1]}".encode(), *row[2:]) for row in chunk]


async def in_chunks(
    connection: Connection, key: tuple[str, int], rows: Callable[[str, str], AsyncIterable[Row]], size: int
) -> AsyncIterator[list[Row]]:
    """Yield all rows of a repo in path order, in chunks.

    Args:
        connection: A connection within a transaction.
        key: DID and bucket of the repo.
        rows: Returns the rows from one collection to another, both included, ordered by collection and record key.
        size: Rows per chunk.

    Raises:
        DatabaseError: The database is unavailable.
    """
    chunk: list[Row] = []
    with database_errors():
        collections = [row[0] for row in await connection.fetch(_COLLECTIONS, *key)]
        for first, last in path_order_ranges(collections):
            async for row in rows(first, last):
                chunk.append(row)
                if len(chunk) == size:
                    yield chunk
                    chunk = []
    if chunk:
        yield chunk


def path_order_ranges(collections: Sequence[str]) -> list[tuple[str, str]]:
    """Return ranges of collections (first, last), whose records follow each other in path order.

    Path order compares the bytes of `collection/rkey`. It differs from the order by collection and record key if one
    collection is a prefix of another, because `-` and `.` sort before `/`.

    Args:
        collections: Sorted by name.
    """
    positions = {collection: position for position, collection in enumerate(collections)}
    ranges: list[tuple[str, str]] = []
    for collection in sorted(collections, key=lambda collection: f"{collection}/"):
        if ranges and positions[collection] == positions[ranges[-1][1]] + 1:
            ranges[-1] = (ranges[-1][0], collection)
        else:
            ranges.append((collection, collection))
    return ranges


class ExportedRecord(NamedTuple):
    """A row of the view `atproto.records`.

    Attributes:
        value: JSON text.
    """

    uri: str
    did: str
    collection: str
    rkey: str
    cid: str
    rev: str
    value: str | None
    value_problem: str | None
    indexed_at: datetime


_EXPORT = f"select {', '.join(ExportedRecord._fields)} from atproto.records where collection = $1"


class Exports(Area):
    """Reads of whole repos and collections."""

    @asynccontextmanager
    async def consistent_read(self, did: str) -> AsyncIterator[ConsistentRead]:
        """Read a repo from a single snapshot, which is taken by the first query of the block."""
        async with self._pool.acquired() as connection:
            transaction = connection.transaction(isolation="repeatable_read", readonly=True)
            with database_errors():
                await transaction.start()
                # The block may do other work between two queries.
                await connection.execute("set local idle_in_transaction_session_timeout = 0")
            try:
                yield ConsistentRead(connection, did)
            finally:
                with database_errors():
                    await transaction.rollback()

    async def records(self, collection: str) -> AsyncGenerator[list[ExportedRecord]]:
        """Yield all visible records of a collection from one snapshot, in pages and in no defined order.

        A page may take hours: the consumer may be slow, and a cluster reads all records before it sends the first page.
        """
        async with (
            self._pool.maintenance_connection() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            cursor = await connection.cursor(_EXPORT, collection)
            while page := await cursor.fetch(CHUNK_SIZE):
                yield [ExportedRecord(*row) for row in page]
