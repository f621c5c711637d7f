"""The store: one pool of connections, and each thing that the service does with the database as a method."""

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
from indexer.store import export, hosts, identities, letters, listings, queries, resync, retention
from indexer.store.apply import apply
from indexer.store.erasure import Erased, erase_some
from indexer.store.errors import CONNECT_SECONDS, database_errors
from indexer.store.export import ExportedRecord
from indexer.store.letters import Letter
from indexer.store.queries import Counts
from indexer.store.records import Reading
from indexer.store.resync import ResyncTransaction
from indexer.store.retention import Keep, Log, Upkeep
from indexer.store.rows import Connection, buckets_of, repo_columns, repo_of
from indexer.store.tenure import hold
from indexer.sync.identity import HandleCheck, HandleClaim, StoredIdentity
from indexer.sync.listing import Listing, Purpose
from indexer.sync.plan import Batch, DeadLetter, RepoWrite
from indexer.sync.planning import plan_listed
from indexer.sync.repo import Repo
from indexer.sync.shard import Shard, resume

STATEMENT_SECONDS = 60.0
RESERVED = 3  # connections that resyncs leave to the live path, the leases and the observers

_SETTINGS = {
    "application_name": "indexer",
    "jit": "off",  # it costs more than any statement here
    "max_parallel_workers_per_gather": "0",  # counting millions of repos can wait, and others want the cores
    "idle_in_transaction_session_timeout": "300s",
}

_REPOS = f"""
    select {repo_columns("r")} from indexer.repo r where did = any($1::text[]) and bucket = any($2::smallint[])
"""

# The sub-query sees what was there before the statement.
_CHOOSE = """
    insert into indexer.choice (name, value) values ($1, $2) on conflict (name) do update set value = excluded.value
    returning (select value from indexer.choice where name = $1)
"""


class Store:
    """Postgres. Every method raises `DatabaseError` for what another try may cure, and tries nothing twice itself."""

    def __init__(self, pool: asyncpg.Pool, connections: int, dsn: str) -> None:
        self._pool = pool
        self._dsn = dsn
        self._resyncs = Semaphore(max(1, connections - RESERVED))

    @classmethod
    async def open(cls, dsn: str, *, connections: int = 10, readonly: bool = False) -> Self:
        """With at most so many connections; resyncs share all but three of them. `readonly`, none of them can write."""
        settings = _SETTINGS | ({"default_transaction_read_only": "on"} if readonly else {})
        with database_errors():
            pool = await asyncpg.create_pool(
                dsn,
                min_size=1,
                max_size=connections,
                timeout=CONNECT_SECONDS,
                command_timeout=STATEMENT_SECONDS,
                server_settings=settings,
            )
        return cls(pool, connections, dsn)

    async def close(self) -> None:
        await self._pool.close()

    @property
    def address(self) -> str:
        """What others connect with, but for a password."""
        return make_url(self._dsn)._replace(password=None).difference_update_query(["password"]).render_as_string()

    @asynccontextmanager
    async def hold(self, buckets: range) -> AsyncIterator[Event | None]:
        """Keeps other processes off these buckets, by a connection of its own; see `indexer.store.tenure`."""
        with database_errors():
            connection = await asyncpg.connect(self._dsn, timeout=CONNECT_SECONDS, command_timeout=STATEMENT_SECONDS)
            try:
                async with hold(connection, buckets) as lost:
                    yield lost
            finally:
                await connection.close(timeout=CONNECT_SECONDS)

    async def repos(self, dids: Sequence[str]) -> dict[str, Repo]:
        """The rows that there are."""
        async with self._connection() as connection:
            rows = await connection.fetch(_REPOS, list(dids), buckets_of(dids))
        return {row["did"]: repo_of(row) for row in rows}

    async def cursor(self, relay: str, shard: str) -> int | None:
        """Where the shard goes on; None if none of its buckets was ever worked on. See `indexer.sync.shard.resume`."""
        async with self._connection() as connection:
            rows = await connection.fetch("select shard, seq from indexer.cursor where relay = $1", relay)
        return resume({Shard.parse(name): seq for name, seq in rows}, Shard.parse(shard))

    async def choose(self, name: str, value: str) -> str | None:
        """Notes a setting that decides what is stored; gives what it was before, None if it is new."""
        async with self._connection() as connection:
            before: str | None = await connection.fetchval(_CHOOSE, name, value)
        return before

    async def apply(self, batch: Batch) -> frozenset[str]:
        """Writes the batch in one transaction; gives the DIDs that moved, see `indexer.store.apply`."""
        async with self._transaction() as connection:
            return await apply(connection, batch)

    async def amend(self, did: str, plan: Callable[[Repo], Repo]) -> None:
        """Writes the row that `plan` makes of the present one, unless that is the very same, or there is none."""
        while True:
            repo = (await self.repos([did])).get(did)
            if repo is None or (after := plan(repo)) is repo:
                return
            if not await self.apply(Batch((RepoWrite(repo.version, after),))):
                return

    async def claim(self, count: int, buckets: range, lease_seconds: float, now: float) -> list[Repo]:
        """At most `count` repos that are due, now in progress, those first that broke."""
        async with self._transaction() as connection:
            return await resync.claim(connection, count, buckets, now + lease_seconds, now)

    async def renew(self, did: str, lease: int, seconds: float) -> bool:
        """Whether the claim still stands; then it does so for `seconds` from now on."""
        async with self._connection() as connection:
            return await resync.renew(connection, did, lease, time() + seconds)

    async def expire_leases(self, buckets: range, now: float) -> int:
        """Ends claims whose time is over, so that the repos can be claimed again."""
        async with self._transaction() as connection:
            return await resync.expire_leases(connection, buckets, now)

    async def mark_missing(self, buckets: range, seconds: float, now: float) -> int:
        """Has some repos fetched again that have been synchronized for so long, and lack values that no export had."""
        async with self._transaction() as connection:
            return await resync.mark_missing(connection, buckets, now - seconds, now)

    async def erase_some(self, buckets: range, now: float) -> Erased | None:
        """Some records of one account that stayed deleted for long enough; None if there is none."""
        async with self._transaction() as connection:
            return await erase_some(connection, buckets, now)

    async def wake_parked(self, buckets: range, seconds: float, now: float) -> int:
        """Has some repos tried again that were given up on so long ago, those of a bucket first that waited longest."""
        async with self._transaction() as connection:
            return await resync.wake_parked(connection, buckets, now - seconds, now)

    @asynccontextmanager
    async def resync(self, claimed: Repo) -> AsyncIterator[ResyncTransaction]:
        """Commits at the end of the block if it was finished, and rolls back otherwise."""
        async with self._resyncs, self._lent() as connection:
            transaction = connection.transaction()
            with database_errors():
                await transaction.start()
            resyncing = ResyncTransaction(connection, claimed)
            try:
                yield resyncing
            except BaseException:
                with database_errors():
                    await transaction.rollback()
                raise
            with database_errors():
                await (transaction.commit() if resyncing.finished else transaction.rollback())

    @asynccontextmanager
    async def reading(self, did: str) -> AsyncIterator[Reading]:
        """A repo, its row and its records, as of one moment: that of the first question."""
        async with self._lent() as connection:
            transaction = connection.transaction(isolation="repeatable_read", readonly=True)
            with database_errors():
                await transaction.start()
                # Between two questions, its reader may have other things to do.
                await connection.execute("set local idle_in_transaction_session_timeout = 0")
            try:
                yield Reading(connection, did)
            finally:
                with database_errors():
                    await transaction.rollback()

    async def load(self, dids: Sequence[str]) -> Mapping[str, StoredIdentity]:
        async with self._connection() as connection:
            return await identities.load(connection, dids)

    async def save(self, stored: Sequence[StoredIdentity]) -> None:
        async with self._transaction() as connection:
            await identities.save(connection, stored)

    async def tend_log(self, keep: Keep, now: float) -> tuple[Log, Upkeep]:
        """Drops what is not to be kept of the change log; gives how it stood before, and what was done."""
        async with self._connection() as connection:
            log = await retention.load_log(connection)
            return log, await retention.upkeep(connection, retention.plan_upkeep(log, keep, now))

    async def load_hosts(self) -> list[HostState]:
        async with self._connection() as connection:
            return await hosts.load(connection)

    async def save_hosts(self, states: Sequence[HostState]) -> None:
        async with self._transaction() as connection:
            await hosts.save(connection, states)

    async def stale_identities(self, buckets: range, most: int) -> list[str]:
        """DIDs that are known to have changed since they were looked up, those first that have waited longest."""
        async with self._connection() as connection:
            return await identities.stale(connection, buckets, most)

    async def did_of_handle(self, handle: str) -> str | None:
        """The DID that the handle was found to belong to, as far as we have looked."""
        async with self._connection() as connection:
            return await identities.did_of_handle(connection, handle)

    async def claim_handles(self, count: int, buckets: range, lease_seconds: float, now: float) -> list[HandleClaim]:
        """At most `count` claimed handles that are due to be checked, the last to become so first."""
        async with self._connection() as connection:
            return await identities.claim_handles(connection, count, buckets, now + lease_seconds, now)

    async def save_check(self, check: HandleCheck) -> None:
        async with self._transaction() as connection:
            await identities.save_check(connection, check)

    async def counts(self, since: float = inf) -> Counts:
        """As of now; `ended` since then, in Unix seconds."""
        async with self._connection() as connection:
            return await queries.counts(connection, since)

    async def repo_report(self, did: str) -> dict[str, Any] | None:
        """All that is known of a repo, by column."""
        async with self._connection() as connection:
            return await queries.repo_report(connection, did)

    async def record(self, did: str, collection: str, rkey: str) -> dict[str, Any] | None:
        """A record of a visible repo as the face shows it, its value decoded."""
        async with self._connection() as connection:
            return await queries.record(connection, did, collection, rkey)

    async def export(self, collection: str) -> AsyncGenerator[list[ExportedRecord]]:
        """All visible records of a collection, page by page, of one moment."""
        async with self._connection() as connection:
            async for page in export.export(connection, collection):
                yield page

    async def estimate(self, collection: str) -> int:
        """About how many records a collection has."""
        async with self._connection() as connection:
            return await export.estimate(connection, collection)

    async def sample(self, count: int) -> list[str]:
        """At most `count` DIDs of active synchronized repos, at random; see `queries.sample`."""
        async with self._connection() as connection:
            return await queries.sample(connection, count)

    async def visible_repos(self) -> dict[str, tuple[str, str | None]]:
        """Sync status and reason of each repo that the face calls visible."""
        async with self._connection() as connection:
            return await queries.visible_repos(connection)

    async def visible_records(self, did: str) -> dict[str, bytes]:
        """The CID of each record that the face shows, by path."""
        async with self._connection() as connection:
            return await queries.visible_records(connection, did)

    async def add(self, dids: Iterable[str]) -> int:
        """Repos to be tracked from now on; gives how many were not yet."""
        async with self._connection() as connection:
            return await queries.add(connection, dids)

    async def listing(self, purpose: Purpose, source: str, collection: str = "") -> Listing | None:
        """How far this list was read the last time; None if it never was."""
        async with self._connection() as connection:
            return await listings.load(connection, purpose, source, collection)

    async def save_listing(self, listing: Listing) -> None:
        async with self._connection() as connection:
            await listings.save(connection, listing)

    async def add_listed(self, dids: Sequence[str], place: Callable[[int], Listing]) -> Listing:
        """Tracks the repos of a page, and notes the place behind it, which is made of how many were new."""
        async with self._transaction() as connection:
            listing = place(await queries.add(connection, dids))
            await listings.save(connection, listing)
        return listing

    async def different(self, revs: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Of accounts that a relay lists as active at these revisions: who is behind here, and who is hidden."""
        async with self._connection() as connection:
            return await listings.different(connection, revs)

    async def mark_behind(self, revs: Mapping[str, str], now: float) -> int:
        """Has those repos fetched again that are still at an older revision; gives how many."""
        repos = await self.repos(list(revs))
        after = {did: plan_listed(repo, revs[did], now) for did, repo in repos.items()}
        writes = [RepoWrite(repos[did].version, repo) for did, repo in after.items() if repo is not repos[did]]
        return len(writes) - len(await self.apply(Batch(tuple(writes))))

    async def mark_resync(self, dids: Sequence[str] = (), *, errored: bool = False, all: bool = False) -> int:  # noqa: A002
        """Asks for resyncs of these, or of those whose last one failed, or of all; gives how many are known."""
        async with self._connection() as connection:
            if not (errored or all):
                return await queries.mark(connection, dids)
            last, marked = await queries.mark_page(connection, "", errored=not all)
            while last is not None:
                last, more = await queries.mark_page(connection, last, errored=not all)
                marked += more
        return marked

    async def letters(self, reason: Rejection | None = None, did: str | None = None, *, most: int) -> list[Letter]:
        """Dead letters, the newest first; of this reason and this DID, if given."""
        async with self._connection() as connection:
            return await letters.newest(connection, reason, did, most)

    async def letters_of(self, reason: Rejection) -> list[int]:
        """The numbers of all dead letters of the reason, in the order in which they came."""
        async with self._connection() as connection:
            return await letters.of_reason(connection, reason)

    async def letter(self, number: int) -> tuple[Letter, bytes] | None:
        """A dead letter, and what is kept of its frame."""
        async with self._connection() as connection:
            return await letters.read(connection, number)

    async def amend_letter(self, number: int, refused: DeadLetter) -> None:
        """Notes how the letter's message was refused once more. Raises `LetterGoneError`."""
        async with self._connection() as connection:
            await letters.amend(connection, number, refused)

    async def settle_letter(self, number: int, batch: Batch) -> bool:
        """Writes what the letter's message changes, of one repo, and deletes the letter, in one transaction.

        False if the repo moved; then nothing is done. Nor is it if the letter is gone: raises `LetterGoneError`.
        """
        async with self._transaction() as connection:
            if await apply(connection, batch):
                return False
            # Behind the repo's row, in the order in which the live path takes its locks.
            await letters.delete(connection, number)
        return True

    async def takedown(self, did: str, *, on: bool) -> bool:
        """Hides a repo here, or shows it again; whether it is known."""
        async with self._connection() as connection:
            known: bool = await connection.fetchval("select atproto.request_takedown($1, $2)", did, on)
        return known

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        with database_errors():
            async with self._lent() as connection:
                yield connection

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[asyncpg.pool.PoolConnectionProxy]:
        """For a block whose errors are not all the database's."""
        with database_errors():
            connection = await self._acquire()
        try:
            yield connection
        finally:
            with database_errors():
                await self._pool.release(connection)

    async def _acquire(self) -> asyncpg.pool.PoolConnectionProxy:
        """The pool's own time-out is Python 3.11's `wait_for`, in which a cancellation can get lost."""
        async with timeout(CONNECT_SECONDS):
            return await self._pool.acquire()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        async with self._connection() as connection, connection.transaction():
            yield connection
