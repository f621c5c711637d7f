"""Reconciliation hides and shows accounts."""

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from time import time
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from indexer.atproto.crypto import PrivateKey
from indexer.errors import UnavailableError
from indexer.net.http.host_limits import FAILURE_THRESHOLD
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.identity_cache import IdentityCache
from indexer.reasons import Desync, FetchFailure
from indexer.sync.identity import StoredIdentity
from indexer.sync.repo import Repo, StreamPoint, SyncStatus
from indexer.sync.scope import Track
from indexer.sync.shard import Shard
from indexer.telemetry.metrics import Metrics
from tests.db.repo_rows import did, insert
from tests.net.http.scripted_host import ScriptedHost, http_response
from tests.net.pds.missing_methods import MISSING_METHOD_ANSWERS, MissingMethodAnswer
from tests.tasks.crawl_scenario import (
    HIDDEN,
    NEWER,
    NO_WAIT,
    STORED,
    Crawl,
    after,
    missing_method,
    page,
    path,
    status_path,
    status_response,
    stored,
)

pytestmark = pytest.mark.slow

KEY = PrivateKey.from_seed("k256", b"reconciliation").public.did_key()


async def test_account_that_became_active_unnoticed_is_shown_and_resynced(crawl: Crawl) -> None:
    names = ("back", "still hidden", "moved")
    await insert(crawl.db, *[stored(name, **HIDDEN, hosting_relay="wss://r.test", hosting_seq=7) for name in names])
    crawl.lists(*[(did(name), STORED) for name in names])
    crawl.tells("back", active=True)
    crawl.tells("still hidden", active=False)
    crawl.host.pages[status_path("moved")] = http_response(b'{"error": "RepoNotFound"}', status=404)
    assert (await crawl.reconcile()).found == 1
    assert set(await crawl.inactive()) == {did("still hidden"), did("moved")}
    back = await crawl.row("back")
    assert (back.active, back.hosting_status, back.hosting_seq) == (True, None, 7)
    assert (back.sync_status, back.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.REACTIVATED)
    assert await crawl.sql.fetchval("select count(*) from atproto.changes where action = 'visible'") == 1


async def test_account_that_is_not_listed_is_hidden_if_the_relay_says_so(crawl: Crawl) -> None:
    """It was taken down or deleted while messages were lost."""
    names = ("listed", "listed as inactive", "deleted", "active", "elsewhere")
    await insert(crawl.db, *[stored(name) for name in names], Repo(did("never fetched"), version=1))
    crawl.lists((did("listed"), STORED), {"did": did("listed as inactive"), "rev": STORED, "active": False})
    crawl.tells("listed as inactive", active=False)
    crawl.tells("active", active=True)
    crawl.host.pages[status_path("deleted")] = status_response("deleted", active=False, status="deleted")
    crawl.host.pages[status_path("elsewhere")] = http_response(b'{"error": "RepoNotFound"}', status=404)
    progress = await crawl.reconcile()
    rows = await crawl.sql.fetch("select did, hosting_status, erase_at is not null from indexer.repo where not active")
    assert {tuple(row) for row in rows} == {
        (did("listed as inactive"), "deactivated", False),
        (did("deleted"), "deleted", True),
    }
    assert (progress.listed, progress.found) == (2, 3)
    assert (await crawl.row("elsewhere")).sync_reason is Desync.STATUS_UNKNOWN, "its host is asked"
    logged = await crawl.sql.fetch("select did, action from atproto.changes where action in ('hidden', 'deleted')")
    assert sorted([action for _, action in logged]) == ["deleted", "hidden", "hidden"]
    assert len(crawl.host.requests) == 5


async def test_answer_is_recorded_with_the_position_of_the_relays_stream(crawl: Crawl) -> None:
    place = {"hosting_relay": "wss://r.test", "hosting_seq": 7}
    await insert(crawl.db, stored("back", **HIDDEN, **place), stored("gone", **place))
    crawl.lists((did("back"), STORED))
    crawl.tells("back", active=True)
    crawl.tells("gone", active=False)
    points = {crawl.host.url: StreamPoint("wss://other.test", 2, 50, 1_767_225_601.5)}
    await crawl.reconcile(stream_point=points.get)
    assert await crawl.inactive() == [did("gone")]
    for repo in [await crawl.row("back"), await crawl.row("gone")]:
        recorded = repo.hosting_relay, repo.hosting_epoch, repo.hosting_seq, repo.hosting_time
        assert recorded == points[crawl.host.url]


async def test_requests_for_an_account_whose_row_was_removed_meanwhile_are_not_repeated(crawl: Crawl) -> None:
    await insert(crawl.db, stored("gone"))
    crawl.lists()
    remove = partial(crawl.sql.execute, "delete from indexer.repo where did = $1", did("gone"))
    crawl.host.pages[status_path("gone")] = after(remove, http_response(status=500))
    assert (await crawl.reconcile()).finished_at is not None
    assert crawl.requests_for("gone") == 1


RULE = (
    # before, the list, the relay's answer, the host's answer, after
    ("shown", "unlisted", "throttled", "-", "withheld throttled"),
    ("shown", "unlisted", "takendown", "-", "hidden takendown"),
    ("shown", "unlisted", "501", "-", "status-unknown"),
    ("shown", "unlisted", "RepoNotFound", "-", "status-unknown"),
    ("shown", "unlisted", "RepoDeactivated", "-", "hidden deactivated"),
    ("shown", "deactivated", "501", "-", "hidden deactivated"),
    ("shown", "desynchronized", "501", "-", "withheld desynchronized"),
    ("shown", "deactivated", "active", "-", "shown"),
    ("withheld", "active", "active", "-", "reactivated"),
    ("withheld", "unlisted", "suspended", "-", "hidden suspended"),
    ("withheld", "unlisted", "501", "-", "withheld throttled"),
    ("hidden", "active", "active", "active", "reactivated"),
    ("hidden", "active", "active", "takendown", "hidden deactivated"),
    ("hidden", "active", "active", "500", "reactivated"),
    ("hidden", "active", "501", "active", "reactivated"),
    ("hidden", "active", "501", "deactivated", "hidden deactivated"),
    ("hidden", "active", "501", "500", "hidden deactivated"),
    ("hidden", "active", "501", "501", "reactivated"),
    ("hidden", "active", "deactivated", "-", "hidden deactivated"),
)
BEFORE: dict[str, dict[str, Any]] = {
    "shown": {},
    "hidden": HIDDEN,
    "withheld": {
        "hosting_status": "throttled",
        "withheld_since": 1_767_225_600.0,
        "sync_status": SyncStatus.DESYNCHRONIZED,
        "sync_reason": Desync.WITHHELD,
        "next_attempt_at": inf,
    },
}


def answer(word: str) -> bytes:
    """Return the answer of a relay or host to `getRepoStatus`: a status, an error name, or an HTTP status."""
    if word.isdigit():
        return http_response(status=int(word))
    if word.startswith("Repo"):
        return http_response(orjson.dumps({"error": word}), status=400)
    return status_response("a", active=word == "active", status=word)


@pytest.mark.parametrize(("before", "listed", "relay", "own_host", "after"), RULE)
async def test_three_sources_of_the_hosting_status_are_weighed_by_one_rule(
    crawl: Crawl, before: str, listed: str, relay: str, own_host: str, after: str
) -> None:
    """docs/protocol.md#accounts has the rule in words."""
    await insert(crawl.db, stored("a", **BEFORE[before]))
    entry: dict[str, object] = {"did": did("a"), "rev": STORED}
    inactive = {"active": False, "status": listed}
    crawl.lists(*([] if listed == "unlisted" else [entry if listed == "active" else entry | inactive]))
    crawl.host.pages[status_path("a")] = answer(relay)
    async with ScriptedHost() as pds:
        if own_host != "-":
            pds.pages[status_path("a")] = answer(own_host)
        pds.pages[f"/xrpc/com.atproto.sync.getLatestCommit?did={did('a')}"] = http_response(b"{}")
        identities = IdentityCache(Directory(pds.url), crawl.db.identities, Metrics(), clock=time, refresh_rate=inf)
        await crawl.reconcile(identities=identities)
        await identities.close()
    row = await crawl.row("a")
    if not row.active:
        state = f"hidden {row.hosting_status}"
    elif row.withheld_since is not None:
        state = f"withheld {row.hosting_status}"
        assert row.sync_status is SyncStatus.DESYNCHRONIZED
    else:
        state = row.sync_reason or "shown"
        state = "reactivated" if before == "withheld" and row.next_attempt_at != inf else state
    assert state == after
    assert bool(pds.requests) is (own_host != "-")


@pytest.mark.parametrize("server", MISSING_METHOD_ANSWERS, ids=lambda answer: answer.server)
async def test_account_is_fetched_again_if_the_relay_does_not_offer_its_status(
    crawl: Crawl, server: MissingMethodAnswer
) -> None:
    await insert(crawl.db, stored("a"))
    crawl.lists()
    crawl.host.pages[status_path("a")] = missing_method(server)
    await crawl.reconcile()
    assert (await crawl.row("a")).sync_reason is Desync.STATUS_UNKNOWN
    assert crawl.requests_for("a") == 1


async def test_listed_account_that_the_relay_withholds_is_added_and_not_called_current(crawl: Crawl) -> None:
    crawl.lists(
        {"did": did("a"), "rev": STORED, "active": False, "status": "throttled"},
        {"did": did("b"), "rev": STORED, "active": False},
    )
    crawl.host.pages[status_path("a")] = answer("throttled")
    await crawl.reconcile(track=Track.ALL)
    row = await crawl.row("a")
    assert (row.active, row.hosting_status, row.sync_status) == (True, "throttled", SyncStatus.DESYNCHRONIZED)
    assert row.withheld_since is not None
    shown = await crawl.sql.fetch("select did, visible, hosting_status, withheld_since is null from atproto.repos")
    assert list(map(tuple, shown)) == [(did("a"), True, "throttled", False)]


class Directory(DidResolver):
    """A directory in which all accounts have the same PDS.

    Attributes:
        down: It gives no answer.
    """

    def __init__(self, pds: str) -> None:
        self._pds = pds
        self.down = False

    async def resolve(self, did: str, *, known: bool = True) -> StoredIdentity:  # noqa: ARG002 - as the cache calls it
        if self.down:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "the directory is down")
        return StoredIdentity(did, None, self._pds, KEY, fetched_at=time())


@pytest.mark.parametrize("case", ["hosted here", "moved", "known nowhere", "directory down", "over budget"])
async def test_pds_reports_only_the_accounts_that_it_hosts(case: str, crawl: Crawl) -> None:
    """It still knows accounts that have moved to another PDS. Their stored identity is from before the move."""
    moves, url = case != "hosted here", crawl.host.url
    await insert(crawl.db, stored("shown"), stored("hidden", **HIDDEN))
    crawl.lists((did("hidden"), STORED))
    crawl.tells("shown", active=False)
    crawl.tells("hidden", active=True)
    directory = Directory("https://new.test" if moves else url)
    directory.down = case in ("known nowhere", "directory down")
    if case != "known nowhere":
        await crawl.db.identities.save(
            [StoredIdentity(did(name), None, url, KEY, time() - 200) for name in ("shown", "hidden", "other")]
        )
    rate = 1e-9 if case == "over budget" else inf
    identities = IdentityCache(directory, crawl.db.identities, Metrics(), clock=time, refresh_rate=rate)
    if case == "over budget":
        await identities.lookup(did("other"), refresh=True)
    progress = await crawl.reconcile(identities=identities, sources_are_hosts=True)
    await identities.close()
    active = await crawl.sql.fetch("select did from indexer.repo where active")
    assert [row["did"] for row in active] == [did("shown" if moves else "hidden")]
    assert progress.found == (0 if moves else 2)
    assert len(crawl.host.requests) == 3, "the PDS was asked about both accounts"


@pytest.fixture
async def unlisted(crawl: Crawl) -> AsyncIterator[list[str]]:
    """Yield the names of stored accounts that are not listed, in order. The relay calls only the last one inactive."""
    names = sorted("abcde", key=did)
    await insert(crawl.db, *map(stored, names))
    crawl.lists()
    for name in names:
        crawl.tells(name, active=name != names[-1])
    yield names
    assert await crawl.inactive() == [did(names[-1])]


async def test_next_reconciliation_asks_for_unlisted_accounts_beyond_the_limit(
    crawl: Crawl, unlisted: list[str]
) -> None:
    reconciliation = crawl.reconciliation(replace(NO_WAIT, max_unlisted=2))
    for _ in range(3):
        await crawl.reconcile(reconciliation)
    assert [crawl.requests_for(name) for name in unlisted] == [1] * 5


async def test_reconciliation_continues_with_the_unlisted_account_at_which_the_relay_failed(
    crawl: Crawl, unlisted: list[str]
) -> None:
    """A relay that allows only some requests at a time would never answer the last ones otherwise."""
    for name in unlisted[1:]:
        crawl.host.pages[status_path(name)] = http_response(b'{"error": "RateLimitExceeded"}', status=400)
    reconciliation = crawl.reconciliation()
    for name in unlisted[1:]:
        with pytest.raises(UnavailableError):
            await crawl.reconcile(reconciliation)
        crawl.tells(name, active=name != unlisted[-1])
    for _ in range(2):
        await crawl.reconcile(reconciliation)
    asked = [line.split(" ")[1].partition("?did=")[2] for line in crawl.host.requests if "getrepostatus" in line]
    failed = [name for name in unlisted[1:] for _ in range(2)]
    expected = [unlisted[0], *failed, *unlisted[:-1]]
    assert asked == [did(name) for name in expected], "then the next one asks for all again"


async def test_unlisted_account_is_found_although_the_relay_lists_many_accounts_of_another_shard(
    crawl: Crawl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not stored in this database, so the set of listed accounts has no room for them."""
    monkeypatch.setattr("indexer.tasks.repo_list_pages.MIN_ACCOUNTS", 1)
    shard = Shard(0, 2)
    own = next(name for name in map(str, count()) if shard.owns(did(name)))
    others = [did(name) for name in map(str, range(1_000)) if not shard.owns(did(name))]
    await insert(crawl.db, stored(own))
    crawl.lists(*[(other, STORED) for other in others])
    crawl.tells(own, active=False)
    await crawl.reconcile(settings=replace(NO_WAIT, shard=shard))
    assert await crawl.inactive() == [did(own)]


async def test_account_hidden_by_the_stream_meanwhile_stays_hidden(crawl: Crawl) -> None:
    """It is marked as deleted just before the response is sent."""
    await insert(crawl.db, stored("back", **HIDDEN))
    crawl.lists((did("back"), STORED))

    def delete(repo: Repo) -> Repo:
        return repo._replace(version=repo.version + 1, hosting_status="deleted")

    response = status_response("back", active=True)
    crawl.host.pages[status_path("back")] = after(partial(crawl.db.repos.update, did("back"), delete), response)
    assert (await crawl.reconcile()).found == 0
    repo = await crawl.row("back")
    assert (repo.active, repo.hosting_status) == (False, "deleted")


@pytest.mark.parametrize("active", [True, False])
async def test_hosting_status_is_followed_although_a_resync_changes_the_row_meanwhile(
    active: bool, crawl: Crawl
) -> None:
    """Another part of it is changed just before the response is sent."""
    await insert(crawl.db, stored("a") if not active else stored("a", active=False, hosting_status="suspended"))
    crawl.lists(*[(did("a"), STORED)] * active)

    def fail(repo: Repo) -> Repo:
        return repo._replace(version=repo.version + 1, attempts=3)

    response = status_response("a", active=active, status="suspended")
    crawl.host.pages[status_path("a")] = after(partial(crawl.db.repos.update, did("a"), fail), response)
    assert (await crawl.reconcile()).found == 1
    repo = await crawl.row("a")
    assert (repo.active, repo.hosting_status) == ((True, None) if active else (False, "suspended"))


async def test_account_of_which_the_relay_never_tells_the_status_is_fetched_again(crawl: Crawl) -> None:
    """It may be deleted, so it does not count as synchronized. The others are compared, one at a second attempt."""
    names = sorted("abc", key=did)
    await insert(crawl.db, *map(stored, names))
    crawl.lists()
    crawl.tells(names[0], active=False)

    async def recover() -> None:
        crawl.tells(names[2], active=False)

    crawl.host.pages[status_path(names[1])] = http_response(status=500)
    crawl.host.pages[status_path(names[2])] = after(recover, http_response(status=502))
    with capture_logs() as lines:
        progress = await crawl.reconcile()
    assert progress.finished_at is not None
    rows = await crawl.sql.fetch("select did, sync_reason from indexer.repo where active")
    assert [tuple(row) for row in rows] == [(did(names[1]), "status-unknown")]
    assert [crawl.requests_for(name) for name in names] == [1, 2, 2]
    [logged] = [line for line in lines if line["event"] == "reconciliation.status-unknown"]
    assert (logged["accounts"], logged["error"]) == (1, "http-status: 500")


async def test_hidden_account_of_which_the_relay_never_tells_the_status_stays_hidden(crawl: Crawl) -> None:
    await insert(crawl.db, stored("unknown", **HIDDEN), stored("back", **HIDDEN), stored("behind"))
    crawl.lists((did("unknown"), STORED), (did("back"), STORED), cursor="x")
    crawl.host.pages[path("x")] = page((did("behind"), NEWER))
    crawl.host.pages[status_path("unknown")] = http_response(b"no JSON")
    crawl.tells("back", active=True)
    assert (await crawl.reconcile()).found == 2
    assert await crawl.inactive() == [did("unknown")]
    assert await crawl.behind() == {did("behind"): NEWER}
    assert crawl.requests_for("unknown") == 2


async def test_accounts_without_a_status_do_not_use_up_their_attempts_while_the_relay_is_paused(crawl: Crawl) -> None:
    """Five failed requests in a row pause the relay. The reconciliation fails then, and continues later."""
    names = sorted(map(str, range(FAILURE_THRESHOLD)), key=did)
    await insert(crawl.db, *map(stored, names))
    crawl.lists()
    for name in names:
        crawl.host.pages[status_path(name)] = http_response(status=500)
    with pytest.raises(UnavailableError, match="host-paused"):
        await crawl.reconcile()
    assert sum(map(crawl.requests_for, names)) == FAILURE_THRESHOLD
    assert await crawl.sql.fetch("select from indexer.repo where sync_reason is not null") == []
