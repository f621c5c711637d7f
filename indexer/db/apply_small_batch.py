"""Write a small batch of ordinary commits with one statement, which is its own transaction.

While few messages arrive, a batch has a few commits, and takes most of its time for the round trips of the statements
that `indexer.db.apply_batch` sends one after the other. An ordinary batch needs none of their answers: each commit
advances the head of a repo that is at the expected version, the records that it creates do not exist, and the others
do. So one statement does the work of all, and fails if any of this is not so. Then nothing was written, and
`apply_batch.apply` writes the batch.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncpg import DivisionByZeroError

from indexer.db.apply_batch import (
    ADVANCE_REPOS,
    RECORD_TYPES,
    SAVE_CURSOR,
    STATEMENT_BYTES,
    AppliedBatch,
    cursor_values,
    update_arguments,
    upsert_records,
)
from indexer.db.columns import HEAD_COLUMNS, Connection, columns_of, head_arrays, renumbered, unnest
from indexer.db.copy_records import record_rows
from indexer.sync.plans import Batch, Cursor, RecordChange, RepoWrite

MAX_CHANGES = 100
"""The most changes of a small batch, and the most repos. With more, the statements of `apply_batch` are faster."""

_PLANNED = {**RECORD_TYPES, "action": "text", "live": "boolean", "log_ordinal": "integer"}
_FIRST_OF_REPOS = len(_PLANNED) + 1
_VERSIONS = _FIRST_OF_REPOS + 1 + len(HEAD_COLUMNS)  # after the buckets and the heads
_FIRST_OF_CURSOR = _VERSIONS + 1
_IF_LOCKED = f"(select count(*) from advanced) = cardinality(${_VERSIONS}::bigint[])"

# All parts see the database as it was when the statement began, also after `advanced` has waited for a lock of a repo.
# So they do not see what another transaction has committed meanwhile. It has changed the version of the repo, because
# nothing else may write records without that; then `advanced` has too few rows, and the statement fails. Parts that
# read `advanced` run after it, so rows are locked in the order of `apply`: repos, written records, deleted records.
WRITE = f"""
    -- "division by zero" is no failure: a row is not as expected, so the batch is written by several statements.
    with planned as materialized (select * from {unnest(_PLANNED, "w")}),
    advanced as ({renumbered(ADVANCE_REPOS, _FIRST_OF_REPOS)}),
    written as ({upsert_records(f"planned where action <> 'delete' and {_IF_LOCKED}")}),
    deleted as (
        delete from indexer.record r using planned w
        where w.action = 'delete' and {_IF_LOCKED}
            and r.did = w.did and r.collection = w.collection and r.rkey = w.rkey and r.bucket = w.bucket
        returning 1
    ),
    started as (
        insert into indexer.change_batch (segment, size)
        select current_segment, (select count(*) from planned) from indexer.change_log
        where exists (select from planned)
        returning segment, id
    ),
    logged as (
        insert into indexer.change (segment, batch, ordinal, bucket, live, action, did, collection, rkey, rev, cid)
        select started.segment, started.id, log_ordinal, bucket, live, action, did, collection, rkey, rev, cid
        from started, planned
    ),
    saved as ({renumbered(SAVE_CURSOR, _FIRST_OF_CURSOR)})
    select 1 / (
        {_IF_LOCKED}
        and not exists (
            select from written join planned using (did, collection, rkey) where existed <> (action = 'update')
        )
        and (select count(*) from deleted) = (select count(*) from planned where action = 'delete')
    )::int
"""
"""Takes the rows of `_planned_rows` as arrays, the arguments of `ADVANCE_REPOS` and those of `SAVE_CURSOR`."""


class NotAsPlannedError(Exception):
    """A repo or a record is not as the batch was planned on. Nothing was written."""


class SmallBatch(NamedTuple):
    """A batch that `apply_small` can write.

    Attributes:
        writes: The writes of the repos.
        changes: Their changes in the order of the change log, each with its DID, and True if the stream caused it.
        cursor: The cursor to save.
    """

    writes: Sequence[RepoWrite]
    changes: Sequence[tuple[str, RecordChange, bool]]
    cursor: Cursor


def small_batch(batch: Batch) -> SmallBatch | None:
    """Return the batch if it only advances the heads of few repos, and changes few records, each once; otherwise None.

    None as well if it writes an unproven repo: its stored records may differ from what its commits say.
    """
    if batch.cursor is None or batch.dead_letters or batch.stale_identities or not batch.writes:
        return None
    if not all(write.advances and write.repo.unproven_since is None for write in batch.writes):
        return None
    if max(len(batch.writes), sum(len(write.changes) for write in batch.writes)) > MAX_CHANGES:
        return None
    changes = [(write.repo.did, change, write.live) for write in batch.writes for change in write.changes]
    keys = {(did, change.collection, change.rkey) for did, change, _ in changes}
    if len(keys) < len(changes) or sum(change.size for _, change, _ in changes) > STATEMENT_BYTES:
        return None
    return SmallBatch(batch.writes, changes, batch.cursor)


async def apply_small(connection: Connection, batch: SmallBatch) -> AppliedBatch:
    """Write a batch, in a transaction of its own. Links must not be kept, and the tables not be distributed.

    Raises:
        NotAsPlannedError: A repo is not at the expected version, a created record exists, or an updated or deleted
            one does not. Nothing was written.
    """
    try:
        await connection.execute(
            WRITE,
            *columns_of(_planned_rows(batch), _PLANNED),
            *update_arguments(sorted(batch.writes, key=lambda write: write.repo.did), head_arrays),
            *cursor_values(batch.cursor),
        )
    except DivisionByZeroError:
        raise NotAsPlannedError from None
    return AppliedBatch(frozenset(), Counter([change.action for _, change, _ in batch.changes]))


def _planned_rows(batch: SmallBatch) -> list[tuple[Any, ...]]:
    """Return a row for each change, in the order of `_PLANNED`, sorted by key."""
    records = record_rows([(did, change) for did, change, _ in batch.changes])
    return sorted(
        (*record, change.action, live, ordinal)
        for ordinal, (record, (_, change, live)) in enumerate(zip(records, batch.changes, strict=True))
    )
