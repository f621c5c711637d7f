"""Reconciliation of the relay's repo list with the database."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from time import monotonic, time
from typing import Any, Self

import asyncpg
import orjson
import pytest
import stamina

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.syntax import tid_of
from indexer.errors import UnavailableError
from indexer.identity import IdentityCache
from indexer.monitoring.metrics import Metrics
from indexer.outbound import OutboundClient
from indexer.reasons import Desync, FetchFailure, GapReason
from indexer.service.crawl import reconcile
from indexer.service.crawl.reconcile import Reconciliation, ReconciliationSettings
from indexer.service.current_scope import CurrentScope
from indexer.service.open_gaps import OpenGaps
from indexer.store import Store
from indexer.store.crawl_rows import ListDifferences
from indexer.sync.crawl_progress import CrawlProgress
from indexer.sync.gap import Gap
from indexer.sync.plans import Batch, RepoWrite
from indexer.sync.repo_state import TOMBSTONED, Repo, SyncStatus
from indexer.sync.scope import Scope, Track
from indexer.sync.shard import Shard
from indexer.sync.stored_identity import StoredIdentity
from tests.outbound.scripted_host import ScriptedHost, http_response
from tests.service.crawl.repo_list_responses import FAILURE, page, path, requested_cursors
from tests.store.repo_rows import did, head, in_progress, insert, synchronized
from tests.sync.signing_account import STORE_ALL
from tests.waiting import until

pytestmark = pytest.mark.slow

KEY = PrivateKey.from_seed("k256", b"reconciliation").public.did_key()
OLDER, STORED, NEWER = "3laaaaaaaaa22", "3laaaaaaaab22", "3laaaaaaaac22"
DAY = 86_400.0
NO_WAIT = ReconciliationSettings(Shard(), interval=DAY, settle=0.0, poll=0.01, first_retry=0.01)
LONG_SETTLE = replace(NO_WAIT, settle=600.0)


def stored(name: object, **fields: Any) -> Repo:
    return synchronized(name, head=head(STORED), **fields)


def make_reconciliation(
    store: Any,
    outbound: OutboundClient,
    host: ScriptedHost,
    settings: ReconciliationSettings = NO_WAIT,
    *sources: str,
    identities: IdentityCache | None = None,
    track: Track = Track.LISTED,
) -> Reconciliation:
    """Return the reconciliation of a daemon whose stream from the first source, or else from `host`, is open."""
    metrics, scope = Metrics(), scope_of(store, track)
    gaps = OpenGaps(store, settings.shard, metrics)
    return Reconciliation(store, outbound, metrics, gaps, lambda: sources or (host.url,), scope, settings, identities)


def scope_of(store: Store, track: Track) -> CurrentScope:
    return CurrentScope(store, replace(STORE_ALL, scope=Scope(track=track)))


def ignore_progress(_progress: CrawlProgress) -> None:
    pass


async def behind(sql: asyncpg.Connection) -> dict[str, str]:
    rows = await sql.fetch("select did, latest_unverified_rev from indexer.repo where sync_reason = 'behind'")
    return {row["did"]: row["latest_unverified_rev"] for row in rows}


async def test_only_repos_that_are_behind_are_desynchronized(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    tombstoned = stored("gone", active=False, hosting_status=TOMBSTONED)
    unchanged = [stored("equal"), stored("ahead"), tombstoned, stored("future"), stored("not listed")]
    broken = stored("broken")._replace(sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.CHAIN_BREAK)
    await insert(store, stored("behind"), broken, *unchanged)
    future_rev = tid_of(int((time() + 3_600) * 1_000_000))
    listed = {"equal": STORED, "ahead": OLDER, "gone": NEWER, "future": future_rev, "broken": NEWER}
    host.pages[path()] = page(*[(did(name), rev) for name, rev in listed.items()], cursor="x")
    host.pages[path("x")] = page((did("behind"), NEWER), (did("unknown"), NEWER))
    serve_status(host, "not listed", active=True)
    reconciliation = make_reconciliation(store, outbound, host)
    progress = await reconciliation.reconcile(host.url, ignore_progress)
    assert (progress.listed, progress.found) == (7, 1)
    assert await behind(sql) == {did("behind"): NEWER}
    assert await store.repos([repo.did for repo in unchanged]) == {repo.did: repo for repo in unchanged}
    assert await store.repos([broken.did, did("unknown")]) == {broken.did: broken}
    marked = (await store.repos([did("behind")]))[did("behind")]
    assert (marked.sync_status, marked.head, marked.next_attempt_at) == (SyncStatus.DESYNCHRONIZED, head(STORED), None)


async def test_reconciliation_ends_the_wait_of_new_accounts_that_the_relay_lists(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """Their host added too many. Others keep waiting."""
    error = "new-accounts: evil.example added too many accounts"
    waiting = Repo(did("listed"), version=1, from_stream=True, next_attempt_at=9e9, last_error=error)
    await insert(store, waiting, waiting._replace(did=did("not listed")))
    host.pages[path()] = page((did("listed"), STORED))
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert (progress.listed, progress.found) == (1, 0)
    repos = await store.repos([did("listed"), did("not listed")])
    assert (repos[did("listed")].next_attempt_at, repos[did("listed")].last_error) == (None, None)
    assert not repos[did("listed")].from_stream
    assert repos[did("not listed")].next_attempt_at == 9e9


def serve_status(host: ScriptedHost, name: str, *, active: bool) -> None:
    status = {"did": did(name), "active": active} | ({} if active else {"status": "deactivated"})
    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={did(name)}"] = http_response(orjson.dumps(status))


async def test_account_that_became_active_unnoticed_is_shown_and_resynced(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    hidden = {"active": False, "hosting_status": "deactivated", "hosting_relay": "wss://r.test", "hosting_seq": 7}
    await insert(store, *[stored(name, **hidden) for name in ("back", "still hidden", "moved")])
    host.pages[path()] = page(*[(did(name), STORED) for name in ("back", "still hidden", "moved")])
    serve_status(host, "back", active=True)
    serve_status(host, "still hidden", active=False)
    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={did('moved')}"] = http_response(
        b'{"error": "RepoNotFound"}', status=404
    )
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert progress.found == 1
    repos = await store.repos([did(name) for name in ("back", "still hidden", "moved")])
    assert [repo.active for repo in repos.values()].count(True) == 1
    back = repos[did("back")]
    assert (back.active, back.hosting_status, back.hosting_seq) == (True, None, 7)
    assert (back.sync_status, back.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.REACTIVATED)
    assert await sql.fetchval("select count(*) from atproto.changes where action = 'visible'") == 1


class Directory:
    """A directory in which all accounts have the same PDS.

    Attributes:
        down: It gives no answer.
    """

    def __init__(self, pds: str) -> None:
        self._pds = pds
        self.down = False

    async def resolve(self, did: str, *, known: bool) -> StoredIdentity:  # noqa: ARG002 - as the cache calls it
        if self.down:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "the directory is down")
        return StoredIdentity(did, None, self._pds, KEY, fetched_at=time())


@pytest.mark.parametrize("case", ["hosted here", "moved", "known nowhere", "directory down", "over budget"])
async def test_pds_reports_only_the_accounts_that_it_hosts(
    case: str, store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """It still knows accounts that have moved to another PDS. Their stored identity is from before the move."""
    moves = case != "hosted here"
    hidden = {"active": False, "hosting_status": "deactivated"}
    await insert(store, stored("shown"), stored("hidden", **hidden))
    host.pages[path()] = page((did("hidden"), STORED))
    serve_status(host, "shown", active=False)
    serve_status(host, "hidden", active=True)
    directory = Directory("https://new.test" if moves else host.url)
    directory.down = case in ("known nowhere", "directory down")
    if case != "known nowhere":
        await store.save_identities(
            [StoredIdentity(did(name), None, host.url, KEY, time() - 200) for name in ("shown", "hidden", "other")]
        )
    rate = 1e-9 if case == "over budget" else inf
    identities = IdentityCache(directory, store, Metrics(), clock=time, refresh_rate=rate)
    if case == "over budget":
        await identities.lookup(did("other"), refresh=True)
    progress = await make_reconciliation(store, outbound, host, identities=identities).reconcile(
        host.url, ignore_progress
    )
    await identities.close()
    active = await sql.fetch("select did from indexer.repo where active")
    assert [row["did"] for row in active] == [did("shown" if moves else "hidden")]
    assert progress.found == (0 if moves else 2)
    assert len(host.requests) == 3, "the PDS was asked about both accounts"


async def test_account_hidden_by_the_stream_meanwhile_stays_hidden(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("back", active=False, hosting_status="deactivated"))
    host.pages[path()] = page((did("back"), STORED))

    async def hide(writer: asyncio.StreamWriter) -> None:
        """Mark the account as deleted just before the response is sent."""
        await store.update_repo(
            did("back"), lambda repo: repo._replace(version=repo.version + 1, hosting_status="deleted")
        )
        writer.write(http_response(orjson.dumps({"did": did("back"), "active": True})))
        await writer.drain()

    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={did('back')}"] = hide
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert progress.found == 0
    repo = (await store.repos([did("back")]))[did("back")]
    assert (repo.active, repo.hosting_status) == (False, "deleted")


@pytest.mark.parametrize("active", [True, False])
async def test_hosting_status_is_followed_although_a_resync_changes_the_row_meanwhile(
    active: bool, store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    row = stored("a") if not active else stored("a", active=False, hosting_status="suspended")
    await insert(store, row)
    host.pages[path()] = page((did("a"), STORED)) if active else page()

    async def answer(writer: asyncio.StreamWriter) -> None:
        """Change another part of the row just before the response is sent."""
        await store.update_repo(did("a"), lambda repo: repo._replace(version=repo.version + 1, attempts=3))
        status = {"did": did("a"), "active": active} | ({} if active else {"status": "suspended"})
        writer.write(http_response(orjson.dumps(status)))
        await writer.drain()

    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={did('a')}"] = answer
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert progress.found == 1
    repo = (await store.repos([did("a")]))[did("a")]
    assert (repo.active, repo.hosting_status) == ((True, None) if active else (False, "suspended"))


class ForgettingStore:
    """A store in which hidden repos are forgotten right after they were found."""

    def __init__(self, store: Store, sql: asyncpg.Connection) -> None:
        self._store = store
        self._sql = sql

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def find_differences(self, revs: Mapping[str, str]) -> ListDifferences:
        found: ListDifferences = await self._store.find_differences(revs)
        await self._sql.execute("delete from indexer.repo where did = any($1::text[])", list(found.hidden))
        return found


async def test_hidden_repo_that_is_forgotten_meanwhile_is_left_out(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("back", active=False, hosting_status="deactivated"))
    host.pages[path()] = page((did("back"), STORED))
    serve_status(host, "back", active=True)
    progress = await make_reconciliation(ForgettingStore(store, sql), outbound, host).reconcile(
        host.url, ignore_progress
    )
    assert (progress.listed, progress.found) == (1, 0)
    assert await sql.fetchval("select count(*) from indexer.repo") == 0


class CatchingUpStore:
    """A store in which the stream updates repos right after they were found to be behind."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def find_differences(self, revs: Mapping[str, str]) -> ListDifferences:
        found: ListDifferences = await self._store.find_differences(revs)
        for repo in (await self._store.repos(found.behind)).values():
            after = repo._replace(version=repo.version + 1, head=head(NEWER))
            assert not (await self._store.write(Batch((RepoWrite(repo.version, after),)))).skipped
        return found


async def test_repo_updated_by_the_stream_meanwhile_is_not_behind(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("late"))
    host.pages[path()] = page((did("late"), NEWER))
    progress = await make_reconciliation(CatchingUpStore(store), outbound, host).reconcile(host.url, ignore_progress)
    assert progress.found == 0
    assert await behind(sql) == {}
    assert (await store.repos([did("late")]))[did("late")].head == head(NEWER)


@asynccontextmanager
async def waiting(reconciliation: Reconciliation, host: ScriptedHost) -> AsyncIterator[float]:
    """Run a reconciliation until it waits to compare a page again, and yield the remaining seconds."""
    task = asyncio.create_task(reconciliation.reconcile(host.url, ignore_progress))
    try:
        await until(lambda: reconciliation.waits_until is not None)
        assert reconciliation.waits_until is not None
        yield reconciliation.waits_until - monotonic()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_repo_is_compared_again_after_the_settle_time(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("behind"))
    host.pages[path()] = page((did("behind"), NEWER))
    async with waiting(make_reconciliation(store, outbound, host, LONG_SETTLE), host) as seconds:
        assert 590 < seconds <= 600
        assert await behind(sql) == {}
    progress = await store.crawl_progress("sweep", host.url)
    assert progress is not None
    assert (progress.listed, progress.cursor, progress.finished_at) == (0, None, None)


async def test_interrupted_reconciliation_is_resumed(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    host.pages[path()] = page((did(1), STORED), cursor="x")
    host.pages[path("x")] = FAILURE
    reconciliation = make_reconciliation(store, outbound, host)
    with stamina.set_testing(True, attempts=1), pytest.raises(UnavailableError):
        await reconciliation.reconcile(host.url, ignore_progress)
    host.pages[path("x")] = page((did(2), STORED))
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert requested_cursors(host) == [None, "x", "x"]
    assert progress.listed == 2
    assert progress.finished_at is not None


async def test_reconciliation_interrupted_long_ago_starts_again(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await store.save_crawl_progress(CrawlProgress("sweep", host.url, "", "x", 7, 3, began_at=time() - DAY - 1))
    host.pages[path()] = page((did(1), STORED))
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert requested_cursors(host) == [None]
    assert progress.listed == 1


async def test_number_of_pending_pages_is_bounded(
    store: Store, host: ScriptedHost, outbound: OutboundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No third page is read while two are pending."""
    monkeypatch.setattr(reconcile, "MAX_PENDING_PAGES", 1)
    await insert(store, *[stored(number) for number in range(3)])
    for number in range(3):
        host.pages[path(str(number) if number else None)] = page((did(number), NEWER), cursor=str(number + 1))
    async with waiting(make_reconciliation(store, outbound, host, LONG_SETTLE), host):
        assert requested_cursors(host) == [None, "1"]


@asynccontextmanager
async def running(reconciliation: Reconciliation) -> AsyncIterator[None]:
    task = asyncio.create_task(reconciliation.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_first_reconciliation_is_due_one_interval_after_the_first_start(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    host.pages[path()] = page()
    for _ in range(2):
        async with running(make_reconciliation(store, outbound, host)):
            await until(lambda: begun(store, host))
    first = await store.crawl_progress("sweep", host.url)
    assert first is not None
    assert host.requests == []
    await store.save_crawl_progress(replace(first, finished_at=time() - DAY - 1))
    async with running(make_reconciliation(store, outbound, host)):
        await until(lambda: len(host.requests) == 1)


async def test_reconciliation_does_not_wait_for_a_time_from_before_the_clock_was_set_back(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    ahead = CrawlProgress("sweep", host.url, began_at=time() + DAY, finished_at=time() + DAY)
    await store.save_crawl_progress(ahead)

    async def counted_from_now() -> bool:
        progress = await store.crawl_progress("sweep", host.url)
        return progress is not None and progress.finished_at is not None and progress.finished_at <= time()

    async with running(make_reconciliation(store, outbound, host)):
        await until(counted_from_now)


async def begun(store: Store, host: ScriptedHost) -> bool:
    return await store.crawl_progress("sweep", host.url) is not None


def gap(relay: str = "wss://relay.test", shard: str = "0/1") -> Gap:
    return Gap(relay, shard, GapReason.CURSOR_OUTDATED, first_seq=6)


class Reconciling:
    """A running reconciliation and its gaps. The stream of the first source is open."""

    def __init__(
        self, store: Store, outbound: OutboundClient, *sources: str, settings: ReconciliationSettings = NO_WAIT
    ) -> None:
        self.metrics = Metrics()
        self.gaps = OpenGaps(store, settings.shard, self.metrics)
        self.sources = list(sources)
        scope = scope_of(store, Track.LISTED)
        self.reconciliation = Reconciliation(
            store, outbound, self.metrics, self.gaps, lambda: self.sources, scope, settings
        )

    async def __aenter__(self) -> Self:
        await self.gaps.refresh()
        self._task = asyncio.create_task(self.reconciliation.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert not self._task.done()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def wait_until_closed(self) -> None:
        await until(lambda: self.gaps.gaps == [])


CLOSED_BY = "select closed_by from atproto.gaps order by opened_at"


async def test_gap_starts_a_reconciliation_that_closes_it(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("behind"))
    host.pages[path()] = page((did(1), STORED), cursor="x")
    host.pages[path("x")] = page((did("behind"), NEWER))
    async with Reconciling(store, outbound, host.url) as reconciling:
        assert host.requests == []
        await reconciling.gaps.open(gap())
        assert reconciling.metrics.registry.get_sample_value("indexer_gaps_open") == 1
        await reconciling.wait_until_closed()
        assert reconciling.metrics.registry.get_sample_value("indexer_gaps_open") == 0
    assert await behind(sql) == {did("behind"): NEWER}
    assert [row[0] for row in await sql.fetch(CLOSED_BY)] == [host.url]
    assert requested_cursors(host) == [None, "x"]


async def test_gap_opened_during_a_reconciliation_needs_another_one(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """The first page was read before the second gap was opened."""
    opened_again = asyncio.Event()

    async def open_again(writer: asyncio.StreamWriter) -> None:
        if not opened_again.is_set():
            opened_again.set()
            await reconciling.gaps.open(gap())
        writer.write(page((did(2), STORED)))
        await writer.drain()

    host.pages[path()] = page((did(1), STORED), cursor="x")
    host.pages[path("x")] = open_again
    async with Reconciling(store, outbound, host.url) as reconciling:
        await reconciling.gaps.open(gap())
        await opened_again.wait()
        await reconciling.wait_until_closed()
    assert requested_cursors(host) == [None, "x", None, "x"]
    assert await sql.fetchval("select count(*) from atproto.gaps where closed_at is not null") == 2


async def test_gap_is_not_closed_by_a_reconciliation_that_began_before_it(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """The interrupted reconciliation is not resumed: its first page was read too early."""
    await store.save_crawl_progress(CrawlProgress("sweep", host.url, "", "x", 7, 3, began_at=time()))
    await store.open_gap(gap())
    host.pages[path()] = page((did(1), STORED))
    async with Reconciling(store, outbound, host.url) as reconciling:
        await reconciling.wait_until_closed()
    assert requested_cursors(host) == [None]


async def test_interrupted_reconciliation_starts_again_after_a_gap_was_opened(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    host.pages[path()] = page((did(1), STORED), cursor="x")
    host.pages[path("x")] = FAILURE
    gaps, scope = OpenGaps(store, NO_WAIT.shard, Metrics()), scope_of(store, Track.LISTED)
    reconciliation = Reconciliation(store, outbound, Metrics(), gaps, lambda: (host.url,), scope, NO_WAIT)
    with stamina.set_testing(True, attempts=1), pytest.raises(UnavailableError):
        await reconciliation.reconcile(host.url, ignore_progress)
    opened = await gaps.open(gap())
    host.pages[path("x")] = page((did(2), STORED))
    progress = await reconciliation.reconcile(host.url, ignore_progress)
    assert requested_cursors(host) == [None, "x", None, "x"]
    assert progress.last_gap == opened.id


async def test_gap_stays_open_while_no_stream_is_open(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await store.open_gap(gap())
    host.pages[path()] = page((did(1), STORED))
    async with Reconciling(store, outbound) as reconciling:
        await reconciling.gaps.refresh()
        assert host.requests == []
        reconciling.sources.append(host.url)
        await reconciling.wait_until_closed()


async def test_gap_stays_open_if_the_stream_changes_to_another_relay(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    async with ScriptedHost() as other:

        async def change_relay(writer: asyncio.StreamWriter) -> None:
            reconciling.sources[:] = [other.url, host.url]
            writer.write(page((did(1), STORED)))
            await writer.drain()

        host.pages[path()] = change_relay
        other.pages[path()] = page((did(1), STORED))
        async with Reconciling(store, outbound, host.url) as reconciling:
            await reconciling.gaps.open(gap())
            await reconciling.wait_until_closed()
        assert [row[0] for row in await sql.fetch(CLOSED_BY)] == [other.url]
        assert len(host.requests) == 1


async def test_next_relay_is_compared_once_if_the_connected_one_does_not_answer(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("behind"))
    async with ScriptedHost() as other:
        host.pages[path()] = FAILURE
        other.pages[path()] = page((did("behind"), NEWER))
        with stamina.set_testing(True, attempts=1):
            async with Reconciling(store, outbound, host.url, other.url) as reconciling:
                await reconciling.gaps.open(gap())
                await until(lambda: len(host.requests) == 3)
                assert await behind(sql) == {did("behind"): NEWER}
                assert len(other.requests) == 1
                assert reconciling.gaps.newest == 1, "only the relay whose stream is open closes the gap"
                assert f"failed and will be retried: {host.url}: http-status" in (
                    reconciling.reconciliation.progress or ""
                )
                host.pages[path()] = page((did("behind"), NEWER))
                await reconciling.wait_until_closed()


async def test_shard_compares_its_own_repos_and_closes_its_own_gaps(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    first, second = Shard(0, 2), Shard(1, 2)
    await insert(store, *[stored(name) for name in "abcdefgh"])
    host.pages[path()] = page(*[(did(name), NEWER) for name in "abcdefgh"])
    await store.open_gap(gap(shard=str(second)))
    async with Reconciling(store, outbound, host.url, settings=replace(NO_WAIT, shard=first)) as reconciling:
        await reconciling.gaps.open(gap(shard=str(first)))
        await reconciling.wait_until_closed()
    marked = await behind(sql)
    assert 0 < len(marked) < 8
    assert all(first.owns(marked_did) for marked_did in marked)
    assert [opened.gap.shard for opened in await store.open_gaps()] == [str(second)]


async def test_unknown_accounts_are_tracked_if_all_are(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    inactive: dict[str, object] = {"did": did("inactive"), "rev": NEWER, "active": False}
    host.pages[path()] = page((did("unknown"), NEWER), inactive)
    for track in (Track.LISTED, Track.ALL):
        reconciliation = make_reconciliation(store, outbound, host, track=track)
        progress = await reconciliation.reconcile(host.url, ignore_progress)
        assert progress.found == (track is Track.ALL)
    repos = await store.repos([did("unknown"), did("inactive")])
    assert [(repo.did, repo.sync_reason) for repo in repos.values()] == [(did("unknown"), Desync.NEW)]


async def test_account_that_is_not_listed_is_hidden_if_the_relay_says_so(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """It was taken down or deleted while messages were lost."""
    names = ("listed", "listed as inactive", "deleted", "active", "elsewhere")
    await insert(store, *[stored(name) for name in names], Repo(did("never fetched"), version=1))
    inactive: dict[str, object] = {"did": did("listed as inactive"), "rev": STORED, "active": False}
    host.pages[path()] = page((did("listed"), STORED), inactive)
    serve_status(host, "listed as inactive", active=False)
    serve_status(host, "active", active=True)
    deleted = {"did": did("deleted"), "active": False, "status": "deleted"}
    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={did('deleted')}"] = http_response(orjson.dumps(deleted))
    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={did('elsewhere')}"] = http_response(
        b'{"error": "RepoNotFound"}', status=404
    )
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    rows = await sql.fetch("select did, hosting_status, erase_at is not null from indexer.repo where not active")
    assert {tuple(row) for row in rows} == {
        (did("listed as inactive"), "deactivated", False),
        (did("deleted"), "deleted", True),
    }
    assert (progress.listed, progress.found) == (2, 2)
    logged = await sql.fetch("select did, action from atproto.changes where action in ('hidden', 'deleted')")
    assert sorted([action for _, action in logged]) == ["deleted", "hidden", "hidden"]
    assert len(host.requests) == 5


async def test_repo_that_is_being_fetched_notes_the_listed_rev(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    claimed = await in_progress(store, "claimed", now=time())
    host.pages[path()] = page((claimed.did, NEWER))
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert progress.found == 0
    noted = (await store.repos([claimed.did]))[claimed.did]
    assert (noted.sync_status, noted.latest_unverified_rev) == (SyncStatus.IN_PROGRESS, NEWER)


async def test_failed_reconciliation_is_resumed(store: Store, host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages[path()] = page((did(1), STORED), cursor="x")
    host.pages[path("x")] = FAILURE
    with stamina.set_testing(True, attempts=1):
        async with Reconciling(store, outbound, host.url) as reconciling:
            await reconciling.gaps.open(gap())
            await until(lambda: requested_cursors(host)[-2:] == ["x", "x"])
            host.pages[path("x")] = page()
            await reconciling.wait_until_closed()
            await until(lambda: reconciling.reconciliation.progress == "done; accounts listed: 1, different: 0")
    assert requested_cursors(host).count(None) == 1
