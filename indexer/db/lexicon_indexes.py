"""Build indexes that queries on the typed views use (docs/sql.md#typed-views).

An index has the expressions of the columns of a view, and only the records of its collection. It is built while the
daemon writes (CONCURRENTLY), so nothing here runs in a transaction. The values that it contains are bounded: a record
with a longer string must not make the daemon's writes fail.
"""

import json
from asyncio import sleep
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import NamedTuple

import asyncpg

from indexer.atproto.lexicon import FieldKind
from indexer.db.columns import Connection
from indexer.db.connections import Area
from indexer.db.lexicon_columns import (
    INDEXABLE_KEYS,
    MAX_INDEXED_BYTES,
    IndexableColumn,
    ViewField,
    indexable_columns,
)
from indexer.db.lexicon_rows import load_lexicons

PREFIX = "lexicon_"
_HASH_CHARACTERS = 12
_GIN_KINDS = frozenset({FieldKind.TEXT_ARRAY, FieldKind.ARRAY, FieldKind.OBJECT, FieldKind.ANY})
"""Kinds of columns that only a GIN index can contain."""

_INDEXES = """
    select c.relname as name, i.indisvalid as valid, obj_description(c.oid, 'pg_class') as comment
    from pg_index i join pg_class c on c.oid = i.indexrelid
    where i.indrelid = 'indexer.record'::regclass and starts_with(c.relname, $1)
    order by comment, name
"""
# An index of another process waits for this one before it appears here: only one is built on a table at a time.
_PROGRESS = """
    select phase, case when blocks_total > 0 then blocks_done else tuples_done end as done,
        case when blocks_total > 0 then blocks_total else tuples_total end as total
    from pg_stat_progress_create_index
    where datname = current_database() and relid = 'indexer.record'::regclass limit 1
"""
_EXPRESSION = "select (indexer.lexicon_expressions($1::jsonb))[$2::integer]"
_LITERAL = "select quote_literal($1::text)"
_ANALYZE = "analyze indexer.record"
# Two indexes of a table that are built at the same time wait for each other. They would also wait for a statement that
# waits for this lock, because such a statement has a snapshot; so no statement does.
_LOCK = "lock table indexer.lexicon_index_lock in exclusive mode nowait"
LOCK_INTERVAL = 0.5
"""Seconds between attempts to get the lock."""


class UnknownColumnError(Exception):
    """A view has no such column, or no index can contain it. The message says why, and what to use."""


class LexiconIndex(NamedTuple):
    """An index on columns of a view.

    Attributes:
        name: The name of the index in Postgres.
        nsid: The NSID of the record type; empty if the index was left without its comment.
        columns: The columns, separated by commas.
        valid: False if building it was interrupted, so that no query uses it.
    """

    name: str
    nsid: str
    columns: str
    valid: bool


class BuildProgress(NamedTuple):
    """The progress of an index that is being built.

    Attributes:
        phase: What Postgres does now; docs/sql.md#typed-views names the page that explains the phases.
        done: Pages or rows that the phase has processed.
        total: All pages or rows of the phase; 0 if it counts none, for example while it waits for a transaction.
    """

    phase: str
    done: int
    total: int


class _Definition(NamedTuple):
    """Parts of the statement that builds an index. The database has quoted them.

    Attributes:
        method: The access method: btree, hash or gin.
        expressions: The columns and expressions, separated by commas, with their operator class if they need one.
        collection: The literal with which the condition of the index compares the collection.
    """

    method: str
    expressions: str
    collection: str

    def name_for(self, nsid: str) -> str:
        """Return the name of the index. It changes with the expressions, so an outdated index is recognized."""
        return f"{_prefix_of(nsid)}{_digest(f'{self.method} {self.expressions}')}"


class LexiconIndexes(Area):
    """Indexes on columns of typed views."""

    async def load(self) -> list[LexiconIndex]:
        """Return all indexes on columns of views."""
        async with self._pool.connection() as connection:
            return await _load_indexes(connection)

    async def build(self, nsid: str, columns: Sequence[str]) -> LexiconIndex | None:
        """Build an index on columns of the view of a stored lexicon; return None if there is one already.

        Raises:
            UnknownColumnError: There is no such column, or no index can contain these columns.
        """
        async with self._index_connection() as connection:
            stored = (await load_lexicons(connection))[nsid]
            definition = await _definition(connection, nsid, columns, stored.fields)
            index = definition.name_for(nsid)
            for present in await _load_indexes(connection):
                if present.name == index and present.valid:
                    await _comment(connection, index, nsid, columns)
                    return None
                if present.name == index:
                    await connection.execute(f"drop index concurrently indexer.{index}")
            method, expressions, collection = definition
            await connection.execute(
                f"create index concurrently {index} on indexer.record using {method} ({expressions}) "
                f"where collection = {collection}"
            )
            await _comment(connection, index, nsid, columns)
            await connection.execute(_ANALYZE)  # the planner needs the distribution of the values of an expression
            return LexiconIndex(index, nsid, ",".join(columns), valid=True)

    async def build_progress(self) -> BuildProgress | None:
        """Return the progress of the index that is being built now; None if none is."""
        async with self._pool.connection() as connection:
            rows = await connection.fetch(_PROGRESS)
            return BuildProgress(*rows[0]) if rows else None

    async def drop_outdated(self) -> list[LexiconIndex]:
        """Drop indexes whose lexicon was removed or whose columns have changed; return them."""
        async with self._index_connection() as connection:
            stored = await load_lexicons(connection)
            dropped = []
            for present in await _load_indexes(connection):
                if await _is_current(
                    connection, present, stored[present.nsid].fields if present.nsid in stored else None
                ):
                    continue
                index = present.name
                await connection.execute(f"drop index concurrently indexer.{index}")
                dropped.append(present)
            return dropped

    @asynccontextmanager
    async def _index_connection(self) -> AsyncIterator[asyncpg.Connection]:
        """Open a connection that builds and drops indexes; no other process does so at the same time."""
        async with self._pool.maintenance_connection() as holder:
            await _lock_builds(holder)
            async with self._pool.maintenance_connection() as connection:
                yield connection


async def _load_indexes(connection: Connection) -> list[LexiconIndex]:
    rows = await connection.fetch(_INDEXES, PREFIX)
    parts = [(row, (row["comment"] or "").partition(": ")) for row in rows]
    return [LexiconIndex(row["name"], nsid, columns, row["valid"]) for row, (nsid, _, columns) in parts]


async def _lock_builds(connection: Connection) -> None:
    """Wait until no other process builds or drops an index. None does until this connection is closed."""
    while True:
        if await _try_lock(connection):
            return
        await sleep(LOCK_INTERVAL)


async def _try_lock(connection: Connection) -> bool:
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute(_LOCK)
    except asyncpg.LockNotAvailableError:
        await transaction.rollback()
        return False
    return True


async def _comment(connection: asyncpg.Connection, index: str, nsid: str, columns: Sequence[str]) -> None:
    comment: str = await connection.fetchval(_LITERAL, f"{nsid}: {','.join(columns)}")
    await connection.execute(f"comment on index indexer.{index} is {comment}")


async def _is_current(
    connection: asyncpg.Connection, present: LexiconIndex, fields: Mapping[str, ViewField] | None
) -> bool:
    if not present.nsid:
        return False  # it was built, but not commented
    try:
        definition = await _definition(connection, present.nsid, present.columns.split(","), fields or {})
    except UnknownColumnError:
        return False
    return definition.name_for(present.nsid) == present.name


async def _definition(
    connection: asyncpg.Connection, nsid: str, columns: Sequence[str], fields: Mapping[str, ViewField]
) -> _Definition:
    """Return the parts of the statement that builds an index on these columns.

    Raises:
        UnknownColumnError: There is no such column, or no index can contain these columns.
    """
    known = indexable_columns(fields.values())
    parts: list[str] = []
    of_lexicon: list[IndexableColumn] = []  # the columns that are not keys
    max_bytes = 0  # of all columns of a row together
    for column in columns:
        if column in INDEXABLE_KEYS:
            parts.append(column)
            max_bytes += INDEXABLE_KEYS[column]
        elif column in known:
            field = json.dumps(known[column].field.to_json())
            expression: str = await connection.fetchval(_EXPRESSION, field, known[column].position + 1)
            parts.append(f"({expression})")
            of_lexicon.append(known[column])
            max_bytes += known[column].max_bytes
        else:
            names = ", ".join([*known, *INDEXABLE_KEYS])
            raise UnknownColumnError(f"{nsid} has no column {column}; the columns are {names}")
    if not of_lexicon:
        raise UnknownColumnError(f"{nsid}: an index needs a column of the lexicon; {', '.join(columns)} are keys")
    method = _method(nsid, columns, of_lexicon, max_bytes)
    operators = " jsonb_path_ops" if method == "gin" and of_lexicon[0].kind is not FieldKind.TEXT_ARRAY else ""
    collection: str = await connection.fetchval(_LITERAL, nsid)
    return _Definition(method, ", ".join(parts) + operators, collection)


def _method(nsid: str, columns: Sequence[str], of_lexicon: Sequence[IndexableColumn], max_bytes: int) -> str:
    """Return the access method of an index whose values have at most `max_bytes` bytes together.

    A hash index and the operators for jsonb store hashes, so a value may be of any size.

    Raises:
        UnknownColumnError: No index can contain these columns.
    """
    needs_gin = any(column.kind in _GIN_KINDS for column in of_lexicon)
    if len(columns) == 1:
        if of_lexicon[0].kind is FieldKind.TEXT and max_bytes > MAX_INDEXED_BYTES:
            return "hash"
        if of_lexicon[0].kind is not FieldKind.TEXT_ARRAY or max_bytes <= MAX_INDEXED_BYTES:
            return "gin" if needs_gin else "btree"
        limit = f"may be longer than {MAX_INDEXED_BYTES} bytes"
        raise UnknownColumnError(f"{nsid}: no index can contain {columns[0]}, whose items {limit}")
    if needs_gin or max_bytes > MAX_INDEXED_BYTES:
        names = ",".join(columns)
        raise UnknownColumnError(
            f"{nsid}: no index can contain {names} together: they must not be lists or objects, and have at most "
            f"{MAX_INDEXED_BYTES} bytes"
        )
    return "btree"


def _prefix_of(nsid: str) -> str:
    return f"{PREFIX}{_digest(nsid)}_"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:_HASH_CHARACTERS]
