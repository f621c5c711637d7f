"""A change of the scope while the stream of the relay is lost, whose lists would be read, or the clock is wrong."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from time import time
from typing import Any

import pytest
import stamina
from structlog.testing import capture_logs

from indexer.db import Database
from indexer.db.crawls import CrawlProgress
from indexer.db.scope import CurrentScope
from indexer.reasons import Desync
from indexer.sync.account import plan_active
from indexer.sync.repo import needs_export
from indexer.sync.shard import Shard
from indexer.tasks.scope import ScopeBackfill, ScopeSettings
from indexer.telemetry.metrics import Metrics
from tests.db.repo_rows import did, insert, synchronized
from tests.net.http.scripted_host import ScriptedHost, http_response
from tests.net.pds.missing_methods import MISSING_METHOD_ANSWERS, MissingMethodAnswer
from tests.sync.signing_account import STORE_ALL
from tests.tasks.crawl_scenario import HIDDEN, Crawl, list_of, list_path, missing_method

pytestmark = pytest.mark.slow

POST, LIKE, FOLLOW = "app.bsky.feed.post", "app.bsky.feed.like", "app.bsky.graph.follow"
LIST = list_path(LIKE)


async def widened_scope(db: Database, *added: str) -> CurrentScope:
    """Add likes, or the named collections, to a scope of posts."""
    scope = CurrentScope(db.scope, STORE_ALL)
    await scope.begin()
    await db.scope.change(collections=[POST])
    await db.scope.change(collections=[POST, *(added or [LIKE])])
    await scope.refresh()
    return scope


async def backfill_of(crawl: Crawl, *added: str, scope: CurrentScope | None = None, **options: Any) -> ScopeBackfill:
    """Widen the scope; return a backfill that does not wait before it reads a list, for the first time or again."""
    scope = scope or await widened_scope(crawl.db, *added)
    sources, shard = options.pop("sources", lambda: [crawl.host.url]), options.pop("shard", Shard())
    settings = replace(ScopeSettings(settle=0.0, rechecks=(3_600.0,), recheck_poll=0.0, retry=0.0), **options)
    return ScopeBackfill(crawl.db, crawl.outbound, scope, sources, shard, Metrics(), settings)


async def insert_incomplete(crawl: Crawl, *names: str, **fields: Any) -> None:
    """Insert repos that are complete for a scope without likes."""
    await insert(crawl.db, *[synchronized(name, scope_version=2, **fields) for name in names])


async def widened(crawl: Crawl, names: Sequence[str]) -> list[str]:
    """Return the names of the repos that are fetched because of the scope."""
    repos = await crawl.db.repos.load(list(map(did, names)))
    return [name for name in names if repos[did(name)].sync_reason == Desync.SCOPE_WIDENED]


@contextmanager
def without_retries() -> Iterator[list[Any]]:
    """Send each request once; yield the log."""
    with stamina.set_testing(True, attempts=1), capture_logs() as lines:
        yield lines


@pytest.mark.parametrize("open_for", range(1, 5))
async def test_relay_that_is_lost_before_its_list_is_read_is_not_one_that_offers_none(
    crawl: Crawl, open_for: int
) -> None:
    """Its stream is open until it was asked for so often."""
    asked = 0

    def sources() -> list[str]:
        nonlocal asked
        asked += 1
        return [crawl.host.url] if asked <= open_for else []

    backfill = await backfill_of(crawl, sources=sources, rechecks=(0.0, 3_600.0))
    await insert_incomplete(crawl, "listed", "without")
    crawl.host.pages[LIST] = list_of("listed")
    await backfill.step()
    assert await widened(crawl, ["listed", "without"]) == ["listed"]
    [recheck] = await crawl.db.crawls.rechecks(Shard())
    assert len(crawl.host.requests) == 1 + recheck.found, "a repetition that read no list does not count"


async def test_list_is_compared_again_although_the_clock_was_set_back(crawl: Crawl) -> None:
    """The clock was a year ahead when the list was compared for the first time."""
    backfill = await backfill_of(crawl, rechecks=(0.0,))
    await crawl.db.crawls.save(CrawlProgress("recheck", "", LIKE, began_at=time() + 365 * 86_400))
    crawl.host.pages[LIST] = list_of()
    await backfill.step()
    await backfill.step()
    assert await crawl.db.crawls.rechecks(Shard()) == []
    assert len(crawl.host.requests) == 1


async def test_list_is_compared_again_by_all_present_shards_although_their_number_has_changed(crawl: Crawl) -> None:
    """The list lacked two repos when the process of a single shard compared it."""
    scope = await widened_scope(crawl.db)
    shards = [Shard(0, 2), Shard(1, 2)]
    names = [next(name for name in map(str, count()) if shard.owns(did(name))) for shard in shards]
    await insert(crawl.db, *[synchronized(name, scope_version=3, synchronized_at=time() - 60) for name in names])
    await crawl.db.crawls.save(CrawlProgress("recheck", "", LIKE, began_at=time(), found=1))
    crawl.host.pages[LIST] = list_of(*names)
    for shard in shards:
        backfill = await backfill_of(crawl, scope=scope, shard=shard, rechecks=(0.0, 0.0))
        for _ in range(3):
            await backfill.step()
        assert await crawl.db.crawls.rechecks(shard) == []
    assert await widened(crawl, names) == names


@pytest.mark.parametrize(
    "failure",
    [http_response(status=403), http_response(status=500), http_response(b"<html>")],
    ids=["403", "500", "no JSON"],
)
async def test_list_that_cannot_be_read_is_read_again_before_repos_are_fetched(crawl: Crawl, failure: bytes) -> None:
    backfill = await backfill_of(crawl)
    await insert_incomplete(crawl, "listed", "without")
    crawl.host.pages[LIST] = failure
    with without_retries() as lines:
        await backfill.step()
    assert await widened(crawl, ["listed", "without"]) == []
    [logged] = [line for line in lines if line["event"] == "scope.list-failed"]
    assert logged["collection"] == LIKE
    crawl.host.pages[LIST] = list_of("listed")
    await backfill.step()
    assert await widened(crawl, ["listed", "without"]) == ["listed"]
    assert len(crawl.host.requests) == 2


async def test_lists_are_not_read_again_because_a_record_is_hidden(crawl: Crawl) -> None:
    scope = await widened_scope(crawl.db, LIKE, FOLLOW)
    backfill = await backfill_of(crawl, scope=scope)
    await insert_incomplete(crawl, "listed", "without")
    crawl.host.pages = {LIST: list_of("listed"), list_path(FOLLOW): http_response(status=500)}
    with without_retries():
        await backfill.step()
    assert await crawl.db.removals.add(f"at://{did('listed')}/{LIKE}/one", "hide")
    await scope.refresh()
    crawl.host.pages = {LIST: list_of(), list_path(FOLLOW): list_of()}
    await backfill.step()
    assert await widened(crawl, ["listed", "without"]) == ["listed"], "the list that was read is used"


async def test_all_repos_are_fetched_if_the_list_cannot_be_read_for_long(crawl: Crawl) -> None:
    backfill = await backfill_of(crawl, give_up=1e-9)
    await insert_incomplete(crawl, "one")
    crawl.host.pages[LIST] = http_response(status=403)
    with without_retries() as lines:
        await backfill.step()
        assert await widened(crawl, ["one"]) == []
        await backfill.step()
    assert await widened(crawl, ["one"]) == ["one"]
    assert "scope.list-given-up" in [line["event"] for line in lines]


@pytest.mark.parametrize("server", MISSING_METHOD_ANSWERS, ids=lambda answer: answer.server)
async def test_next_relay_is_asked_if_the_first_one_does_not_offer_the_list(
    crawl: Crawl, server: MissingMethodAnswer
) -> None:
    answer = missing_method(server)
    async with ScriptedHost() as other:
        backfill = await backfill_of(crawl, sources=lambda: [crawl.host.url, other.url])
        await insert_incomplete(crawl, "listed", "without")
        crawl.host.pages[LIST] = answer
        other.pages[LIST] = list_of("listed")
        with without_retries():
            await backfill.step()
    assert await widened(crawl, ["listed", "without"]) == ["listed"]


@pytest.mark.parametrize("server", MISSING_METHOD_ANSWERS, ids=lambda answer: answer.server)
async def test_all_repos_are_fetched_for_an_added_collection_if_no_relay_offers_the_list(
    crawl: Crawl, server: MissingMethodAnswer
) -> None:
    backfill = await backfill_of(crawl)
    await insert_incomplete(crawl, "one", "two")
    crawl.host.pages[LIST] = missing_method(server)
    with without_retries():
        await backfill.step()
    assert sorted(await widened(crawl, ["one", "two"])) == ["one", "two"]


@pytest.mark.parametrize("failure", [http_response(status=500), http_response(status=404)], ids=["500", "404"])
async def test_repetition_counts_only_if_a_list_was_read_to_its_end(crawl: Crawl, failure: bytes) -> None:
    """The list that was compared first lacked the repo."""
    backfill = await backfill_of(crawl, rechecks=(0.0,))
    await insert(crawl.db, synchronized("lacking", scope_version=3, synchronized_at=time() - 60))
    await crawl.db.crawls.save(CrawlProgress("recheck", "", LIKE, began_at=time()))
    crawl.host.pages[LIST] = failure
    with without_retries() as lines:
        await backfill.step()
    assert len(await crawl.db.crawls.rechecks(Shard())) == 1
    assert "scope.list-failed" in [line["event"] for line in lines]
    crawl.host.pages[LIST] = list_of("lacking")
    await backfill.step()
    assert await crawl.db.crawls.rechecks(Shard()) == []
    assert await widened(crawl, ["lacking"]) == ["lacking"]


async def test_repos_wait_for_all_lists_and_each_list_is_read_only_once(crawl: Crawl) -> None:
    backfill = await backfill_of(crawl, LIKE, FOLLOW)
    names = ["listed", "in the failing list", "without"]
    await insert_incomplete(crawl, *names)
    crawl.host.pages[LIST] = list_of("listed")
    crawl.host.pages[list_path(FOLLOW)] = http_response(status=403)
    with without_retries():
        for _ in range(3):
            await backfill.step()
    assert await widened(crawl, names) == []
    assert await crawl.db.crawls.rechecks(Shard()) == []
    crawl.host.pages[list_path(FOLLOW)] = list_of("in the failing list")
    await backfill.step()
    assert await widened(crawl, names) == ["listed", "in the failing list"]
    assert [LIST.lower() in request for request in crawl.host.requests].count(True) == 1
    assert [recheck.collection for recheck in await crawl.db.crawls.rechecks(Shard())] == [LIKE, FOLLOW]


@pytest.mark.parametrize("listed", [False, True])
async def test_inactive_repo_lacks_records_until_it_is_active_again(crawl: Crawl, *, listed: bool) -> None:
    """A list may lack inactive accounts, so it does not show that they have no records."""
    scope = await widened_scope(crawl.db)
    backfill = await backfill_of(crawl, scope=scope)
    await insert_incomplete(crawl, "inactive", **HIDDEN)
    await backfill.step()
    assert crawl.host.requests == [], "no list is read for inactive repos only"
    await insert_incomplete(crawl, "without")
    crawl.host.pages[LIST] = list_of(*["inactive"] * listed)
    backfill = await backfill_of(crawl, scope=scope)
    for _ in range(3):
        await backfill.step()
    assert len(crawl.host.requests) == 1
    assert await widened(crawl, ["without", "inactive"]) == []
    [progress] = [one for one in await crawl.db.scope.progress() if one.collection == LIKE]
    assert (progress.repos, progress.complete) == (1, 1), "inactive accounts are not counted"

    active = await crawl.db.repos.update(did("inactive"), lambda repo: plan_active(repo, time()))
    assert active is not None
    assert needs_export(active, scope.scope)
    assert [repo.did for repo in await crawl.db.resyncs.claim(10, range(256), time() + 60, time())] == [did("inactive")]
    [progress] = [one for one in await crawl.db.scope.progress() if one.collection == LIKE]
    assert (progress.repos, progress.complete) == (2, 1)
