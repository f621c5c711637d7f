"""Read whole repos, in the order of MST paths, and whole collections, each from one snapshot and in chunks."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from asyncpg import Record as Row

from indexer.db.columns import Connection, repo_columns, repo_of
from indexer.db.connections import Area
from indexer.sync.repo import Repo
from indexer.sync.shard import bucket_of

CHUNK_SIZE = 100
"""Whole records in memory at a time. A record has up to a mebibyte, most have a few hundred bytes."""
SORT_TIMEOUT = 900.0
"""Seconds to wait for the next records of a repo. Before the first, Postgres reads and sorts all, maybe millions."""

_REPO = f"select {repo_columns('r')} from indexer.repo r where did = $1 and bucket = $2"

PATH = "convert_to(collection || '/' || rkey, 'UTF8')"
"""The path of a record in SQL, as the tree compares it: by bytes. `-` and `.` sort before `/`."""

_RECORDS = f"""
    select {PATH} as path, cid, value, value_problem, original,
        case lower(proof::text) when 'c' then 'commit' when 'e' then 'export' when 'r' then 'range' end
    from indexer.record where did = $1 and bucket = $2 order by path
"""


class RecordRow(NamedTuple):
    """A row of the table `record`; `RecordChange` describes the values. Postgres has formatted the JSON of `value`."""

    path: bytes
    cid: bytes
    value: str | None
    problem: str | None
    original: bytes | None
    proof: str | None


@dataclass(frozen=True)
class ConsistentRead:
    """Reads one repo from a single snapshot, within the read-only transaction of `Exports.consistent_read`."""

    connection: Connection
    key: tuple[str, int]

    async def repo(self) -> Repo | None:
        """Return the row of the repo; None if there is none."""
        row = await self.connection.fetchrow(_REPO, *self.key)
        return None if row is None else repo_of(row)

    async def records(self) -> AsyncIterator[list[RecordRow]]:
        """Yield the records in path order, in chunks; one chunk is in memory at a time."""
        rows = self.connection.cursor(_RECORDS, *self.key, prefetch=CHUNK_SIZE, timeout=SORT_TIMEOUT)
        async for chunk in in_chunks(rows, CHUNK_SIZE):
            yield [RecordRow(*row) for row in chunk]


async def in_chunks(rows: AsyncIterable[Row], size: int) -> AsyncIterator[list[Row]]:
    """Yield the rows of a cursor in chunks of this size. The cursor is closed at their end."""
    chunk: list[Row] = []
    async for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class ExportedRecord(NamedTuple):
    """A row of the view `atproto.records`, with `value` as JSON text."""

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
        async with (
            self._pool.connection() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            # The block may do other work between two queries.
            await connection.execute("set local idle_in_transaction_session_timeout = 0")
            yield ConsistentRead(connection, (did, bucket_of(did)))

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
