"""Write a `Batch` in one transaction: repos, records, change log, resync buffer, dead letters, and the cursor.

Each table is written by few statements per batch: one for new and one for existing rows, or one for writes and one for
deletes. Repos of which only the head advances have their own. Records with large values take more statements, of at
most `STATEMENT_BYTES` each. A statement takes arrays, sorted by key, with each key once: it cannot change a row twice,
and concurrent statements lock rows in the same order. Many new records are written by COPY, also sorted by key.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from time import time
from typing import Any, NamedTuple

from indexer.db import dead_letters
from indexer.db.change_log import log_changes
from indexer.db.columns import (
    HEAD_COLUMNS,
    REPO_COLUMNS,
    Connection,
    buckets_of,
    columns_of,
    head_arrays,
    of_buckets,
    repo_arrays,
    repo_values,
    storable,
    unnest,
)
from indexer.db.copy_records import create_records, record_rows
from indexer.db.identities import is_postponed
from indexer.db.placement import shard_of
from indexer.sync.changes import (
    RecordKey,
    RepoVisibility,
    change_log_entries,
    effective_changes,
    visibility_of,
)
from indexer.sync.plans import Action, Batch, Cursor, RecordChange, RepoWrite
from indexer.sync.repo_state import DELETED, Repo, SyncStatus
from indexer.sync.shard import bucket_of

STATEMENT_BYTES = 8 << 20
"""Bytes of records in one statement, if it has more than one row. Postgres refuses messages of 1 GiB, and the driver
needs several times the memory of a statement."""

MIN_COPIED = 50
"""The least number of new records that are written by COPY. Below, its savepoint costs more than an upsert."""

MIN_SPLIT = 10
"""The least mean number of rows for a shard with which each shard gets a statement of its own."""

_VALUES = repo_values("w")

INSERT_REPOS = f"""
    insert into indexer.repo ({", ".join(_VALUES)}) select {", ".join(_VALUES.values())}
    from {unnest(REPO_COLUMNS, "w")} order by w.ordinal
    on conflict (did, bucket) do nothing returning did
"""
"""Takes the arrays of `repo_arrays`; returns the DIDs that had no row yet."""


def _assignments(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items() if name not in ("did", "bucket"))


UPDATE_REPOS = f"""
    update indexer.repo r set {_assignments(_VALUES)}, updated_at = now(),
        lease_until = case when w.sync_status = '{SyncStatus.IN_PROGRESS}' then r.lease_until end
    from {unnest({**REPO_COLUMNS, "expected_version": "bigint"}, "w", 2)}
    join indexer.repo before
        on before.did = w.did and {of_buckets("before")} and before.version = w.expected_version
    where r.did = before.did and r.bucket = before.bucket and {of_buckets("r")} and r.version = w.expected_version
    returning r.did, before.visible,
        not before.active and before.hosting_status is not distinct from '{DELETED}' as deleted,
        before.sync_status = '{SyncStatus.SYNCHRONIZED}' as synchronized,
        case when before.active then 'active' else coalesce(before.hosting_status, 'inactive') end as hosting_status
"""
"""Takes the buckets, the arrays of `repo_arrays`, and the expected versions; returns a `RepoVisibility` per DID."""

ADVANCE_REPOS = f"""
    update indexer.repo r set {_assignments({name: f"w.{name}" for name in HEAD_COLUMNS})}, updated_at = now()
    from {unnest({**HEAD_COLUMNS, "expected_version": "bigint"}, "w", 2)}
    where r.did = w.did and {of_buckets("r")} and r.version = w.expected_version
    returning r.did
"""
"""Takes the buckets, the arrays of `head_arrays`, and the expected versions; returns the DIDs that were written.

Nearly all writes only advance the head. With the arrays of all columns they take twice the time. The visibility before
the write is not read: a row at the expected version is equal to the row that the write was planned on, except for
`lease_until` and `updated_at`.
"""

_RECORD_KEY = {"did": "text", "collection": "text", "rkey": "text"}
RECORD_TYPES = {
    **_RECORD_KEY,
    "bucket": "smallint",
    "cid": "bytea",
    "rev": "text",
    "value": "text",
    "value_problem": "text",
    "original": "bytea",
}
"""The SQL types of the columns of `record_rows`, in their order."""


def upsert_records(rows: str) -> str:
    """Return the statement that writes records, and returns their keys, each with `existed`.

    Args:
        rows: What follows `from`: rows with the columns of `RECORD_TYPES` and `ordinal`.
    """
    # The system column xmax of a row that was just inserted is 0, because no transaction has locked the row yet.
    return f"""
        insert into indexer.record
            (did, collection, rkey, bucket, cid, rev, value, value_problem, original, indexed_at)
        select did, collection, rkey, bucket, cid, rev, value::jsonb, value_problem, original, statement_timestamp()
        from {rows} order by ordinal
        on conflict (did, collection, rkey, bucket) do update
        set cid = excluded.cid, rev = excluded.rev, value = excluded.value, value_problem = excluded.value_problem,
            original = excluded.original, indexed_at = excluded.indexed_at
        returning did, collection, rkey, xmax <> 0 as existed
    """


# For records that may exist, and for few new ones. Returns the keys of the rows that existed.
_UPSERT_RECORDS = f"""
    with written as ({upsert_records(unnest(RECORD_TYPES, "w"))})
    select did, collection, rkey from written where existed
"""

_DELETE_RECORDS = f"""
    delete from indexer.record r using {unnest(_RECORD_KEY, "w", 2)}
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

# `refresh_at` is not before the latest announcement, so that a lookup that asked earlier does not remove the mark
# (`identities._CHANGED_SINCE`). So an announcement ends a postponement, but not the back-off after failed refreshes,
# which is the same however often the identity is announced.
_MARK_STALE = f"""
    update indexer.identity i
    set stale = true, refresh_at = case
        when i.refresh_failures > 0 then greatest(i.refresh_at, to_timestamp($3)) else to_timestamp($3)
    end
    from {unnest({"did": "text"}, "w", 2)}
    where i.did = w.did and {of_buckets("i")} and (
        not i.stale or i.refresh_at < to_timestamp($3) or i.refresh_failures = 0 and {is_postponed("$3")}
    )
"""

# A time that is far ahead is from before the clock was set back, and would hide the lag.
SAVE_CURSOR = """
    insert into indexer.cursor as c (relay, shard, epoch, seq, event_time, caught_up_at, stored_until, updated_at)
    values ($1, $2, $3, $4, $5, to_timestamp($6), to_timestamp($7), to_timestamp($8))
    on conflict (relay, shard) do update
    set epoch = excluded.epoch, seq = excluded.seq, event_time = excluded.event_time, updated_at = excluded.updated_at,
        stored_until = coalesce(excluded.stored_until, c.stored_until),
        caught_up_at = greatest(
            excluded.caught_up_at, case when c.caught_up_at <= to_timestamp($8::float8 + 300) then c.caught_up_at end
        )
    where (excluded.epoch, excluded.seq) >= (c.epoch, c.seq)
"""
"""Takes the values of `cursor_values`."""


@dataclass(frozen=True, slots=True)
class AppliedBatch:
    """The result of one batch.

    Attributes:
        skipped: The DIDs whose writes were skipped.
        changes: The number of records that were created, updated and deleted, by action.
    """

    skipped: frozenset[str]
    changes: Counter[Action]


class WrittenRecords(NamedTuple):
    """The result of writing changes of records.

    Attributes:
        existed: The keys of the changed records that existed before.
        as_planned: True if each change happened as it says, so that `effective_changes` need not be computed: no record
            has several changes, those that were created did not exist, and all others did.
    """

    existed: set[RecordKey]
    as_planned: bool


async def apply(connection: Connection, batch: Batch, *, shards: int = 1, buffers_empty: bool = False) -> AppliedBatch:
    """Write the batch within the open transaction.

    A write is skipped, together with the dead letters of its DID, if the row of the repo is no longer at the version
    that the write was planned on. If any write is skipped, the cursor is not saved.

    Args:
        connection: The connection.
        batch: The batch.
        shards: The number of shards of each table, if it is a distributed database.
        buffers_empty: No event is buffered for a repo at its expected version.
    """
    before = await _write_repos(connection, batch.writes, shards)
    writes = [write for write in batch.writes if write.repo.did in before]
    skipped = frozenset([write.repo.did for write in batch.writes]) - before.keys()
    changes = [(write.repo.did, change) for write in writes for change in write.changes]
    unproven = frozenset([write.repo.did for write in writes if write.repo.unproven_since is not None])
    written = await write_records(connection, changes, unproven)
    if not written.as_planned:
        writes = [_as_it_happened(write, written.existed) for write in writes]
    await log_changes(
        connection, [entry for write in writes for entry in change_log_entries(before[write.repo.did], write)]
    )
    # A repo of which only the head advances was synchronized before, so its buffer is empty.
    if not buffers_empty:
        await _write_buffered_events(connection, [write for write in writes if not write.advances])
    await dead_letters.insert(
        connection, [dead_letter for dead_letter in batch.dead_letters if dead_letter.did not in skipped]
    )
    if batch.stale_identities:
        dids = sorted(batch.stale_identities)
        await connection.execute(_MARK_STALE, buckets_of(dids), dids, time())
    if batch.cursor is not None and not skipped:
        await connection.execute(SAVE_CURSOR, *cursor_values(batch.cursor))
    return AppliedBatch(skipped, Counter([change.action for write in writes for change in write.changes]))


def _as_it_happened(write: RepoWrite, stored: set[RecordKey]) -> RepoWrite:
    changes = effective_changes(write.repo.did, write.changes, stored)
    return write if changes == write.changes else write._replace(changes=changes)  # a copy costs 3 µs


async def _write_repos(
    connection: Connection, writes: Sequence[RepoWrite], shards: int
) -> dict[str, RepoVisibility | None]:
    """Write the rows that are at the expected version.

    Returns:
        The visibility before the write by DID, without the repos whose writes were skipped. None: it does not change.
    """
    ordered = sorted(writes, key=lambda write: write.repo.did)
    written: dict[str, RepoVisibility | None] = {}
    if new := [write.repo for write in ordered if write.expected_version == 0]:
        rows = await connection.fetch(INSERT_REPOS, *repo_arrays(new))
        written.update({did: visibility_of(Repo(did)) for (did,) in rows})
    known = [write for write in ordered if write.expected_version != 0]
    for advanced in _by_shard([write for write in known if write.advances], shards):
        rows = await connection.fetch(ADVANCE_REPOS, *update_arguments(advanced, head_arrays))
        written.update(dict.fromkeys([did for (did,) in rows]))
    if others := [write for write in known if not write.advances]:
        rows = await connection.fetch(UPDATE_REPOS, *update_arguments(others, repo_arrays))
        written.update({did: RepoVisibility(*before) for did, *before in rows})
    return written


def _by_shard(writes: Sequence[RepoWrite], shards: int) -> Iterator[Sequence[RepoWrite]]:
    """Yield the writes together, or those of each shard if they are many.

    Citus sends all arrays to each of the shards that a statement is for. For many rows that costs more than a statement
    for each shard.
    """
    if shards == 1 or len(writes) < MIN_SPLIT * shards:
        yield from [writes] if writes else []
        return
    parts: list[list[RepoWrite]] = [[] for _ in range(shards)]
    for write in writes:
        parts[shard_of(bucket_of(write.repo.did), shards)].append(write)
    yield from filter(None, parts)


def update_arguments(
    writes: Sequence[RepoWrite], arrays: Callable[[Sequence[Repo]], list[list[Any]]]
) -> list[list[Any]]:
    """Return the arguments of `UPDATE_REPOS` or `ADVANCE_REPOS`, which takes these arrays."""
    repos = [write.repo for write in writes]
    return [buckets_of([repo.did for repo in repos]), *arrays(repos), [write.expected_version for write in writes]]


async def write_records(
    connection: Connection, changes: Sequence[tuple[str, RecordChange]], unproven: AbstractSet[str] = frozenset()
) -> WrittenRecords:
    """Write changes, each with its DID, in order. Of several changes of one record only the last one is written.

    New records are copied. If one of them exists already, all are upserted instead. Then the COPY was wasted. To avoid
    that in every batch, new records of `unproven` repos are not copied.

    Args:
        connection: The connection.
        changes: The changes.
        unproven: The DIDs whose new records are not copied, because their stored records may be wrong.
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
    if len(creates) < MIN_COPIED or not await create_records(connection, creates):
        puts = [(key[0], last[key]) for key in keys if last[key].action != "delete"]
    existed: set[RecordKey] = set()
    for part in _statements(puts):
        updated = await connection.fetch(_UPSERT_RECORDS, *columns_of(record_rows(part), RECORD_TYPES))
        existed.update([(did, collection, rkey) for did, collection, rkey in updated])
    if deletes:
        buckets = buckets_of([did for did, _, _ in deletes])
        deleted = await connection.fetch(_DELETE_RECORDS, buckets, *columns_of(deletes, _RECORD_KEY))
        existed.update([(did, collection, rkey) for did, collection, rkey in deleted])
    return WrittenRecords(existed, distinct and existed == {key for key in keys if last[key].action != "create"})


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


async def _write_buffered_events(connection: Connection, writes: Iterable[RepoWrite]) -> None:
    """Empty the buffers of repos that are not in progress, and append to the buffers of those that are."""
    # A repo with lease 0 was never claimed, so its buffer is empty.
    ended = sorted(w.repo.did for w in writes if w.repo.sync_status is not SyncStatus.IN_PROGRESS and w.repo.lease)
    if ended:
        await connection.execute(_DELETE_BUFFERED_EVENTS, ended, buckets_of(ended))
    rows = [
        (event.did, bucket_of(event.did), event.relay, event.seq, event.frame)
        for write in writes
        if write.repo.sync_status is SyncStatus.IN_PROGRESS
        for event in write.buffered
    ]
    if rows:
        await connection.execute(_INSERT_BUFFERED_EVENTS, *columns_of(rows, _BUFFERED_EVENT_COLUMNS))


def cursor_values(cursor: Cursor) -> tuple[Any, ...]:
    """Return the arguments of `SAVE_CURSOR`."""
    return (
        cursor.relay,
        cursor.shard,
        cursor.epoch,
        cursor.seq,
        storable(cursor.event_time),
        cursor.caught_up_at,
        cursor.stored_until,
        time(),
    )
