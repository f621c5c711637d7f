"""Read-only queries for commands, the status page and the demo. Most of them read the public schema `atproto`."""

import json
from dataclasses import dataclass, field
from typing import Any

from indexer.atproto.cid import parse_cid
from indexer.outbound import HostState
from indexer.store.change_log_segments import ConsumerState, load_consumers
from indexer.store.columns import Connection, visible
from indexer.store.host_states import load_paused
from indexer.sync.plans import Cursor
from indexer.sync.repo_state import SyncStatus
from indexer.sync.shard import bucket_of

FIRST_PAGES_PER_REPO = 4
"""Pages of the table that a sample reads first, for each repo of the sample."""
PAGES_FACTOR = 8
"""If too few repos qualify, a sample reads so many times as many pages."""
MAX_SAMPLE_PAGES = 32_768
"""Pages that a sample reads at most: a quarter of a gigabyte."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of the status report.

    Attributes:
        statuses: Repos by sync status.
        reasons: Repos by sync reason, if they have one.
        queued: Repos in the resync queue, due now or later.
        parked: Repos that are not tried again until an event unparks them.
        records: An estimate by Postgres.
        cursors: One per relay and shard.
        failures: Repos by the first word of their last error, if they have one.
        consumers: The registered consumers of the change log.
        hosts: Some paused hosts, those with the most consecutive failures.
        ended: Repos that left the resync queue since a given time: synchronized or parked.
    """

    statuses: dict[SyncStatus, int]
    reasons: dict[str, int]
    queued: int
    parked: int
    records: int
    cursors: list[Cursor]
    failures: dict[str, int] = field(default_factory=dict)
    consumers: list[ConsumerState] = field(default_factory=list)
    hosts: list[HostState] = field(default_factory=list)
    ended: int = 0


_COUNT_REPOS = f"""
    select sync_status, sync_reason, split_part(last_error, ':', 1) as failure, count(*) as repos,
        count(*) filter (where sync_status = '{SyncStatus.DESYNCHRONIZED}' and active) as waiting,
        count(parked_at) as parked,
        count(*) filter (where greatest(synchronized_at, parked_at) >= to_timestamp($1)) as ended
    from indexer.repo group by sync_status, sync_reason, failure
"""

_CURSORS = """
    select relay, shard, seq, event_time, date_part('epoch', caught_up_at) as caught_up_at
    from atproto.cursors order by relay, shard
"""

_COUNT_RECORDS = """
    select greatest(reltuples::bigint, pg_stat_get_live_tuples(oid), 0)
    from pg_class where oid = 'indexer.record'::regclass
"""

_REPO = f"""
    select r.did, i.handle, i.pds, r.sync_status, r.sync_reason,
        r.rev, atproto.cid_text(r.data) as data, atproto.cid_text(r.commit) as commit, r.latest_verified_rev,
        coalesce(r.hosting_status, case when r.active then 'active' else 'inactive' end) as hosting_status,
        r.takedown, {visible("r")} as visible, r.attempts as resync_attempts,
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

_TABLE_PAGES = "select pg_relation_size('indexer.repo') / current_setting('block_size')::integer"

SAMPLE = f"""
    select did from indexer.repo tablesample system ($1)
    where sync_status = '{SyncStatus.SYNCHRONIZED}' and active order by random() limit $2
"""
"""Takes the percentage of pages and the number of repos.

SYSTEM chooses whole pages and reads only those. The random order makes it unlikely that a sample has several repos of
one page.
"""


async def counts(connection: Connection, since: float) -> Counts:
    """Return the counts, with `ended` since the Unix time `since`."""
    statuses = dict.fromkeys(SyncStatus, 0)
    reasons: dict[str, int] = {}
    failures: dict[str, int] = {}
    waiting = parked = ended = 0
    for row in await connection.fetch(_COUNT_REPOS, since):
        statuses[SyncStatus(row["sync_status"])] += row["repos"]
        if row["sync_reason"] is not None:
            reasons[row["sync_reason"]] = reasons.get(row["sync_reason"], 0) + row["repos"]
        if row["failure"] is not None:
            failures[row["failure"]] = failures.get(row["failure"], 0) + row["repos"]
        waiting += row["waiting"]
        parked += row["parked"]
        ended += row["ended"]
    cursors = await connection.fetch(_CURSORS)
    return Counts(
        statuses=statuses,
        reasons=reasons,
        queued=waiting - parked,
        parked=parked,
        records=await connection.fetchval(_COUNT_RECORDS),
        cursors=[Cursor(**row) for row in cursors],
        failures=failures,
        consumers=await load_consumers(connection),
        hosts=await load_paused(connection),
        ended=ended,
    )


async def repo_report(connection: Connection, did: str) -> dict[str, Any] | None:
    """Return everything that is stored about a repo, by column; None if the repo is unknown."""
    row = await connection.fetchrow(_REPO, did, bucket_of(did))
    return None if row is None else dict(row)


async def record(connection: Connection, did: str, collection: str, rkey: str) -> dict[str, Any] | None:
    """Return the row of `atproto.records` with its value decoded; None if there is none."""
    row = await connection.fetchrow(_RECORD, did, collection, rkey)
    if row is None:
        return None
    return {**row, "value": None if row["value"] is None else json.loads(row["value"])}


async def sample_synchronized(connection: Connection, count: int) -> list[str]:
    """Return the DIDs of at most `count` active synchronized repos, chosen at random.

    Reads a part of the table, up to `MAX_SAMPLE_PAGES` (or `FIRST_PAGES_PER_REPO` per repo, if that is more). So it
    returns fewer repos if very few qualify.
    """
    total = await connection.fetchval(_TABLE_PAGES)
    pages = FIRST_PAGES_PER_REPO * count
    while True:
        percentage = 100.0 * min(1.0, pages / max(total, 1))
        rows = await connection.fetch(SAMPLE, percentage, count)
        if len(rows) == count or pages >= min(total, MAX_SAMPLE_PAGES):
            return [did for (did,) in rows]
        pages = min(PAGES_FACTOR * pages, MAX_SAMPLE_PAGES)


async def visible_repos(connection: Connection) -> dict[str, tuple[str, str | None]]:
    """Return sync status and sync reason of each visible repo, by DID."""
    rows = await connection.fetch("select did, sync_status, sync_reason from atproto.repos where visible")
    return {did: (status, reason) for did, status, reason in rows}


async def visible_records(connection: Connection, did: str) -> dict[str, bytes]:
    """Return the CID of each record of a visible repo, by path; empty if the repo is not visible."""
    rows = await connection.fetch("select collection || '/' || rkey, cid from atproto.records where did = $1", did)
    return {path: parse_cid(cid) for path, cid in rows}
