"""The writer: the only code that writes records, sets heads, adds buffered events, and advances cursors.

Functions in SQL (`08_requests.sql`, `09_scope.sql`), the statements of claims and leases, and resets of cursors write
other columns.

`write` writes a `Batch` within an open transaction: live messages, the end of resyncs, replayed dead letters, erasures,
narrowed scopes and untracked repos. Each row of a repo is compared with the version that its write was planned on. A
resync writes its records before, in the same transaction, with `write_changes` and `create_records`, chunk by chunk.

Each table is written by few statements per batch: one for new and one for existing rows, or one for writes and one for
deletes. Repos of which only the head advances have their own. Records with large values take more statements, of at
most `STATEMENT_BYTES` each. A statement takes arrays, sorted by key, with each key once: it cannot change a row twice,
and concurrent statements lock rows in the same order. Many new records are written by COPY, which takes a third of the
time, also sorted by key, except those of a resync (`in_filling_order`). A core that reads exports may return their
rows in the binary format of COPY.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from time import time
from typing import Any, NamedTuple, TypeVar

from asyncpg import Record as Row
from asyncpg import UniqueViolationError

from indexer.crash_points import crash_point
from indexer.db import dead_letters, identities
from indexer.db.change_log import COLUMNS as CHANGE_COLUMNS
from indexer.db.change_log import log_changes, log_chunks
from indexer.db.columns import (
    HEAD_COLUMNS,
    RECORD_KEY,
    REPO_COLUMNS,
    Columns,
    Connection,
    buckets_of,
    columns_of,
    copy_binary,
    head_arrays,
    of_buckets,
    repo_arrays,
    stored_values,
    typed,
    unnest,
    values_of,
)
from indexer.sync.changes import (
    Action,
    Batch,
    Proof,
    RecordChange,
    RecordKey,
    RepoWrite,
    change_log_entries,
    effective_changes,
    record_entries,
)
from indexer.sync.export import ColumnLayout, RecordChunk
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import PLAIN, Layout, bucket_of

T = TypeVar("T")

STATEMENT_BYTES = 8 << 20
"""Bytes of records in one statement, if it has more than one row. Postgres refuses messages of 1 GiB, and the driver
needs several times the memory of a statement."""

MIN_COPIED = 50
"""The least number of new records that are written by COPY. Below, its savepoint costs more than an upsert."""

MIN_SPLIT = 10
"""The least mean number of rows for a part of the layout with which each part gets a statement of its own.

Citus sends all arrays to each of the shards that a statement is for. For many rows that costs more than a statement for
each shard."""

_VALUES = stored_values(REPO_COLUMNS, "w")

# Takes the arrays of `repo_arrays`; returns the DIDs that had no row yet.
_INSERT_REPOS = f"""
    insert into indexer.repo ({", ".join(_VALUES)}) select {", ".join(_VALUES.values())}
    from {unnest(REPO_COLUMNS, "w")} order by w.ordinal
    on conflict (did, bucket) do nothing returning did
"""


def _update_repos(columns: Columns, *others: str) -> str:
    """Return the statement that takes the buckets, an array for each column, and the expected versions.

    `others` are further assignments. It returns the DIDs that were written.
    """
    values = stored_values(columns, "w").items()
    assignments = [f"{name} = {value}" for name, value in values if name not in {"did", "bucket"}]
    return f"""
        update indexer.repo r set {", ".join([*assignments, "updated_at = now()", *others])}
        from {unnest({**columns, "expected_version": "bigint"}, "w", 2)}
        where r.did = w.did and {of_buckets("r")} and r.version = w.expected_version
        returning r.did
    """


UPDATE_REPOS = _update_repos(
    REPO_COLUMNS, f"lease_until = case when w.sync_status = '{SyncStatus.IN_PROGRESS}' then r.lease_until end"
)
ADVANCE_REPOS = _update_repos(HEAD_COLUMNS)
"""Nearly all writes only advance the head. With the arrays of all columns they take twice the time."""

RECORD_COLUMNS = typed(
    "did text, collection text, rkey text, bucket smallint, cid bytea, rev text, value text, value_problem text, "
    'original bytea, proof "char"'
)
"""The SQL types of the columns of `record_rows`, in their order."""
ROW_LAYOUT = ColumnLayout(tuple(RECORD_COLUMNS), CHANGE_COLUMNS)
"""The columns of the `rows` of a `RecordChunk`."""

# For records that may exist, and for few new ones. Returns the keys of the rows that existed: the system column xmax of
# a row that was just inserted is 0, because no transaction has locked the row yet.
_UPSERT_RECORDS = f"""
    with written as (
        insert into indexer.record as r
            (did, collection, rkey, bucket, cid, rev, value, value_problem, original, proof, indexed_at)
        select did, collection, rkey, bucket, cid, rev, value::jsonb, value_problem, original, proof,
            statement_timestamp()
        from {unnest(RECORD_COLUMNS, "w")} order by ordinal
        on conflict (did, collection, rkey, bucket) do update
        set cid = excluded.cid, rev = excluded.rev, value = excluded.value, value_problem = excluded.value_problem,
            original = excluded.original, proof = excluded.proof, indexed_at = excluded.indexed_at,
            first_seen = coalesce(r.first_seen, r.indexed_at),
            first_live = case when r.first_seen is null then r.proof in ('c', 'E', 'R') else r.first_live end
        returning r.did, r.collection, r.rkey, r.xmax <> 0 as existed
    )
    select did, collection, rkey from written where existed
"""

_DELETE_RECORDS = f"""
    delete from indexer.record r using {unnest(RECORD_KEY, "w", 2)}
    where r.did = w.did and r.collection = w.collection and r.rkey = w.rkey and {of_buckets("r")}
    returning r.did, r.collection, r.rkey
"""

_BUFFERED_EVENT_COLUMNS = {"did": "text", "bucket": "smallint", "relay": "text", "seq": "bigint", "frame": "bytea"}

_INSERT_BUFFERED_EVENTS = f"""
    insert into indexer.buffered_event ({", ".join(_BUFFERED_EVENT_COLUMNS)})
    select {", ".join(_BUFFERED_EVENT_COLUMNS)} from {unnest(_BUFFERED_EVENT_COLUMNS, "w")} order by ordinal
"""

# The order does not matter, because the rows of the repos are locked.
_DELETE_BUFFERED_EVENTS = """
    delete from indexer.buffered_event where did = any($1::text[]) and bucket = any($2::smallint[])
"""

# A time that is far ahead is from before the clock was set back, and would hide the lag.
_SAVE_CURSOR = """
    insert into indexer.cursor as c (relay, shard, epoch, seq, event_time, caught_up_at, updated_at)
    values ($1, $2, $3, $4, $5, to_timestamp($6), to_timestamp($7))
    on conflict (relay, shard) do update
    set epoch = excluded.epoch, seq = excluded.seq, event_time = excluded.event_time, updated_at = excluded.updated_at,
        caught_up_at = greatest(
            excluded.caught_up_at, case when c.caught_up_at <= to_timestamp($7::float8 + 300) then c.caught_up_at end
        )
    where (excluded.epoch, excluded.seq) >= (c.epoch, c.seq)
"""


class RecordsExistError(Exception):
    """A record exists already. The transaction has failed."""


class NewRepoRecords(NamedTuple):
    """A chunk of new records of one repo. `first_of` is the rev of the export, in its first chunk."""

    did: str
    chunk: RecordChunk
    first_of: str | None = None


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """The DIDs whose writes were skipped, and the numbers of records that were created, updated and deleted."""

    skipped: frozenset[str]
    changes: Counter[Action]


async def write(connection: Connection, batch: Batch, *, layout: Layout = PLAIN) -> WrittenBatch:
    """Write the batch within the open transaction.

    A write is skipped, together with the dead letters of its DID, if the row of the repo is no longer at the version
    that the write was planned on. If any write is skipped, no cursor is saved, and no dead letter is resolved.

    Raises:
        DeadLetterGoneError: The dead letter that the batch resolves does not exist.
    """
    done = await _write_repos(connection, batch.writes, layout)
    writes = [write for write in batch.writes if write.repo.did in done]
    skipped = frozenset([write.repo.did for write in batch.writes]) - done
    changes = [(write.repo.did, change) for write in writes for change in write.changes]
    unproven = frozenset([write.repo.did for write in writes if write.repo.unproven_since is not None])
    existed, as_planned = await _write_records(connection, changes, "commit", unproven)
    if not as_planned:
        writes = [_as_it_happened(write, existed) for write in writes]
    await log_changes(connection, [entry for write in writes for entry in change_log_entries(write)])
    await _write_buffered_events(connection, writes)
    await dead_letters.insert(
        connection, [dead_letter for dead_letter in batch.dead_letters if dead_letter.did not in skipped]
    )
    if batch.stale_identities:
        await identities.mark_stale(connection, batch.stale_identities)
    if batch.resolved is not None and not skipped:
        await dead_letters.delete(connection, batch.resolved)
        crash_point("dead-letter.resolved")
    if not skipped:
        for cursor in batch.cursors:
            values = values_of(cursor, ("relay", "shard", "epoch", "seq", "event_time", "caught_up_at"))
            await connection.execute(_SAVE_CURSOR, *values, time())
    return WrittenBatch(skipped, Counter([change.action for write in writes for change in write.changes]))


async def change_repos(connection: Connection, repos: Iterable[Repo], change: Callable[[Repo], Repo]) -> int:
    """Write rows as `change` returns them; return how many were still at the version that was read."""
    writes = tuple([RepoWrite(repo, change(repo)) for repo in repos])
    return len(writes) - len((await write(connection, Batch(writes))).skipped)


async def write_changes(
    connection: Connection, did: str, changes: Sequence[RecordChange], proof: Proof, *, live: bool
) -> tuple[RecordChange, ...]:
    """Write and log changes of a repo in progress, whose row `write` writes later; return them as they happened.

    Only the resync that has claimed the repo writes its records. If it has lost the claim, `write` skips the row.
    """
    existed, as_planned = await _write_records(connection, [(did, change) for change in changes], proof, live=live)
    effective = tuple(changes) if as_planned else effective_changes(did, changes, existed)
    await log_changes(connection, list(record_entries(did, effective, live=live)))
    return effective


async def create_records(connection: Connection, parts: Sequence[NewRepoRecords]) -> None:
    """Insert records of repos in progress of which none are stored, and log them as one batch of changes.

    Raises:
        RecordsExistError: One of the records exists already.
    """
    ready = [part.chunk.rows for part in parts if part.chunk.rows]
    others: list[tuple[Any, ...]] = []
    for did, chunk, _ in parts:
        others += record_rows([(did, change) for change in in_filling_order(chunk.changes)], chunk.proof)
    try:
        if ready:
            pieces = (piece for rows in ready for piece in rows.records())
            await copy_binary(connection, "record", list(RECORD_COLUMNS), pieces)
        if others:
            await _copy_records(connection, others)
    except UniqueViolationError as error:
        raise RecordsExistError(str(error)) from error
    await log_chunks(connection, parts)


def in_filling_order(records: Sequence[T]) -> list[T]:
    """Return sorted records of a repo in the order that fills the pages of the primary key: three of seven come last.

    A full page that gets keys in order is split in halves, and the lower half stays half empty. The records that come
    last fill it. The rows of the native core are in the same order (native/src/copy_rows.rs).
    """
    return [record for last in (0, 1) for index, record in enumerate(records) if index % 7 % 2 == last]


def _as_it_happened(write: RepoWrite, stored: set[RecordKey]) -> RepoWrite:
    changes = effective_changes(write.repo.did, write.changes, stored)
    return write if changes == write.changes else write._replace(changes=changes)  # a copy costs 3 µs


async def _write_repos(connection: Connection, writes: Sequence[RepoWrite], layout: Layout) -> set[str]:
    """Write the rows that are at the expected version; return their DIDs."""
    ordered = sorted(writes, key=lambda write: write.repo.did)
    written: list[Row] = []
    if new := [write.repo for write in ordered if not write.before.known]:
        written += await connection.fetch(_INSERT_REPOS, *repo_arrays(new))
    known = [write for write in ordered if write.before.known]
    for advanced in layout.divide(
        [write for write in known if write.advances], lambda write: write.repo.did, MIN_SPLIT
    ):
        written += await connection.fetch(ADVANCE_REPOS, *_update_arguments(advanced, head_arrays))
    if others := [write for write in known if not write.advances]:
        written += await connection.fetch(UPDATE_REPOS, *_update_arguments(others, repo_arrays))
    return {did for (did,) in written}


def _update_arguments(
    writes: Sequence[RepoWrite], arrays: Callable[[Sequence[Repo]], list[list[Any]]]
) -> list[list[Any]]:
    """Return the arguments of `UPDATE_REPOS` or `ADVANCE_REPOS`, which takes these arrays."""
    repos = [write.repo for write in writes]
    return [buckets_of([repo.did for repo in repos]), *arrays(repos), [write.before.version for write in writes]]


async def _write_records(
    connection: Connection,
    changes: Sequence[tuple[str, RecordChange]],
    proof: Proof,
    unproven: AbstractSet[str] = frozenset(),
    *,
    live: bool = True,
) -> tuple[set[RecordKey], bool]:
    """Write changes, each with its DID, in order. Of several changes of one record only the last one is written.

    Return the keys of the changed records that existed before, and True if each change happened as it says: no record
    has several changes, those that were created did not exist, and all others did.

    New records are copied. If one of them exists already, all are upserted instead. Then the COPY was wasted. To avoid
    that in every batch, new records of `unproven` repos are not copied: their stored records may be wrong.
    """
    last = {(did, change.collection, change.rkey): change for did, change in changes}
    distinct = len(last) == len(changes)
    first = last if distinct else {(did, change.collection, change.rkey): change for did, change in reversed(changes)}
    keys = sorted(last)
    creates, puts, deletes = [], [], []
    for key in keys:
        change = last[key]
        if change.action == "delete":
            deletes.append(key)
        elif first[key].action == "create" and key[0] not in unproven:
            creates.append((key[0], change))
        else:
            puts.append((key[0], change))
    existed: set[RecordKey] = set()
    if not distinct:  # a record that is deleted and then created is a new one, with another first-seen time
        deletes = sorted({(did, one.collection, one.rkey) for did, one in changes if one.action == "delete"})
    if deletes:
        buckets = buckets_of([did for did, _, _ in deletes])
        deleted = await connection.fetch(_DELETE_RECORDS, buckets, *columns_of(deletes, RECORD_KEY))
        existed.update([(did, collection, rkey) for did, collection, rkey in deleted])
    if len(creates) < MIN_COPIED or not await _try_copy(connection, record_rows(creates, proof, live=live)):
        puts = [(key[0], last[key]) for key in keys if last[key].action != "delete"]
    for part in _statements(puts):
        rows = record_rows(part, proof, live=live)
        updated = await connection.fetch(_UPSERT_RECORDS, *columns_of(rows, RECORD_COLUMNS))
        existed.update([(did, collection, rkey) for did, collection, rkey in updated])
    return existed, distinct and existed == {key for key in keys if last[key].action != "create"}


def _statements(puts: Sequence[tuple[str, RecordChange]]) -> Iterator[Sequence[tuple[str, RecordChange]]]:
    """Yield the writes in parts of at most `STATEMENT_BYTES`, or of one write."""
    start, size = 0, 0
    for number, (_, change) in enumerate(puts):
        size += change.size
        if size > STATEMENT_BYTES and number > start:
            yield puts[start:number]
            start, size = number, change.size
    if puts:
        yield puts[start:]


async def _try_copy(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> bool:
    """Insert new records in a savepoint; return False if one of them exists already. Then nothing is written."""
    try:
        async with connection.transaction():
            await _copy_records(connection, rows)
    except UniqueViolationError:
        return False
    return True


async def _copy_records(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    await connection.copy_records_to_table("record", schema_name="indexer", columns=list(RECORD_COLUMNS), records=rows)


def record_rows(
    changes: Iterable[tuple[str, RecordChange]], proof: Proof, *, live: bool = False
) -> list[tuple[Any, ...]]:
    """Return the rows of records, each given with its DID, in the order of `RECORD_COLUMNS`."""
    letter = (proof[:1].upper() if live and proof != "commit" else proof[:1]).encode()
    return [
        (did, collection, rkey, bucket_of(did), cid, rev, value, problem, original, letter)
        for did, (_, collection, rkey, rev, cid, value, problem, original) in changes
    ]


async def _write_buffered_events(connection: Connection, writes: Iterable[RepoWrite]) -> None:
    """Empty the buffers of repos that are not in progress, and append to the buffers of those that are."""
    ended = sorted(
        write.repo.did
        for write in writes
        if write.before.buffered_events and write.repo.sync_status is not SyncStatus.IN_PROGRESS
    )
    if ended:
        await connection.execute(_DELETE_BUFFERED_EVENTS, ended, buckets_of(ended))
    rows = [
        (event.did, bucket_of(event.did), event.relay, event.seq, event.frame)
        for write in writes
        if write.buffered and write.repo.sync_status is SyncStatus.IN_PROGRESS
        for event in write.buffered
    ]
    if rows:
        await connection.execute(_INSERT_BUFFERED_EVENTS, *columns_of(rows, _BUFFERED_EVENT_COLUMNS))
