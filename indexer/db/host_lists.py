"""The hosts that relays consume, and the repo lists of these hosts: which are due, and what they count.

All times are Unix seconds of the clocks of the processes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import orjson

from indexer.crash_points import crash_point
from indexer.db.columns import buckets_of, columns_of, of_buckets, typed, unnest
from indexer.db.connections import Area
from indexer.db.repos import add_repos
from indexer.db.scope import holds
from indexer.sync.repo import OUT_OF_SCOPE, SyncStatus
from indexer.sync.scope import Scope
from indexer.sync.shard import bucket_of

FIRST_RETRY_SECONDS = 300.0
"""Pause after the first failed reading of a list; each further failure doubles it."""

_COLUMNS = typed("host text, url text, host_bucket smallint, accounts bigint, status text")
_SAVE_HOSTS = f"""
    with listed as (
        insert into indexer.relay_host (relay, host, accounts, status, listed_at)
        select $1, host, accounts, status, to_timestamp($2) from {unnest(_COLUMNS, "w", 3)} order by host
        on conflict (relay, host) do update
        set accounts = excluded.accounts, status = excluded.status, listed_at = excluded.listed_at
    )
    insert into indexer.host_list (host, url, host_bucket)
    select host, url, host_bucket from {unnest(_COLUMNS, "w", 3)} order by host on conflict do nothing
"""
_REMOVE_UNLISTED = "delete from indexer.relay_host where relay = $1 and listed_at < to_timestamp($2)"
_REMOVE_WITHOUT_RELAY = """
    delete from indexer.host_list l
    where not exists (select from indexer.relay_host r where r.host = l.host)
"""

_MOST_LACKING = """
    select host from indexer.host_list where lacking > 0 and host_bucket = any($1::smallint[])
    order by lacking desc, host
"""
_NOT_WITHHELD = """
    select url, lacking - coalesce((
        select sum(number::bigint) from jsonb_each(counts->'withheld') r, jsonb_each_text(r.value) w(status, number)
    ), 0)::bigint as accounts
    from indexer.host_list where lacking > 0
"""
# Hosts that fail are last, so that invented ones delay no others. So are lists that were read for long already.
_DUE = f"""
    select host from indexer.host_list
    where host_bucket = any($1::smallint[]) and (
        ended_at is null or ended_at < to_timestamp($2) or ended_at > to_timestamp($3::float8 + 60)
        or reading is not null
        or failures > 0
            and ended_at < to_timestamp($3::float8 - {FIRST_RETRY_SECONDS} * 2 ^ least(failures - 1, 20))
        or host = any($4::text[]) and failures = 0
            and ended_at < to_timestamp($3::float8 - $5::float8 * greatest(1, (counts->>'pages')::integer))
    )
    order by failures, reading is not null, ended_at nulls first, host
"""
_LOAD = """
    select host, url, cursor, reading, date_part('epoch', reading_since) as reading_since, lacking, failures
    from indexer.host_list where host = $1
"""

_HOSTED = f"""
    select r.did, i.pds, r.rev, r.sync_status, r.active, r.tracked, r.hosting_status, r.hosting_relay,
        r.withheld_since is not null as withheld
    from {unnest({"did": "text"}, "w", 2)}
    join indexer.repo r on r.did = w.did and {of_buckets("r")}
    left join indexer.identity i on i.did = r.did and i.bucket = r.bucket
"""

_SAVE_PAGE = """
    update indexer.host_list set reading = $2::jsonb, reading_since = to_timestamp($3), cursor = $4 where host = $1
"""
_SAVE_COMPLETE = """
    update indexer.host_list l
    set counts = $2::jsonb, began_at = to_timestamp($3), finished_at = to_timestamp($4), ended_at = to_timestamp($4),
        reading = null, reading_since = null, cursor = null, failures = 0, last_error = null,
        lacking = $5::bigint + $6::bigint + greatest(0, $7::bigint - (
            select coalesce(
                max(coalesce(accounts, $7::bigint)) filter (where coalesce(status, '') not in ('banned', 'offline')), 0)
            from indexer.relay_host r where r.host = l.host
        ))
    where host = $1 returning lacking
"""
_SAVE_FAILURE = """
    update indexer.host_list
    set reading = null, reading_since = null, cursor = null, ended_at = to_timestamp($2), failures = failures + 1,
        last_error = $3
    where host = $1
"""
_SUMMARY = """
    select count(*) as hosts, count(*) filter (where finished_at is not null) as listed,
        count(*) filter (where failures > 0) as failing,
        count(*) filter (where lacking > 0) as withheld, coalesce(sum(lacking), 0)::bigint as accounts
    from indexer.host_list where host_bucket = any($1::smallint[])
"""


@dataclass(slots=True)
class HostCounts:
    """The counts of one reading of the repo list of a host. Accounts are those that the list names.

    Attributes:
        pages: Pages of the list.
        accounts: Accounts that are active on the host.
        inactive: Accounts that are not.
        unproven: Active accounts of which no identity that names the host is known.
        repos: Active accounts whose identity names the host, and that are tracked.
        synchronized: Those of `repos` that are synchronized.
        behind: Those of `repos` that are not withheld, and of which the stream did not bring the listed rev in time.
        last_commit: The time in the newest stored rev of `repos`; None: there is none.
        withheld: Those of `repos` that a relay withholds, by the URL of its stream and by their hosting status.
    """

    pages: int = 0
    accounts: int = 0
    inactive: int = 0
    unproven: int = 0
    repos: int = 0
    synchronized: int = 0
    behind: int = 0
    last_commit: float | None = None
    withheld: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def total_withheld(self) -> int:
        """The accounts that relays withhold."""
        return sum(sum(statuses.values()) for statuses in self.withheld.values())


@dataclass(frozen=True, slots=True)
class HostList:
    """The repo list of a host, and its reading.

    Attributes:
        cursor: The cursor of the next page; None for the first page.
        counts: What the reading has counted so far.
        reading_since: When the reading began; None: it has not begun.
        lacking: The accounts that no relay passed on at the last complete reading.
        failures: Readings that failed since the last complete one.
    """

    host: str
    url: str
    cursor: str | None
    counts: HostCounts
    reading_since: float | None
    lacking: int
    failures: int


class HostedRepo(NamedTuple):
    """The stored state of an account that a host lists."""

    did: str
    pds: str | None
    rev: str | None
    sync_status: str
    active: bool
    tracked: bool
    hosting_status: str | None
    hosting_relay: str | None
    withheld: bool

    @property
    def out_of_scope(self) -> bool:
        """True if the scope wanted the repo no more."""
        return not self.tracked and self.hosting_status == OUT_OF_SCOPE

    @property
    def is_synchronized(self) -> bool:
        """True if its records are those of its rev, as far as it is known."""
        return self.sync_status == SyncStatus.SYNCHRONIZED


class HostLists(Area):
    """The hosts of relays, and their repo lists."""

    async def save_hosts(
        self, relay: str, hosts: Iterable[tuple[str, str, int | None, str | None]], now: float
    ) -> None:
        """Store hosts that a relay lists: name, base URL, number of accounts and status."""
        unique = {host: (host, url, bucket_of(host), accounts, status) for host, url, accounts, status in hosts}
        rows = list(unique.values())
        await self._execute(_SAVE_HOSTS, relay, now, *columns_of(rows, _COLUMNS))

    async def remove_unlisted(self, relay: str, began_at: float) -> None:
        """Remove the hosts that a complete list of a relay, which was read since `began_at`, does not have."""
        async with self._pool.transaction() as connection:
            await connection.execute(_REMOVE_UNLISTED, relay, began_at)
            await connection.execute(_REMOVE_WITHOUT_RELAY)

    async def most_lacking(self, buckets: Sequence[int]) -> list[str]:
        """Return the hosts with accounts that no relay passes on, those with the most of them first."""
        return [host for (host,) in await self._fetch(_MOST_LACKING, list(buckets))]

    async def not_withheld(self) -> dict[str, int]:
        """Return how many accounts of any shard relays omit or bring late, by the URLs of their hosts."""
        return {row["url"]: row["accounts"] for row in await self._fetch(_NOT_WITHHELD) if row["accounts"] > 0}

    async def due(
        self, buckets: Sequence[int], since: float, now: float, followed: Sequence[str] = (), page_seconds: float = 0.0
    ) -> list[str]:
        """Return the hosts whose lists are to be read: those that do not fail are first.

        The buckets are those of the names of hosts. A list that was read after `since` is not due, unless that failed,
        or the host is `followed`: then it is due again `page_seconds` for each page after its last reading. Both
        times are Unix seconds.
        """
        rows = await self._fetch(_DUE, list(buckets), since, now, list(followed), page_seconds)
        return [host for (host,) in rows]

    async def load(self, host: str) -> HostList | None:
        """Return the list of a host; None if no relay lists the host any more."""
        rows = await self._fetch(_LOAD, host)
        if not rows:
            return None
        fields: dict[str, Any] = dict(rows[0])
        reading = fields.pop("reading")
        return HostList(counts=HostCounts(**orjson.loads(reading)) if reading else HostCounts(), **fields)

    async def hosted(self, dids: Sequence[str]) -> dict[str, HostedRepo]:
        """Return what is stored about listed accounts, by DID; unknown ones are left out."""
        rows = await self._fetch(_HOSTED, buckets_of(dids), list(dids))
        return {row["did"]: HostedRepo(*row) for row in rows}

    async def add(self, dids: Sequence[str], scope: Scope) -> int | None:
        """Track accounts that only their host has named; return how many were not tracked yet, None: scope changed."""
        async with self._pool.transaction() as connection:
            if not await holds(connection, scope.version):
                return None
            added = await add_repos(connection, dids, wanted_in=scope.version, wanted_before=0, from_stream=True)
            crash_point("hosts.added")
            return added

    async def save_page(self, reading: HostList, cursor: str | None, now: float) -> HostList:
        """Store that a page was read; return the reading with the cursor of the next page."""
        since = now if reading.reading_since is None else reading.reading_since
        await self._execute(_SAVE_PAGE, reading.host, _json(reading.counts), since, cursor)
        crash_point("hosts.page")
        return replace(reading, cursor=cursor, reading_since=since)

    async def save_complete(self, reading: HostList, now: float) -> int:
        """Store that the list was read to its end; return how many accounts no relay passes on."""
        counts, since = reading.counts, now if reading.reading_since is None else reading.reading_since
        numbers = counts.total_withheld, counts.behind, counts.repos
        lacking = await self._fetchval(_SAVE_COMPLETE, reading.host, _json(counts), since, now, *numbers)
        return int(lacking or 0)

    async def save_failure(self, host: str, error: str, now: float) -> None:
        """Store that the list could not be read. The next reading begins with the first page."""
        await self._execute(_SAVE_FAILURE, host, now, error[:500])

    async def summary(self, buckets: Sequence[int]) -> dict[str, int]:
        """Return the numbers of hosts by state, and of the `accounts` that no relay passes on."""
        [row] = await self._fetch(_SUMMARY, list(buckets))
        return dict(row)


def _json(counts: HostCounts) -> str:
    return orjson.dumps(asdict(counts)).decode()
