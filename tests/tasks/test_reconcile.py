"""Reconciliation of the relay's repo list with the database."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic, time

import pytest

from indexer.atproto.syntax import tid_of
from indexer.db.crawls import CrawlProgress, ListDifferences
from indexer.reasons import Desync, FetchFailure
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.repo import TOMBSTONED, Repo, SyncStatus
from indexer.sync.scope import Track
from tests.db.repo_rows import did, head, in_progress, insert
from tests.tasks.crawl_scenario import (
    DAY,
    HIDDEN,
    NEWER,
    NO_WAIT,
    OLDER,
    STORED,
    Crawl,
    page,
    path,
    requested_cursors,
    running,
    stored,
)
from tests.waiting import until

pytestmark = pytest.mark.slow


async def test_only_repos_that_are_behind_are_desynchronized(crawl: Crawl) -> None:
    tombstoned = stored("gone", active=False, hosting_status=TOMBSTONED)
    unchanged = [stored("equal"), stored("ahead"), tombstoned, stored("future"), stored("not listed")]
    broken = stored("broken")._replace(sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.CHAIN_BREAK)
    await insert(crawl.db, stored("behind"), broken, *unchanged)
    future_rev = tid_of(int((time() + 3_600) * 1_000_000))
    listed = {"equal": STORED, "ahead": OLDER, "gone": NEWER, "future": future_rev, "broken": NEWER}
    crawl.lists(*[(did(name), rev) for name, rev in listed.items()], cursor="x")
    crawl.host.pages[path("x")] = page((did("behind"), NEWER), (did("unknown"), NEWER))
    crawl.tells("not listed", active=True)
    progress = await crawl.reconcile()
    assert (progress.listed, progress.found) == (7, 1)
    assert await crawl.behind() == {did("behind"): NEWER}
    assert await crawl.db.repos.load([repo.did for repo in unchanged]) == {repo.did: repo for repo in unchanged}
    assert await crawl.db.repos.load([broken.did, did("unknown")]) == {broken.did: broken}
    marked = await crawl.row("behind")
    assert (marked.sync_status, marked.head, marked.next_attempt_at) == (SyncStatus.DESYNCHRONIZED, head(STORED), None)


async def test_reconciliation_ends_the_wait_of_new_accounts_that_the_relay_lists(crawl: Crawl) -> None:
    """Their host added too many. Others keep waiting."""
    error = "new-accounts: evil.example added too many accounts"
    waiting = Repo(
        did("listed"),
        version=1,
        from_stream=True,
        next_attempt_at=9e9,
        last_failure=FetchFailure.NEW_ACCOUNTS,
        last_error=error,
    )
    await insert(crawl.db, waiting, waiting._replace(did=did("not listed")))
    crawl.lists((did("listed"), STORED))
    progress = await crawl.reconcile()
    assert (progress.listed, progress.found) == (1, 0)
    listed = await crawl.row("listed")
    assert (listed.next_attempt_at, listed.last_failure, listed.last_error) == (None, None, None)
    assert not listed.from_stream
    assert (await crawl.row("not listed")).next_attempt_at == 9e9


async def test_repo_updated_by_the_stream_meanwhile_is_not_behind(
    crawl: Crawl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream delivers its commit right after the repo was found to be behind."""
    await insert(crawl.db, stored("late"))
    crawl.lists((did("late"), NEWER))
    find_differences = crawl.db.crawls.find_differences

    async def find_and_catch_up(revs: Mapping[str, str]) -> ListDifferences:
        found = await find_differences(revs)
        for repo in (await crawl.db.repos.load(found.behind)).values():
            write = RepoWrite(repo, repo._replace(version=repo.version + 1, head=head(NEWER)))
            assert not (await crawl.db.write(Batch((write,)))).skipped
        return found

    monkeypatch.setattr(crawl.db.crawls, "find_differences", find_and_catch_up)
    assert (await crawl.reconcile()).found == 0
    assert await crawl.behind() == {}
    assert (await crawl.row("late")).head == head(NEWER)


@asynccontextmanager
async def waiting_to_compare_again(crawl: Crawl) -> AsyncIterator[float]:
    """Run a reconciliation until it waits to compare a page again, and yield the remaining seconds."""
    reconciliation = crawl.reconciliation(replace(NO_WAIT, settle=600.0, max_pending_pages=1))
    task = asyncio.create_task(crawl.reconcile(reconciliation))
    try:
        await until(lambda: reconciliation.waits_until is not None)
        assert reconciliation.waits_until is not None
        yield reconciliation.waits_until - monotonic()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_repo_is_compared_again_after_the_settle_time(crawl: Crawl) -> None:
    await insert(crawl.db, stored("behind"))
    crawl.lists((did("behind"), NEWER))
    async with waiting_to_compare_again(crawl) as seconds:
        assert 590 < seconds <= 600
        assert await crawl.behind() == {}
    progress = await crawl.progress()
    assert progress is not None
    assert (progress.listed, progress.cursor, progress.finished_at) == (0, None, None)


async def test_number_of_pending_pages_is_bounded(crawl: Crawl) -> None:
    """No third page is read while two are pending."""
    await insert(crawl.db, *[stored(number) for number in range(3)])
    for number in range(3):
        crawl.host.pages[path(str(number) if number else None)] = page((did(number), NEWER), cursor=str(number + 1))
    async with waiting_to_compare_again(crawl):
        assert requested_cursors(crawl.host) == [None, "1"]


async def test_reconciliation_of_a_former_process_starts_again(crawl: Crawl) -> None:
    await crawl.db.crawls.save(CrawlProgress("sweep", crawl.host.url, "", "x", 7, 3, began_at=time() - 1))
    crawl.lists((did(1), STORED))
    async with running(crawl.reconciliation()):
        await until(lambda: requested_cursors(crawl.host) == [None])


async def test_first_reconciliation_is_due_one_interval_after_the_first_start(crawl: Crawl) -> None:
    async def begun() -> bool:
        return await crawl.progress() is not None

    crawl.lists()
    for _ in range(2):
        async with running(crawl.reconciliation()):
            await until(begun)
    first = await crawl.progress()
    assert first is not None
    assert crawl.host.requests == []
    await crawl.db.crawls.save(replace(first, finished_at=time() - DAY - 1))
    async with running(crawl.reconciliation()):
        await until(lambda: len(crawl.host.requests) == 1)


async def test_reconciliation_does_not_wait_for_a_time_from_before_the_clock_was_set_back(crawl: Crawl) -> None:
    ahead = CrawlProgress("sweep", crawl.host.url, began_at=time() + DAY, finished_at=time() + DAY)
    await crawl.db.crawls.save(ahead)

    async def counted_from_now() -> bool:
        progress = await crawl.progress()
        return progress is not None and progress.finished_at is not None and progress.finished_at <= time()

    async with running(crawl.reconciliation()):
        await until(counted_from_now)


async def test_unknown_accounts_are_tracked_if_all_are(crawl: Crawl) -> None:
    crawl.lists((did("unknown"), NEWER), {"did": did("inactive"), "rev": NEWER, "active": False})
    for track in (Track.LISTED, Track.ALL):
        progress = await crawl.reconcile(track=track)
        assert progress.found == (track is Track.ALL)
    repos = await crawl.db.repos.load([did("unknown"), did("inactive")])
    assert [(repo.did, repo.sync_reason) for repo in repos.values()] == [(did("unknown"), Desync.NEW)]


async def test_account_without_a_listed_rev_is_tracked_or_shown_but_is_not_behind(crawl: Crawl) -> None:
    """The relay has never received a commit of these accounts."""
    await insert(crawl.db, stored("stored"), stored("hidden", **HIDDEN))
    await in_progress(crawl.db, "fetched", now=time())
    crawl.lists(*[(did(name), "") for name in ("stored", "hidden", "fetched", "unknown")])
    crawl.tells("hidden", active=True)
    progress = await crawl.reconcile(track=Track.ALL)
    assert (progress.listed, progress.found) == (4, 2)
    assert await crawl.behind() == {}
    assert (await crawl.row("hidden")).sync_reason is Desync.REACTIVATED
    assert (await crawl.row("unknown")).sync_reason is Desync.NEW
    assert len(crawl.host.requests) == 2, "the relay is asked only about the hidden account"


async def test_repo_that_is_being_fetched_notes_the_listed_rev(crawl: Crawl) -> None:
    claimed = await in_progress(crawl.db, "claimed", now=time())
    crawl.lists((claimed.did, NEWER))
    assert (await crawl.reconcile()).found == 0
    noted = await crawl.row("claimed")
    assert (noted.sync_status, noted.latest_unverified_rev) == (SyncStatus.IN_PROGRESS, NEWER)
