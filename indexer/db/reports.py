"""Read-only queries for commands, the status and the demo. Each one is bounded, however large the database is."""

import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from time import time
from typing import Any

import asyncpg

from indexer.atproto.cid import cid_text, parse_cid
from indexer.atproto.syntax import is_nsid
from indexer.db import links, process_reports
from indexer.db.columns import Connection
from indexer.db.connections import Area
from indexer.db.crawls import LISTS_READ
from indexer.db.layout import estimate_rows, load_parts
from indexer.db.process_reports import ProcessReport
from indexer.db.scope import load as load_scope
from indexer.db.tap_feed import count_refused
from indexer.reasons import Rejection
from indexer.sync.events import MAX_AHEAD, event_seconds
from indexer.sync.hints import JETSTREAM
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import BUCKETS, bucket_of

TIMEOUT_SECONDS = 5
"""Seconds after which the server cancels a query of the status."""
MAX_SAMPLE_PAGES = 8_192
"""Pages of the table that a sample reads at most: 64 MiB, about 200,000 repos."""
MAX_COUNTED_PAGES = 131_072
"""Pages of the table that a count reads at most: a gigabyte, about three million repos. The numbers of repos in a
larger table are estimated from this number of pages."""
MAX_FEW = 100_000
"""Repos of a kind that are counted exactly beside an estimate, because the estimate of few repos is bad."""
COUNT_MILLISECONDS = 20_000
"""Time limit of one attempt to count. The next attempt reads fewer pages, by `PAGES_FACTOR`."""
PAGES_FACTOR = 8


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of repos and records.

    Attributes:
        statuses: Repos by sync status.
        reasons: Repos by sync reason, if they have one.
        queued: Repos in the resync queue, due now or later.
        parked: Repos that are tried again only after an event, or after `INDEXER_SWEEP_INTERVAL`.
        records: An estimate by Postgres.
        failures: Repos by the first word of their last error, if they have one.
        ended: Repos that left the resync queue since a given time: synchronized or parked.
        unproven: Repos to which an undecidable commit was applied since their last complete export.
        counted_share: The share of the table of repos that was read; 1.0 if all repos were counted. If it is smaller,
            all numbers of repos are estimates, except small ones of `in-progress`, `queued`, `parked`, `unproven` and
            `incomplete`.
        incomplete: Repos that were fetched before, and wait for the records of a collection that the scope added.
        unlisted: Signal collections whose list of repos was not read to its end yet, or is read again.
    """

    statuses: dict[SyncStatus, int]
    reasons: dict[str, int]
    queued: int
    parked: int
    records: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    ended: int = 0
    unproven: int = 0
    counted_share: float = 1.0
    incomplete: int = 0
    unlisted: int = 0


MAX_ROWS = 50
"""Rows of each list of the status."""
MAX_HOSTS = 10
"""Paused hosts, and hosts with withheld accounts, in the status."""
# The columns are the fields of the rows of the status document. Times of the clocks of the processes are compared with
# $1, the present time by such a clock.
_CURSORS = """
    select relay, shard, seq, event_time, $1 - date_part('epoch', caught_up_at) as lag_seconds
    from atproto.cursors order by relay, shard
"""
_GAPS = """
    select relay, shard, reason, first_seq, last_seq, date_part('epoch', clock_timestamp() - opened_at) as open_seconds
    from indexer.gap where closed_at is null order by id
"""
_HOSTS = """
    select host, coalesce(pause_reason, '') as reason, date_part('epoch', paused_until) - $1 as seconds_left,
        consecutive_failures as failures_in_a_row, last_error,
        $1 - date_part('epoch', last_success) as last_success_seconds_ago
    from indexer.host where paused_until > to_timestamp($1::float8)
    order by consecutive_failures desc, paused_until desc limit $2
"""
_WITHHELD = """
    select host, (counts->>'repos')::bigint as repos, (counts->>'synchronized')::bigint as synchronized,
        lacking as not_passed_on, (select max(accounts) from indexer.relay_host r where r.host = l.host) as at_relay,
        $1 - date_part('epoch', finished_at) as listed_seconds_ago
    from indexer.host_list l where lacking > 0 order by lacking desc, host limit $2
"""
_CONSUMERS = """
    select name, seq, behind, coalesce(date_part('epoch', clock_timestamp() - behind_since), 0) as lag_seconds,
        date_part('epoch', clock_timestamp() - seen_at) as silent_seconds, cut_off_at is not null as cut_off
    from atproto.readers order by name limit $1
"""
# The table has a bounded number of rows per relay and reason, and frames are not read.
REJECTIONS = """
    select d.reason, n.stored, n.last_hour, date_part('epoch', clock_timestamp() - d.time) as newest_seconds_ago,
        d.relay, d.seq, d.did, d.detail
    from (
        select reason, count(*) as stored, count(*) filter (where time > now() - interval '1 hour') as last_hour,
            max(id) as newest
        from indexer.dead_letter group by reason
    ) n join indexer.dead_letter d on d.id = n.newest
    order by d.time desc, d.reason limit $1
"""
_REJECTION_TEXTS = {str(reason): reason.text for reason in Rejection}

_IS_INCOMPLETE = "active and priority <> 2 and parked_at is null"
"""The condition beside a low `scope_version`. Repos that were never fetched wait in the resync queue as new ones."""

# Each of these kinds has an index of its own. $1 is the largest number. Citus needs a column in the inner query.
_FEW = "select count(*) from (select 1 from indexer.repo where {} limit $1) found"
_FEW_KINDS = {
    "in_progress": f"sync_status = '{SyncStatus.IN_PROGRESS}'",
    "waiting": f"sync_status = '{SyncStatus.DESYNCHRONIZED}' and active",
    "parked": "parked_at is not null",
    "unproven": "unproven_since is not null",
}
_KINDS = _FEW_KINDS | {
    "ended": "greatest(synchronized_at, parked_at) >= to_timestamp($1)",
    "incomplete": f"scope_version < $2 and {_IS_INCOMPLETE}",
}
# The index has the version, and not the rest of the condition. So the rows that it finds are limited.
FEW_INCOMPLETE = f"""
    select count(*) as found, count(*) filter (where tracked and {_IS_INCOMPLETE}) as incomplete from (
        select active, tracked, priority, parked_at from indexer.repo
        where bucket = any($2::smallint[]) and scope_version < $3 limit $1
    ) found
"""

# Without `atproto.cid_text`: on a cluster, its two calls take 3.5 ms to plan, and each execution is planned.
REPO = """
    select r.did, i.handle, i.pds, r.sync_status, r.sync_reason,
        r.rev, r.data, r.commit, r.latest_verified_rev,
        coalesce(r.hosting_status, case when r.active then 'active' else 'inactive' end) as hosting_status,
        r.active, r.withheld_since, r.takedown, r.tracked, r.visible, r.attempts as resync_attempts,
        nullif(r.next_attempt_at, 'infinity') as next_attempt_at,
        coalesce(r.next_attempt_at = 'infinity', false) as parked,
        r.last_failure, r.last_error, r.synchronized_at, r.unproven_since, r.updated_at, r.lease_until,
        r.buffered_events, r.buffered_bytes, r.bucket,
        (
            select count(*) from (select from indexer.record c where c.did = r.did and c.bucket = $2 limit $3) counted
        ) as records
    from indexer.repo r left join indexer.identity i using (did, bucket)
    where r.did = $1 and r.bucket = $2
"""

_RECORD = """
    select uri, cid, rev, value, value_problem, indexed_at, first_seen, first_seen_live from atproto.records
    where did = $1 and bucket = $2 and collection = $3 and rkey = $4
"""
_REDACTED = "select coalesce(reason, '') from indexer.removal where target = $1 and action = 'redact'"
_REMOVED = "select count(*) from indexer.removed where target >= 'at://' || $1 || '/' and target < 'at://' || $1 || '0'"
_RECORDS = "select collection || '/' || rkey, cid from atproto.records where did = $1 and bucket = $2"


def count_sample(percentage: float) -> str:
    """Return the statement that counts the repos in so many percent of the pages of one part of the table.

    They are always the same pages, so that estimates are comparable. The percentage is no parameter, because Citus
    sends null instead of a parameter of TABLESAMPLE to a shard.
    """
    numbers = ", ".join(f"count(*) filter (where {where}) as {kind}" for kind, where in _KINDS.items())
    return f"""
        select sync_status, sync_reason, last_failure as failure, count(*) as repos, {numbers}
        from indexer.repo tablesample system ({percentage}) repeatable (0)
        where tracked and bucket = any($3::smallint[])
        group by sync_status, sync_reason, failure
    """


def sample(percentage: float) -> str:
    """Return the statement that selects at most $1 repos from so many percent of the pages of one part of the table.

    SYSTEM chooses whole pages and reads only those. The random order makes it unlikely that a sample has several repos
    of one page.
    """
    return f"""
        select did from indexer.repo tablesample system ({percentage})
        where sync_status = '{SyncStatus.SYNCHRONIZED}' and active and bucket = any($2::smallint[])
        order by random() limit $1
    """


class Reports(Area):
    """Reports for operators."""

    async def counts(self, since: float = inf) -> Counts:
        """Return the counts, with `ended` since the Unix time `since`.

        The numbers of repos are estimated from a part of the table if it is large (`MAX_COUNTED_PAGES`) or the database
        slow (`COUNT_MILLISECONDS`).
        """
        async with self._pool.connection() as connection:
            counts = await count_repos(connection, since)
            return replace(counts, records=await estimate_rows(connection, "indexer.record"))

    async def state(self) -> tuple[dict[str, Any], list[ProcessReport]]:
        """Return fields of the status document, by name, and what the processes report."""
        async with self._pool.transaction() as connection:
            return await load_state(connection, time())

    async def repo(self, did: str, max_records: int = 2**62) -> dict[str, Any] | None:
        """Return what is stored about a repo, by column, with the number of its records up to `max_records`.

        `redacted` is the reason of its redaction; None if it is not redacted. `removed` is the number of its records
        that are redacted or hidden one by one.
        """
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(REPO, did, bucket_of(did), max_records)
            if row is None:
                return None
            cids = {name: None if row[name] is None else cid_text(row[name]) for name in ("data", "commit")}
            redacted, removed = await connection.fetchval(_REDACTED, did), await connection.fetchval(_REMOVED, did)
            return {**row, **cids, "redacted": redacted, "removed": removed}

    async def record(self, did: str, collection: str, rkey: str) -> dict[str, Any] | None:
        """Return the row of `atproto.records` with its value decoded; None if there is none."""
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(_RECORD, did, bucket_of(did), collection, rkey)
            if row is None:
                return None
            return {**row, "value": None if row["value"] is None else json.loads(row["value"])}

    async def visible_repos(self) -> dict[str, tuple[str, str | None]]:
        """Return sync status and sync reason of each visible repo, by DID."""
        rows = await self._fetch("select did, sync_status, sync_reason from atproto.repos where visible")
        return {did: (status, reason) for did, status, reason in rows}

    async def visible_records(self, did: str) -> dict[str, bytes]:
        """Return the CID of each record of a visible repo, by path; empty if the repo is not visible."""
        rows = await self._fetch(_RECORDS, did, bucket_of(did))
        return {path: parse_cid(cid) for path, cid in rows}

    async def sample_synchronized(self, count: int) -> list[str]:
        """Return the DIDs of at most `count` active synchronized repos, chosen at random.

        Reads at most `MAX_SAMPLE_PAGES` of the table, so it returns fewer repos if very few qualify.
        """
        async with self._pool.connection() as connection:
            parts = await load_parts(connection, "indexer.repo")
            statement = sample(100.0 * min(1.0, MAX_SAMPLE_PAGES / max(1, sum(part.pages for part in parts))))
            rows = [row for part in parts for row in await connection.fetch(statement, count, part.buckets)]
            return [did for (did,) in random.sample(rows, min(count, len(rows)))]


async def load_state(connection: Connection, now: float) -> tuple[dict[str, Any], list[ProcessReport]]:
    """Return what `Reports.state` returns, at `now` (Unix seconds). Run it in a transaction."""
    await connection.execute(f"set local statement_timeout = '{TIMEOUT_SECONDS}s'")

    async def rows(sql: str, *parameters: object) -> list[dict[str, Any]]:
        """Return the rows. A duration is at least 0, whatever the clocks of other processes say."""
        return [
            {name: max(0.0, value) if "seconds" in name and value is not None else value for name, value in row.items()}
            for row in await connection.fetch(sql, *parameters)
        ]

    cursors, gaps = await rows(_CURSORS, now), await rows(_GAPS)
    for cursor in cursors:
        # With a Jetstream, all events are stored up to the last comparison, which says nothing of the stream.
        if cursor["lag_seconds"] is None or cursor["relay"] == JETSTREAM:
            at = event_seconds(cursor["event_time"])  # None: its time is not possible
            cursor["lag_seconds"] = None if at is None or at > now + MAX_AHEAD else max(0.0, now - at)
    state = {
        "cursors": cursors,
        "links": await links.load_progress(connection),
        "gaps_open": len(gaps),
        "gaps": gaps[:MAX_ROWS],
        "hosts": await rows(_HOSTS, now, MAX_HOSTS),
        "withheld": await rows(_WITHHELD, now, MAX_HOSTS),
        "rejections": [
            row | {"meaning": _REJECTION_TEXTS.get(row["reason"], "")} for row in await rows(REJECTIONS, MAX_ROWS)
        ],
        "consumers": await rows(_CONSUMERS, MAX_ROWS),
        "set_aside_events": await count_refused(connection),
    }
    return state, await process_reports.load(connection)


async def count_repos(connection: Connection, since: float) -> Counts:
    """Count all repos, or those of a part of the table; the part becomes smaller until the time limit suffices."""
    scope = await load_scope(connection)
    complete_from = 0 if scope is None else scope.complete_from
    signals = set(filter(is_nsid, scope.signal_patterns)) if scope else set()  # other patterns have no list
    listed = {row["collection"] for row in await connection.fetch(LISTS_READ)}
    async with _limited_time(connection):
        parts = await load_parts(connection, "indexer.repo")
    total = sum(part.pages for part in parts)
    pages = min(total, MAX_COUNTED_PAGES)
    while True:
        share, rows = pages / total if total else 1.0, list[asyncpg.Record]()
        try:
            async with _limited_time(connection, len(parts)):
                for part in parts:
                    rows += await connection.fetch(count_sample(100.0 * share), since, complete_from, part.buckets)
            break
        except asyncpg.QueryCanceledError:
            if pages <= 1:
                raise
            pages = max(1, pages // PAGES_FACTOR)

    def by(column: str) -> dict[str, int]:
        numbers = Counter[str | None]()
        for row in rows:
            numbers[row[column]] += row["repos"]
        return {name: round(number / share) for name, number in numbers.most_common() if name is not None}

    statuses = {status: by("sync_status").get(status, 0) for status in SyncStatus}
    totals = {kind: round(sum(row[kind] for row in rows) / share) for kind in _KINDS}
    if share < 1.0:
        totals |= await _count_few(connection, complete_from)
        statuses[SyncStatus.IN_PROGRESS] = totals["in_progress"]
        statuses[SyncStatus.DESYNCHRONIZED] = max(statuses[SyncStatus.DESYNCHRONIZED], totals["waiting"])
    return Counts(
        statuses=statuses,
        reasons=by("sync_reason"),
        failures=by("failure"),
        queued=max(0, totals["waiting"] - totals["parked"]),
        parked=totals["parked"],
        ended=totals["ended"],
        unproven=totals["unproven"],
        incomplete=totals["incomplete"],
        unlisted=0 if "" in listed else len(signals - listed),  # a PDS may list all its repos instead
        counted_share=share,
    )


async def _count_few(connection: Connection, complete_from: int) -> dict[str, int]:
    """Return the exact numbers of kinds with few repos, as far as the time limit suffices."""
    exact = dict[str, int]()
    with suppress(asyncpg.QueryCanceledError):
        async with _limited_time(connection, len(_FEW_KINDS) + 1):
            for kind, where in _FEW_KINDS.items():
                number = await connection.fetchval(_FEW.format(where), MAX_FEW)
                exact |= {kind: number} if number < MAX_FEW else {}
            [(found, number)] = await connection.fetch(FEW_INCOMPLETE, MAX_FEW, list(range(BUCKETS)), complete_from)
            exact |= {"incomplete": number} if found < MAX_FEW else {}
    return exact


@asynccontextmanager
async def _limited_time(connection: Connection, statements: int = 1) -> AsyncIterator[None]:
    """Run so many statements in a transaction. Postgres cancels one that takes its share of the time limit."""
    async with connection.transaction():
        await connection.execute(f"set local statement_timeout = {max(1, COUNT_MILLISECONDS // statements)}")
        yield
