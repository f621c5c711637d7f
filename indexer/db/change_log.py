"""Append to the change log. COMMIT assigns the numbers of the changes (`seq`).

    step                                   rows
    log_changes inserts a batch            change_batch  id 7, size 3, first_seq null
                and its changes            change        batch 7, ordinal 0
                                           change        batch 7, ordinal 1
                                           change        batch 7, ordinal 2
    COMMIT runs the trigger `publish`:
      1. lock the table numbering_lock     (waits for other commits that number changes)
      2. take 3 numbers                    change_batch  id 7, size 3, first_seq 41
    Postgres makes the commit visible
    Postgres releases the lock             seq = first_seq + ordinal: 41, 42, 43

The lock is released after the commit is visible. So the next transaction gets higher numbers, and a snapshot that shows
a number shows all smaller ones. A consumer therefore needs one number to store its position. See
docs/decisions/0005-number-changes-at-commit.md.

On a cluster, the numbers are assigned after the commit (`indexer.cluster.numbering`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from indexer.db.columns import Connection, columns_of, copy_binary, typed, unnest
from indexer.sync.changes import ChangeLogEntry, record_entries
from indexer.sync.export import RecordChunk
from indexer.sync.shard import bucket_of

_INSERT_BATCH = """
    insert into indexer.change_batch (segment, size) select current_segment, $1 from indexer.change_log
    returning segment, id
"""

_LOGGED = typed("bucket smallint, live boolean, action text, did text, collection text, rkey text, rev text, cid bytea")
COLUMNS = ("segment", "batch", "ordinal", *_LOGGED)
"""The columns of the table `change`, as COPY writes them."""

MIN_COPIED_CHANGES = 20
"""The least number of changes that are written by COPY. Below, its additional round trips cost more than it saves."""

_INSERT_CHANGES = f"""
    with started as ({_INSERT_BATCH})
    insert into indexer.change (segment, batch, ordinal, {", ".join(_LOGGED)})
    select started.segment, started.id, w.ordinal - 1, {", ".join(f"w.{name}" for name in _LOGGED)}
    from started, {unnest(_LOGGED, "w", 2)}
"""


async def log_changes(connection: Connection, changes: Sequence[ChangeLogEntry]) -> None:
    """Append changes to the log, in this order, within the open transaction."""
    if not changes:
        return
    if len(changes) < MIN_COPIED_CHANGES:
        await connection.execute(_INSERT_CHANGES, len(changes), *_arrays(changes))
        return
    segment, batch = await _begin_batch(connection, len(changes))
    rows = log_rows(segment, batch, 0, changes)
    await connection.copy_records_to_table("change", schema_name="indexer", columns=COLUMNS, records=rows)


async def log_chunks(connection: Connection, parts: Sequence[tuple[str, RecordChunk, str | None]]) -> None:
    """Append the new records of resyncs to the log: as one batch of changes, within the open transaction.

    A part has the DID of a repo, a chunk of its records, and the rev if it is the first chunk: then the batch begins
    with an entry "snapshot".
    """
    snapshots = [ChangeLogEntry(did, "snapshot", rev, live=False) for did, _, rev in parts if rev]
    count = len(snapshots) + sum(chunk.count for _, chunk, _ in parts)
    if not count:
        return
    segment, batch = await _begin_batch(connection, count, snapshots)
    ordinal, ready_rows = len(snapshots), []
    for _, chunk, _ in parts:
        if chunk.rows:
            ready_rows.append(chunk.rows.changes(segment, batch, ordinal))
            ordinal += chunk.count
    if ready_rows:
        await copy_binary(connection, "change", COLUMNS, ready_rows)
    entries = (entry for did, chunk, _ in parts for entry in record_entries(did, chunk.changes, live=False))
    if rows := log_rows(segment, batch, ordinal, entries):
        await connection.copy_records_to_table("change", schema_name="indexer", columns=COLUMNS, records=rows)


async def _begin_batch(connection: Connection, size: int, first: Sequence[ChangeLogEntry] = ()) -> tuple[int, int]:
    """Insert a batch of `size` changes with the first ones; return its segment and its ID.

    Its other changes must follow in the transaction.
    """
    if first:
        inserted = await connection.fetch(f"{_INSERT_CHANGES} returning segment, batch", size, *_arrays(first))
    else:
        inserted = await connection.fetch(_INSERT_BATCH, size)
    segment, batch = inserted[0]
    return segment, batch


def _arrays(changes: Iterable[ChangeLogEntry]) -> list[list[Any]]:
    """Return the arrays of `_INSERT_CHANGES`."""
    return columns_of([row for _, _, _, *row in log_rows(0, 0, 0, changes)], _LOGGED)


def log_rows(segment: int, batch: int, first_ordinal: int, changes: Iterable[ChangeLogEntry]) -> list[tuple[Any, ...]]:
    """Return the rows of changes, in the order of `COLUMNS`."""
    return [
        (segment, batch, ordinal, bucket_of(did), live, action, did, collection, rkey, rev, cid)
        for ordinal, (did, action, rev, live, collection, rkey, cid) in enumerate(changes, first_ordinal)
    ]
