"""Insert records that are not stored yet, by COPY, from rows or from ready-made bytes.

COPY takes a third of the time of an upsert. A core that reads exports may return the rows of a chunk in the binary
format of COPY. Otherwise, the database driver encodes them.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NamedTuple

from asyncpg import UniqueViolationError

from indexer.db.change_log import COLUMNS as CHANGE_COLUMNS
from indexer.db.change_log import begin_batch, log_rows
from indexer.db.columns import Connection
from indexer.sync.changes import record_entries
from indexer.sync.export import PIECE_BYTES, RecordChunk
from indexer.sync.plans import RecordChange
from indexer.sync.shard import bucket_of

RECORD_COLUMNS = ("did", "collection", "rkey", "bucket", "cid", "rev", "value", "value_problem", "original")
"""The columns of a new record, in the order of the rows of a `RecordChunk`."""

# The signature, no flags, and no extension: the header of the binary format. A row count of -1 ends the rows.
_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"


class RecordsExistError(Exception):
    """A record exists already. The transaction has failed."""


class NewRepoRecords(NamedTuple):
    """A chunk of new records of one repo."""

    did: str
    chunk: RecordChunk


def record_rows(changes: Iterable[tuple[str, RecordChange]]) -> list[tuple[Any, ...]]:
    """Return the rows of records, each given with its DID, in the order of `RECORD_COLUMNS`."""
    return [
        (did, collection, rkey, bucket_of(did), cid, rev, value, problem, original)
        for did, (_, collection, rkey, rev, cid, value, problem, original) in changes
    ]


async def create_records(connection: Connection, creates: Iterable[tuple[str, RecordChange]]) -> bool:
    """Insert new records, each with its DID, in a savepoint.

    Returns:
        False if one of the records exists already; then nothing is written, and the transaction goes on.
    """
    try:
        async with connection.transaction():
            await _copy_records(connection, creates)
    except UniqueViolationError:
        return False
    return True


async def copy_chunks(connection: Connection, parts: Sequence[NewRepoRecords]) -> None:
    """Insert new records and log them as one batch of changes. Run it in a transaction.

    Raises:
        RecordsExistError: One of the records exists already.
    """
    ready = [part for part in parts if part.chunk.record_rows is not None]
    others = [part for part in parts if part.chunk.record_rows is None and part.chunk.count]
    try:
        if ready:
            source = _binary(piece for part in ready for piece in part.chunk.record_rows or ())
            await connection.copy_to_table(
                "record", schema_name="indexer", columns=RECORD_COLUMNS, source=source, format="binary"
            )
        if others:
            await _copy_records(connection, [(did, change) for did, chunk in others for change in chunk.changes()])
    except UniqueViolationError as error:
        raise RecordsExistError(str(error)) from error
    await _log_chunks(connection, ready, others)


async def _log_chunks(
    connection: Connection, ready: Sequence[NewRepoRecords], others: Sequence[NewRepoRecords]
) -> None:
    count = sum(part.chunk.count for part in (*ready, *others))
    if not count:
        return
    segment, batch = await begin_batch(connection, count)
    ordinal, ready_rows = 0, []
    for part in ready:
        ready_rows.append(part.chunk.change_rows(segment, batch, ordinal))
        ordinal += part.chunk.count
    if ready_rows:
        source = _binary(ready_rows)
        await connection.copy_to_table(
            "change", schema_name="indexer", columns=CHANGE_COLUMNS, source=source, format="binary"
        )
    if others:
        entries = (entry for did, chunk in others for entry in record_entries(did, chunk.changes(), live=False))
        rows = log_rows(segment, batch, ordinal, entries)
        await connection.copy_records_to_table("change", schema_name="indexer", columns=CHANGE_COLUMNS, records=rows)


async def _copy_records(connection: Connection, creates: Iterable[tuple[str, RecordChange]]) -> None:
    rows = record_rows(creates)
    await connection.copy_records_to_table("record", schema_name="indexer", columns=RECORD_COLUMNS, records=rows)


async def _binary(rows: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the rows as a whole file in the binary format of COPY. Small rows are joined, as each item is a message."""
    joined = bytearray(_HEADER)
    for row in rows:
        joined += row
        if len(joined) >= PIECE_BYTES:
            yield bytes(joined)
            joined.clear()
    yield bytes(joined + _TRAILER)
