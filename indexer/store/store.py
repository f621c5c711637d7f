"""The store: a pool of database connections, with one method for each operation of the daemon and the commands."""

from asyncio import Event, Semaphore, timeout
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from math import inf
from time import time
from typing import Any, Self

import asyncpg
from sqlalchemy import make_url

from indexer.outbound import HostState
from indexer.reasons import Rejection
from indexer.store import (
    change_log_segments,
    collection_export,
    crawl_rows,
    dead_letters,
    erase_records,
    host_states,
    identities,
    repo_requests,
    report_queries,
    resync_queue,
    shard_lock,
)
from indexer.store.apply_batch import apply
from indexer.store.change_log_segments import ChangeLogState, RetentionPolicy, TrimPlan
from indexer.store.collection_export import ExportedRecord
from indexer.store.columns import Connection, buckets_of, repo_columns, repo_of
from indexer.store.consistent_read import ConsistentRead
from indexer.store.database_errors import CONNECT_TIMEOUT, database_errors
from indexer.store.dead_letters import StoredDeadLetter
from indexer.store.erase_records import ErasedBatch
from indexer.store.report_queries import Counts
from indexer.store.resync_transaction import ResyncTransaction
from indexer.sync.crawl_progress import CrawlProgress, Purpose
from indexer.sync.plan_event import plan_listed
from indexer.sync.plans import Batch, DeadLetter, RepoWrite
from indexer.sync.repo_state import Repo
from indexer.sync.shard import Shard, resume_seq
from indexer.sync.stored_identity import HandleCheck, HandleClaim, StoredIdentity

STATEMENT_TIMEOUT = 60.0
"""Seconds after which a statement is cancelled."""
RESERVED_CONNECTIONS = 3
"""Connections that resyncs leave to the live path, to lease heartbeats, and to reports."""

_SERVER_SETTINGS = {
    "application_name": "indexer",
    "jit": "off",  # compiling costs more than executing any of these statements
    "max_parallel_workers_per_gather": "0",  # reports are not urgent, and other processes need the cores
    "idle_in_transaction_session_timeout": "300s",
}

LOAD_REPOS = f"""
    select {repo_columns("r")} from indexer.repo r where did = any($1::text[]) and bucket = any($2::smallint[])
"""
"""Takes DIDs and their buckets."""

# A sub-query in RETURNING sees the table as it was before the statement.
_REMEMBER_SETTING = """
    insert into indexer.stored_setting (name, value) values ($1, $2)
    on conflict (name) do update set value = excluded.value
    returning (select value from indexer.stored_setting where name = $1)
"""


def without_password(dsn: str) -> str:
    """Return the connection string without the password."""
    return make_url(dsn)._replace(password=None).difference_update_query(["password"]).render_as_string()


class Store:
    """All access to Postgres. Every method raises `DatabaseError` for a transient error, and retries nothing itself."""

    def __init__(self, pool: asyncpg.Pool, connections: int, dsn: str) -> None:
        self._pool = pool
        self._dsn = dsn
        self._resync_connections = Semaphore(max(1, connections - RESERVED_CONNECTIONS))

    @classmethod
    async def open(cls, dsn: str, *, connections: int = 10, readonly: bool = False) -> Self:
        """Connect to the database.

        Args:
            dsn: The database.
            connections: The size of the pool. Resyncs use all but `RESERVED_CONNECTIONS` of them.
            readonly: Let the server reject every write.
        """
        settings = _SERVER_SETTINGS | ({"default_transaction_read_only": "on"} if readonly else {})
        with database_errors():
            pool = await asyncpg.create_pool(
                dsn,
                min_size=1,
                max_size=connections,
                timeout=CONNECT_TIMEOUT,
                command_timeout=STATEMENT_TIMEOUT,
                server_settings=settings,
            )
        return cls(pool, connections, dsn)

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.close()

    @property
    def address(self) -> str:
        """The connection string without the password."""
        return without_password(self._dsn)

    # The live path: repos, batches, cursor, shard.

    async def repos(self, dids: Sequence[str]) -> dict[str, Repo]:
        """Return the rows of the repos by DID; unknown DIDs are left out."""
        async with self._connection() as connection:
            rows = await connection.fetch(LOAD_REPOS, list(dids), buckets_of(dids))
        return {row["did"]: repo_of(row) for row in rows}

    async def apply(self, batch: Batch) -> frozenset[str]:
        """Write the batch in one transaction; return the DIDs whose rows changed since their writes were planned.

        See `indexer.store.apply_batch.apply`.
        """
        async with self._transaction() as connection:
            return await apply(connection, batch)

    async def update_repo(self, did: str, plan: Callable[[Repo], Repo]) -> None:
        """Replace the row by `plan(row)`, which is called again if the row changes meanwhile.

        Nothing is written if there is no row, or if `plan` returns the same object.
        """
        while True:
            repo = (await self.repos([did])).get(did)
            if repo is None or (after := plan(repo)) is repo:
                return
            if not await self.apply(Batch((RepoWrite(repo.version, after),))):
                return

    async def cursor(self, relay: str, shard: str) -> int | None:
        """Return the sequence number after which the shard resumes; None if it has never processed the relay.

        See `indexer.sync.shard.resume_seq`.
        """
        async with self._connection() as connection:
            rows = await connection.fetch("select shard, seq from indexer.cursor where relay = $1", relay)
        return resume_seq({Shard.parse(name): seq for name, seq in rows}, Shard.parse(shard))

    async def remember_setting(self, name: str, value: str) -> str | None:
        """Store a setting that decides what is stored; return its previous value, None if there was none."""
        async with self._connection() as connection:
            before: str | None = await connection.fetchval(_REMEMBER_SETTING, name, value)
        return before

    @asynccontextmanager
    async def hold_buckets(self, buckets: range) -> AsyncIterator[Event | None]:
        """Hold the shard locks of the buckets during the block, on a connection of its own.

        Yields:
            An event that is set if the connection is lost; None if another process holds one of the locks.
        """
        with database_errors():
            connection = await asyncpg.connect(self._dsn, timeout=CONNECT_TIMEOUT, command_timeout=STATEMENT_TIMEOUT)
            try:
                async with shard_lock.hold(connection, buckets) as lost:
                    yield lost
            finally:
                await connection.close(timeout=CONNECT_TIMEOUT)

    # Resyncs: the queue, and the transaction of one resync.

    async def claim(self, count: int, buckets: range, lease_seconds: float, now: float) -> list[Repo]:
        """Claim at most `count` repos that are due at `now`, in the order of the resync queue."""
        async with self._transaction() as connection:
            return await resync_queue.claim(connection, count, buckets, now + lease_seconds, now)

    async def renew(self, did: str, lease: int, seconds: float) -> bool:
        """Extend the lease to `seconds` from now; return False if the claim is lost."""
        async with self._connection() as connection:
            return await resync_queue.renew(connection, did, lease, time() + seconds)

    async def expire_leases(self, buckets: range, now: float) -> int:
        """End claims whose lease expired before `now`; return how many."""
        async with self._transaction() as connection:
            return await resync_queue.expire_leases(connection, buckets, now)

    async def request_missing_values(self, buckets: range, seconds: float, now: float) -> int:
        """Desynchronize repos that lack record values and were synchronized `seconds` ago or earlier; return how many.

        One call processes a limited number of repos.
        """
        async with self._transaction() as connection:
            return await resync_queue.request_missing_values(connection, buckets, now - seconds, now)

    async def unpark(self, buckets: range, seconds: float, now: float) -> int:
        """Unpark repos that were parked `seconds` ago or earlier; return how many.

        One call processes a limited number of repos.
        """
        async with self._transaction() as connection:
            return await resync_queue.unpark(connection, buckets, now - seconds, now)

    @asynccontextmanager
    async def resync(self, claimed: Repo) -> AsyncIterator[ResyncTransaction]:
        """Begin the transaction of a resync. The end of the block commits it if it was finished, else rolls it back.

        An exception in the block rolls it back, too. The block may raise any error: only errors of the database
        become a `DatabaseError`.
        """
        async with self._resync_connections, self._acquired() as connection:
            transaction = connection.transaction()
            with database_errors():
                await transaction.start()
            resync = ResyncTransaction(connection, claimed)
            commit = False
            try:
                yield resync
                commit = resync.finished
            finally:
                with database_errors():
                    await (transaction.commit() if commit else transaction.rollback())

    # Requests of commands: track, resync, takedown.

    async def add_repos(self, dids: Iterable[str]) -> int:
        """Start to track repos; return how many were not tracked yet."""
        async with self._connection() as connection:
            return await repo_requests.add_repos(connection, dids)

    async def request_resyncs(
        self, dids: Sequence[str] = (), *, errored: bool = False, everything: bool = False
    ) -> int:
        """Request resyncs of these repos, of all whose last resync failed, or of all; return of how many repos."""
        async with self._connection() as connection:
            if errored or everything:
                return await repo_requests.request_resyncs_of_all(connection, errored=not everything)
            return await repo_requests.request_resyncs(connection, dids)

    async def set_takedown(self, did: str, *, on: bool) -> bool:
        """Hide a repo locally, or show it again; return False if the repo is unknown."""
        async with self._connection() as connection:
            return await repo_requests.set_takedown(connection, did, on=on)

    # Deleted accounts.

    async def erase_batch(self, buckets: range, now: float) -> ErasedBatch | None:
        """Erase records of one account whose grace period is over; return None if there is no such account."""
        async with self._transaction() as connection:
            return await erase_records.erase_batch(connection, buckets, now)

    # Identities and handles.

    async def load_identities(self, dids: Sequence[str]) -> Mapping[str, StoredIdentity]:
        """Return the stored identities by DID; unknown DIDs are left out."""
        async with self._connection() as connection:
            return await identities.load_identities(connection, dids)

    async def save_identities(self, stored: Sequence[StoredIdentity]) -> None:
        """Store identities, unless a later reading is stored."""
        async with self._transaction() as connection:
            await identities.save_identities(connection, stored)

    async def stale_identities(self, buckets: range, limit: int) -> list[str]:
        """Return DIDs whose document is known to have changed since it was read, longest ago first."""
        async with self._connection() as connection:
            return await identities.stale_identities(connection, buckets, limit)

    async def did_of_handle(self, handle: str) -> str | None:
        """Return the DID for which the handle was verified; None if there is none."""
        async with self._connection() as connection:
            return await identities.did_of_handle(connection, handle)

    async def claim_handles(self, count: int, buckets: range, lease_seconds: float, now: float) -> list[HandleClaim]:
        """Claim at most `count` handles that are due to be checked; those that became due last come first."""
        async with self._connection() as connection:
            return await identities.claim_handles(connection, count, buckets, now + lease_seconds, now)

    async def save_handle_check(self, check: HandleCheck) -> None:
        """Store the result of a check, unless the account claims another handle now."""
        async with self._transaction() as connection:
            await identities.save_handle_check(connection, check)

    # Crawls and reconciliation: repo lists compared with the database.

    async def crawl_progress(self, purpose: Purpose, source: str, collection: str = "") -> CrawlProgress | None:
        """Return the progress of the last crawl of this list; None if there was none."""
        async with self._connection() as connection:
            return await crawl_rows.load_progress(connection, purpose, source, collection)

    async def save_crawl_progress(self, progress: CrawlProgress) -> None:
        """Store the progress of a crawl."""
        async with self._connection() as connection:
            await crawl_rows.save_progress(connection, progress)

    async def add_listed(self, dids: Sequence[str], progress: Callable[[int], CrawlProgress]) -> CrawlProgress:
        """Add the repos of a page and store the progress, in one transaction; return the progress.

        Args:
            dids: The accounts of the page.
            progress: Returns the progress after the page, given the number of repos that were not tracked yet.
        """
        async with self._transaction() as connection:
            after_page = progress(await repo_requests.add_repos(connection, dids))
            await crawl_rows.save_progress(connection, after_page)
        return after_page

    async def find_differences(self, revs: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Compare accounts that a relay lists as active, with their revs, to the stored repos.

        Returns:
            The DIDs of synchronized repos with an older rev, and the DIDs of accounts that are stored as inactive.
        """
        async with self._connection() as connection:
            return await crawl_rows.find_differences(connection, revs)

    async def desynchronize_behind(self, revs: Mapping[str, str], now: float) -> int:
        """Desynchronize the repos that still have an older rev; return how many."""
        repos = await self.repos(list(revs))
        after = {did: plan_listed(repo, revs[did], now) for did, repo in repos.items()}
        writes = [RepoWrite(repos[did].version, repo) for did, repo in after.items() if repo is not repos[did]]
        return len(writes) - len(await self.apply(Batch(tuple(writes))))

    # Hosts.

    async def load_hosts(self) -> list[HostState]:
        """Return the hosts that are paused, or whose last request failed recently."""
        async with self._connection() as connection:
            return await host_states.load_states(connection)

    async def save_hosts(self, states: Sequence[HostState]) -> None:
        """Add the request statistics of hosts to the stored ones, and store their pauses."""
        async with self._transaction() as connection:
            await host_states.save_states(connection, states)

    # The change log.

    async def trim_change_log(self, policy: RetentionPolicy, now: float) -> tuple[ChangeLogState, TrimPlan]:
        """Trim the change log; return its state before, and the steps that succeeded."""
        async with self._connection() as connection:
            log = await change_log_segments.load_state(connection)
            plan = change_log_segments.plan_trim(log, policy, now)
            return log, await change_log_segments.trim(connection, plan)

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

    async def resolve_dead_letter(self, id_: int, batch: Batch) -> bool:
        """Write the effect of a replayed message and delete its dead letter, in one transaction.

        Returns:
            False if the row of the repo changed since the batch was planned; then nothing is written.

        Raises:
            DeadLetterGoneError: The dead letter does not exist; nothing is written.
        """
        async with self._transaction() as connection:
            if await apply(connection, batch):
                return False
            # After the row of the repo, because the live path locks them in this order, too.
            await dead_letters.delete(connection, id_)
        return True

    # Reports, reads and exports.

    async def counts(self, since: float = inf) -> Counts:
        """Return the numbers of the status report, with `ended` since the Unix time `since`."""
        async with self._connection() as connection:
            return await report_queries.counts(connection, since)

    async def repo_report(self, did: str) -> dict[str, Any] | None:
        """Return everything that is stored about a repo, by column; None if the repo is unknown."""
        async with self._connection() as connection:
            return await report_queries.repo_report(connection, did)

    async def record(self, did: str, collection: str, rkey: str) -> dict[str, Any] | None:
        """Return the row of `atproto.records` with its value decoded; None if there is none."""
        async with self._connection() as connection:
            return await report_queries.record(connection, did, collection, rkey)

    async def visible_repos(self) -> dict[str, tuple[str, str | None]]:
        """Return sync status and sync reason of each visible repo, by DID."""
        async with self._connection() as connection:
            return await report_queries.visible_repos(connection)

    async def visible_records(self, did: str) -> dict[str, bytes]:
        """Return the CID of each record of a visible repo, by path."""
        async with self._connection() as connection:
            return await report_queries.visible_records(connection, did)

    async def sample_synchronized(self, count: int) -> list[str]:
        """Return the DIDs of at most `count` active synchronized repos, chosen at random.

        It may return fewer; see `indexer.store.report_queries.sample_synchronized`.
        """
        async with self._connection() as connection:
            return await report_queries.sample_synchronized(connection, count)

    @asynccontextmanager
    async def consistent_read(self, did: str) -> AsyncIterator[ConsistentRead]:
        """Read a repo from a single snapshot, which is taken by the first query of the block."""
        async with self._acquired() as connection:
            transaction = connection.transaction(isolation="repeatable_read", readonly=True)
            with database_errors():
                await transaction.start()
                # The block may do other work between two queries.
                await connection.execute("set local idle_in_transaction_session_timeout = 0")
            try:
                yield ConsistentRead(connection, did)
            finally:
                with database_errors():
                    await transaction.rollback()

    async def export_collection(self, collection: str) -> AsyncGenerator[list[ExportedRecord]]:
        """Yield all visible records of a collection from one snapshot, in pages."""
        async with self._connection() as connection:
            async for page in collection_export.export_collection(connection, collection):
                yield page

    async def estimate_records(self, collection: str) -> int:
        """Return an estimate of the number of records of a collection."""
        async with self._connection() as connection:
            return await collection_export.estimate_records(connection, collection)

    # Connections.

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        async with self._connection() as connection, connection.transaction():
            yield connection

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """Acquire a connection for a block in which all transient errors come from the database."""
        with database_errors():
            async with self._acquired() as connection:
                yield connection

    @asynccontextmanager
    async def _acquired(self) -> AsyncIterator[asyncpg.pool.PoolConnectionProxy]:
        """Acquire a connection for a block that may raise other transient errors as well."""
        with database_errors():
            connection = await self._acquire()
        try:
            yield connection
        finally:
            with database_errors():
                await self._pool.release(connection)

    async def _acquire(self) -> asyncpg.pool.PoolConnectionProxy:
        # `asyncio.timeout` never loses a cancellation. The timeout of `acquire` would apply to `release`, too.
        async with timeout(CONNECT_TIMEOUT):
            return await self._pool.acquire()
