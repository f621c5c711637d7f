"""The store: one method for each operation of the daemon and the commands. Each area has a base class in its module."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from indexer.crash_points import crash_point
from indexer.db import (
    blocking_sessions,
    change_log_segments,
    crawl_rows,
    dead_letters,
    gap_rows,
    host_states,
    repo_requests,
)
from indexer.db.account_methods import AccountMethods
from indexer.db.blocking_sessions import BlockingSession, OldSnapshots
from indexer.db.change_log_segments import ChangeLogState, RetentionPolicy, TrimPlan
from indexer.db.columns import Connection, buckets_of, repo_columns, repo_of
from indexer.db.crawl_progress import CrawlProgress, Purpose
from indexer.db.crawl_rows import ListDifferences
from indexer.db.database_errors import DatabaseError, is_conflict, is_read_only, refused_writes
from indexer.db.dead_letters import StoredDeadLetter
from indexer.db.feed_methods import FeedMethods
from indexer.db.lexicon_methods import LexiconMethods
from indexer.db.placement import divide_by_shard
from indexer.db.repo_requests import RequestedPage
from indexer.db.report_methods import ReportMethods
from indexer.db.resync_methods import ResyncMethods
from indexer.db.scope_methods import ScopeMethods
from indexer.db.shard_lock import ShardLock, ShardSession, load_sessions, open_lock, session_name
from indexer.db.write import WrittenBatch, write
from indexer.reasons import Rejection
from indexer.sync.changes import Batch, DeadLetter, RepoWrite
from indexer.sync.identity import HostState
from indexer.sync.plan import plan_listed
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.scope import Scope
from indexer.sync.shard import Shard
from indexer.sync.stream import Gap, OpenGap, Position, StoredCursor

LOAD_REPOS = f"""
    select {repo_columns("r")} from indexer.repo r where did = any($1::text[]) and bucket = any($2::smallint[])
"""
"""Takes DIDs and their buckets."""


class Store(ResyncMethods, ScopeMethods, AccountMethods, FeedMethods, ReportMethods, LexiconMethods):
    """All access to Postgres. Every method raises `DatabaseError` for a transient error, and retries nothing itself."""

    # The live path: repos, batches, cursor, shard.

    async def repos(self, dids: Sequence[str]) -> dict[str, Repo]:
        """Return the rows of the repos by DID; unknown DIDs are left out."""
        async with self._connection() as connection:
            rows = await connection.fetch(LOAD_REPOS, list(dids), buckets_of(dids))
        return {row["did"]: repo_of(row) for row in rows}

    async def write(self, batch: Batch) -> WrittenBatch:
        """Write the batch in one transaction: see `indexer.db.write`.

        Raises:
            DeadLetterGoneError: The dead letter that the batch resolves does not exist; nothing is written.
            RefusedWriteError: The database cannot store the values of the batch.
        """
        async with self._refusals_checked():
            with refused_writes():
                async with self._transaction() as connection:
                    written = await write(connection, batch, shards=self.shards)
                    crash_point("batch.written")
        return written

    async def answers_after(self, error: DatabaseError) -> bool:
        """Return True if the database answers and can be written, so that the write that failed may be the cause.

        Of a deadlock, another transaction is the cause, and the write never is.
        """
        return not is_read_only(error) and not is_conflict(error) and await self.accepts_writes()

    async def update_repo(self, did: str, plan: Callable[[Repo], Repo]) -> Repo | None:
        """Replace the row by `plan(row)`, which is called again if the row changes meanwhile; return the written row.

        Nothing is written, and None is returned, if there is no row or if `plan` returns the same object.
        """
        while True:
            repo = (await self.repos([did])).get(did)
            if repo is None or (after := plan(repo)) is repo:
                return None
            if not (await self.write(Batch((RepoWrite(repo, after),)))).skipped:
                return after

    async def shard_sessions(self) -> list[ShardSession]:
        """Return the sessions of all processes that own a shard of this database, or wait for one."""
        async with self._connection() as connection:
            return await load_sessions(connection)

    async def cursors(self) -> list[StoredCursor]:
        """Return the stored cursors of all relays and shards."""
        async with self._connection() as connection:
            return await gap_rows.load_cursors(connection)

    async def reset_cursor(self, relay: str, shards: Sequence[Shard], position: Position) -> None:
        """Store the position in a new epoch as the cursor of each shard, and open a gap for each shard."""
        async with self._transaction() as connection:
            await gap_rows.reset_cursor(connection, relay, shards, position)

    async def has_synchronized_repo(self, buckets: Sequence[int]) -> bool:
        """Return True if at least one repo of the buckets is synchronized."""
        async with self._connection() as connection:
            return await gap_rows.has_synchronized_repo(connection, buckets)

    async def open_gap(self, gap: Gap) -> OpenGap:
        """Store a gap in the stream."""
        async with self._transaction() as connection:
            opened = await gap_rows.open_gap(connection, gap)
            crash_point("gap.opened")
        return opened

    async def set_last_seq_of_gap(self, gap_id: int, last_seq: int) -> None:
        """Store where a gap ends."""
        async with self._connection() as connection:
            await gap_rows.set_last_seq(connection, gap_id, last_seq)

    async def open_gaps(self) -> list[OpenGap]:
        """Return the open gaps of all shards, oldest first."""
        async with self._connection() as connection:
            return await gap_rows.load_open(connection)

    @asynccontextmanager
    async def shard_lock(self, positions: range) -> AsyncIterator[ShardLock]:
        """Open the lock of these positions, on a connection of its own; release it at the end of the block."""
        async with (
            self._own_connection({"application_name": session_name(positions)}) as connection,
            open_lock(connection, positions, self.placement) as lock,
        ):
            yield lock

    # Requests of commands: track, resync, takedown.

    async def add_repos(self, dids: Iterable[str]) -> int:
        """Add the repos that have no row; return how many. Repos that were untracked stay untracked."""
        async with self._connection() as connection:
            return await repo_requests.add_repos(connection, dids)

    async def request_resyncs(self, dids: Sequence[str]) -> int:
        """Request resyncs of these repos; return how many of them exist."""
        async with self._connection() as connection:
            return await repo_requests.request_resyncs(connection, dids)

    async def request_resyncs_of_all(self, *, errored: bool = False) -> AsyncGenerator[RequestedPage]:
        """Request resyncs of all repos, or of those whose last resync failed; yield each page of repos."""
        async with (
            self._connection() as connection,
            aclosing(repo_requests.request_resyncs_of_all(connection, errored=errored)) as pages,
        ):
            async for page in pages:
                yield page

    async def estimate_repos(self) -> int:
        """Return an estimate of the number of repos."""
        async with self._connection() as connection:
            return await repo_requests.estimate_repos(connection)

    async def set_takedown(self, did: str, *, on: bool) -> bool:
        """Hide a repo locally, or show it again; return False if the repo is unknown."""
        async with self._connection() as connection:
            return await repo_requests.set_takedown(connection, did, on=on)

    # Crawls and reconciliation: repo lists compared with the database.

    async def crawl_progress(
        self, purpose: Purpose, source: str, collection: str = "", shard: str = "0/1"
    ) -> CrawlProgress | None:
        """Return the progress of the last crawl of this list; None if there was none."""
        async with self._connection() as connection:
            return await crawl_rows.load_progress(connection, purpose, source, collection, shard)

    async def save_crawl_progress(self, progress: CrawlProgress) -> None:
        """Store the progress of a crawl."""
        async with self._connection() as connection:
            await crawl_rows.save_progress(connection, progress)
        crash_point("crawl.saved")

    async def add_listed(
        self, dids: Sequence[str], progress: CrawlProgress, *, scope: Scope | None = None, close_gaps: bool = False
    ) -> CrawlProgress:
        """Add the repos of a page and store the progress, in one transaction; return the stored progress.

        If the scope has changed, no more repos are added. The progress is stored, with those that were added before.

        On a distributed database, the repos of each shard are added in a transaction of their own, before the progress
        is stored. A process that ends in between reads the page again: repos that exist are not added or counted twice.

        Args:
            dids: The accounts of the page that may be unknown.
            progress: The progress after the page. The repos that were not tracked yet are added to what it found.
            scope: The scope that wants the repos; None if a command does.
            close_gaps: Close the gaps that were open when the crawl began, if the page was the last one.
        """
        found, rest = await self._add_by_shard(dids, scope, by_signal=False)
        async with self._transaction() as connection:
            added = await repo_requests.add_listed(connection, rest, scope, by_signal=False)
            return await _save_page(connection, progress, found + (added or 0), close_gaps=close_gaps)

    async def add_signals(self, dids: Sequence[str], progress: CrawlProgress, scope: Scope) -> CrawlProgress | None:
        """Add the repos of a page of the list of a signal collection, as `add_listed`; return the stored progress.

        The scope also wants those of them that are tracked already. Return None if it has changed: the progress is not
        stored, because a list counts only for the scope that it was read for.
        """
        found, rest = await self._add_by_shard(dids, scope, by_signal=True)
        async with self._transaction() as connection:
            added = await repo_requests.add_listed(connection, rest, scope, by_signal=True)
            if added is None:
                return None
            return await _save_page(connection, progress, found + added)

    async def _add_by_shard(
        self, dids: Sequence[str], scope: Scope | None, *, by_signal: bool
    ) -> tuple[int, Sequence[str]]:
        """Add repos in a transaction for each shard, if they are many; return how many, and those that are left."""
        if len(divide_by_shard(dids, self.shards)) <= 1:
            return 0, dids

        async def add(part: Sequence[str]) -> int | None:
            async with self._transaction() as connection:
                return await repo_requests.add_listed(connection, part, scope, by_signal=by_signal)

        return sum([added or 0 for added in await self._divided(dids, add)]), []

    async def find_differences(self, revs: Mapping[str, str]) -> ListDifferences:
        """Compare accounts that a relay lists as active, with their revs, to the stored repos."""

        async def find(dids: Sequence[str]) -> ListDifferences:
            async with self._connection() as connection:
                return await crawl_rows.find_differences(connection, {did: revs[did] for did in dids})

        return crawl_rows.join_differences(await self._divided(list(revs), find))

    async def active_repos(self, after: str, buckets: Sequence[int], limit: int) -> list[str]:
        """Return the next DIDs after `after`, at most `limit`, of active repos that were fetched before."""
        async with self._connection() as connection:
            return await crawl_rows.active_repos(connection, after, buckets, limit)

    async def desynchronize_behind(self, revs: Mapping[str, str], now: float) -> int:
        """Desynchronize the repos that still have an older rev; return how many.

        A repo that is being fetched only notes the rev. A repo that changes meanwhile is compared again.
        """
        desynchronized, pending = 0, list(revs)
        while pending:
            repos = await self.repos(pending)
            after = {did: plan_listed(repo, revs[did], now) for did, repo in repos.items()}
            writes = [RepoWrite(repos[did], repo) for did, repo in after.items() if repo is not repos[did]]
            pending = list((await self.write(Batch(tuple(writes)))).skipped)
            desynchronized += sum(
                write.repo.sync_status is SyncStatus.DESYNCHRONIZED for write in writes if write.repo.did not in pending
            )
        return desynchronized

    # Hosts.

    async def load_hosts(self) -> list[HostState]:
        """Return the hosts that are paused, or whose last request failed recently."""
        async with self._connection() as connection:
            return await host_states.load_states(connection)

    async def save_hosts(self, states: Sequence[HostState]) -> None:
        """Add the request statistics of hosts to the stored ones, and store their pauses."""
        async with self._transaction() as connection:
            await host_states.save_states(connection, states)
            crash_point("hosts.saved")

    # The change log.

    async def trim_change_log(self, policy: RetentionPolicy, now: float) -> tuple[ChangeLogState, TrimPlan]:
        """Trim the change log; return its state before, and the steps that succeeded."""
        async with self._connection() as connection:
            log = await change_log_segments.load_state(connection)
            plan = change_log_segments.plan_trim(log, policy, now)
            return log, await change_log_segments.trim(connection, plan)

    async def change_log_size(self) -> int:
        """Return the bytes of the change log."""
        async with self._connection() as connection:
            return await change_log_segments.load_size(connection)

    async def end_blocking_sessions(self, segments: Sequence[int], min_seconds: float) -> list[BlockingSession]:
        """End the sessions of consumers whose transactions lock one of the segments; return them."""
        async with self._connection() as connection:
            return await blocking_sessions.end_blocking_sessions(connection, segments, min_seconds)

    async def end_oldest_transaction(self, min_seconds: float) -> list[BlockingSession]:
        """Return the sessions with the oldest transactions, of consumers and of others; end the former if this old."""
        async with self._connection() as connection:
            return await blocking_sessions.end_oldest_transaction(connection, min_seconds)

    async def end_old_snapshots(self, max_dead_cursors: int, min_seconds: float) -> OldSnapshots:
        """Return the old snapshots if so many dead cursors are left; end sessions of consumers that are this old."""
        async with self._connection() as connection:
            return await blocking_sessions.end_old_snapshots(connection, max_dead_cursors, min_seconds)

    # Dead letters.

    async def dead_letters(
        self, reason: Rejection | None = None, did: str | None = None, *, limit: int
    ) -> list[StoredDeadLetter]:
        """Return dead letters, newest first, only those of the reason and of the DID if they are given."""
        async with self._connection() as connection:
            return await dead_letters.load_newest(connection, reason, did, limit)

    async def dead_letter_ids(self, reason: Rejection) -> list[int]:
        """Return the IDs of all dead letters with this reason, oldest first."""
        async with self._connection() as connection:
            return await dead_letters.load_ids(connection, reason)

    async def dead_letter(self, id_: int) -> tuple[StoredDeadLetter, bytes] | None:
        """Return a dead letter and its stored frame; None if it does not exist."""
        async with self._connection() as connection:
            return await dead_letters.load(connection, id_)

    async def update_dead_letter(self, id_: int, rejected: DeadLetter) -> None:
        """Store why a replayed message was rejected again.

        Raises:
            DeadLetterGoneError: The dead letter does not exist.
        """
        async with self._connection() as connection:
            await dead_letters.update(connection, id_, rejected)


async def _save_page(
    connection: Connection, progress: CrawlProgress, found: int, *, close_gaps: bool = False
) -> CrawlProgress:
    """Store the progress after a page in which these many repos were found; return it."""
    after_page = replace(progress, found=progress.found + found)
    await crawl_rows.save_progress(connection, after_page)
    if close_gaps and after_page.finished_at is not None:
        positions = Shard.parse(after_page.shard).positions
        await gap_rows.close_gaps(connection, positions, after_page.last_gap, after_page.source)
        crash_point("gap.closed")
    crash_point("crawl.page")
    return after_page
