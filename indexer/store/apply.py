"""The only writer of repos, records and changes: a `Batch` in one transaction, one statement a table.

Statements are fed by arrays, sorted by key, each key once: the same statement can't affect a row twice, and two
writers take their locks in one order.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from indexer.store import letters
from indexer.store.feed import log_changes
from indexer.store.rows import (
    REPO_COLUMNS,
    Connection,
    buckets_of,
    columns_of,
    of_buckets,
    plain,
    repo_arrays,
    repo_values,
    unnest,
)
from indexer.sync.feed import Standing, changes_of, standing
from indexer.sync.plan import Batch, Cursor, RecordChange, RepoWrite
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import bucket_of

_VALUES = repo_values("w")

_INSERT_REPOS = f"""
    insert into indexer.repo ({", ".join(_VALUES)}) select {", ".join(_VALUES.values())}
    from {unnest(REPO_COLUMNS, "w")} order by w.place
    on conflict (did, bucket) do nothing returning did
"""

_UPDATE_REPOS = f"""
    update indexer.repo r
    set {", ".join(f"{name} = {value}" for name, value in _VALUES.items() if name not in ("did", "bucket"))},
        lease_until = case when w.status = 'in-progress' then r.lease_until end, updated_at = now()
    from {unnest({**REPO_COLUMNS, "expected": "bigint"}, "w", 2)}
    join indexer.repo before on before.did = w.did and {of_buckets("before")} and before.version = w.expected
    where r.did = before.did and r.bucket = before.bucket and {of_buckets("r")} and r.version = w.expected
    returning r.did, before.active and not before.takedown as visible,
        not before.active and before.hosting_status is not distinct from 'deleted' as deleted,
        before.status = 'synchronized' as synchronized
"""

_KEY = {"did": "text", "collection": "text", "rkey": "text"}
_RECORD = {
    **_KEY,
    "bucket": "smallint",
    "cid": "bytea",
    "rev": "text",
    "value": "text",
    "value_problem": "text",
    "original": "bytea",
}

# A row that was not there before has never been locked: its xmax is 0.
_PUT_RECORDS = f"""
    with put as (
        insert into indexer.record
            (did, collection, rkey, bucket, cid, rev, value, value_problem, original, indexed_at)
        select did, collection, rkey, bucket, cid, rev, value::jsonb, value_problem, original, statement_timestamp()
        from {unnest(_RECORD, "w")} order by place
        on conflict (did, collection, rkey, bucket) do update
        set cid = excluded.cid, rev = excluded.rev, value = excluded.value, value_problem = excluded.value_problem,
            original = excluded.original, indexed_at = excluded.indexed_at
        returning xmax = 0 as created
    )
    select count(*) filter (where created) as create, count(*) filter (where not created) as update from put
"""

_DELETE_RECORDS = f"""
    delete from indexer.record r using {unnest(_KEY, "w", 2)}
    where r.did = w.did and r.collection = w.collection and r.rkey = w.rkey and {of_buckets("r")}
"""

_KEPT = {"did": "text", "bucket": "smallint", "relay": "text", "seq": "bigint", "frame": "bytea"}

_INSERT_KEPT = f"""
    insert into indexer.kept_event ({", ".join(_KEPT)}) select {", ".join(_KEPT)}
    from {unnest(_KEPT, "w")} order by place
"""

# In any order, as their repos' rows are locked.
_DELETE_KEPT = "delete from indexer.kept_event where did = any($1::text[]) and bucket = any($2::smallint[])"

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
    """Writes the batch within the open transaction.

    Gives the DIDs whose rows are not at the version that their writes were planned on: of those nothing is written,
    their dead letters included, and then the cursor isn't either.
    """
    written = await _write_repos(connection, batch.writes)
    writes = [write for write in batch.writes if write.repo.did in written]
    moved = frozenset([write.repo.did for write in batch.writes]) - written.keys()
    await write_records(connection, [(write.repo.did, change) for write in writes for change in write.changes])
    await log_changes(connection, [change for write in writes for change in changes_of(written[write.repo.did], write)])
    await _write_kept(connection, writes)
    await letters.write(connection, [letter for letter in batch.dead_letters if letter.did not in moved])
    if batch.stale_identities:
        dids = sorted(batch.stale_identities)
        await connection.execute(_MARK_STALE, buckets_of(dids), dids)
    if batch.cursor is not None and not moved:
        await _save_cursor(connection, batch.cursor)
    return moved


async def _write_repos(connection: Connection, writes: Sequence[RepoWrite]) -> dict[str, Standing]:
    """Compares and sets; gives how each repo stood before, of those whose rows were at the expected version."""
    ordered = sorted(writes, key=lambda write: write.repo.did)
    written: dict[str, Standing] = {}
    if new := [write.repo for write in ordered if write.expected == 0]:
        rows = await connection.fetch(_INSERT_REPOS, *repo_arrays(new))
        written.update({did: standing(Repo(did)) for (did,) in rows})
    if known := [write for write in ordered if write.expected != 0]:
        repos, versions = [write.repo for write in known], [write.expected for write in known]
        buckets = buckets_of(repo.did for repo in repos)
        rows = await connection.fetch(_UPDATE_REPOS, buckets, *repo_arrays(repos), versions)
        written.update({did: Standing(*before) for did, *before in rows})
    return written


async def write_records(connection: Connection, changes: Sequence[tuple[str, RecordChange]]) -> Counter[str]:
    """Records brought to where the changes of (DID, change) end; gives how many were created, updated and deleted."""
    found: Counter[str] = Counter()
    last = {(did, change.collection, change.rkey): change for did, change in changes}
    puts = [(key, last[key]) for key in sorted(last) if last[key].action != "delete"]
    deletes = [key for key in sorted(last) if last[key].action == "delete"]
    if puts:
        records = [_record(did, change) for (did, *_), change in puts]
        [counts] = await connection.fetch(_PUT_RECORDS, *columns_of(records, _RECORD))
        found.update(dict(counts))
    if deletes:
        buckets = buckets_of(did for did, *_ in deletes)
        status = await connection.execute(_DELETE_RECORDS, buckets, *columns_of(deletes, _KEY))
        found["delete"] = int(status.removeprefix("DELETE "))
    return found


def _record(did: str, new: RecordChange) -> tuple[Any, ...]:
    """As `_RECORD` has it."""
    return (did, new.collection, new.rkey, bucket_of(did), new.cid, new.rev, new.value, new.problem, new.original)


async def create_records(connection: Connection, did: str, creates: Sequence[RecordChange]) -> None:
    """Records of which none is there, by COPY: a third of the time that `write_records` takes.

    Raises `UniqueViolationError`, and then nothing is written.
    """
    if not creates:
        return
    records = [_record(did, change) for change in creates]
    async with connection.transaction():
        await connection.copy_records_to_table("record", schema_name="indexer", columns=_RECORD, records=records)


async def _write_kept(connection: Connection, writes: Iterable[RepoWrite]) -> None:
    """What was kept goes with the end of the resync; a repo that was never claimed has kept nothing."""
    ended = sorted(w.repo.did for w in writes if w.repo.status is not SyncStatus.IN_PROGRESS and w.repo.lease)
    if ended:
        await connection.execute(_DELETE_KEPT, ended, buckets_of(ended))
    rows = [
        (kept.did, bucket_of(kept.did), kept.relay, kept.seq, kept.frame)
        for write in writes
        if write.repo.status is SyncStatus.IN_PROGRESS
        for kept in write.kept
    ]
    if rows:
        await connection.execute(_INSERT_KEPT, *columns_of(rows, _KEPT))


async def _save_cursor(connection: Connection, cursor: Cursor) -> None:
    event_time = plain(cursor.event_time)
    await connection.execute(_SAVE_CURSOR, cursor.relay, cursor.shard, cursor.seq, event_time, cursor.caught_up_at)
