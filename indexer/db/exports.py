"""Read whole repos, in the order of MST paths, and whole collections, each from one snapshot and in chunks.

The first-seen times of an exported collection can be set in another database.
"""

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from asyncpg import Record as Row

from indexer.db.columns import Connection, buckets_of, columns_of, of_buckets, repo_columns, repo_of, typed, unnest
from indexer.db.connections import Area
from indexer.db.view_columns import ViewColumn, load_view_columns
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


EXPORTED = (
    "uri", "did", "collection", "rkey", "cid", "rev", "value", "value_problem",
    "indexed_at", "first_seen", "first_seen_live",
)  # fmt: skip
"""The exported columns of the view `atproto.records`."""

Page = list[Row]
"""Rows of a view, as mappings."""

_SEEN = typed("did text, collection text, rkey text, first_seen timestamptz, live boolean")
_MATCH = f"""
    {unnest(_SEEN, "w", 2)}
    where r.did = w.did and r.collection = w.collection and r.rkey = w.rkey and {of_buckets("r")}
"""
_SET_FIRST_SEEN = f"""
    update indexer.record r set first_seen = w.first_seen, first_live = w.live from {_MATCH}
        and w.first_seen < coalesce(r.first_seen, r.indexed_at)
"""
# Shorter than Postgres' deadlock_timeout, so that no write of the daemon ends in a deadlock.
_LOCK_TIMEOUT = "set local lock_timeout = '500ms'"


class SeenRecord(NamedTuple):
    """When a record was first stored in another database, and if it was found live there; None: unknown."""

    did: str
    collection: str
    rkey: str
    first_seen: datetime
    live: bool | None


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

    @asynccontextmanager
    async def rows(
        self, collection: str, view: str | None = None
    ) -> AsyncIterator[tuple[list[ViewColumn], AsyncIterator[Page]]]:
        """Read all visible records of a collection, or the rows of its typed view, from one snapshot.

        Yield the columns and the pages of rows, which are in no defined order. Values of type jsonb are JSON text. A
        page may take hours: the consumer may be slow, and a cluster reads all records before it sends the first page.
        """
        async with (
            self._pool.maintenance_connection() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            of_schema = await load_view_columns(connection, "lexicon" if view else "atproto")
            columns = [column for column in of_schema if column.view == (view or "records")]
            if not view:
                columns = [column for name in EXPORTED for column in columns if column.name == name]
            names = ", ".join(f'"{column.name}"' for column in columns)
            source = f'lexicon."{view}"' if view else "atproto.records where collection = $1"
            cursor = await connection.cursor(f"select {names} from {source}", *([] if view else [collection]))

            async def pages() -> AsyncIterator[Page]:
                while page := await cursor.fetch(CHUNK_SIZE):
                    yield page

            yield columns, pages()

    async def set_first_seen(self, seen: Sequence[SeenRecord]) -> tuple[int, int]:
        """Set the first-seen times of stored records that are earlier than the stored ones. No record may occur twice.

        Return how many of the records are stored, and how many times were set. A `DatabaseError` may mean that the
        daemon has locked a record.
        """
        async with self._pool.transaction() as connection:
            await connection.execute(_LOCK_TIMEOUT)
            return await set_first_seen(connection, seen)


async def set_first_seen(connection: Connection, seen: Sequence[SeenRecord]) -> tuple[int, int]:
    """Set first-seen times within the open transaction, as `Exports.set_first_seen` does."""
    arguments = [buckets_of([one.did for one in seen]), *columns_of(sorted(seen), _SEEN)]
    stored = await connection.fetchval(f"select count(*) from indexer.record r, {_MATCH}", *arguments)
    changed = await connection.execute(_SET_FIRST_SEEN, *arguments)
    return stored, int(changed.split()[-1])
