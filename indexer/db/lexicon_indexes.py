"""Build indexes that queries on the typed views use (docs/sql.md#typed-views).

An index has the expressions of the columns of a view, and only the records of its collection. It is built while the
daemon writes (CONCURRENTLY), so nothing here runs in a transaction. The values that it contains are bounded: a record
with a longer string must not make the daemon's writes fail.
"""

import json
from asyncio import sleep
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import NamedTuple

import asyncpg

from indexer.atproto.lexicon import FieldKind
from indexer.db.columns import Connection
from indexer.db.connections import Area
from indexer.db.lexicons import (
    INDEXABLE_KEYS,
    MAX_INDEXED_BYTES,
    IndexableColumn,
    ViewField,
    indexable_columns,
    load_lexicons,
)

PREFIX = "lexicon_"
_HASH_CHARACTERS = 12
_GIN_KINDS = frozenset({FieldKind.TEXT_ARRAY, FieldKind.ARRAY, FieldKind.OBJECT, FieldKind.ANY})
"""Kinds of columns that only a GIN index can contain."""

_INDEXES = """
    select c.relname as name, split_part(comment, ': ', 1) as nsid, split_part(comment, ': ', 2) as columns,
        i.indisvalid as valid
    from pg_index i join pg_class c on c.oid = i.indexrelid, coalesce(obj_description(c.oid, 'pg_class'), '') comment
    where i.indrelid = 'indexer.record'::regclass and starts_with(c.relname, $1)
    order by comment, name
"""
_SORT_AT = "lexicon.sort_at(value, first_seen, indexed_at)"
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
    """An index on columns of a view, which are separated by commas.

    Attributes:
        nsid: The NSID of the record type; empty if the index was left without its comment.
        valid: False if building it was interrupted, so that no query uses it.
    """

    name: str
    nsid: str
    columns: str
    valid: bool


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
            index, definition = await _define(connection, nsid, columns, stored.fields)
            comment: str = await connection.fetchval(_LITERAL, f"{nsid}: {','.join(columns)}")
            present = {one.name: one for one in await _load_indexes(connection)}.get(index)
            if present is None or not present.valid:
                if present is not None:
                    await connection.execute(f"drop index concurrently indexer.{index}")
                await connection.execute(f"create index concurrently {index} on indexer.record using {definition}")
            await connection.execute(f"comment on index indexer.{index} is {comment}")
            if present is not None and present.valid:
                return None
            await connection.execute(_ANALYZE)  # the planner needs the distribution of the values of an expression
            return LexiconIndex(index, nsid, ",".join(columns), valid=True)

    async def drop_outdated(self) -> list[LexiconIndex]:
        """Drop indexes whose lexicon was removed or whose columns have changed; return them."""
        async with self._index_connection() as connection:
            stored, dropped = await load_lexicons(connection), []
            for present in await _load_indexes(connection):
                if of := stored.get(present.nsid):
                    with suppress(UnknownColumnError):
                        name, _ = await _define(connection, present.nsid, present.columns.split(","), of.fields)
                        if name == present.name:
                            continue
                await connection.execute(f"drop index concurrently indexer.{present.name}")
                dropped.append(present)
            return dropped

    @asynccontextmanager
    async def _index_connection(self) -> AsyncIterator[asyncpg.Connection]:
        """Open a connection that builds and drops indexes; no other process does so at the same time."""
        async with self._pool.maintenance_connection() as holder, self._pool.maintenance_connection() as connection:
            while True:
                transaction = holder.transaction()
                await transaction.start()
                try:
                    await holder.execute(_LOCK)
                    break
                except asyncpg.LockNotAvailableError:
                    await transaction.rollback()
                await sleep(LOCK_INTERVAL)
            yield connection


async def _load_indexes(connection: Connection) -> list[LexiconIndex]:
    return [LexiconIndex(*row) for row in await connection.fetch(_INDEXES, PREFIX)]


async def _define(
    connection: asyncpg.Connection, nsid: str, columns: Sequence[str], fields: Mapping[str, ViewField]
) -> tuple[str, str]:
    """Return the name of an index on these columns, and its definition after USING.

    The name changes with the expressions, so an outdated index is recognized.

    Raises:
        UnknownColumnError: There is no such column, or no index can contain these columns.
    """
    known = indexable_columns(fields.values())
    parts: list[str] = []
    of_lexicon: list[IndexableColumn] = []  # the columns that are not keys
    max_bytes = 0  # of all columns of a row together
    for column in columns:
        if column in INDEXABLE_KEYS and column not in known:
            parts.append(_SORT_AT if column == "sort_at" else column)
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
    if not of_lexicon and _SORT_AT not in parts:
        raise UnknownColumnError(
            f"{nsid}: an index needs a column of the lexicon or sort_at; {', '.join(columns)} are keys"
        )
    method = _method(nsid, columns, of_lexicon, max_bytes)
    operators = " jsonb_path_ops" if method == "gin" and of_lexicon[0].kind is not FieldKind.TEXT_ARRAY else ""
    expressions = ", ".join(parts) + operators
    collection: str = await connection.fetchval(_LITERAL, nsid)
    name = f"{PREFIX}{_digest(nsid)}_{_digest(f'{method} {expressions}')}"
    return name, f"{method} ({expressions}) where collection = {collection}"


def _method(nsid: str, columns: Sequence[str], of_lexicon: Sequence[IndexableColumn], max_bytes: int) -> str:
    """Return the access method of an index whose values have at most `max_bytes` bytes together.

    A hash index and the operators for jsonb store hashes, so a value may be of any size.

    Raises:
        UnknownColumnError: No index can contain these columns.
    """
    needs_gin = any(column.kind in _GIN_KINDS for column in of_lexicon)
    if len(columns) == 1 and of_lexicon:
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


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:_HASH_CHARACTERS]
