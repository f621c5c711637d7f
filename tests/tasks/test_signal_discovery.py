"""Relays whose lists of repos with signal collections cannot be read, or only some of them."""

from dataclasses import replace

import pytest
import stamina
from structlog.testing import capture_logs

from indexer.db import Database
from indexer.db.scope import CurrentScope
from indexer.net.http.http_client import OutboundClient
from indexer.sync.scope import Track
from indexer.tasks.discover import SignalDiscovery
from indexer.tasks.scope import ScopeSettings
from tests.db.repo_rows import did
from tests.net.http.scripted_host import ScriptedHost, http_response
from tests.net.pds.missing_methods import MISSING_METHOD_ANSWERS, MissingMethodAnswer
from tests.sync.signing_account import STORE_ALL
from tests.tasks.crawl_scenario import list_of, list_path, missing_method, path

QUICK = ScopeSettings(settle=0.0)

pytestmark = pytest.mark.slow

LIKE, FOLLOW = "app.bsky.feed.like", "app.bsky.graph.follow"


@pytest.fixture
async def scope(db: Database) -> CurrentScope:
    """Return a scope whose repos are those with likes or follows."""
    scope = CurrentScope(db.scope, STORE_ALL)
    await scope.begin()
    await db.scope.change(track=Track.SIGNAL, signal_collections=[FOLLOW, LIKE])
    await scope.refresh()
    return scope


async def test_list_that_cannot_be_read_delays_no_other_list_and_is_read_again_alone(
    db: Database,
    scope: CurrentScope,
    host: ScriptedHost,
    outbound: OutboundClient,
) -> None:
    discovery = SignalDiscovery(db, outbound, scope, lambda: [host.url], lambda: None, replace(QUICK, retry=0.0))
    host.pages = {list_path(LIKE): http_response(status=500), list_path(FOLLOW): list_of("follower")}
    with stamina.set_testing(True, attempts=1), capture_logs() as lines:
        await discovery.step()
    assert set(await db.repos.load([did("follower"), did("liker")])) == {did("follower")}
    assert [line["collection"] for line in lines if line["event"] == "scope.list-failed"] == [LIKE]
    assert (await db.reports.counts()).unlisted == 1
    host.pages = {list_path(LIKE): list_of("liker"), list_path(FOLLOW): http_response(status=500)}
    await discovery.step()
    assert set(await db.repos.load([did("follower"), did("liker")])) == {did("follower"), did("liker")}
    assert (await db.reports.counts()).unlisted == 0
    assert await db.removals.add(f"at://{did('liker')}/{LIKE}/one", "hide")
    await scope.refresh()
    await discovery.step()
    assert len(host.requests) == 3, "nothing is read again that was read, also if a record is hidden"


@pytest.mark.parametrize("server", MISSING_METHOD_ANSWERS, ids=lambda answer: answer.server)
async def test_signal_collection_that_no_relay_lists_is_named_with_the_reason(
    db: Database, scope: CurrentScope, host: ScriptedHost, outbound: OutboundClient, server: MissingMethodAnswer
) -> None:
    discovery = SignalDiscovery(db, outbound, scope, lambda: [host.url], lambda: None, QUICK)
    host.pages = {list_path(LIKE): missing_method(server), list_path(FOLLOW): list_of("follower")}
    with stamina.set_testing(True, attempts=1), capture_logs() as lines:
        await discovery.step()
    [line] = [line for line in lines if line["event"] == "scope.signals-not-listed"]
    assert line["collection"] == LIKE
    assert str(server.status.real) in line["error"]


async def test_pds_without_lists_of_collections_gives_the_list_of_all_its_repos(
    db: Database, scope: CurrentScope, host: ScriptedHost, outbound: OutboundClient
) -> None:
    discovery = SignalDiscovery(db, outbound, scope, lambda: [host.url], lambda: None, QUICK, sources_are_hosts=True)
    method_missing = missing_method(MISSING_METHOD_ANSWERS[0])
    host.pages = {list_path(LIKE): method_missing, list_path(FOLLOW): method_missing, path(): list_of("ada", "bob")}
    with stamina.set_testing(True, attempts=1), capture_logs() as lines:
        await discovery.step()
        await discovery.step()
    assert set(await db.repos.load([did("ada"), did("bob")])) == {did("ada"), did("bob")}
    assert [line["event"] for line in lines if line["log_level"] != "debug"] == ["scope.discovered"] * 2
    assert len(host.requests) == 4, "nothing is read again"
    assert (await db.reports.counts()).unlisted == 0
    assert await db.scope_changes.unread_lists(scope.scope) == []
    for collection in (FOLLOW, LIKE):
        progress = await db.crawls.progress("signal", host.url, collection)
        assert progress is not None
        assert progress.listed == 2


@pytest.mark.parametrize(("status", "asks_the_next"), [(404, True), (502, False)])
async def test_next_relay_is_asked_only_if_the_first_one_does_not_offer_the_list(
    db: Database, scope: CurrentScope, host: ScriptedHost, outbound: OutboundClient, status: int, asks_the_next: bool
) -> None:
    """The list of a relay decides which repos are untracked, so a failure is no reason to take that of another one."""
    async with ScriptedHost() as first:
        first.pages = {list_path(LIKE): http_response(status=status), list_path(FOLLOW): list_of("follower")}
        host.pages = {list_path(LIKE): list_of("liker")}
        sources = [first.url, host.url]
        discovery = SignalDiscovery(db, outbound, scope, lambda: sources, lambda: None, QUICK)
        with stamina.set_testing(True, attempts=1), capture_logs() as lines:
            await discovery.step()
        found = {did("follower"), did("liker")} if asks_the_next else {did("follower")}
        assert set(await db.repos.load([did("follower"), did("liker")])) == found
        expected = [(first.url, FOLLOW), *[(host.url, LIKE)] * asks_the_next]
        discovered = [line for line in lines if line["event"] == "scope.discovered"]
        assert sorted((line["relay"], line["collection"]) for line in discovered) == sorted(expected)
        assert len(host.requests) == asks_the_next
