"""Repos are compared with their own hosts: what hints omit is found in one pass, and hosts lie only about their own."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import time
from typing import Any

import asyncpg
import pytest
from aiohttp import web

from indexer.atproto.syntax import tid_of
from indexer.db import Database
from indexer.demo.http_server import XrpcError
from indexer.demo.local_account import LocalAccount
from indexer.reasons import Desync, GapReason
from indexer.sync.changes import Batch
from indexer.sync.hints import JETSTREAM
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import Shard
from indexer.sync.stream import Cursor, Gap
from indexer.tasks import repo_checks as module
from indexer.tasks.repo_checks import RepoChecks, RepoCheckSettings
from tests.background import running
from tests.db.repo_rows import completed, head, insert, synchronized
from tests.tasks.host_crawl import Hosts, LyingPds, host_network
from tests.tasks.test_hosts import WITHHELD
from tests.waiting import until

pytestmark = pytest.mark.slow

NOTE = "com.example.note"
QUICK = RepoCheckSettings(retry=0.0, failure_pause=0.01)
FINE = (SyncStatus.SYNCHRONIZED, None)


@dataclass
class Checked:
    """Two PDSes with stored accounts, whose requests for statuses are counted."""

    hosts: Hosts

    def __post_init__(self) -> None:
        self.asked = Counter[str]()
        self.crawl = self.hosts.crawl()
        for pds in self.hosts.network.pdses:
            self.answer(pds)

    def answer(self, pds: LyingPds | int, answer: Any = None) -> None:
        """Let a PDS answer requests for statuses: with what this function returns for a DID, or else as usual."""
        host = self.hosts.network.pdses[pds] if isinstance(pds, int) else pds
        usual = LyingPds()  # of which only the method is used
        usual.hosted = host.hosted

        async def tell(request: web.Request) -> web.Response:
            self.asked[did := request.query["did"]] += 1
            if answer is None:
                return await usual._get_repo_status(request)  # noqa: SLF001
            return web.json_response(await answer(did))

        host.status_answer = tell

    def checks(self, settings: RepoCheckSettings = QUICK) -> RepoChecks:
        hosts = self.hosts
        crawl = self.crawl
        return RepoChecks(hosts.db, hosts.outbound, hosts.metrics, crawl.scope, crawl.identities, settings)

    async def accounts(self, number: int, pds: int = 0, **fields: Any) -> list[LocalAccount]:
        """Create accounts, and store them with their identities, at their heads."""
        accounts = [self.hosts.network.create_account(pds=pds) for _ in range(number)]
        for account in accounts:
            await self.crawl.identities.lookup(account.did)
            row = synchronized("any", did=account.did, head=head(account.rev), synchronized_at=time())
            await insert(self.hosts.db, row._replace(**fields))
        return accounts

    async def repo(self, account: LocalAccount) -> Repo:
        return (await self.hosts.repos())[account.did]

    async def states(self, *accounts: LocalAccount) -> list[tuple[SyncStatus, Desync | None]]:
        repos = await self.hosts.repos()
        return [(repos[account.did].sync_status, repos[account.did].sync_reason) for account in accounts]


def completed_at(rev: str, repo: Repo) -> Repo:
    """Return the row after a resync that found this rev."""
    return completed(repo)._replace(head=head(rev), synchronized_at=time(), next_attempt_at=None)


@pytest.fixture
async def checked(db: Database, sql: asyncpg.Connection) -> AsyncIterator[Checked]:
    async with host_network(db) as hosts:
        await sql.execute("delete from indexer.cursor")
        yield Checked(hosts)


async def test_everything_that_hints_omit_is_found_in_one_pass(checked: Checked) -> None:
    same, behind, deactivated, deleted, moved = await checked.accounts(5)
    [back] = await checked.accounts(1, active=False, hosting_status="deactivated")
    before = time()
    behind.create(NOTE, {"n": 1})
    deactivated.set_status("deactivated")
    deleted.set_status("deleted")
    old, moved.pds = moved.pds, checked.hosts.network.pdses[1]
    moved.pds.hosted[moved.did] = old.hosted.pop(moved.did)
    moved.rotate_key()  # publishes the new PDS
    moved.create(NOTE, {"n": 2})
    checks = checked.checks()
    await checks.compare_all()
    assert await checked.states(same, behind, moved, back) == [
        FINE,
        (SyncStatus.DESYNCHRONIZED, Desync.BEHIND),
        (SyncStatus.DESYNCHRONIZED, Desync.BEHIND),
        (SyncStatus.DESYNCHRONIZED, Desync.REACTIVATED),
    ]
    assert (await checked.repo(behind)).latest_unverified_rev == behind.rev
    hidden = await checked.repo(deactivated)
    assert (hidden.active, hidden.hosting_status, hidden.erase_at) == (False, "deactivated", None)
    gone = await checked.repo(deleted)
    assert (gone.active, gone.hosting_status) == (False, "deleted")
    assert gone.erase_at is not None
    assert (checks.compared, checks.total) == (6, 6)
    assert checks.began_at is not None
    assert before - 0.001 <= checks.began_at <= time()


async def test_account_that_its_host_has_lost_for_a_moment_is_not_deleted(checked: Checked) -> None:
    [account] = await checked.accounts(1)
    hosted = checked.hosts.network.pdses[0].hosted
    lost = hosted.pop(account.did)

    async def restore(_did: str) -> dict[str, Any]:
        hosted[account.did] = lost
        checked.answer(0)
        raise XrpcError("RepoNotFound", "lost")

    checked.answer(0, restore)
    await checked.checks().compare_all()
    assert await checked.states(account) == [FINE]
    assert checked.asked[account.did] == 2


async def test_repos_of_a_host_that_is_down_are_desynchronized_and_all_others_are_compared(checked: Checked) -> None:
    unknown, other = await checked.accounts(8), await checked.accounts(1, pds=1)
    other[0].create(NOTE, {"n": 1})
    await checked.hosts.network.pdses[0].stop()
    checks = checked.checks()
    await checks.compare_all()
    assert set(await checked.states(*unknown)) == {(SyncStatus.DESYNCHRONIZED, Desync.STATUS_UNKNOWN)}
    assert await checked.states(*other) == [(SyncStatus.DESYNCHRONIZED, Desync.BEHIND)]
    assert checks.lacking is None, "no synchronized repo is outdated"
    await checked.hosts.network.pdses[0].start()


async def test_pages_are_read_for_many_repos_of_one_host_and_the_rest_is_asked_singly(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE_COST", 2)
    accounts, [elsewhere] = await checked.accounts(7), await checked.accounts(1, pds=1)
    accounts[0].create(NOTE, {"n": 1})
    accounts[6].create(NOTE, {"n": 1})
    listed = [*accounts[:3], *[checked.hosts.network.create_account(pds=0) for _ in range(9)]]

    def one_by_one(cursor: str) -> dict[str, Any]:
        account = listed[int(cursor or "0")]
        return {"repos": [{"did": account.did, "rev": account.rev}], "cursor": str(int(cursor or "0") + 1)}

    checked.hosts.network.pdses[0].pages = one_by_one
    checks = checked.checks()
    await checks.compare_all()
    assert checked.hosts.network.pdses[0].requests == ["", "1", "2"], "half as many as repos"
    assert checked.hosts.network.pdses[1].requests == [], "one repo is no reason to read a list"
    assert checked.asked == Counter([account.did for account in (*accounts[3:], elsewhere)])
    assert await checked.states(*accounts) == [
        (SyncStatus.DESYNCHRONIZED, Desync.BEHIND), *[FINE] * 5, (SyncStatus.DESYNCHRONIZED, Desync.BEHIND)
    ]  # fmt: skip
    assert checks.compared == 8


async def test_list_counts_only_for_accounts_of_its_host_and_with_what_it_says_in_full(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another status than the stored one, a rev from the future or none: such an account is asked about."""
    monkeypatch.setattr(module, "PAGE_COST", 1)
    accounts, [other] = await checked.accounts(4), await checked.accounts(1, pds=1)
    entries: list[dict[str, Any]] = [
        {"did": accounts[0].did, "active": False, "status": "deleted"},
        {"did": accounts[1].did, "rev": tid_of(int((time() + 86_400) * 1e6))},
        {"did": accounts[2].did},
        {"did": accounts[3].did, "rev": accounts[3].rev},
        {"did": other.did, "rev": tid_of(int(time() * 1e6))},
        {"did": other.did, "active": False, "status": "deleted"},
    ]
    checked.hosts.network.pdses[0].pages = lambda _cursor: {"repos": entries}
    await checked.checks().compare_all()
    assert await checked.states(*accounts, other) == [FINE] * 5
    assert all([(await checked.repo(account)).active for account in (*accounts, other)])
    assert checked.asked == Counter([account.did for account in accounts[:3]]), "the list of the other one was read"


async def test_list_without_end_is_read_only_so_far(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_COST", 2)
    await checked.accounts(6)
    pds = checked.hosts.network.pdses[0]
    pds.pages = lambda _cursor: {"repos": [], "cursor": str(len(pds.requests))}
    await checked.checks().compare_all()
    assert len(pds.requests) == 3
    assert checked.asked.total() == 6


@pytest.mark.parametrize("rev", [None, "now", "zzzzzzzzzzzzz", 7])
async def test_active_repo_without_a_possible_rev_is_not_taken_for_current(checked: Checked, rev: object) -> None:
    """Neither is it outdated: its host must show a commit."""
    [account] = await checked.accounts(1)
    checked.hosts.network.pdses[0].hosted[account.did].repo.head = replace(
        checked.hosts.network.pdses[0].hosted[account.did].repo.head, rev="zzzzzzzzzzzzz"
    )

    async def answer(did: str) -> dict[str, Any]:
        return {"did": did, "active": True, "rev": rev}

    checked.answer(0, answer)
    await checked.checks().compare_all()
    assert await checked.states(account) == [(SyncStatus.DESYNCHRONIZED, Desync.STATUS_UNKNOWN)]


async def test_host_that_sends_no_rev_is_asked_for_the_latest_commit(checked: Checked) -> None:
    same, behind = await checked.accounts(2)
    behind.create(NOTE, {"n": 1})

    async def answer(did: str) -> dict[str, Any]:
        if did == same.did:
            raise XrpcError("MethodNotImplemented", "Method Not Implemented", 501)
        return {"did": did, "active": True}

    checked.answer(0, answer)
    await checked.checks().compare_all()
    assert await checked.states(same, behind) == [FINE, (SyncStatus.DESYNCHRONIZED, Desync.BEHIND)]


async def test_status_that_another_host_claims_changes_nothing(checked: Checked) -> None:
    """The stored identity names the former host, which says that the account is active, or gone."""
    says_active, says_gone = await checked.accounts(2)
    network, rev = checked.hosts.network, says_active.rev
    for account in (says_active, says_gone):
        network.pdses[1].hosted[account.did] = network.pdses[0].hosted[account.did]
        account.pds = network.pdses[1]
        account.rotate_key()

    async def answer(did: str) -> dict[str, Any]:
        return {"did": did, "active": did == says_active.did, "status": "deactivated", "rev": rev}

    checked.answer(0, answer)
    await checked.checks().compare_all()
    assert await checked.states(says_active, says_gone) == [FINE, (SyncStatus.DESYNCHRONIZED, Desync.BEHIND)]
    assert (await checked.repo(says_gone)).active, "its present host was asked"
    assert checked.asked == {says_active.did: 1, says_gone.did: 2}


async def test_host_that_changes_its_mind_desynchronizes_its_repo_after_growing_pauses(checked: Checked) -> None:
    [account], checks, waits = await checked.accounts(1), checked.checks(), []
    for status in ("deactivated", None) * 3:
        account.set_status(status)
        await checks.compare_all()
        repo = await checked.repo(account)
        assert repo.active == (status is None)
        if repo.active:
            assert repo.sync_reason is Desync.REACTIVATED
            waits.append((repo.next_attempt_at or time()) - time())
            await checked.hosts.db.repos.update(account.did, partial(completed_at, account.rev))
    assert waits == sorted(waits)
    assert waits[-1] > 1


async def test_revs_that_a_host_makes_up_desynchronize_its_repo_after_growing_pauses(checked: Checked) -> None:
    [account], checks, waits = await checked.accounts(1), checked.checks(), []

    async def answer(did: str) -> dict[str, Any]:
        return {"did": did, "active": True, "rev": tid_of(int(time() * 1e6))}

    checked.answer(0, answer)
    for _ in range(4):
        await checks.compare_all()
        repo = await checked.repo(account)
        assert repo.sync_reason is Desync.BEHIND
        waits.append((repo.next_attempt_at or time()) - time())
        await checked.hosts.db.repos.update(account.did, partial(completed_at, account.rev))
    assert waits == sorted(waits)
    assert waits[-1] > 1


async def test_host_that_asks_for_a_pause_is_asked_again_after_it(checked: Checked) -> None:
    accounts, throttled = await checked.accounts(12), list[str]()

    async def answer(did: str) -> dict[str, Any]:
        if len(throttled) < 1:
            throttled.append(did)
            raise web.HTTPTooManyRequests(headers={"Retry-After": "1"})
        return {"did": did, "active": True, "rev": accounts[0].rev}

    checked.answer(0, answer)
    checks = checked.checks()
    await checks.compare_all()
    assert await checked.states(*accounts) == [FINE] * 12
    assert checked.asked.total() == 13
    assert checks.compared == 12


@pytest.mark.parametrize(("retry_after", "answers", "most"), [("1", 0, 2), ("3600", 9, 13)])
async def test_pauses_count_for_the_share_of_a_host(
    checked: Checked, retry_after: str, answers: int, most: int
) -> None:
    accounts = await checked.accounts(40)

    async def answer(did: str) -> dict[str, Any]:
        if checked.asked.total() > answers:
            raise web.HTTPTooManyRequests(headers={"Retry-After": retry_after})
        return {"did": did, "active": True, "rev": accounts[0].rev}

    checked.answer(0, answer)
    await checked.checks(replace(QUICK, interval=12.0, page_size=10, min_rate=0.002)).compare_all()
    assert checked.asked.total() <= most


@dataclass
class Clock:
    """The clock of the comparison."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock.monotonic)
    return clock


@pytest.mark.parametrize("page_size", [1_000, 5])
async def test_host_that_never_answers_is_left_after_its_share_of_the_pass(
    checked: Checked, clock: Clock, page_size: int
) -> None:
    bad, others = await checked.accounts(20), await checked.accounts(20, pds=1)

    async def answer(_did: str) -> dict[str, Any]:
        clock.now += 0.5
        raise web.HTTPForbidden

    checked.answer(0, answer)
    checks = checked.checks(replace(QUICK, interval=16.0, page_size=page_size))
    await checks.compare_all()
    assert 4 < sum(checked.asked[account.did] for account in bad) <= 8, "two seconds"
    assert set(await checked.states(*bad)) == {(SyncStatus.DESYNCHRONIZED, Desync.STATUS_UNKNOWN)}
    assert await checked.states(*others) == [FINE] * 20
    assert checks.compared == 40


@pytest.mark.parametrize(
    ("seconds", "min_rate", "asked"),
    [
        pytest.param(0.05, 1_000.0, 60, id="ends in time"),
        pytest.param(0.1, 1_000.0, 13, id="left after its share"),
        pytest.param(0.1, 1.0, 41, id="left when half of the interval is over"),
        pytest.param(0.1, 0.1, 60, id="our own rates allow no more"),
    ],
)
async def test_host_that_answers_slowly_is_left_unless_it_would_end_in_time(
    checked: Checked, clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, min_rate: float, asked: int
) -> None:
    """It has a second in any case, and four if it would end then. Its list names 30 of its 90 repos."""
    monkeypatch.setattr(module, "PAGE_COST", 90)
    accounts = await checked.accounts(90)
    listed = [{"did": account.did, "rev": account.rev} for account in accounts[:30]]
    checked.hosts.network.pdses[0].pages = lambda _cursor: {"repos": listed}

    async def answer(did: str) -> dict[str, Any]:
        clock.now += seconds
        return {"did": did, "active": True, "rev": accounts[0].rev}

    checked.answer(0, answer)
    checks = checked.checks(replace(QUICK, interval=8.0, min_rate=min_rate))
    await checks.compare_all()
    assert checked.asked.total() == asked
    seconds = 0.0
    await checks.compare_all()
    assert Counter(await checked.states(*accounts))[FINE] == 30 + asked, "each pass begins anew"


@pytest.mark.parametrize(("lists_repos", "pages", "asked"), [(False, 2, 9), (True, 10, 0)])
async def test_slow_list_gets_half_of_the_share_unless_it_would_end_in_time(
    checked: Checked, clock: Clock, monkeypatch: pytest.MonkeyPatch, lists_repos: bool, pages: int, asked: int
) -> None:
    monkeypatch.setattr(module, "PAGE_COST", 1)
    accounts, pds = await checked.accounts(10), checked.hosts.network.pdses[0]

    def page(_cursor: str) -> dict[str, Any]:
        clock.now += 0.6
        listed = accounts[len(pds.requests) - 1 :][:lists_repos]
        return {"repos": [{"did": a.did, "rev": a.rev} for a in listed], "cursor": str(len(pds.requests))}

    async def answer(_did: str) -> dict[str, Any]:
        clock.now += 0.17
        raise web.HTTPForbidden

    pds.pages = page
    checked.answer(0, answer)
    await checked.checks(replace(QUICK, interval=16.0, min_rate=1_000.0)).compare_all()
    assert (len(pds.requests), checked.asked.total()) == (pages, asked)


async def test_pauses_before_second_attempts_count_for_the_hosts_that_cause_them(
    checked: Checked, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FAILED", 1)
    await checked.accounts(10)

    async def answer(_did: str) -> dict[str, Any]:
        raise web.HTTPForbidden

    checked.answer(0, answer)
    checks, pauses = checked.checks(replace(QUICK, interval=0.4, page_size=2, retry=0.02)), list[float]()
    monkeypatch.setattr(checks.stage, "idle", lambda: pauses.append(clock.now))
    await checks.compare_all()
    assert (checked.asked.total(), pauses) == (14, [0.0] * 4), "its share is less than four pauses"


async def test_repo_that_is_fetched_when_the_pass_gives_it_up_is_compared_again(checked: Checked) -> None:
    [account] = await checked.accounts(1, sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.REQUESTED)
    await checked.hosts.db.resyncs.claim(1, range(256), 60.0, time())
    account.create(NOTE, {"n": 1})

    async def answer(did: str) -> dict[str, Any]:
        if checked.asked.total() <= 2:
            raise web.HTTPForbidden
        return {"did": did, "active": True, "rev": account.rev}

    async def is_compared() -> bool:
        return (await checked.repo(account)).latest_unverified_rev == account.rev

    checked.answer(0, answer)
    async with running(checked.checks().run()):
        await until(is_compared)


async def test_one_host_occupies_one_place_of_the_queue(checked: Checked) -> None:
    slow, [other] = await checked.accounts(40), await checked.accounts(1, pds=1)
    checks, more = checked.checks(), asyncio.Event()

    async def answer(did: str) -> dict[str, Any]:
        await more.wait()
        return {"did": did, "active": True, "rev": slow[0].rev}

    async with running(checks.run()):
        await until(lambda: checks.began_at is not None)
        checked.answer(0, answer)
        other.set_status("deactivated")
        for account in (*slow, other):
            checks.ask(account.did)
        await until(lambda: is_hidden(checked, other))
        assert sum(checked.asked[account.did] for account in slow) == 41
        more.set()
        await until(lambda: sum(checked.asked[account.did] for account in slow) == 80)
        checks.ask(slow[0].did)
        await until(lambda: checked.asked[slow[0].did] == 3)


async def test_repo_jumps_the_queue_and_the_queue_is_bounded(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ASKED", 2)
    dropped, deleted, same = await checked.accounts(3)
    checks = checked.checks()
    async with running(checks.run()):
        await until(lambda: checks.began_at is not None)
        assert checked.asked.total() == 3
        deleted.set_status("deleted")
        for account in (dropped, deleted, deleted, same):
            checks.ask(account.did)
        await until(lambda: checked.asked.total() == 5)
        await until(lambda: is_hidden(checked, deleted))
    assert checked.asked[dropped.did] == 1
    assert (await checked.repo(deleted)).hosting_status == "deleted"


async def is_hidden(checked: Checked, account: LocalAccount) -> bool:
    return not (await checked.repo(account)).active


async def test_readiness_fails_until_a_pass_has_ended_and_says_how_far_it_is(checked: Checked) -> None:
    await checked.accounts(3)
    reached, more = asyncio.Event(), asyncio.Event()

    async def answer(did: str) -> dict[str, Any]:
        reached.set()
        await more.wait()
        return {"did": did, "active": False, "status": "deactivated"}

    checked.answer(0, answer)
    checks = checked.checks()
    async with running(checks.run()):
        await reached.wait()
        assert checks.lacking is not None
        assert "0 of 3 repos are compared" in checks.lacking
        more.set()
        await until(lambda: checks.lacking is None)
    cursor, *_ = await checked.hosts.db.gaps.cursors()
    assert cursor.caught_up_at == checks.began_at


async def test_restart_compares_at_once_and_an_earlier_pass_counts_until_the_interval_is_over(
    checked: Checked,
) -> None:
    await checked.accounts(2)
    await checked.checks().compare_all()
    reached, never = asyncio.Event(), asyncio.Event()

    async def answer(_did: str) -> dict[str, Any]:
        reached.set()
        await never.wait()
        return {}

    checked.answer(0, answer)
    again, late = checked.checks(), checked.checks(replace(QUICK, interval=0.0001))
    for checks in (again, late):
        async with running(checks.run()):
            await reached.wait()
            reached.clear()
    assert again.lacking is None
    assert late.lacking is not None
    never.set()


async def test_passes_begin_when_half_of_the_interval_is_over(
    checked: Checked, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    [account] = await checked.accounts(1)
    sleep, pauses = asyncio.sleep, list[float]()

    async def answer(did: str) -> dict[str, Any]:
        clock.now += 0.5
        return {"did": did, "active": True, "rev": account.rev}

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    checked.answer(0, answer)
    monkeypatch.setattr(asyncio, "sleep", pause)
    async with running(checked.checks(replace(QUICK, interval=4.0)).run()):
        await until(lambda: pauses.count(1.5) == 3)


async def test_pass_stores_its_beginning_beside_the_position_and_closes_earlier_gaps(checked: Checked) -> None:
    await checked.accounts(1)
    db = checked.hosts.db
    await db.gaps.open(Gap("wss://relay.test", "0/1", GapReason.CURSOR_RESET))
    position = int(time() * 1e6) + 10**12
    await db.write(Batch(cursors=(Cursor(JETSTREAM, "0/1", position),)))

    async def answer(did: str) -> dict[str, Any]:
        await db.gaps.open(Gap("wss://later.test", "0/1", GapReason.CURSOR_RESET))
        return {"did": did, "active": False}

    checked.answer(0, answer)
    checks = checked.checks()
    await checks.compare_all()
    assert [gap.gap.relay for gap in await db.gaps.load_open()] == ["wss://later.test"]
    await db.write(Batch(cursors=(Cursor(JETSTREAM, "0/1", position + 1),)))
    [cursor] = await db.gaps.cursors()
    assert cursor.seq == position + 1
    assert cursor.caught_up_at == pytest.approx(checks.began_at)


async def test_first_pass_stores_a_position_from_which_no_hint_is_missed(checked: Checked) -> None:
    await checked.accounts(1)
    checks = checked.checks()
    await checks.compare_all()
    [cursor] = await checked.hosts.db.gaps.cursors()
    assert cursor.seq == pytest.approx(int((checks.began_at or 0) * 1e6), abs=1)


async def test_each_shard_compares_its_own_repos_in_pages(checked: Checked) -> None:
    accounts = await checked.accounts(9)
    shards = [Shard(0, 2), Shard(1, 2)]
    owned: list[Sequence[LocalAccount]] = [[one for one in accounts if shard.owns(one.did)] for shard in shards]
    for shard, own in zip(shards, owned, strict=True):
        await checked.checks(replace(QUICK, shard=shard, page_size=2)).compare_all()
        assert checked.asked == Counter([account.did for account in own])
        checked.asked.clear()
    assert [cursor.shard for cursor in await checked.hosts.db.gaps.cursors()] == ["0/2", "1/2"]
    assert all(owned)


async def test_withheld_and_fetched_repos_are_compared_too(checked: Checked) -> None:
    """A relay withheld the one before. The export of the other one may be older than the pass."""
    [withheld] = await checked.accounts(1, **WITHHELD)
    [fetched] = await checked.accounts(1, sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.REQUESTED)
    await checked.hosts.db.resyncs.claim(1, range(256), 60.0, time())
    fetched.create(NOTE, {"n": 1})
    await checked.checks().compare_all()
    due = await checked.repo(withheld)
    assert due.withheld_since is None
    assert (due.next_attempt_at or 0.0) <= time()
    assert (await checked.repo(fetched)).latest_unverified_rev == fetched.rev


async def test_withheld_repo_on_the_list_of_its_host_is_asked_about(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE_COST", 1)
    [withheld] = await checked.accounts(1, **WITHHELD)
    await checked.checks().compare_all()
    repo = await checked.repo(withheld)
    assert (repo.withheld_since, (repo.next_attempt_at or 0.0) <= time()) == (None, True)


async def test_repos_that_wait_or_are_gone_are_not_asked_about(checked: Checked) -> None:
    await checked.accounts(1, sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.REQUESTED)
    await checked.accounts(1, active=False, hosting_status="tombstoned")
    await checked.accounts(1, active=False, tracked=False)
    await checked.checks().compare_all()
    assert not checked.asked


async def test_many_failures_are_tried_again_before_further_repos(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FAILED", 1)
    await checked.accounts(4)
    order = list[str]()

    async def answer(did: str) -> dict[str, Any]:
        order.append(did)
        raise web.HTTPForbidden

    checked.answer(0, answer)
    await checked.checks(replace(QUICK, page_size=2)).compare_all()
    assert len(order) == 8
    assert set(order[:2]) == set(order[2:4])


async def test_listed_repos_that_wait_for_a_resync_are_not_counted_as_compared(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The filter of listed repos is only as large as the number of the others."""
    monkeypatch.setattr(module, "PAGE_COST", 2)
    await checked.accounts(4)
    await checked.accounts(6, sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.NEW)
    checks = checked.checks()
    await checks.compare_all()
    assert (checks.compared, checks.total, checked.asked.total()) == (4, 4, 0)
