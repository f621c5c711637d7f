"""Reconciliation of the relay's repo list with the database."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic, time
from typing import Any

import asyncpg
import orjson
import pytest
import stamina

from indexer.atproto.syntax import tid_of
from indexer.errors import UnavailableError
from indexer.monitoring.metrics import Metrics
from indexer.outbound import OutboundClient
from indexer.reasons import Desync
from indexer.service.crawl import reconcile
from indexer.service.crawl.reconcile import Reconciliation, ReconciliationIntervals
from indexer.store import Store
from indexer.sync.crawl_progress import CrawlProgress
from indexer.sync.plans import Batch, RepoWrite
from indexer.sync.repo_state import TOMBSTONED, Repo, SyncStatus
from tests.outbound.scripted_host import ScriptedHost, http_response
from tests.service.crawl.repo_list_responses import FAILURE, page, path, requested_cursors
from tests.store.repo_rows import did, head, in_progress, insert, synchronized
from tests.waiting import until

OLDER, STORED, NEWER = "3laaaaaaaaa22", "3laaaaaaaab22", "3laaaaaaaac22"
DAY = 86_400.0
NO_WAIT = ReconciliationIntervals(settle=0.0, retry=0.0)


def stored(name: object, **fields: Any) -> Repo:
    return synchronized(name, head=head(STORED), **fields)


def make_reconciliation(
    store: Any,
    outbound: OutboundClient,
    host: ScriptedHost,
    *,
    interval: float = DAY,
    intervals: ReconciliationIntervals = NO_WAIT,
) -> Reconciliation:
    return Reconciliation(store, outbound, Metrics(), host.url, interval=interval, drift=300.0, intervals=intervals)


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
    broken = replace(stored("broken"), sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.CHAIN_BREAK)
    claimed = await in_progress(store, "claimed", now=time())
    await insert(store, stored("behind"), broken, *unchanged)
    future_rev = tid_of(int((time() + 3_600) * 1_000_000))
    listed = {"equal": STORED, "ahead": OLDER, "gone": NEWER, "future": future_rev, "broken": NEWER, "claimed": NEWER}
    host.pages[path()] = page(*[(did(name), rev) for name, rev in listed.items()], cursor="x")
    host.pages[path("x")] = page((did("behind"), NEWER), (did("unknown"), NEWER))
    reconciliation = make_reconciliation(store, outbound, host)
    progress = await reconciliation.reconcile(ignore_progress)
    assert (progress.listed, progress.found) == (8, 1)
    assert await behind(sql) == {did("behind"): NEWER}
    assert await store.repos([repo.did for repo in unchanged]) == {repo.did: repo for repo in unchanged}
    assert await store.repos([broken.did, claimed.did, did("unknown")]) == {broken.did: broken, claimed.did: claimed}
    marked = (await store.repos([did("behind")]))[did("behind")]
    assert (marked.sync_status, marked.head, marked.next_attempt_at) == (SyncStatus.DESYNCHRONIZED, head(STORED), None)


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
    progress = await make_reconciliation(store, outbound, host).reconcile(ignore_progress)
    assert progress.found == 1
    repos = await store.repos([did(name) for name in ("back", "still hidden", "moved")])
    assert [repo.active for repo in repos.values()].count(True) == 1
    back = repos[did("back")]
    assert (back.active, back.hosting_status, back.hosting_seq) == (True, None, 7)
    assert (back.sync_status, back.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.REACTIVATED)
    assert await sql.fetchval("select count(*) from atproto.changes where action = 'visible'") == 1


async def test_account_hidden_by_the_stream_meanwhile_stays_hidden(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("back", active=False, hosting_status="deactivated"))
    host.pages[path()] = page((did("back"), STORED))

    async def hide(writer: asyncio.StreamWriter) -> None:
        """Mark the account as deleted just before the response is sent."""
        await store.update_repo(
            did("back"), lambda repo: replace(repo, version=repo.version + 1, hosting_status="deleted")
        )
        writer.write(http_response(orjson.dumps({"did": did("back"), "active": True})))
        await writer.drain()

    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={did('back')}"] = hide
    progress = await make_reconciliation(store, outbound, host).reconcile(ignore_progress)
    assert progress.found == 0
    repo = (await store.repos([did("back")]))[did("back")]
    assert (repo.active, repo.hosting_status) == (False, "deleted")


class CatchingUpStore:
    """A store in which the stream updates repos right after they were found to be behind."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def find_differences(self, revs: Mapping[str, str]) -> tuple[list[str], list[str]]:
        behind, hidden = await self._store.find_differences(revs)
        for repo in (await self._store.repos(behind)).values():
            after = replace(repo, version=repo.version + 1, head=head(NEWER))
            assert not await self._store.apply(Batch((RepoWrite(repo.version, after),)))
        return behind, hidden


async def test_repo_updated_by_the_stream_meanwhile_is_not_behind(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("late"))
    host.pages[path()] = page((did("late"), NEWER))
    progress = await make_reconciliation(CatchingUpStore(store), outbound, host).reconcile(ignore_progress)
    assert progress.found == 0
    assert await behind(sql) == {}
    assert (await store.repos([did("late")]))[did("late")].head == head(NEWER)


@asynccontextmanager
async def waiting(reconciliation: Reconciliation) -> AsyncIterator[float]:
    """Run a reconciliation until it waits to compare a page again, and yield the remaining seconds."""
    task = asyncio.create_task(reconciliation.reconcile(ignore_progress))
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
    async with waiting(
        make_reconciliation(store, outbound, host, intervals=ReconciliationIntervals(settle=600.0))
    ) as seconds:
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
        await reconciliation.reconcile(ignore_progress)
    host.pages[path("x")] = page((did(2), STORED))
    progress = await make_reconciliation(store, outbound, host).reconcile(ignore_progress)
    assert requested_cursors(host) == [None, "x", "x"]
    assert progress.listed == 2
    assert progress.finished_at is not None


async def test_reconciliation_interrupted_long_ago_starts_again(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await store.save_crawl_progress(CrawlProgress("sweep", host.url, "", "x", 7, 3, began_at=time() - DAY - 1))
    host.pages[path()] = page((did(1), STORED))
    progress = await make_reconciliation(store, outbound, host).reconcile(ignore_progress)
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
    async with waiting(make_reconciliation(store, outbound, host, intervals=ReconciliationIntervals(settle=600.0))):
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


async def begun(store: Store, host: ScriptedHost) -> bool:
    return await store.crawl_progress("sweep", host.url) is not None


async def test_request_starts_a_reconciliation_and_restarts_a_running_one(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("behind"))
    host.pages[path()] = page((did(1), STORED), cursor="x")
    host.pages[path("x")] = page((did("behind"), NEWER))
    reconciliation = make_reconciliation(store, outbound, host, intervals=ReconciliationIntervals(settle=600.0))
    async with running(reconciliation):
        reconciliation.request()
        await until(lambda: requested_cursors(host) == [None, "x"])
        reconciliation.request()
        await until(lambda: requested_cursors(host) == [None, "x", None, "x"])
    assert await behind(sql) == {}


async def test_failed_reconciliation_is_resumed(store: Store, host: ScriptedHost, outbound: OutboundClient) -> None:
    host.pages[path()] = page((did(1), STORED), cursor="x")
    host.pages[path("x")] = FAILURE
    reconciliation = make_reconciliation(store, outbound, host)
    with stamina.set_testing(True, attempts=1):
        async with running(reconciliation):
            reconciliation.request()
            await until(lambda: requested_cursors(host)[-2:] == ["x", "x"])
            host.pages[path("x")] = page()
            assert reconciliation.progress == "running: 1 accounts listed, 0 differ"
            await until(lambda: reconciliation.progress == "done: 1 accounts listed, 0 differ")
    assert requested_cursors(host).count(None) == 1
