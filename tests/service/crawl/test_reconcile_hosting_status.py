"""Reconciliation hides and shows accounts."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from math import inf
from time import time
from typing import Any

import asyncpg
import orjson
import pytest
from structlog.testing import capture_logs

from indexer.atproto.crypto import PrivateKey
from indexer.concurrency.stage_progress import StageProgress
from indexer.errors import UnavailableError
from indexer.identity import IdentityCache
from indexer.monitoring.metrics import Metrics
from indexer.outbound import OutboundClient
from indexer.outbound.host_limits import FAILURE_THRESHOLD
from indexer.reasons import Desync, FetchFailure
from indexer.service.crawl.hosting_status import MAX_ATTEMPTS, HostingStatusChecks
from indexer.store import Store
from indexer.store.crawl_rows import ListDifferences
from indexer.sync.repo_state import Repo, StreamPoint, SyncStatus
from indexer.sync.scope import Track
from indexer.sync.shard import Shard
from indexer.sync.stored_identity import StoredIdentity
from tests.outbound.scripted_host import ScriptedHost, http_response
from tests.service.crawl.reconciliations import (
    NEWER,
    NO_WAIT,
    STORED,
    behind,
    ignore_progress,
    make_reconciliation,
    scope_of,
    serve_status,
    status_path,
    stored,
)
from tests.service.crawl.repo_list_responses import page, path
from tests.store.repo_rows import did, insert

pytestmark = pytest.mark.slow

KEY = PrivateKey.from_seed("k256", b"reconciliation").public.did_key()


async def test_account_that_became_active_unnoticed_is_shown_and_resynced(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    hidden = {"active": False, "hosting_status": "deactivated", "hosting_relay": "wss://r.test", "hosting_seq": 7}
    await insert(store, *[stored(name, **hidden) for name in ("back", "still hidden", "moved")])
    host.pages[path()] = page(*[(did(name), STORED) for name in ("back", "still hidden", "moved")])
    serve_status(host, "back", active=True)
    serve_status(host, "still hidden", active=False)
    host.pages[status_path("moved")] = http_response(b'{"error": "RepoNotFound"}', status=404)
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert progress.found == 1
    repos = await store.repos([did(name) for name in ("back", "still hidden", "moved")])
    assert [repo.active for repo in repos.values()].count(True) == 1
    back = repos[did("back")]
    assert (back.active, back.hosting_status, back.hosting_seq) == (True, None, 7)
    assert (back.sync_status, back.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.REACTIVATED)
    assert await sql.fetchval("select count(*) from atproto.changes where action = 'visible'") == 1


async def test_answer_is_recorded_with_the_position_of_the_relays_stream(
    store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    hidden = {"active": False, "hosting_relay": "wss://r.test", "hosting_seq": 7}
    await insert(store, stored("back", **hidden), stored("gone", hosting_relay="wss://r.test", hosting_seq=7))
    host.pages[path()] = page((did("back"), STORED))
    serve_status(host, "back", active=True)
    serve_status(host, "gone", active=False)
    points = {host.url: StreamPoint("wss://other.test", 2, 50, 1_767_225_601.5)}
    await make_reconciliation(store, outbound, host, stream_point=points.get).reconcile(host.url, ignore_progress)
    repos = await store.repos([did("back"), did("gone")])
    assert {name: repo.active for name, repo in repos.items()} == {did("back"): True, did("gone"): False}
    for repo in repos.values():
        place = repo.hosting_relay, repo.hosting_epoch, repo.hosting_seq, repo.hosting_time
        assert place == points[host.url]


async def test_requests_for_an_account_whose_row_was_removed_meanwhile_are_not_repeated(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    await insert(store, stored("gone"))
    host.pages[status_path("gone")] = http_response(status=500)
    scope, stage = scope_of(store, Track.LISTED), StageProgress("reconciliation")
    checks = HostingStatusChecks(store, outbound, Metrics(), scope, stage, None, lambda _: None, first_retry=0.0)
    assert not await checks.follow(host.url, did("gone"), active=False)
    await sql.execute("delete from indexer.repo where did = $1", did("gone"))
    async with asyncio.timeout(10):
        assert await checks.repeat_failed(host.url) == 0
    assert len(host.requests) == 1


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


async def test_next_reconciliation_asks_for_unlisted_accounts_beyond_the_limit(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay does not list the accounts. It says of the last one only that it is not active."""
    monkeypatch.setattr("indexer.service.crawl.reconcile.MAX_UNLISTED", 2)
    names = sorted(["a", "b", "c", "d", "e"], key=did)
    await insert(store, *map(stored, names))
    host.pages[path()] = page()
    for name in names:
        serve_status(host, name, active=name != names[-1])
    reconciliation = make_reconciliation(store, outbound, host)
    for _ in range(3):
        await reconciliation.reconcile(host.url, ignore_progress)
    assert [row["did"] for row in await sql.fetch("select did from indexer.repo where not active")] == [did(names[-1])]


async def test_reconciliation_continues_with_the_unlisted_account_at_which_the_relay_failed(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """A relay that allows only some requests at a time would never answer the last ones otherwise."""
    names = sorted(["a", "b", "c", "d", "e"], key=did)
    await insert(store, *map(stored, names))
    host.pages[path()] = page()
    reconciliation = make_reconciliation(store, outbound, host)
    for name in names:
        if name != names[0]:
            host.pages[status_path(name)] = http_response(b'{"error": "RateLimitExceeded"}', status=400)
            with pytest.raises(UnavailableError):
                await reconciliation.reconcile(host.url, ignore_progress)
        serve_status(host, name, active=name != names[-1])
    for _ in range(2):
        await reconciliation.reconcile(host.url, ignore_progress)
    assert [row["did"] for row in await sql.fetch("select did from indexer.repo where not active")] == [did(names[-1])]
    asked = [request.split(" ")[1].partition("?did=")[2] for request in host.requests if "getrepostatus" in request]
    failed = [name for name in names[1:] for _ in range(2)]
    assert asked == [did(name) for name in [names[0], *failed, *names[:-1]]], "then the next one asks for all again"


async def test_unlisted_account_is_found_although_the_relay_lists_many_accounts_of_another_shard(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not stored in this database, so the set of listed accounts has no room for them."""
    monkeypatch.setattr("indexer.service.crawl.listed_accounts.MIN_ACCOUNTS", 1)
    shard = Shard(0, 2)
    own = next(name for name in map(str, count()) if shard.owns(did(name)))
    others = [did(name) for name in map(str, range(1_000)) if not shard.owns(did(name))]
    await insert(store, stored(own))
    host.pages[path()] = page(*[(other, STORED) for other in others])
    serve_status(host, own, active=False)
    settings = replace(NO_WAIT, shard=shard)
    await make_reconciliation(store, outbound, host, settings).reconcile(host.url, ignore_progress)
    assert [row["did"] for row in await sql.fetch("select did from indexer.repo where not active")] == [did(own)]


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
    host.pages[status_path("deleted")] = http_response(orjson.dumps(deleted))
    host.pages[status_path("elsewhere")] = http_response(b'{"error": "RepoNotFound"}', status=404)
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

    host.pages[status_path("back")] = hide
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

    host.pages[status_path("a")] = answer
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


def requests_for(host: ScriptedHost, name: str) -> int:
    return sum(status_path(name).lower() in request for request in host.requests)


async def test_account_of_which_the_relay_never_tells_the_status_is_fetched_again(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """It may be deleted, so it does not count as synchronized. The other accounts are compared."""
    names = sorted(["a", "b", "c"], key=did)
    await insert(store, *map(stored, names))
    host.pages[path()] = page()
    for name in names:
        serve_status(host, name, active=False)
    host.pages[status_path(names[1])] = http_response(status=500)
    with capture_logs() as lines:
        progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert progress.finished_at is not None
    rows = await sql.fetch("select did, sync_reason from indexer.repo where active")
    assert [tuple(row) for row in rows] == [(did(names[1]), "status-unknown")]
    assert requests_for(host, names[1]) == MAX_ATTEMPTS
    [logged] = [line for line in lines if line["event"] == "reconciliation.status-unknown"]
    assert (logged["accounts"], logged["error"]) == (1, "http-status: 500")


async def test_hidden_account_of_which_the_relay_never_tells_the_status_stays_hidden(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    hidden = {"active": False, "hosting_status": "deactivated"}
    await insert(store, stored("unknown", **hidden), stored("back", **hidden), stored("behind"))
    host.pages[path()] = page((did("unknown"), STORED), (did("back"), STORED), cursor="x")
    host.pages[path("x")] = page((did("behind"), NEWER))
    host.pages[status_path("unknown")] = http_response(b"no JSON")
    serve_status(host, "back", active=True)
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert progress.found == 2
    rows = await sql.fetch("select did from indexer.repo where not active")
    assert [row["did"] for row in rows] == [did("unknown")]
    assert await behind(sql) == {did("behind"): NEWER}
    assert requests_for(host, "unknown") == MAX_ATTEMPTS


@pytest.mark.parametrize("active", [True, False])
async def test_status_that_the_relay_tells_at_a_later_attempt_counts(
    active: bool, store: Store, host: ScriptedHost, outbound: OutboundClient
) -> None:
    hidden: dict[str, Any] = {"active": False, "hosting_status": "deactivated"} if active else {}
    await insert(store, stored("a", **hidden))
    host.pages[path()] = page((did("a"), STORED)) if active else page()

    async def fail_once(writer: asyncio.StreamWriter) -> None:
        serve_status(host, "a", active=active)
        writer.write(http_response(status=502))
        await writer.drain()

    host.pages[status_path("a")] = fail_once
    progress = await make_reconciliation(store, outbound, host).reconcile(host.url, ignore_progress)
    assert progress.found == 1
    repo = (await store.repos([did("a")]))[did("a")]
    assert (repo.active, repo.sync_reason) == (active, Desync.REACTIVATED if active else None)
    assert requests_for(host, "a") == 2


async def test_accounts_without_a_status_do_not_use_up_their_attempts_while_the_relay_is_paused(
    store: Store, sql: asyncpg.Connection, host: ScriptedHost, outbound: OutboundClient
) -> None:
    """Five failed requests in a row pause the relay. The reconciliation fails then, and continues later."""
    names = sorted(map(str, range(FAILURE_THRESHOLD)), key=did)
    await insert(store, *map(stored, names))
    host.pages[path()] = page()
    for name in names:
        host.pages[status_path(name)] = http_response(status=500)
    reconciliation = make_reconciliation(store, outbound, host)
    with pytest.raises(UnavailableError, match="host-paused"):
        await reconciliation.reconcile(host.url, ignore_progress)
    assert sum(requests_for(host, name) for name in names) == FAILURE_THRESHOLD
    assert await sql.fetch("select from indexer.repo where sync_reason is not null") == []
