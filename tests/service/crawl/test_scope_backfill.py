"""A change of the scope while the stream of the relay is lost, whose lists would be read, or the clock is wrong."""

import asyncio
from collections.abc import Sequence
from itertools import count
from time import monotonic, time
from typing import Any, cast

import asyncpg
import orjson
import pytest
import stamina
from structlog.testing import capture_logs

from indexer.monitoring.metrics import Metrics
from indexer.outbound import OutboundClient
from indexer.reasons import Desync
from indexer.service.crawl.scope_backfill import ScopeBackfill
from indexer.service.current_scope import CurrentScope
from indexer.store import Store
from indexer.sync.crawl_progress import CrawlProgress
from indexer.sync.plan_account import plan_active
from indexer.sync.repo_transitions import needs_export
from indexer.sync.shard import Shard
from tests.outbound.scripted_host import ScriptedHost, http_response
from tests.store.repo_rows import did, insert, synchronized
from tests.sync.signing_account import STORE_ALL
from tests.waiting import until

POST, LIKE, FOLLOW = "app.bsky.feed.post", "app.bsky.feed.like", "app.bsky.graph.follow"


def list_path(collection: str) -> str:
    return f"/xrpc/com.atproto.sync.listReposByCollection?limit=2000&collection={collection}"


LIST = list_path(LIKE)


async def widened_scope(store: Store, *added: str) -> CurrentScope:
    """Add likes, or the named collections, to a scope of posts."""
    scope = CurrentScope(store, STORE_ALL)
    await scope.begin()
    await store.set_collections([POST])
    await store.set_collections([POST, *(added or [LIKE])])
    await scope.refresh()
    return scope


async def finish_resyncs(sql: asyncpg.Connection) -> None:
    """Let the requested resyncs succeed."""
    await sql.execute(
        "update indexer.repo set version = version + 1, sync_status = 'synchronized', sync_reason = null, "
        "scope_version = 3 where sync_reason is not null"
    )


async def widened(store: Store, names: Sequence[str]) -> list[str]:
    """Return the names of the repos that are fetched because of the scope."""
    repos = await store.repos(list(map(did, names)))
    return [name for name in names if repos[did(name)].sync_reason == Desync.SCOPE_WIDENED]


@pytest.mark.parametrize("open_for", range(1, 5))
async def test_relay_that_is_lost_before_its_list_is_read_is_not_one_that_offers_none(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient, open_for: int
) -> None:
    scope = CurrentScope(store, STORE_ALL)
    await scope.begin()
    await store.set_collections([POST])
    await insert(store, synchronized("listed", scope_version=2), synchronized("without", scope_version=2))
    await store.set_collections([POST, LIKE])
    await scope.refresh()
    host.pages[LIST] = http_response(orjson.dumps({"repos": [{"did": did("listed")}]}))
    asked = 0

    def sources() -> list[str]:
        """Return the relay while its stream is open: until it was asked for so often."""
        nonlocal asked
        asked += 1
        return [host.url] if asked <= open_for else []

    backfill = ScopeBackfill(store, outbound, scope, sources, Shard(), Metrics(), settle=0.0, recheck=(0.0, 3_600.0))
    await backfill.step()
    repos = await store.repos([did("listed"), did("without")])
    assert {name for name in ("listed", "without") if repos[did(name)].sync_reason} == {"listed"}
    [recheck] = await store.rechecks(Shard())
    assert len(host.requests) == 1 + recheck.found, "a repetition that read no list does not count"


async def test_list_is_compared_again_although_the_clock_was_set_back(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """The clock was a year ahead when the list was compared for the first time."""
    scope = await widened_scope(store)
    year_ahead = time() + 365 * 86_400
    await store.save_crawl_progress(CrawlProgress("recheck", "", LIKE, began_at=year_ahead))
    host.pages[LIST] = http_response(orjson.dumps({"repos": []}))
    backfill = ScopeBackfill(
        store, outbound, scope, lambda: [host.url], Shard(), Metrics(), settle=0.0, recheck=(0.0,), recheck_poll=0.0
    )
    await backfill.step()
    await backfill.step()
    assert await store.rechecks(Shard()) == []
    assert len(host.requests) == 1


async def test_list_is_compared_again_by_all_present_shards_although_their_number_has_changed(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """The list lacked two repos when the process of a single shard compared it."""
    scope = await widened_scope(store)
    shards = [Shard(0, 2), Shard(1, 2)]
    names = [next(name for name in map(str, count()) if shard.owns(did(name))) for shard in shards]
    await insert(store, *[synchronized(name, scope_version=3, synchronized_at=time() - 60) for name in names])
    await store.save_crawl_progress(CrawlProgress("recheck", "", LIKE, began_at=time(), found=1))
    host.pages[LIST] = http_response(orjson.dumps({"repos": [{"did": did(name)} for name in names]}))
    for shard in shards:
        backfill = ScopeBackfill(
            store, outbound, scope, lambda: [host.url], shard, Metrics(), settle=0.0, recheck=(0.0, 0.0), recheck_poll=0
        )
        for _ in range(3):
            await backfill.step()
        assert await store.rechecks(shard) == []
    repos = await store.repos(list(map(did, names)))
    assert [repo.sync_reason for repo in repos.values()] == [Desync.SCOPE_WIDENED] * 2


async def test_repo_without_records_is_not_fetched_although_the_list_has_many_accounts_that_are_not_stored(
    store: Store, host: ScriptedHost, outbound: OutboundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set of listed accounts has room for the stored ones only."""
    monkeypatch.setattr("indexer.service.crawl.listed_accounts.MIN_ACCOUNTS", 1)
    scope = await widened_scope(store)
    names = ["listed", *[f"without {number}" for number in range(10)]]
    await insert(store, *[synchronized(name, scope_version=2) for name in names])
    host.pages[LIST] = http_response(
        orjson.dumps({"repos": [{"did": did(name)} for name in ("listed", *map(str, range(1_000)))]})
    )
    backfill = ScopeBackfill(store, outbound, scope, lambda: [host.url], Shard(), Metrics(), settle=0.0)
    await backfill.step()
    repos = await store.repos([did(name) for name in names])
    assert [name for name in names if repos[did(name)].sync_reason] == ["listed"]


def backfill_of(
    store: Store, outbound: OutboundClient, scope: CurrentScope, *sources: str, recheck: Sequence[float] = (3_600.0,)
) -> ScopeBackfill:
    """Return a backfill that does not wait before it reads a list, for the first time or again."""
    return ScopeBackfill(
        store,
        outbound,
        scope,
        lambda: sources,
        Shard(),
        Metrics(),
        settle=0.0,
        recheck=recheck,
        recheck_poll=0.0,
        first_retry=0.0,
    )


@pytest.mark.slow
async def test_pause_before_a_list_is_asked_for_again_is_no_stall(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    scope = await widened_scope(store)
    await insert(store, synchronized("without", scope_version=2))
    backfill = backfill_of(store, outbound, scope, host.url)
    waits: list[float] = []

    async def throttled_once(writer: asyncio.StreamWriter) -> None:
        waits.append(backfill.stage.seconds_without_progress(0.0))
        again = http_response(status=503, headers={"Retry-After": "1"})
        writer.write(again if len(waits) == 1 else http_response(orjson.dumps({"repos": []})))

    host.pages[LIST] = throttled_once
    running = asyncio.create_task(backfill.run())
    await until(lambda: len(waits) == 2)
    running.cancel()
    assert max(waits) < 0.5


@pytest.mark.parametrize(
    "failure",
    [*[http_response(status=status) for status in (400, 403, 500, 502)], http_response(b"<html>")],
    ids=["400", "403", "500", "502", "no JSON"],
)
async def test_list_that_cannot_be_read_is_read_again_before_repos_are_fetched(
    store: Store, host: ScriptedHost, outbound: OutboundClient, failure: bytes
) -> None:
    scope = await widened_scope(store)
    await insert(store, synchronized("listed", scope_version=2), synchronized("without", scope_version=2))
    backfill = backfill_of(store, outbound, scope, host.url)
    host.pages[LIST] = failure
    with stamina.set_testing(True, attempts=1), capture_logs() as lines:
        await backfill.step()
    assert [repo.sync_reason for repo in (await store.repos([did("listed"), did("without")])).values()] == [None, None]
    [logged] = [line for line in lines if line["event"] == "scope.list-failed"]
    assert logged["collection"] == LIKE
    host.pages[LIST] = http_response(orjson.dumps({"repos": [{"did": did("listed")}]}))
    await backfill.step()
    repos = await store.repos([did("listed"), did("without")])
    assert {name for name in ("listed", "without") if repos[did(name)].sync_reason} == {"listed"}
    assert len(host.requests) == 2


async def test_all_repos_are_fetched_if_the_list_cannot_be_read_for_long(
    store: Store, host: ScriptedHost, outbound: OutboundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = await widened_scope(store)
    await insert(store, synchronized("one", scope_version=2))
    backfill = backfill_of(store, outbound, scope, host.url)
    host.pages[LIST] = http_response(status=403)
    with stamina.set_testing(True, attempts=1), capture_logs() as lines:
        await backfill.step()
        assert await widened(store, ["one"]) == []
        monkeypatch.setattr("indexer.service.crawl.scope_backfill.GIVE_UP_SECONDS", 0.0)
        await backfill.step()
    assert await widened(store, ["one"]) == ["one"]
    assert "scope.list-given-up" in [line["event"] for line in lines]


@pytest.mark.parametrize(
    "answer",
    [
        http_response(status=404),
        http_response(status=501),
        http_response(b'{"error": "MethodNotImplemented"}', status=400),
        http_response(b'{"error": "XRPCNotSupported"}', status=400),
    ],
    ids=["404", "501", "MethodNotImplemented", "XRPCNotSupported"],
)
async def test_next_relay_is_asked_if_the_first_one_does_not_offer_the_list(
    store: Store, host: ScriptedHost, outbound: OutboundClient, answer: bytes
) -> None:
    scope = await widened_scope(store)
    await insert(store, synchronized("listed", scope_version=2), synchronized("without", scope_version=2))
    async with ScriptedHost() as other:
        host.pages[LIST] = answer
        other.pages[LIST] = http_response(orjson.dumps({"repos": [{"did": did("listed")}]}))
        with stamina.set_testing(True, attempts=1):
            await backfill_of(store, outbound, scope, host.url, other.url).step()
    repos = await store.repos([did("listed"), did("without")])
    assert {name for name in ("listed", "without") if repos[did(name)].sync_reason} == {"listed"}


@pytest.mark.parametrize("failure", [http_response(status=500), http_response(status=404)], ids=["500", "404"])
async def test_repetition_counts_only_if_a_list_was_read_to_its_end(
    store: Store, host: ScriptedHost, outbound: OutboundClient, failure: bytes
) -> None:
    """The list that was compared first lacked the repo."""
    scope = await widened_scope(store)
    await insert(store, synchronized("lacking", scope_version=3, synchronized_at=time() - 60))
    await store.save_crawl_progress(CrawlProgress("recheck", "", LIKE, began_at=time()))
    backfill = backfill_of(store, outbound, scope, host.url, recheck=(0.0,))
    host.pages[LIST] = failure
    with stamina.set_testing(True, attempts=1), capture_logs() as lines:
        await backfill.step()
    assert len(await store.rechecks(Shard())) == 1
    assert "scope.list-failed" in [line["event"] for line in lines]
    host.pages[LIST] = http_response(orjson.dumps({"repos": [{"did": did("lacking")}]}))
    await backfill.step()
    assert await store.rechecks(Shard()) == []
    assert (await store.repos([did("lacking")]))[did("lacking")].sync_reason == Desync.SCOPE_WIDENED


@pytest.mark.parametrize("failing", [LIKE, FOLLOW])
async def test_listed_repos_are_fetched_although_the_list_of_another_collection_fails(
    store: Store, host: ScriptedHost, outbound: OutboundClient, failing: str
) -> None:
    """Repos that the failing list may name wait for it, synchronized. The other list is read only once."""
    readable = FOLLOW if failing == LIKE else LIKE
    scope = await widened_scope(store, LIKE, FOLLOW)
    names = ["listed", "in the failing list", "without", "inactive"]
    await insert(store, *[synchronized(name, scope_version=2, active=name != "inactive") for name in names])
    listed = [{"did": did(name)} for name in ("listed", "inactive")]
    host.pages[list_path(readable)] = http_response(orjson.dumps({"repos": listed}))
    host.pages[list_path(failing)] = http_response(status=403)
    backfill = backfill_of(store, outbound, scope, host.url)
    with stamina.set_testing(True, attempts=1):
        for _ in range(3):
            await backfill.step()
    assert await widened(store, names) == ["listed"]
    assert await store.rechecks(Shard()) == []
    host.pages[list_path(failing)] = http_response(orjson.dumps({"repos": [{"did": did("in the failing list")}]}))
    await backfill.step()
    assert await widened(store, names) == ["listed", "in the failing list"]
    assert [list_path(readable).lower() in request for request in host.requests].count(True) == 1
    assert [recheck.collection for recheck in await store.rechecks(Shard())] == [LIKE, FOLLOW]


@pytest.mark.slow
async def test_all_listed_repos_are_fetched_in_turn_although_the_list_of_another_collection_fails(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.service.crawl.scope_backfill.MAX_WAITING", 2)
    monkeypatch.setattr("indexer.service.crawl.scope_backfill.PAGE_SIZE", 3)
    scope = await widened_scope(store, LIKE, FOLLOW)
    names = list(map(str, range(8)))
    await insert(store, *[synchronized(name, scope_version=2) for name in names])
    host.pages[list_path(LIKE)] = http_response(orjson.dumps({"repos": [{"did": did(name)} for name in names[1:]]}))
    host.pages[list_path(FOLLOW)] = http_response(status=403)
    backfill, fetched = backfill_of(store, outbound, scope, host.url), list[str]()
    with stamina.set_testing(True, attempts=1):
        for _ in range(20):
            await backfill.step()
            due = await widened(store, names)
            assert len(due) <= 2
            fetched += due
            await finish_resyncs(sql)
    assert sorted(fetched) == names[1:]


@pytest.mark.parametrize("listed", [False, True])
async def test_inactive_repo_lacks_records_until_it_is_active_again(
    store: Store, host: ScriptedHost, outbound: OutboundClient, *, listed: bool
) -> None:
    """A list may lack inactive accounts, so it does not show that they have no records."""
    scope = await widened_scope(store)
    await insert(store, synchronized("without", scope_version=2))
    await insert(store, synchronized("inactive", scope_version=2, active=False, hosting_status="deactivated"))
    host.pages[LIST] = http_response(orjson.dumps({"repos": [{"did": did("inactive")}] if listed else []}))
    backfill = backfill_of(store, outbound, scope, host.url)
    for _ in range(3):
        await backfill.step()
    assert len(host.requests) == 1
    assert await widened(store, ["without", "inactive"]) == []
    [progress] = [one for one in await store.scope_progress() if one.collection == LIKE]
    assert (progress.repos, progress.complete) == (1, 1), "inactive accounts are not counted"

    active = await store.update_repo(did("inactive"), lambda repo: plan_active(repo, time()))
    assert active is not None
    assert needs_export(active, scope.scope)
    assert [repo.did for repo in await store.claim(10, range(256), time() + 60, time())] == [did("inactive")]
    [progress] = [one for one in await store.scope_progress() if one.collection == LIKE]
    assert (progress.repos, progress.complete) == (2, 1)


async def test_no_list_is_read_for_inactive_repos_only(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    scope = await widened_scope(store)
    await insert(store, synchronized("inactive", scope_version=2, active=False, hosting_status="deactivated"))
    host.pages[LIST] = http_response(orjson.dumps({"repos": [{"did": did("inactive")}]}))
    backfill = backfill_of(store, outbound, scope, host.url)
    for _ in range(3):
        await backfill.step()
    assert host.requests == []
    active = await store.update_repo(did("inactive"), lambda repo: plan_active(repo, time()))
    assert active is not None
    assert needs_export(active, scope.scope)


class SlowSearches:
    """The store, whose searches for incomplete repos are slow, as if there were many inactive ones; counts them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.searches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def request_incomplete(self, *arguments: Any) -> int:
        self.searches += 1
        await asyncio.sleep(0.1)
        return await self._store.request_incomplete(*arguments)


@pytest.mark.slow
async def test_slow_search_that_finds_no_incomplete_repo_is_repeated_rarely(
    store: Store, outbound: OutboundClient
) -> None:
    scope, slow = await widened_scope(store, "com.example.*"), SlowSearches(store)
    await insert(store, synchronized("inactive", scope_version=2, active=False))
    backfill, began_at = backfill_of(cast("Store", slow), outbound, scope), monotonic()
    while slow.searches < 3:
        await backfill.step()
        await asyncio.sleep(0.01)
    assert monotonic() - began_at >= 4.0, "two pauses of two seconds"
    await insert(store, synchronized("active", scope_version=2))
    await store.set_collections([POST, "com.example.*", "test.example.*"])
    await scope.refresh()
    await backfill.step()
    assert await widened(store, ["active"]) == ["active"], "at once after the scope was changed"
