"""Write a `Batch` in one transaction: repos, records, change log, resync buffer, dead letters, and the cursor.

Each table is written by at most two statements per batch: one for new and one for existing rows, or one for writes and
one for deletes. A statement takes arrays, sorted by key, with each key once: it cannot change a row twice, and
concurrent transactions lock rows in the same order.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from indexer.store import dead_letters
from indexer.store.change_log import log_changes
from indexer.store.columns import (
    REPO_COLUMNS,
    Connection,
    buckets_of,
    columns_of,
    of_buckets,
    repo_arrays,
    repo_values,
    storable,
    unnest,
    visible,
)
from indexer.sync.changes import RepoVisibility, change_log_entries, visibility_of
from indexer.sync.plans import Batch, Cursor, RecordChange, RepoWrite
from indexer.sync.repo_state import DELETED, Repo, SyncStatus
from indexer.sync.shard import bucket_of

_VALUES = repo_values("w")

INSERT_REPOS = f"""
    insert into indexer.repo ({", ".join(_VALUES)}) select {", ".join(_VALUES.values())}
    from {unnest(REPO_COLUMNS, "w")} order by w.ordinal
    on conflict (did, bucket) do nothing returning did
"""
"""Takes the arrays of `repo_arrays`; returns the DIDs that had no row yet."""

UPDATE_REPOS = f"""
    update indexer.repo r
    set {", ".join(f"{name} = {value}" for name, value in _VALUES.items() if name not in ("did", "bucket"))},
        lease_until = case when w.sync_status = '{SyncStatus.IN_PROGRESS}' then r.lease_until end, updated_at = now()
    from {unnest({**REPO_COLUMNS, "expected_version": "bigint"}, "w", 2)}
    join indexer.repo before
        on before.did = w.did and {of_buckets("before")} and before.version = w.expected_version
    where r.did = before.did and r.bucket = before.bucket and {of_buckets("r")} and r.version = w.expected_version
    returning r.did, {visible("before")} as visible,
        not before.active and before.hosting_status is not distinct from '{DELETED}' as deleted,
        before.sync_status = '{SyncStatus.SYNCHRONIZED}' as synchronized
"""
"""Takes the buckets, the arrays of `repo_arrays`, and the expected versions; returns a `RepoVisibility` per DID."""

_RECORD_KEY = {"did": "text", "collection": "text", "rkey": "text"}
_RECORD_COLUMNS = {
    **_RECORD_KEY,
    "bucket": "smallint",
    "cid": "bytea",
    "rev": "text",
    "value": "text",
    "value_problem": "text",
    "original": "bytea",
}

# The system column xmax of a row that was just inserted is 0, because no transaction has locked the row yet.
_UPSERT_RECORDS = f"""
    with written as (
        insert into indexer.record
            (did, collection, rkey, bucket, cid, rev, value, value_problem, original, indexed_at)
        select did, collection, rkey, bucket, cid, rev, value::jsonb, value_problem, original, statement_timestamp()
        from {unnest(_RECORD_COLUMNS, "w")} order by ordinal
        on conflict (did, collection, rkey, bucket) do update
        set cid = excluded.cid, rev = excluded.rev, value = excluded.value, value_problem = excluded.value_problem,
            original = excluded.original, indexed_at = excluded.indexed_at
        returning xmax = 0 as created
    )
    select count(*) filter (where created) as create, count(*) filter (where not created) as update from written
"""

_DELETE_RECORDS = f"""
    delete from indexer.record r using {unnest(_RECORD_KEY, "w", 2)}
    where r.did = w.did and r.collection = w.collection and r.rkey = w.rkey and {of_buckets("r")}
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

_MARK_STALE = f"""
    update indexer.identity i set stale = true from {unnest({"did": "text"}, "w", 2)}
    where i.did = w.did and {of_buckets("i")} and not i.stale
"""

_SAVE_CURSOR = """
    insert into indexer.cursor as c (relay, shard, seq, event_time, caught_up_at, updated_at)
    values ($1, $2, $3, $4, to_timestamp($5), now())
    on conflict (relay, shard) do update
    set seq = greatest(c.seq, excluded.seq), updated_at = excluded.updated_at,
        caught_up_at = coalesce(excluded.caught_up_at, c.caught_up_at),
        event_time = case when excluded.seq >= c.seq then coalesce(excluded.event_time, c.event_time)
                     else c.event_time end
"""


async def apply(connection: Connection, batch: Batch) -> frozenset[str]:
    """Write the batch within the open transaction; return the DIDs whose writes were skipped.

    A write is skipped, together with the dead letters of its DID, if the row of the repo is no longer at the version
    that the write was planned on. If any write is skipped, the cursor is not saved.
    """
    written = await _write_repos(connection, batch.writes)
    writes = [write for write in batch.writes if write.repo.did in written]
    skipped = frozenset([write.repo.did for write in batch.writes]) - written.keys()
    await write_records(connection, [(write.repo.did, change) for write in writes for change in write.changes])
    await log_changes(
        connection, [entry for write in writes for entry in change_log_entries(written[write.repo.did], write)]
    )
    await _write_buffered_events(connection, writes)
    await dead_letters.insert(
        connection, [dead_letter for dead_letter in batch.dead_letters if dead_letter.did not in skipped]
    )
    if batch.stale_identities:
        dids = sorted(batch.stale_identities)
        await connection.execute(_MARK_STALE, buckets_of(dids), dids)
    if batch.cursor is not None and not skipped:
        await _save_cursor(connection, batch.cursor)
    return skipped


async def _write_repos(connection: Connection, writes: Sequence[RepoWrite]) -> dict[str, RepoVisibility]:
    """Write the rows that are at the expected version; return their visibility before the write, by DID."""
    ordered = sorted(writes, key=lambda write: write.repo.did)
    written: dict[str, RepoVisibility] = {}
    if new := [write.repo for write in ordered if write.expected_version == 0]:
        rows = await connection.fetch(INSERT_REPOS, *repo_arrays(new))
        written.update({did: visibility_of(Repo(did)) for (did,) in rows})
    if known := [write for write in ordered if write.expected_version != 0]:
        repos, versions = [write.repo for write in known], [write.expected_version for write in known]
        buckets = buckets_of(repo.did for repo in repos)
        rows = await connection.fetch(UPDATE_REPOS, buckets, *repo_arrays(repos), versions)
        written.update({did: RepoVisibility(*before) for did, *before in rows})
    return written


async def write_records(connection: Connection, changes: Sequence[tuple[str, RecordChange]]) -> Counter[str]:
    """Write changes, each with its DID, in order; return how many rows were created, updated and deleted.

    Of several changes of one record only the last one is written.
    """
    counts: Counter[str] = Counter()
    last = {(did, change.collection, change.rkey): change for did, change in changes}
    puts = [(key, last[key]) for key in sorted(last) if last[key].action != "delete"]
    deletes = [key for key in sorted(last) if last[key].action == "delete"]
    if puts:
        rows = [_record_row(did, change) for (did, *_), change in puts]
        [put_counts] = await connection.fetch(_UPSERT_RECORDS, *columns_of(rows, _RECORD_COLUMNS))
        counts.update(dict(put_counts))
    if deletes:
        buckets = buckets_of(did for did, *_ in deletes)
        status = await connection.execute(_DELETE_RECORDS, buckets, *columns_of(deletes, _RECORD_KEY))
        counts["delete"] = int(status.removeprefix("DELETE "))
    return counts


def _record_row(did: str, new: RecordChange) -> tuple[Any, ...]:
    """Return the values of `_RECORD_COLUMNS`."""
    return (did, new.collection, new.rkey, bucket_of(did), new.cid, new.rev, new.value, new.problem, new.original)


async def create_records(connection: Connection, did: str, creates: Sequence[RecordChange]) -> None:
    """Insert new records with COPY, which takes a third of the time of `write_records`.

    Raises:
        UniqueViolationError: One of the records exists already; nothing is written.
    """
    if not creates:
        return
    rows = [_record_row(did, change) for change in creates]
    async with connection.transaction():
        await connection.copy_records_to_table("record", schema_name="indexer", columns=_RECORD_COLUMNS, records=rows)


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


async def _save_cursor(connection: Connection, cursor: Cursor) -> None:
    event_time = storable(cursor.event_time)
    await connection.execute(_SAVE_CURSOR, cursor.relay, cursor.shard, cursor.seq, event_time, cursor.caught_up_at)
