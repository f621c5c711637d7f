"""Crawls of repo lists and PLC exports: their stored progress, and the comparison of a list with the table of repos."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal, NamedTuple, Self

from indexer.crash_points import crash_point
from indexer.db import gaps, identities
from indexer.db.columns import Connection, buckets_of, of_buckets, unnest
from indexer.db.connections import Area
from indexer.db.repos import Repos, add_repos
from indexer.db.scope import holds
from indexer.db.write import write
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.identity import StoredIdentity
from indexer.sync.plan import plan_listed
from indexer.sync.repo import OUT_OF_SCOPE, TOMBSTONED, SyncStatus
from indexer.sync.scope import Scope
from indexer.sync.shard import Shard

Purpose = Literal["discover", "sweep", "signal", "untrack", "recheck", "hosts", "identities"]
"""`discover`: a command adds the listed accounts. `sweep`: a reconciliation. `signal`: the list of a signal collection.
`untrack`: a search of stored repos that are out of scope; its cursor is a DID, and `source` is empty. `recheck`: the
list of an added collection, which was compared at `began_at` and is compared again later; `source` is empty. `hosts`:
the list of hosts of a relay; without a source, the lists of all hosts, which a command reads. `identities`: the export
of a PLC directory; its cursor is a position, and all operations up to `finished_at` were read. The collection is `*` if
all DIDs are stored, otherwise only those of tracked repos are."""


@dataclass(frozen=True, slots=True)
class CrawlProgress:
    """The progress of one crawl of a host's repo list.

    Attributes:
        source: The base URL of the host.
        collection: List only accounts with records in this collection; "" lists all accounts.
        cursor: The cursor of the next page; None for the first page.
        found: The number of listed accounts that needed an action: added, desynchronized, or shown again. For
            `untrack`, the number of repos that must be looked at again. For `recheck`, the number of repeated
            comparisons.
        began_at: Unix seconds.
        finished_at: Unix seconds; None while pages are left.
        shard: The shard whose repos are compared, as index/count; "0/1": all.
        last_gap: The ID of the newest gap when a reconciliation began, which closes no later one; 0: none.
    """

    purpose: Purpose
    source: str
    collection: str = ""
    cursor: str | None = None
    listed: int = 0
    found: int = 0
    began_at: float = 0.0
    finished_at: float | None = None
    shard: str = "0/1"
    last_gap: int = 0

    def after_page(self, cursor: str | None, listed: int, found: int, now: float) -> Self:
        """Return the progress after one more page; `cursor` None means that it was the last page."""
        return replace(
            self,
            cursor=cursor,
            listed=self.listed + listed,
            found=self.found + found,
            finished_at=now if cursor is None else None,
        )


_READ = """
    select purpose, source, collection, cursor, listed, found, date_part('epoch', began_at) as began_at,
        date_part('epoch', finished_at) as finished_at, shard, last_gap
    from indexer.crawl_progress where
"""
_LOAD = f"{_READ} purpose = $1 and source = $2 and collection = $3 and shard = $4"
LISTS_READ = "select collection from indexer.crawl_progress where purpose = 'signal' and finished_at is not null"

# This one, which began before, has read all that those have read of other directories.
_DELETE_COVERED = """
    delete from indexer.crawl_progress
    where purpose = $1 and source <> $2 and began_at >= to_timestamp($3) and finished_at <= to_timestamp($4)
"""
_SAVE = """
    insert into indexer.crawl_progress
        (purpose, source, collection, cursor, listed, found, began_at, finished_at, shard, last_gap)
    values ($1, $2, $3, $4, $5, $6, to_timestamp($7), to_timestamp($8), $9, $10)
    on conflict (purpose, source, collection, shard) do update
    set cursor = excluded.cursor, listed = excluded.listed, found = excluded.found, began_at = excluded.began_at,
        finished_at = excluded.finished_at, last_gap = excluded.last_gap
"""

_FIND_DIFFERENCES = f"""
    select r.did,
        r.active and r.sync_status <> '{SyncStatus.DESYNCHRONIZED}' and (r.rev is null or r.rev < w.rev) as behind,
        r.withheld_since is not null
            or not r.active and r.tracked and r.hosting_status is distinct from '{TOMBSTONED}' as hidden,
        r.from_stream and r.rev is null and r.tracked as only_from_stream,
        not r.tracked and r.hosting_status is not distinct from '{OUT_OF_SCOPE}' as unknown
    from {unnest({"did": "text", "rev": "text"}, "w", 2)}
    join indexer.repo r on r.did = w.did and {of_buckets("r")}
"""

_ACTIVE = """
    select did from indexer.repo where did > $1 and active and rev is not null and bucket = any($2::smallint[])
    order by did limit $3
"""

# A repo that waits for its resync is compared by it.
_HOSTED = f"""
    from indexer.repo r left join indexer.identity i on i.did = r.did and i.bucket = r.bucket
    where r.bucket = any($1::smallint[]) and r.tracked and case
        when r.active then r.sync_status <> '{SyncStatus.DESYNCHRONIZED}' or r.withheld_since is not null
        else r.hosting_status is distinct from '{TOMBSTONED}'
    end
"""
_HOSTED_REPOS = f"select r.did, i.pds {_HOSTED} and r.did > $2 order by r.did limit $3"
_COUNT_HOSTED = f"""
    select case when repos >= $2 then pds end as pds, sum(repos)::bigint as repos
    from (select i.pds, count(*) as repos {_HOSTED} group by i.pds) hosts group by 1
"""


class HostedDid(NamedTuple):
    """A repo, and the base URL of its PDS; None if it is not known."""

    did: str
    pds: str | None


class ListDifferences(NamedTuple):
    """The differences between a page of a repo list and the stored repos, as DIDs.

    Attributes:
        behind: Repos with an older rev that are synchronized or being fetched.
        hidden: Accounts that are stored as inactive, or as withheld by the relay.
        unknown: Accounts without a stored repo, and those that were out of scope.
        only_from_stream: Repos that the stream added, that no list has named before, and that were not fetched yet.
    """

    behind: list[str]
    hidden: list[str]
    unknown: list[str]
    only_from_stream: list[str]


class Crawls(Area):
    """Lists of repos, and what they differ in from the stored repos."""

    async def progress(
        self, purpose: Purpose, source: str, collection: str = "", shard: str = "0/1"
    ) -> CrawlProgress | None:
        """Return the progress of the last crawl of this list; None if there was none."""
        rows = await self._fetch(_LOAD, purpose, source, collection, shard)
        return CrawlProgress(**rows[0]) if rows else None

    async def save(self, progress: CrawlProgress) -> None:
        """Store the progress of a crawl."""
        await self._execute(_SAVE, *astuple(progress))
        crash_point("crawl.saved")

    async def begin_operations(self, progress: CrawlProgress) -> None:
        """Store the progress of an export that is read from its beginning, in place of all exports read before."""
        async with self._pool.transaction() as connection:
            await connection.execute("delete from indexer.crawl_progress where purpose = $1", progress.purpose)
            await save_progress(connection, progress)

    async def add_listed(
        self, dids: Sequence[str], progress: CrawlProgress, *, scope: Scope | None = None, close_gaps: bool = False
    ) -> CrawlProgress:
        """Add the repos of a page and store the progress, in one transaction; return the stored progress.

        If the scope has changed, no repos are added.

        Args:
            dids: The accounts of the page that may be unknown.
            progress: The progress after the page. The repos that were not tracked yet are added to what it found.
            scope: The scope that wants the repos; None if a command does.
            close_gaps: Close the gaps that were open when the crawl began, if the page was the last one.
        """
        async with self._pool.transaction() as connection:
            found = 0
            if scope is None:
                found = await add_repos(connection, dids)
            elif await holds(connection, scope.version):
                found = await add_repos(connection, dids, wanted_in=scope.version, wanted_before=0)
            return await _save_page(connection, progress, found, close_gaps=close_gaps)

    async def add_signals(self, dids: Sequence[str], progress: CrawlProgress, scope: Scope) -> CrawlProgress | None:
        """Add the repos of a page of the list of a signal collection, as `add_listed`; return the stored progress.

        The scope also wants those of them that are tracked already. Return None if it has changed: the progress is not
        stored, because a list counts only for the scope that it was read for.
        """
        async with self._pool.transaction() as connection:
            if not await holds(connection, scope.version):
                return None
            found = await add_repos(connection, dids, wanted_in=scope.version, wanted_before=scope.repos_narrowed_in)
            return await _save_page(connection, progress, found)

    async def find_differences(self, revs: Mapping[str, str]) -> ListDifferences:
        """Compare accounts that a relay lists as active, with their revs, to the stored repos."""
        rows = await self._fetch(_FIND_DIFFERENCES, buckets_of(revs), list(revs), list(revs.values()))
        known = {row["did"] for row in rows if not row["unknown"]}
        return ListDifferences(
            behind=[row["did"] for row in rows if row["behind"]],
            hidden=[row["did"] for row in rows if row["hidden"]],
            unknown=[did for did in revs if did not in known],
            only_from_stream=[row["did"] for row in rows if row["only_from_stream"]],
        )

    async def active_repos(self, after: str, buckets: Sequence[int], limit: int) -> list[str]:
        """Return the next DIDs after `after`, at most `limit`, of active repos that were fetched before."""
        return [did for (did,) in await self._fetch(_ACTIVE, after, list(buckets), limit)]

    async def hosted_repos(self, after: str, buckets: Sequence[int], limit: int) -> list[HostedDid]:
        """Return the next repos after `after`, at most `limit`, that are to be compared with their hosts."""
        return [HostedDid(*row) for row in await self._fetch(_HOSTED_REPOS, list(buckets), after, limit)]

    async def count_hosted(self, buckets: Sequence[int], at_least: int) -> dict[str | None, int]:
        """Return the number of these repos by PDS; for None, those of unknown PDSes and of those below `at_least`."""
        rows = await self._fetch(_COUNT_HOSTED, list(buckets), at_least)
        return {row["pds"]: row["repos"] for row in rows}

    async def desynchronize_behind(self, revs: Mapping[str, str], now: float) -> int:
        """Desynchronize the repos that still have an older rev; return how many.

        A repo that is being fetched only notes the rev, and one that waits because its relay withholds it becomes due.
        A repo that changes meanwhile is compared again.
        """
        desynchronized, pending = 0, list(revs)
        while pending:
            repos = await Repos(self._pool).load(pending)
            after = {did: plan_listed(repo, revs[did], now) for did, repo in repos.items()}
            writes = [RepoWrite(repos[did], repo) for did, repo in after.items() if repo is not repos[did]]
            async with self._pool.transaction() as connection:
                pending = list((await write(connection, Batch(tuple(writes)), layout=self._pool.layout)).skipped)
            desynchronized += sum(
                planned.before.sync_status is SyncStatus.SYNCHRONIZED
                for planned in writes
                if planned.repo.did not in pending
            )
        return desynchronized

    async def save_operations(
        self,
        before: CrawlProgress,
        after: CrawlProgress,
        stored: Sequence[StoredIdentity],
        stale: Collection[str],
        changed: Sequence[str],
    ) -> bool:
        """Store what operations of an export have proven, and the progress, in one transaction.

        Return False, and store nothing, if the progress is no longer the one `before`. Identities of `stale` DIDs
        are looked up again. Those of `changed` DIDs are dropped from the memory of all processes.
        """
        async with self._pool.transaction() as connection:
            key = (before.purpose, before.source, before.collection, before.shard)
            row = await connection.fetchrow(f"{_LOAD} for update", *key)
            if (row and row["cursor"]) != before.cursor:
                return False
            await save_progress(connection, after)
            await connection.execute(_DELETE_COVERED, after.purpose, after.source, after.began_at, after.finished_at)
            await identities.save_identities(connection, stored)
            incomplete = await identities.drop_incomplete_chains(connection, stored)
            await identities.mark_stale(connection, {*stale, *incomplete})
            await identities.notify(connection, [*changed, *incomplete])
            crash_point("operations.saved")
        return True

    async def rechecks(self, shard: Shard) -> list[CrawlProgress]:
        """Return the lists of added collections that are to be compared again with the repos of this shard.

        After a change of the number of shards, the lists of former shards with some of these repos are among them,
        until this shard has a progress of its own that began at the same time or later.
        """
        stored = [CrawlProgress(**row) for row in await self._fetch(f"{_READ} purpose = 'recheck' order by collection")]
        own = {progress.collection: progress for progress in stored if progress.shard == str(shard)}
        for progress in stored:
            present = own.get(progress.collection)
            is_left = progress.finished_at is None and Shard.parse(progress.shard).overlaps(shard)
            if is_left and (present is None or present.began_at < progress.began_at):
                own[progress.collection] = replace(progress, shard=str(shard), found=0)
        return [progress for progress in own.values() if progress.finished_at is None]


async def save_progress(connection: Connection, progress: CrawlProgress) -> None:
    """Store the progress of a crawl."""
    await connection.execute(_SAVE, *astuple(progress))


async def _save_page(
    connection: Connection, progress: CrawlProgress, found: int, *, close_gaps: bool = False
) -> CrawlProgress:
    """Store the progress after a page in which these many repos were found; return it."""
    after_page = replace(progress, found=progress.found + found)
    await save_progress(connection, after_page)
    if close_gaps and after_page.finished_at is not None:
        positions = Shard.parse(after_page.shard).positions
        await gaps.close_gaps(connection, positions, after_page.last_gap, after_page.source)
        crash_point("gap.closed")
    crash_point("crawl.page")
    return after_page
