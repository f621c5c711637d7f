"""Rows of records and changes in the binary format of COPY, made in Python. Postgres documents the format."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from indexer.db.change_log import COLUMNS, log_rows
from indexer.db.write import RECORD_COLUMNS, in_filling_order
from indexer.db.write import record_rows as rows_of_records
from indexer.sync.changes import RecordChange, record_entries
from indexer.sync.export import RecordChunk

_INTEGER_BYTES = {"segment": 2, "batch": 8, "ordinal": 4, "bucket": 2}
_PREFIXES = {"value": b"\x01"}
"""jsonb begins with the version of its format."""
_NULL = b"\xff" * 4


def record_rows(did: str, changes: Sequence[RecordChange]) -> bytes:
    """Return the rows of `indexer.record` for new records of a repo, in the order in which they are written."""
    rows = rows_of_records([(did, change) for change in in_filling_order(changes)], "export")
    return _encoded(list(RECORD_COLUMNS), rows)


def change_rows(did: str, changes: Iterable[RecordChange], segment: int, batch: int, first_ordinal: int) -> bytes:
    """Return the rows of `indexer.change` for changes that a resync made."""
    return _encoded(COLUMNS, log_rows(segment, batch, first_ordinal, record_entries(did, changes, live=False)))


def changes_of(chunk: RecordChunk) -> list[RecordChange]:
    """Return the changes of a chunk in path order, also of one that has only rows."""
    if chunk.rows is None:
        return list(chunk.changes)
    written = [dict(zip(RECORD_COLUMNS, row, strict=True)) for row in _decoded(b"".join(chunk.rows.records()))]
    numbers = in_filling_order(range(len(written)))
    rows = [row for _, row in sorted(zip(numbers, written, strict=True), key=lambda pair: pair[0])]
    return [
        RecordChange(
            "create",
            row["collection"].decode(),
            row["rkey"].decode(),
            row["rev"].decode(),
            row["cid"],
            row["value"].removeprefix(_PREFIXES["value"]).decode(),
            row["value_problem"].decode() or None,
        )
        for row in rows
    ]


def _decoded(rows: bytes) -> Iterator[list[bytes]]:
    """Yield the fields of each row; null as empty bytes."""
    position = 0
    while position < len(rows):
        count, position = int.from_bytes(rows[position : position + 2]), position + 2
        fields = []
        for _ in range(count):
            size, start = int.from_bytes(rows[position : position + 4], signed=True), position + 4
            position = start + max(0, size)
            fields.append(rows[start:position])
        yield fields


def _encoded(columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> bytes:
    encoded = bytearray()
    for row in rows:
        encoded += len(row).to_bytes(2)
        for column, value in zip(columns, row, strict=True):
            encoded += _NULL if value is None else _field(column, value)
    return bytes(encoded)


def _field(column: str, value: Any) -> bytes:
    match value:
        case bool():
            field = bytes([value])
        case int():
            field = value.to_bytes(_INTEGER_BYTES[column], signed=True)
        case str():
            field = _PREFIXES.get(column, b"") + value.encode()
        case _:
            field = value
    return len(field).to_bytes(4) + field
