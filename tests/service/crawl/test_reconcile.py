"""Reconciliation of the relay's repo list with the database."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic, time
from typing import Any

import asyncpg
import pytest
import stamina

from indexer.atproto.syntax import tid_of
from indexer.errors import UnavailableError
from indexer.outbound import OutboundClient
from indexer.reasons import Desync
from indexer.service.crawl import reconcile
from indexer.service.crawl.reconcile import Reconciliation
from indexer.store import Store
from indexer.store.crawl_rows import ListDifferences
from indexer.sync.crawl_progress import CrawlProgress
from indexer.sync.plans import Batch, RepoWrite
from indexer.sync.repo_state import TOMBSTONED, Repo, SyncStatus
from indexer.sync.scope import Track
from tests.outbound.scripted_host import ScriptedHost
from tests.service.crawl.reconciliations import (
    DAY,
    LONG_SETTLE,
    NEWER,
    OLDER,
    STORED,
    behind,
    ignore_progress,
    make_reconciliation,
    serve_status,
    stored,
)
from tests.service.crawl.repo_list_responses import FAILURE, page, path, requested_cursors
from tests.store.repo_rows import did, head, in_progress, insert
from tests.waiting import until

pytestmark = pytest.mark.slow


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


async def test_account_without_a_listed_rev_is_tracked_or_shown_but_is_not_behind(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """The relay has never received a commit of these accounts."""
    hidden = stored("hidden", active=False, hosting_status="deactivated")
    await insert(store, stored("stored"), hidden)
    await in_progress(store, "fetched", now=time())
    names = ("stored", "hidden", "fetched", "unknown")
    host.pages[path()] = page(*[(did(name), "") for name in names])
    serve_status(host, "hidden", active=True)
    reconciliation = make_reconciliation(store, outbound, host, track=Track.ALL)
    progress = await reconciliation.reconcile(host.url, ignore_progress)
    assert (progress.listed, progress.found) == (4, 2)
    assert await behind(sql) == {}
    repos = await store.repos(list(map(did, names)))
    assert [repos[did(name)].sync_reason for name in ("hidden", "unknown")] == [Desync.REACTIVATED, Desync.NEW]
    assert len(host.requests) == 2, "the relay is asked only about the hidden account"


async def test_repo_that_is_being_fetched_notes_the_listed_rev(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    claimed = await in_progress(store, "claimed", now=time())
    host.pages[path()] = page((claimed.did, NEWER))
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert progress.found == 0
    noted = (await store.repos([claimed.did]))[claimed.did]
    assert (noted.sync_status, noted.latest_unverified_rev) == (SyncStatus.IN_PROGRESS, NEWER)
