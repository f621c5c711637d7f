"""What commands and the demo ask: mostly of the face, the schema `atproto`, as AppViews do."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from indexer.atproto.cid import parse_cid
from indexer.outbound import HostState
from indexer.store import hosts
from indexer.store.retention import ReaderState, readers
from indexer.store.rows import REPO_COLUMNS, Connection, repo_arrays, repo_values, unnest
from indexer.sync.plan import Cursor
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import bucket_of

AT_ONCE = 1_000
PAGES_EACH = 4  # of the table, to be read for each repo of a sample at first
MOST_PAGES = 32_768  # a quarter of a gigabyte
MORE = 8  # times as many, where too few of the rows were fit


@dataclass(frozen=True, slots=True)
class Counts:
    """Repos by sync status, by reason where there is one, and by why their last fetch failed; `queued` are due or wait
    for their time, `parked` wait for something to wake them, `ended` have left the queue since a given time:
    synchronized, though they may have broken again, or parked. `records` is Postgres's estimate. `readers` are those
    of the change feed, `hosts` the worst few of those that are paused.
    """

    statuses: dict[SyncStatus, int]
    reasons: dict[str, int]
    queued: int
    parked: int
    records: int
    cursors: list[Cursor]
    failures: dict[str, int] = field(default_factory=dict)
    readers: list[ReaderState] = field(default_factory=list)
    hosts: list[HostState] = field(default_factory=list)
    ended: int = 0


_COUNT_REPOS = """
    select status, reason, split_part(last_error, ':', 1) as failure, count(*) as repos,
        count(*) filter (where status = 'desynchronized' and active) as waiting,
        count(parked_at) as parked,
        count(*) filter (where greatest(synchronized_at, parked_at) >= to_timestamp($1)) as ended
    from indexer.repo group by status, reason, failure
"""

_CURSORS = """
    select relay, shard, seq, event_time, date_part('epoch', caught_up_at) as caught_up_at
    from atproto.cursors order by relay, shard
"""

_COUNT_RECORDS = """
    select greatest(reltuples::bigint, pg_stat_get_live_tuples(oid), 0)
    from pg_class where oid = 'indexer.record'::regclass
"""

_REPO = """
    select r.did, i.handle, i.pds, r.status as sync_status, r.reason as sync_reason,
        r.rev, atproto.cid_text(r.data) as data, atproto.cid_text(r.commit) as commit, r.seen_rev,
        coalesce(r.hosting_status, case when r.active then 'active' else 'inactive' end) as hosting_status,
        r.takedown, r.active and not r.takedown as visible, r.attempts as resync_attempts,
        nullif(r.next_attempt_at, 'infinity') as next_attempt_at,
        coalesce(r.next_attempt_at = 'infinity', false) as parked,
        r.last_error, r.synchronized_at, r.updated_at, r.lease_until, r.buffered_events, r.buffered_bytes, r.bucket,
        (select count(*) from indexer.record c where c.did = r.did and c.bucket = r.bucket) as records
    from indexer.repo r left join indexer.identity i using (did, bucket)
    where r.did = $1 and r.bucket = $2
"""

_RECORD = """
    select uri, cid, rev, value, value_problem, indexed_at from atproto.records
    where did = $1 and collection = $2 and rkey = $3
"""

_ADD = f"""
    insert into indexer.repo ({", ".join(REPO_COLUMNS)}) select {", ".join(repo_values("w").values())}
    from {unnest(REPO_COLUMNS, "w")} order by place
    on conflict (did, bucket) do nothing returning did
"""

_MARK = "select count(*) filter (where atproto.request_resync(did)) from unnest($1::text[]) did"

# Page by page and not all at once: the live path waits for the rows that a transaction has changed.
_PAGE = """
    select did, not $3 or (status = 'desynchronized' and last_error is not null) as meant
    from indexer.repo where did > $1 order by did limit $2
"""


_PAGES = "select pg_relation_size('indexer.repo') / current_setting('block_size')::integer"

# Whole pages are chosen, and only those are read; of neighbours on one of them, few.
_SAMPLE = """
    select did from indexer.repo tablesample system ($1)
    where status = 'synchronized' and active order by random() limit $2
"""


async def counts(connection: Connection, since: float) -> Counts:
    statuses = dict.fromkeys(SyncStatus, 0)
    reasons: dict[str, int] = {}
    failures: dict[str, int] = {}
    waiting = parked = ended = 0
    for row in await connection.fetch(_COUNT_REPOS, since):
        statuses[SyncStatus(row["status"])] += row["repos"]
        if row["reason"] is not None:
            reasons[row["reason"]] = reasons.get(row["reason"], 0) + row["repos"]
        if row["failure"] is not None:
            failures[row["failure"]] = failures.get(row["failure"], 0) + row["repos"]
        waiting += row["waiting"]
        parked += row["parked"]
        ended += row["ended"]
    cursors = await connection.fetch(_CURSORS)
    return Counts(
        statuses,
        reasons,
        waiting - parked,
        parked,
        await connection.fetchval(_COUNT_RECORDS),
        [Cursor(**row) for row in cursors],
        failures,
        await readers(connection),
        await hosts.worst(connection),
        ended,
    )


async def repo_report(connection: Connection, did: str) -> dict[str, Any] | None:
    row = await connection.fetchrow(_REPO, did, bucket_of(did))
    return None if row is None else dict(row)


async def record(connection: Connection, did: str, collection: str, rkey: str) -> dict[str, Any] | None:
    row = await connection.fetchrow(_RECORD, did, collection, rkey)
    if row is None:
        return None
    return {**row, "value": None if row["value"] is None else json.loads(row["value"])}


async def sample(connection: Connection, count: int) -> list[str]:
    """At most `count` DIDs of active synchronized repos, at random.

    Fewer in a table where hardly any are: no more of it is read than `MOST_PAGES`, or `PAGES_EACH` of those asked for.
    """
    pages = await connection.fetchval(_PAGES)
    read = PAGES_EACH * count
    while True:
        share = 100.0 * min(1.0, read / max(pages, 1))
        rows = await connection.fetch(_SAMPLE, share, count)
        if len(rows) == count or read >= min(pages, MOST_PAGES):
            return [did for (did,) in rows]
        read = min(MORE * read, MOST_PAGES)


async def visible_repos(connection: Connection) -> dict[str, tuple[str, str | None]]:
    rows = await connection.fetch("select did, sync_status, sync_reason from atproto.repos where visible")
    return {did: (status, reason) for did, status, reason in rows}


async def visible_records(connection: Connection, did: str) -> dict[str, bytes]:
    rows = await connection.fetch("select collection || '/' || rkey, cid from atproto.records where did = $1", did)
    return {path: parse_cid(cid) for path, cid in rows}


async def add(connection: Connection, dids: Iterable[str]) -> int:
    repos = [Repo(did, version=1) for did in sorted(set(dids))]
    added = 0
    for start in range(0, len(repos), AT_ONCE):
        added += len(await connection.fetch(_ADD, *repo_arrays(repos[start : start + AT_ONCE])))
    return added


async def mark(connection: Connection, dids: Sequence[str]) -> int:
    marked: int = await connection.fetchval(_MARK, list(dids))
    return marked


async def mark_page(connection: Connection, after: str, *, errored: bool) -> tuple[str | None, int]:
    """The last DID of the page, None behind the end, and how many of it are marked."""
    page = await connection.fetch(_PAGE, after, AT_ONCE, errored)
    marked = await mark(connection, [did for did, meant in page if meant])
    return (page[-1]["did"] if page else None), marked
