"""Lexicons, and the typed views of their record types (docs/sql.md#typed-views).

The name of a view or a column is an identifier of Postgres, which has at most 63 bytes. All names are ASCII. The
statements that create the views are in functions of the database, so that migrations can call them, too.
"""

import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

import asyncpg

from indexer.atproto.lexicon import (
    MAX_REFERENCE_BYTES,
    FieldKind,
    Lexicon,
    RecordField,
    parse_lexicon,
    record_fields,
    references,
)
from indexer.db.columns import Connection
from indexer.db.connections import Area
from indexer.db.database_errors import DatabaseError
from indexer.db.view_columns import ViewColumn, load_view_columns
from indexer.errors import ViewInUseError
from indexer.reasons import FetchFailure

KEY_COLUMNS = (
    "did", "rkey", "uri", "cid", "rev", "indexed_at", "lexicon_problem", "bucket",
    "first_seen", "first_seen_live", "sort_at",
)  # fmt: skip
"""The first columns of a view. One of an earlier release has the last ones at its end, or a field of that name."""
MAX_NAME_BYTES = 63
MAX_INDEXED_BYTES = 2_560
"""Bytes of the strings of a row that a B-tree and a GIN index can always store; the limit of Postgres is 2,704."""
INDEXABLE_KEYS = {"did": 2_048, "rkey": 512, "indexed_at": 8, "sort_at": 8}
"""Key columns that an index may have beside one of the lexicon, or beside `sort_at`, with their maximum bytes."""

_HASH_CHARACTERS = 8
_TEXT, _NUMBER = FieldKind.TEXT, FieldKind.BIGINT
_PARTS = {
    FieldKind.STRONG_REF: (("_uri", _TEXT, MAX_REFERENCE_BYTES, " (AT-URI)"), ("_cid", _TEXT, 256, " (CID)")),
    FieldKind.BLOB: (
        ("_cid", _TEXT, 256, " (CID)"),
        ("_mime_type", _TEXT, 256, " (MIME type)"),
        ("_size", _NUMBER, 8, " (bytes)"),
    ),
    FieldKind.LINK: (("", _TEXT, 256, ""),),
}
"""The columns of fields whose columns have other types: suffix, type, maximum bytes, and what their comment adds."""
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_OTHER = re.compile(r"[^a-z0-9_]+")


class ViewField(NamedTuple):
    """A field of a record with its columns, as the table `lexicon` stores it."""

    field: RecordField
    columns: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the field in the form that the functions of the database read."""
        field = self.field
        description = f": {field.description}" if field.description else ""
        return {
            "field": field.name,
            "kind": field.kind,
            "max_bytes": field.max_bytes,
            "required": field.required,
            "nullable": field.nullable,
            "columns": self.columns,
            "comments": [f"{field.name}{what}{description}" for *_, what in _parts_of(field)],
        }


def column_name(field: str) -> str:
    """Return the name of a field in snake_case: `createdAt` becomes `created_at`."""
    return _OTHER.sub("_", _WORD_START.sub("_", field).lower()) or "_"


def plan_columns(fields: Sequence[RecordField], before: Mapping[str, ViewField]) -> list[ViewField]:
    """Return the fields in the order of their columns.

    Fields that the view has already (`before`, by name, in order) keep their place and, with the same type, their
    columns. New ones follow. A column whose name is taken by a key or by an earlier field gets a number: `uri_2`.
    """
    of_name = {field.name: field for field in fields}
    kept = {name: view for name, view in before.items() if name in of_name and view.field.kind == of_name[name].kind}
    order = [name for name in before if name in of_name] + [field.name for field in fields if field.name not in before]
    taken = {*KEY_COLUMNS, *(column for view in kept.values() for column in view.columns)}
    planned = []
    for name in order:
        field = of_name[name]
        columns = kept[name].columns if name in kept else _free_columns(field, taken)
        taken.update(columns)
        planned.append(ViewField(field, columns))
    return planned


def fields_of_json(stored: Iterable[Mapping[str, Any]]) -> dict[str, ViewField]:
    """Return the stored fields by name, in order."""
    return {
        one["field"]: ViewField(
            RecordField(one["field"], FieldKind(one["kind"]), one["required"], one["nullable"], one["max_bytes"], ""),
            tuple(one["columns"]),
        )
        for one in stored
    }


class IndexableColumn(NamedTuple):
    """A column of a view.

    Attributes:
        kind: The type of the column.
        max_bytes: The maximum bytes of a value, or of each item of an array.
        position: The number of the column among the columns of its field.
    """

    kind: FieldKind
    max_bytes: int
    field: ViewField
    position: int


def indexable_columns(fields: Iterable[ViewField]) -> dict[str, IndexableColumn]:
    """Return the columns of a view by name, without its keys."""
    return {
        column: IndexableColumn(kind, max_bytes, view, position)
        for view in fields
        for position, (column, (_, kind, max_bytes, _)) in enumerate(
            zip(view.columns, _parts_of(view.field), strict=True)
        )
    }


def _parts_of(field: RecordField) -> tuple[tuple[str, FieldKind, int, str], ...]:
    max_bytes = field.max_bytes if field.kind in {FieldKind.TEXT, FieldKind.TEXT_ARRAY} else 8
    return _PARTS.get(field.kind, (("", field.kind, max_bytes, ""),))


def _free_columns(field: RecordField, taken: set[str]) -> tuple[str, ...]:
    name = column_name(field.name)
    for number in count(1):
        base = name if number == 1 else f"{name}_{number}"
        columns = tuple(identifier(base + suffix) for suffix, *_ in _parts_of(field))
        if taken.isdisjoint(columns):
            return columns
    raise AssertionError


def identifier(name: str) -> str:
    """Return the name of a view or a column: this one, or its beginning and a hash if it is longer than 63 bytes."""
    if len(name) <= MAX_NAME_BYTES:
        return name
    digest = sha256(name.encode()).hexdigest()[:_HASH_CHARACTERS]
    return f"{name[: MAX_NAME_BYTES - _HASH_CHARACTERS - 1]}_{digest}"


_LOAD = "select nsid, document::text, source, view_name, fields::text from indexer.lexicon order by nsid"
_UPSERT = """
    insert into indexer.lexicon (nsid, document, source, view_name, fields) values ($1, $2::json, $3, $4, $5::jsonb)
    on conflict (nsid) do update
    set document = excluded.document, source = excluded.source, view_name = excluded.view_name,
        fields = excluded.fields, added_at = now()
"""


class AddedState(StrEnum):
    """Result of adding a lexicon."""

    ADDED = "added"
    UPDATED = "updated"
    UNCHANGED = "unchanged"
    SKIPPED = "skipped"


class AddedLexicon(NamedTuple):
    """The result of adding a lexicon.

    Attributes:
        view: The name of its view; None if it has none.
        unknown: NSIDs of lexicons that its fields refer to and that are not stored.
    """

    nsid: str
    state: AddedState
    view: str | None = None
    unknown: tuple[str, ...] = ()


class StoredLexicon(NamedTuple):
    """A stored lexicon, the file or AT-URI that it was read from, its view, and the fields in the order of columns."""

    lexicon: Lexicon
    source: str
    view: str | None
    fields: Mapping[str, ViewField]


class Lexicons(Area):
    """Lexicons and their typed views."""

    async def load(self) -> dict[str, StoredLexicon]:
        """Return all stored lexicons by NSID."""
        async with self._pool.connection() as connection:
            return await load_lexicons(connection)

    async def columns(self) -> list[ViewColumn]:
        """Return the columns of all typed views, in the order of the names of the views."""
        async with self._pool.connection() as connection:
            return await load_view_columns(connection, "lexicon")

    async def add(self, given: Mapping[str, tuple[Lexicon, str]]) -> list[AddedLexicon]:
        """Store lexicons (with their sources, by NSID), and create or update the views that depend on them.

        Raises:
            ViewInUseError: A view has to be dropped, and objects of users depend on it.
        """
        async with self._changing_views() as connection:
            stored = await load_lexicons(connection)
            known = {nsid: one.lexicon for nsid, one in stored.items()} | {
                nsid: one for nsid, (one, _) in given.items()
            }
            needed = needed_lexicons(known)
            results = []
            for nsid in sorted(known):
                lexicon, before = known[nsid], stored.get(nsid)
                if before is not None and (nsid not in needed or (before.view and not lexicon.record)):
                    await _drop(connection, nsid)
                if nsid not in needed:
                    results.append(AddedLexicon(nsid, AddedState.SKIPPED))
                    continue
                source = given[nsid][1] if nsid in given else stored[nsid].source
                fields = plan_columns(record_fields(lexicon, known), before.fields if before else {})
                changed = before is None or _changed(before, lexicon, fields)
                if before is None or changed or source != before.source:
                    await _save(connection, lexicon, source, fields)
                state = AddedState.UPDATED if changed else AddedState.UNCHANGED
                results.append(
                    AddedLexicon(
                        nsid,
                        AddedState.ADDED if before is None else state,
                        identifier(nsid) if lexicon.record else None,
                        tuple(sorted(references(lexicon, known) - known.keys())),
                    )
                )
            return results

    async def remove(self, nsids: Iterable[str]) -> None:
        """Remove lexicons with their views, and lexicons that only these refer to.

        Raises:
            ViewInUseError: Objects of users depend on a view.
        """
        async with self._changing_views() as connection:
            known = {nsid: one.lexicon for nsid, one in (await load_lexicons(connection)).items()}
            removed = set(nsids)
            left = needed_lexicons({nsid: one for nsid, one in known.items() if nsid not in removed})
            for nsid in sorted(known.keys() - left):
                await _drop(connection, nsid)

    @asynccontextmanager
    async def _changing_views(self) -> AsyncIterator[Connection]:
        """Begin a transaction that waits only briefly for queries on the views, so that no other query waits long."""
        try:
            async with self._pool.transaction() as connection:
                await connection.execute("set local lock_timeout = '2s'")
                await connection.execute("lock table indexer.lexicon in share row exclusive mode")
                yield connection
        except DatabaseError as error:
            if isinstance(error.__cause__, asyncpg.LockNotAvailableError | asyncpg.DeadlockDetectedError):
                text = "open transactions use a typed view that has to change; end them, or try again later"
                raise DatabaseError(FetchFailure.TIMEOUT, text) from error
            raise


async def load_lexicons(connection: Connection) -> dict[str, StoredLexicon]:
    """Return all stored lexicons by NSID."""
    return {
        row["nsid"]: StoredLexicon(
            parse_lexicon(json.loads(row["document"])),
            row["source"],
            row["view_name"],
            fields_of_json(json.loads(row["fields"] or "[]")),
        )
        for row in await connection.fetch(_LOAD)
    }


def needed_lexicons(known: Mapping[str, Lexicon]) -> set[str]:
    """Return the NSIDs of lexicons with a record type, and of the known ones that their fields refer to."""
    records = {nsid for nsid, lexicon in known.items() if lexicon.record is not None}
    referred = {other for nsid in records for other in references(known[nsid], known)}
    return records | referred & known.keys()


async def _save(connection: Connection, lexicon: Lexicon, source: str, fields: list[ViewField]) -> None:
    if lexicon.record is None:
        await connection.execute(_UPSERT, lexicon.nsid, lexicon.text, source, None, None)
        return
    text = json.dumps([field.to_json() for field in fields])
    with _dependents():
        await connection.execute(_UPSERT, lexicon.nsid, lexicon.text, source, identifier(lexicon.nsid), text)
        await connection.execute("select indexer.create_lexicon_view($1)", lexicon.nsid)


async def _drop(connection: Connection, nsid: str) -> None:
    with _dependents():
        await connection.execute("select indexer.drop_lexicon_view($1)", nsid)


@contextmanager
def _dependents() -> Iterator[None]:
    """Raise `ViewInUseError` if objects of users, or the view of another lexicon, prevent the change of a view.

    Two long NSIDs of one authority may have the same view (`view_name`).
    """
    try:
        yield
    except asyncpg.DependentObjectsStillExistError as error:
        raise ViewInUseError("; ".join((error.detail or str(error)).splitlines())) from error
    except asyncpg.DuplicateTableError as error:
        raise ViewInUseError(str(error)) from error
    except asyncpg.UniqueViolationError as error:
        raise ViewInUseError(f"the view of another lexicon has this name: {error.detail}") from error


def _changed(before: StoredLexicon, lexicon: Lexicon, fields: list[ViewField]) -> bool:
    """Return True if the document has changed, or the type of a field that is defined in another one."""
    return before.lexicon.text != lexicon.text or _types(before.fields.values()) != _types(fields)


def _types(fields: Iterable[ViewField]) -> list[tuple[RecordField, tuple[str, ...]]]:
    """Return what the view depends on: everything but descriptions."""
    return [(view.field._replace(description=""), view.columns) for view in fields]
