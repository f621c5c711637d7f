"""The repo lists of hosts: accounts that relays withhold or omit are found, and followed."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from time import time
from typing import Any

import pytest
import stamina
from structlog.testing import capture_logs

from indexer.atproto.syntax import tid_micros, tid_of
from indexer.concurrency.stage_progress import Work
from indexer.db import Database
from indexer.reasons import Desync
from indexer.sync.account import plan_active
from indexer.sync.repo import PARKED, Head, SyncStatus
from indexer.sync.scope import Track
from indexer.sync.shard import Shard
from indexer.tasks.hosts import HostCrawl
from indexer.telemetry.conditions import ACCOUNTS_WITHHELD
from tests.background import running
from tests.db.repo_rows import head, insert, synchronized
from tests.tasks.host_crawl import QUICK, Hosts, host_network
from tests.waiting import until

pytestmark = pytest.mark.slow

NOTE = "com.example.note"


@pytest.fixture
async def hosts(db: Database) -> AsyncIterator[Hosts]:
    async with host_network(db) as hosts:
        yield hosts


async def store(hosts: Hosts, crawl: HostCrawl, did: str, at: Head, **fields: Any) -> None:
    """Store an account with its identity, at this head."""
    await crawl.identities.lookup(did)
    await insert(hosts.db, synchronized("any", did=did, head=at, synchronized_at=time(), **fields))


async def test_accounts_that_only_their_host_lists_are_added_and_the_relay_is_asked(hosts: Hosts) -> None:
    shown, throttled, gone = [hosts.network.create_account(pds=0) for _ in range(3)]
    hosts.network.relay.withheld.add(throttled.did)
    gone.set_status("deactivated")
    await hosts.read()
    repos = await hosts.repos()
    assert set(repos) == {shown.did, throttled.did}
    assert {repo.from_stream for repo in repos.values()} == {True}, "only the host has named them"
    assert (repos[shown.did].withheld_since, repos[shown.did].hosting_status) == (None, None)
    assert repos[throttled.did].withheld_since is not None
    assert repos[throttled.did].hosting_status == "throttled"


async def test_what_a_list_counts_is_public(hosts: Hosts) -> None:
    network = hosts.network
    stored, throttled, elsewhere, gone, unknown = [network.create_account(pds=0) for _ in range(5)]
    network.relay.withheld.add(throttled.did)
    network.pdses[0].hosted["did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"] = network.pdses[0].hosted[stored.did]  # invented
    elsewhere.pds = network.pdses[1]
    elsewhere.rotate_key()  # publishes the new PDS
    gone.set_status("deactivated")
    crawl = hosts.crawl()
    await store(hosts, crawl, stored.did, head(stored.rev))
    await hosts.read(crawl)
    await hosts.read(crawl)
    view, at_relay = await hosts.view(), await hosts.view(name="relay_hosts")
    assert {name: view[name] for name in view if name.endswith(("accounts", "repos", "passed_on"))} == {
        "accounts": 5, "inactive_accounts": 1, "unproven_accounts": 2, "repos": 3, "synchronized_repos": 1,
        "accounts_not_passed_on": 1,
    }  # fmt: skip
    assert view["last_commit_at"].timestamp() == pytest.approx(tid_micros(stored.rev) / 1e6)
    assert view["list_began_at"] <= view["list_ended_at"]
    assert (at_relay["accounts"], at_relay["status"]) == (6, "active")
    assert (at_relay["withheld_accounts"], at_relay["withheld_by_status"]) == (1, '{"throttled": 1}')
    assert unknown.did in await hosts.repos()


WITHHELD: dict[str, Any] = {
    "sync_status": SyncStatus.DESYNCHRONIZED, "sync_reason": Desync.WITHHELD, "next_attempt_at": PARKED,
    "withheld_since": 1.0, "hosting_status": "throttled",
}  # fmt: skip


async def test_withheld_account_becomes_due_when_its_host_lists_a_newer_rev(hosts: Hosts) -> None:
    account, crawl = hosts.network.create_account(pds=0), hosts.crawl()
    before = account.rev
    await store(hosts, crawl, account.did, head(before), **WITHHELD)
    await hosts.read(crawl)
    assert (await hosts.repos())[account.did].next_attempt_at == PARKED, "it is the stored rev"
    account.create(NOTE, {"n": 1})
    await hosts.read(crawl)
    repo = (await hosts.repos())[account.did]
    assert (repo.next_attempt_at, repo.latest_unverified_rev) == (None, account.rev)
    await hosts.db.repos.update(
        account.did, lambda repo: repo._replace(version=repo.version + 1, next_attempt_at=PARKED)
    )
    behind = await hosts.db.crawls.desynchronize_behind({account.did: account.rev}, time())
    assert behind == 0, "it was not synchronized before"
    assert repo.sync_reason is Desync.WITHHELD


async def test_revs_that_the_host_makes_up_cause_fetches_after_growing_pauses(hosts: Hosts) -> None:
    """The fetch of each finds the stored head, so that the repo waits again."""
    account, crawl = hosts.network.create_account(pds=0), hosts.crawl()
    await store(hosts, crawl, account.did, head("3laaaaaaaaa22"), **WITHHELD)
    waits = []
    for rev in ("3laaaaaaaab22", "3laaaaaaaac22", "3laaaaaaaad22", "3laaaaaaaae22"):
        hosts.network.pdses[0].pages = lambda _cursor, rev=rev: {"repos": [{"did": account.did, "rev": rev}]}
        began = time()
        await hosts.read(crawl)
        repo = (await hosts.repos())[account.did]
        waits.append(round((repo.next_attempt_at or began) - began))
        await hosts.db.repos.update(
            account.did, lambda repo: repo._replace(version=repo.version + 1, next_attempt_at=PARKED)
        )
    assert waits[0] == 0
    assert 40 < waits[1] < waits[2] < waits[3] < 400


@pytest.mark.parametrize(
    ("lags", "behind"),
    [
        ({"0/2": -60.0, "1/2": -60.0}, True),
        ({"0/2": 3_600.0, "1/2": -60.0}, False),
        ({"0/2": -60.0, "1/2": 3_600.0}, False),
        ({"0/2": -60.0}, False),
        ({"0/1": 3_600.0, "0/2": -60.0, "1/2": -60.0}, True),
    ],
)
async def test_account_whose_commits_the_stream_did_not_bring_is_desynchronized_unless_a_process_lags(
    hosts: Hosts, lags: dict[str, float], behind: bool
) -> None:
    await hosts.save_cursors(lags)
    account, crawl = hosts.network.create_account(pds=0), hosts.crawl()
    await store(hosts, crawl, account.did, head(account.rev))
    account.create(NOTE, {"n": 1})
    await hosts.read(crawl)
    repo = (await hosts.repos())[account.did]
    assert (repo.sync_reason is Desync.BEHIND) is behind
    assert (await hosts.view())["accounts_not_passed_on"] == behind
    assert await hosts.db.host_lists.most_lacking(range(256)) == [hosts.name()] * behind


async def test_account_that_catches_up_in_time_stays_synchronized(hosts: Hosts) -> None:
    account = hosts.network.create_account(pds=0)
    crawl = hosts.crawl(replace(QUICK, settle=0.5))
    await store(hosts, crawl, account.did, head(account.rev))
    account.create(NOTE, {"n": 1})
    reading = asyncio.create_task(hosts.read(crawl))
    await until(lambda: bool(hosts.network.pdses[0].requests))
    await hosts.db.repos.update(
        account.did, lambda repo: repo._replace(version=repo.version + 1, head=head(account.rev))
    )
    await reading
    assert (await hosts.repos())[account.did].sync_status is SyncStatus.SYNCHRONIZED


async def test_rev_in_the_future_means_nothing(hosts: Hosts) -> None:
    account, crawl = hosts.network.create_account(pds=0), hosts.crawl()
    await store(hosts, crawl, account.did, head(account.rev))
    future = tid_of(int((time() + 3_600) * 1e6))
    hosts.network.pdses[0].pages = lambda _cursor: {"repos": [{"did": account.did, "rev": future}]}
    await hosts.read(crawl)
    assert (await hosts.repos())[account.did].sync_status is SyncStatus.SYNCHRONIZED


async def test_status_that_the_host_lists_and_confirms_is_followed(hosts: Hosts) -> None:
    leaving, back, taken = [hosts.network.create_account(pds=0) for _ in range(3)]
    crawl = hosts.crawl()
    await store(hosts, crawl, leaving.did, head(leaving.rev))
    await store(hosts, crawl, back.did, head(back.rev), active=False, hosting_status="deactivated")
    await store(hosts, crawl, taken.did, head(taken.rev), active=False, hosting_status="takendown")
    leaving.set_status("deactivated")
    await hosts.read(crawl)
    repos = await hosts.repos()
    assert [repos[one.did].active for one in (leaving, back, taken)] == [False, True, False], (
        "a relay may hide an account that is active on its host"
    )


@pytest.mark.parametrize("track", [Track.LISTED, Track.SIGNAL])
async def test_scope_that_does_not_want_all_repos_adds_none_of_a_list(hosts: Hosts, track: Track) -> None:
    hosts.network.create_account(pds=0)
    await hosts.read(hosts.crawl(track=track))
    assert not await hosts.repos()
    assert (await hosts.view())["accounts"] == 1


async def test_accounts_with_records_of_signal_collections_are_added_if_the_host_lists_them(hosts: Hosts) -> None:
    wanted, _ = [hosts.network.create_account(pds=0) for _ in range(2)]
    elsewhere = hosts.network.create_account(pds=1)
    hosts.network.pdses[0].by_collection = [wanted.did, elsewhere.did]
    await hosts.read(hosts.crawl(track=Track.SIGNAL, signals=[NOTE]))
    assert set(await hosts.repos()) == {wanted.did}


async def test_more_accounts_that_no_relay_passes_on_are_a_condition_until_there_is_none(hosts: Hosts) -> None:
    accounts, crawl = [hosts.network.create_account(pds=0) for _ in range(3)], hosts.crawl()
    relay = hosts.network.relay
    relay.withheld.update(account.did for account in accounts[:2])
    await hosts.read(crawl)
    [condition] = hosts.conditions.active()
    assert (condition.kind, condition.subject, condition.value) == (ACCOUNTS_WITHHELD, hosts.name(), 2)
    assert "do not pass on 2 of 3 accounts (0 before), and withhold 2 of them" in condition.message
    await hosts.read(crawl)
    assert [one.count for one in hosts.conditions.active()] == [1], "there are not more than before"
    [row] = (await hosts.db.reports.state())[0]["withheld"]
    assert row.pop("listed_seconds_ago") >= 0
    assert row == {"host": hosts.name(), "repos": 3, "synchronized": 0, "not_passed_on": 2, "at_relay": 3}
    for account in accounts:
        await hosts.db.repos.update(account.did, lambda repo: plan_active(repo, time()))
    await hosts.read(crawl)
    assert not hosts.conditions.active()
    assert not (await hosts.db.reports.state())[0]["withheld"]


@pytest.mark.parametrize(("at_relay", "status", "omitted"), [(2, "active", 1), (None, None, 0), (9, "banned", 3)])
async def test_accounts_that_a_relay_does_not_count_or_of_a_banned_host_are_omitted(
    hosts: Hosts, at_relay: int | None, status: str | None, omitted: int
) -> None:
    for _ in range(3):
        hosts.network.create_account(pds=0)
    stored = await hosts.read()
    row = (stored.host, stored.url, at_relay, status)
    await hosts.db.host_lists.save_hosts(hosts.network.relay_url, [row], time())
    await hosts.crawl().read_list(hosts.name(), Work())
    assert (await hosts.view())["accounts_not_passed_on"] == omitted


async def test_list_of_a_followed_host_is_read_again_soon_and_others_after_the_interval(hosts: Hosts) -> None:
    hidden = hosts.network.create_account(pds=0)
    hosts.network.create_account(pds=1)
    hosts.network.relay.withheld.add(hidden.did)
    crawl = hosts.crawl()
    async with running(crawl.run()):
        await until(lambda: len(hosts.network.pdses[0].requests) > 6)  # two for each reading
    assert len(hosts.network.pdses[1].requests) == 2
    assert crawl.totals == {"hosts": 2, "listed": 2, "failing": 0, "withheld": 1, "accounts": 1}


async def test_failing_list_is_due_again_after_growing_pauses(hosts: Hosts) -> None:
    await hosts.crawl().read_hosts(hosts.network.relay_url)
    lists, now, due = hosts.db.host_lists, time(), []
    for _ in range(4):
        await lists.save_failure(hosts.name(), "unreachable", now)
        waits = [
            wait for wait in range(60, 9_000, 60) if hosts.name() in await lists.due(range(256), now - 1, now + wait)
        ]
        due.append(waits[0])
    assert due == [360, 660, 1_260, 2_460]


@pytest.mark.parametrize(("status", "requests"), [(501, 1), (400, 2)])
async def test_list_of_hosts_that_cannot_be_read_is_read_again_soon_unless_the_relay_has_none(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, status: int, requests: int
) -> None:
    monkeypatch.setattr("indexer.tasks.hosts.RETRY_SECONDS", 0.01)
    hosts.network.relay.failure = status
    with stamina.set_testing(True, attempts=1), capture_logs() as lines:
        async with running(hosts.crawl().run()):
            await until(lambda: hosts.network.relay.host_pages >= requests)
            await until(lambda: any(line["event"] == "hosts.relay-failed" for line in lines))
            hosts.network.relay.failure = None
            if requests > 1:
                await until(lambda: all_complete(hosts))
    failed = [line["retry_seconds"] for line in lines if line["event"] == "hosts.relay-failed"]
    assert set(failed) == ({0.01} if requests > 1 else {QUICK.interval})


async def test_interrupted_reading_continues_at_its_cursor_with_what_it_has_counted(hosts: Hosts) -> None:
    first, second = [hosts.network.create_account(pds=0).did for _ in range(2)]
    pds = hosts.network.pdses[0]
    pages: dict[str, dict[str, Any]] = {
        "": {"repos": [{"did": first}], "cursor": "a"},
        "a": {"repos": [{"did": second}], "cursor": "b"},
        "b": {"repos": []},
    }

    def page(cursor: str) -> dict[str, Any]:
        pds.delay = 3_600.0 if cursor == "" else 0.0
        return pages[cursor]

    pds.pages = page
    reading = asyncio.create_task(hosts.read())
    await until(lambda: pds.requests == ["", "a"])
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    pds.delay = 0.0
    await hosts.read()
    assert pds.requests == ["", "a", "a", "b"]
    view = await hosts.view()
    assert (view["accounts"], view["repos"]) == (2, 2)


async def test_processes_divide_the_hosts_and_read_no_list_twice(db: Database) -> None:
    async with host_network(db, pds=8) as hosts:
        for number in range(24):
            hosts.network.create_account(pds=number % 8)
        crawls = [hosts.crawl(replace(QUICK, shard=Shard(index, 2))) for index in range(2)]
        async with running(*[crawl.run() for crawl in crawls]):
            await until(lambda: all_complete(hosts))
        assert [len(pds.requests) for pds in hosts.network.pdses] == [2] * 8, "two pages each"
        assert hosts.network.relay.host_pages == 1
        assert set(await hosts.repos()) == set(hosts.network.accounts), "of the buckets of both processes"
        owned = [sum(Shard(index, 2).owns(hosts.name(pds)) for pds in range(8)) for index in range(2)]
        assert [crawl.totals["hosts"] for crawl in crawls] == owned


async def all_complete(hosts: Hosts) -> bool:
    async with hosts.db.connection() as connection:
        number = await connection.fetchval("select count(*) from indexer.host_list where finished_at is not null")
    return bool(number == len(hosts.network.pdses))
