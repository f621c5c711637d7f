"""Hosts and relays that lie in their lists harm only themselves, and cost a bounded number of requests and rows."""

import asyncio
from base64 import b32encode
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from time import time
from typing import Any

import pytest
import stamina
from aiohttp import web

from indexer.atproto.syntax import tid_of
from indexer.concurrency.stage_progress import Work
from indexer.db import Database
from indexer.sync.repo import SyncStatus
from indexer.tasks import hosts as module
from indexer.tasks.hosts import FOLLOWED_PER_DOMAIN, HostCrawl
from tests.background import running
from tests.db.repo_rows import head
from tests.tasks.host_crawl import QUICK, Hosts, host_network
from tests.tasks.test_hosts import store
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
async def hosts(db: Database) -> AsyncIterator[Hosts]:
    async with host_network(db) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def no_retries() -> Any:
    with stamina.set_testing(True, attempts=1):
        yield


def invented(number: int) -> str:
    return "did:plc:" + b32encode(sha256(b"%d" % number).digest()[:15]).decode().lower()


def lookups(crawl: HostCrawl) -> int:
    """Return how many identities were looked up over the network."""
    totals = crawl.identities.lookups["plc"]
    return totals.answered + totals.failed


async def sizes(db: Database) -> tuple[int, int, int]:
    """Return the numbers of repos, of lists of hosts, and of hosts of relays."""
    async with db.connection() as connection:
        row = await connection.fetchrow(
            "select (select count(*) from indexer.repo), (select count(*) from indexer.host_list), "
            "(select count(*) from indexer.relay_host)"
        )
    assert row is not None
    repos, lists, hosts = row
    return repos, lists, hosts


async def test_list_of_a_million_invented_accounts_costs_few_pages_and_lookups_and_no_row(hosts: Hosts) -> None:
    """The honest host is read meanwhile."""
    honest = [hosts.network.create_account(pds=1).did for _ in range(5)]
    liar = hosts.network.pdses[0]

    def page(cursor: str) -> dict[str, Any]:
        start = int(cursor or 0)
        return {"repos": [{"did": invented(start + n)} for n in range(1_000)], "cursor": str(start + 1_000)}

    liar.pages = page
    crawl = hosts.crawl()
    await hosts.read(crawl, 0)
    await hosts.read(crawl, 1)
    assert len(liar.requests) == module.MAX_UNPROVEN // 1_000 + 1
    assert lookups(crawl) <= module.REFUSED_PER_HOUR + len(honest) + 1
    assert set(await hosts.repos()) == set(honest)
    assert await sizes(hosts.db) == (len(honest), 2, 2)
    assert (await hosts.view())[
        "list_error"
    ] == "bad-answer: the identities of most listed accounts do not name the host"
    await hosts.read(crawl, 0)
    assert lookups(crawl) <= module.REFUSED_PER_HOUR + len(honest) + 1, "its allowance is used up"


async def test_list_with_accounts_of_other_hosts_adds_and_desynchronizes_none(hosts: Hosts) -> None:
    known, *others = [hosts.network.create_account(pds=1) for _ in range(150)]
    crawl = hosts.crawl()
    await store(hosts, crawl, known.did, head(known.rev))
    newer = tid_of(int(time() * 1e6))
    lies = [{"did": one.did, "rev": newer, "active": True} for one in others]
    hosts.network.pdses[0].pages = lambda _cursor: {"repos": [{"did": known.did, "rev": newer}, *lies]}
    stored = await hosts.read(crawl)
    assert stored.failures == 0
    assert set(await hosts.repos()) == {known.did}
    assert (await hosts.repos())[known.did].sync_status is SyncStatus.SYNCHRONIZED
    assert (await hosts.view())["unproven_accounts"] == 150
    assert lookups(crawl) <= module.REFUSED_PER_HOUR + 2
    hosts.network.pdses[0].pages = lambda _cursor: {"repos": [{"did": known.did, "active": False, "status": "deleted"}]}
    await hosts.read(crawl)
    assert (await hosts.repos())[known.did].active


async def test_statuses_that_change_with_each_list_cause_few_questions_and_change_nothing(hosts: Hosts) -> None:
    accounts = [hosts.network.create_account(pds=0) for _ in range(150)]
    crawl = hosts.crawl()
    await hosts.read(crawl)
    before = await hosts.repos()
    assert len(before) == len(accounts)
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({"did": request.query["did"], "active": True})

    hosts.network.pdses[0].status_answer = answer
    for status in ("deactivated", "deleted", "takendown"):
        lies = [{"did": one.did, "active": False, "status": status} for one in accounts]
        hosts.network.pdses[0].pages = lambda _cursor, lies=lies: {"repos": lies}
        await hosts.read(crawl)
    assert asked == 3 * module.MAX_STATUSES
    assert await hosts.repos() == before


@pytest.mark.parametrize("accounts", [0, 1])
async def test_endless_list_of_nearly_empty_pages_ends(hosts: Hosts, accounts: int) -> None:
    liar = hosts.network.pdses[0]
    liar.pages = lambda cursor: {
        "repos": [{"did": invented(0)}] * accounts, "cursor": f"{int(cursor or 0) + 1}"
    }  # fmt: skip
    stored = await hosts.read()
    assert stored.failures == 1
    assert len(liar.requests) == module.MAX_SMALL_PAGES + 1


async def test_page_that_is_too_large_ends_the_list(hosts: Hosts) -> None:
    hosts.network.pdses[0].pages = lambda _cursor: {"repos": [{"did": invented(0), "head": "x" * (5 << 20)}]}
    assert (await hosts.read()).failures == 1
    assert (await hosts.view())["list_error"].startswith("too-large: ")


async def test_host_that_does_not_answer_delays_no_other_one(hosts: Hosts) -> None:
    accounts = [hosts.network.create_account(pds=1).did for _ in range(3)]
    silent = hosts.network.pdses[0]
    silent.delay = 3_600.0
    crawl = hosts.crawl(replace(QUICK, concurrency=2, per_domain=2))
    async with running(crawl.run()):
        await until(lambda: bool(silent.requests))
        await until(lambda: is_complete(hosts, 1))
    assert set(await hosts.repos()) == set(accounts)


async def test_list_of_slow_pages_is_read_in_turns_from_its_cursor(hosts: Hosts) -> None:
    accounts = [hosts.network.create_account(pds=0).did for _ in range(3)]
    slow = hosts.network.pdses[0]
    slow.pages = lambda cursor: {
        "repos": [{"did": accounts[int(cursor or 0)]}]
    } | ({"cursor": str(int(cursor or 0) + 1)} if int(cursor or 0) < 2 else {})  # fmt: skip
    crawl = hosts.crawl(replace(QUICK, visit=0.0))
    await hosts.read(crawl)
    assert slow.requests == [""], "the time is over after a page"
    assert (await hosts.view())["accounts"] is None
    crawl = hosts.crawl()
    await hosts.read(crawl)
    assert slow.requests == ["", "", "1", "2"], "the accounts of the first page were not looked up in time"
    assert (await hosts.view())["accounts"] == 3
    slow.requests.clear()
    hurried = hosts.crawl(replace(QUICK, visit=0.0))
    for read in ([""], ["", "1"], ["", "1", "2"]):
        await hosts.read(hurried)
        assert slow.requests == read, "a page at a time"
        is_complete = read[-1] == "2"
        assert ((await hosts.stored()).cursor is None) is is_complete
        due = await hosts.db.host_lists.due(range(256), time() - 3_600, time())
        assert (hosts.name() in due) is not is_complete, "the rest is due"


async def test_hosts_of_one_domain_leave_visits_to_others(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "registered_domain", lambda _host: "liar.test")
    for pds in hosts.network.pdses:
        pds.delay = 3_600.0
    crawl, looks = hosts.crawl(replace(QUICK, concurrency=2, per_domain=1)), list[object]()

    async def count_look() -> list[str]:
        looks.append(None)
        return []

    monkeypatch.setattr(crawl, "most_lacking", count_look)
    async with running(crawl.run()):
        await until(lambda: any(pds.requests for pds in hosts.network.pdses))
        looks.clear()
        await until(lambda: len(looks) > 5)
        assert sorted(len(pds.requests) for pds in hosts.network.pdses) == [0, 1]


async def test_host_with_accounts_without_end_adds_those_of_an_hour(hosts: Hosts) -> None:
    accounts = [hosts.network.create_account(pds=0).did for _ in range(12)]
    crawl = hosts.crawl(new_accounts=5.0)
    await hosts.read(crawl)
    assert len(await hosts.repos()) == 5
    await hosts.read(crawl)
    assert len(await hosts.repos()) == 5
    assert (await hosts.view())["unproven_accounts"] == len(accounts) - 5


async def test_relay_that_invents_hosts_fills_a_bounded_table_and_delays_no_honest_host(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HOSTS", 40)
    monkeypatch.setattr(module, "MAX_HOSTS_OF_DOMAIN", 15)
    relay = hosts.network.relay
    relay.invented = [*(f"h{n}.liar.test" for n in range(30)), *(f"liar{n}.test" for n in range(100))]
    crawl = hosts.crawl()
    progress = await crawl.read_hosts(hosts.network.relay_url)
    assert (progress.found, await sizes(hosts.db)) == (40, (0, 40, 40))
    due = await hosts.db.host_lists.due(range(256), time(), time())
    for host in due:
        if "liar" in host:
            await hosts.db.host_lists.save_failure(host, "no-such-host", time())
    for pds in range(2):
        await crawl.read_list(hosts.name(pds), Work())
    due = await hosts.db.host_lists.due(range(256), time(), time())
    assert set(due[:2]) == {hosts.name(0), hosts.name(1)}
    relay.invented = []
    await crawl.read_hosts(hosts.network.relay_url)
    assert await sizes(hosts.db) == (0, 2, 2)


async def test_hosts_of_one_domain_are_followed_up_to_a_share(hosts: Hosts) -> None:
    names = [f"h{n}.liar.test" for n in range(20)] + ["honest.test"]
    rows = [(name, f"https://{name}", 0, "active") for name in names]
    await hosts.db.host_lists.save_hosts(hosts.network.relay_url, rows, time())
    async with hosts.db.connection() as connection:
        await connection.execute("update indexer.host_list set lacking = 1000, failures = 0")
        await connection.execute("update indexer.host_list set lacking = 1 where host = 'honest.test'")
    followed = await hosts.crawl().most_lacking()
    assert len(followed) == FOLLOWED_PER_DOMAIN + 1
    assert followed[-1] == "honest.test"


async def is_complete(hosts: Hosts, pds: int) -> bool:
    return bool((await hosts.view(pds))["list_ended_at"])


async def test_endless_list_of_hosts_ends(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HOST_PAGES", 5)
    hosts.network.relay.endless = True
    await asyncio.wait_for(hosts.crawl().read_hosts(hosts.network.relay_url), 60)
    assert hosts.network.relay.host_pages == 5
