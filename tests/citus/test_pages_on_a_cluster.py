"""Pages of repo lists on a cluster: each statement and each transaction that adds repos is for one shard."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from indexer.db import Database, DatabaseError, crawls, repos
from indexer.db.connections import MIN_DIVIDED
from indexer.db.crawls import CrawlProgress, ListDifferences
from indexer.reasons import FetchFailure
from indexer.sync.scope import Scope, Track
from indexer.sync.shard import PLAIN, Layout, bucket_of
from tests.db.repo_rows import did, head, insert, synchronized

pytestmark = pytest.mark.proof("cluster")

OLD, NEWER = "3laaaaaaaaa22", "3laaaaaaaab22"
PROGRESS = CrawlProgress("sweep", "https://relay.test", cursor="after the page", began_at=1.0)
DIDS = [did(number) for number in range(200)]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the accounts of each statement or transaction."""
    parts: list[list[str]] = []
    called = repos.add_listed

    async def recorded(connection: Any, dids: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        parts.append(list(dids))
        return await called(connection, dids, *args, **kwargs)

    monkeypatch.setattr(crawls, "add_listed", recorded)
    return parts


def parts_of(dids: Sequence[str], layout: Layout) -> set[int]:
    return {layout.part_of(bucket_of(account)) for account in dids}


async def test_a_page_is_compared_with_a_statement_for_each_shard(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(db, *[synchronized(number, head=head(OLD)) for number in range(100)])
    revs = dict.fromkeys(DIDS, NEWER)
    divided = db.layout.divide(DIDS, str, MIN_DIVIDED)
    assert all(len(parts_of(part, db.layout)) == 1 for part in divided)
    found = await db.crawls.find_differences(revs)
    monkeypatch.setattr(db, "layout", PLAIN)
    whole = await db.crawls.find_differences(revs)
    assert ListDifferences(*map(sorted, found)) == ListDifferences(*map(sorted, whole))
    assert sorted(found.behind) == sorted(DIDS[:100])


async def test_repos_of_a_page_are_added_in_a_transaction_for_each_shard(db: Database, parts: list[list[str]]) -> None:
    stored = await db.crawls.add_listed(DIDS, PROGRESS)
    assert stored.found == len(DIDS)
    assert await db.crawls.progress("sweep", PROGRESS.source) == stored
    assert len(await db.repos.load(DIDS)) == len(DIDS)
    *added, last = parts
    assert len(added) == db.layout.parts > 1
    assert all(len(parts_of(part, db.layout)) == 1 for part in added)
    assert last == [], "the progress is stored after all repos"


async def test_repos_that_were_added_before_the_scope_changed_are_counted(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = await db.scope.begin(Scope(track=Track.ALL))
    add_listed, began, ended = repos.add_listed, asyncio.Lock(), asyncio.Event()

    async def change_the_scope_after_the_first_shard(*args: Any, **kwargs: Any) -> int | None:
        if not began.locked():
            await began.acquire()
            added = await add_listed(*args, **kwargs)
            ended.set()
            return added
        await ended.wait()
        if (await db.scope.load() or scope).version == scope.version:
            await db.scope.change(track=Track.LISTED)  # waits for the transaction of the first shard
        return await add_listed(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(crawls, "add_listed", change_the_scope_after_the_first_shard)
        stored = await db.crawls.add_listed(DIDS, PROGRESS, scope=scope)
    assert 0 < stored.found == len(await db.repos.load(DIDS)) < len(DIDS)
    assert await db.crawls.progress("sweep", PROGRESS.source) == stored


async def test_progress_of_a_page_is_stored_only_if_all_its_repos_are(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is read again then, and what was added before is not added twice."""
    add_listed = repos.add_listed

    async def fail_in_the_first_shard(connection: Any, dids: Sequence[str], *args: Any, **kwargs: Any) -> int | None:
        added = await add_listed(connection, dids, *args, **kwargs)
        if parts_of(dids, db.layout) == {0}:
            raise DatabaseError(FetchFailure.UNREACHABLE, "the node is gone")
        return added

    with monkeypatch.context() as patch:
        patch.setattr(crawls, "add_listed", fail_in_the_first_shard)
        with pytest.raises(DatabaseError, match="the node is gone"):
            await db.crawls.add_listed(DIDS, PROGRESS)
    assert await db.crawls.progress("sweep", PROGRESS.source) is None
    missing = [account for account in DIDS if parts_of([account], db.layout) == {0}]
    assert (await db.repos.load(DIDS)).keys() == set(DIDS) - set(missing)
    stored = await db.crawls.add_listed(DIDS, PROGRESS)
    assert stored.found == len(missing)
    assert len(await db.repos.load(DIDS)) == len(DIDS)
