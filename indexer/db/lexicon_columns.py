"""The names of the views of lexicons and of their columns (docs/sql.md#typed-views).

A name is an identifier of Postgres, which has at most 63 bytes. All names are ASCII.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

from indexer.atproto.lexicon import MAX_REFERENCE_BYTES, FieldKind, RecordField

KEY_COLUMNS = ("did", "rkey", "uri", "cid", "rev", "indexed_at", "lexicon_problem", "bucket")
"""The first columns of every view, `bucket` unless a field of the lexicon has that name."""
MAX_NAME_BYTES = 63
MAX_INDEXED_BYTES = 2_560
"""Bytes of the strings of a row that a B-tree and a GIN index can always store; the limit of Postgres is 2,704."""
INDEXABLE_KEYS = {"did": 2_048, "rkey": 512, "indexed_at": 8}
"""Key columns that an index may have beside those of the lexicon, with their maximum bytes."""

_HASH_CHARACTERS = 8
_SUFFIXES = {
    FieldKind.STRONG_REF: ("_uri", "_cid"),
    FieldKind.BLOB: ("_cid", "_mime_type", "_size"),
}
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_OTHER = re.compile(r"[^a-z0-9_]+")


class ViewField(NamedTuple):
    """A field of a record with its columns, as the table `lexicon` stores it."""

    field: RecordField
    columns: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the field in the form that the functions of the database read."""
        field = self.field
        return {
            "field": field.name,
            "kind": field.kind,
            "max_bytes": field.max_bytes,
            "required": field.required,
            "nullable": field.nullable,
            "columns": self.columns,
            "comments": [_comment(field, suffix) for suffix in _SUFFIXES.get(field.kind, ("",))],
        }


def view_name(nsid: str) -> str:
    """Return the name of the view: the NSID, or its beginning and a hash if it is longer than 63 bytes."""
    return _shortened(nsid)


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
    found = {}
    for view in fields:
        for position, column in enumerate(view.columns):
            kind, max_bytes = _type_of_column(view.field, position)
            found[column] = IndexableColumn(kind, max_bytes, view, position)
    return found


def _type_of_column(field: RecordField, position: int) -> tuple[FieldKind, int]:
    match field.kind:
        case FieldKind.STRONG_REF:
            return FieldKind.TEXT, (MAX_REFERENCE_BYTES, 256)[position]
        case FieldKind.BLOB:
            return ((FieldKind.TEXT, 256), (FieldKind.TEXT, 256), (FieldKind.BIGINT, 8))[position]
        case FieldKind.LINK:
            return FieldKind.TEXT, 256
        case FieldKind.TEXT | FieldKind.TEXT_ARRAY:
            return field.kind, field.max_bytes
        case _:
            return field.kind, 8


def _free_columns(field: RecordField, taken: set[str]) -> tuple[str, ...]:
    name = column_name(field.name)
    for number in count(1):
        base = name if number == 1 else f"{name}_{number}"
        columns = tuple(_shortened(base + suffix) for suffix in _SUFFIXES.get(field.kind, ("",)))
        if taken.isdisjoint(columns):
            return columns
    raise AssertionError


def _comment(field: RecordField, suffix: str) -> str:
    what = {"_uri": " (AT-URI)", "_cid": " (CID)", "_mime_type": " (MIME type)", "_size": " (bytes)"}.get(suffix, "")
    return f"{field.name}{what}: {field.description}" if field.description else f"{field.name}{what}"


def _shortened(name: str) -> str:
    if len(name) <= MAX_NAME_BYTES:
        return name
    digest = sha256(name.encode()).hexdigest()[:_HASH_CHARACTERS]
    return f"{name[: MAX_NAME_BYTES - _HASH_CHARACTERS - 1]}_{digest}"
