"""Exports that are needed and don't come, or come broken: nothing changes until one is whole."""

import asyncio
from collections.abc import Callable
from math import inf
from pathlib import Path
from time import time
from typing import Any

import pytest

from indexer.localnet.account import Account
from indexer.localnet.network import LocalNetwork
from indexer.localnet.pds import GET_REPO
from indexer.localnet.server import Fault
from indexer.localnet.tree import height
from indexer.outbound.client import Patience
from indexer.outbound.hosts import FAILURES
from tests.daemon.stage import POST, Stage, post, staged
from tests.serving import POLL, until
from tests.test_crash import assert_nothing_doubled

FAILING: dict[str, tuple[Callable[[Account], Fault], str]] = {
    "status": (lambda _: Fault(GET_REPO, status=500), "http-status"),
    "hang": (lambda _: Fault(GET_REPO, hang=True), "timeout"),
    "connection cut": (lambda _: Fault(GET_REPO, cut=700), "unreachable"),
    "connection cut at once": (lambda _: Fault(GET_REPO, cut=0), "unreachable"),
    "no bytes": (lambda _: Fault(GET_REPO, sections=0), "export-incomplete"),
    "header alone": (lambda _: Fault(GET_REPO, sections=1), "export-rejected"),
    "commit alone": (lambda _: Fault(GET_REPO, sections=2), "export-incomplete"),
    "root node alone": (lambda _: Fault(GET_REPO, sections=3), "export-incomplete"),
    "a page": (
        lambda _: Fault(GET_REPO, status=200, headers={"Content-Type": "text/html"}, body=b"<html>"),
        "bad-answer",
    ),
    "nonsense": (lambda _: Fault(GET_REPO, status=200, body=bytes(1_000)), "export-rejected"),
    "gone": (
        lambda _: Fault(GET_REPO, status=400, body=b'{"error":"RepoNotFound","message":"?"}'),
        "repo-not-found",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "result"), FAILING.values(), ids=FAILING.keys())
async def test_an_export_that_fails_changes_nothing(
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: Callable[[Account], Fault],
    result: str,
) -> None:
    monkeypatch.setattr("indexer.outbound.client.Patience", lambda: Patience(silence=0.5))
    async with staged(database, tmp_path, resync_source="pds") as stage:
        account = stage.account("ada.test", records=20)
        await stage.equal()
        before = await stage.stored(account)
        fault = failing(account)
        account.pds.faults.append(fault)
        stage.lose_commit(account)
        await stage.counted(0, "resync", result=result)
        assert fault.fired == 1
        assert await stage.stored(account) == before
        row = await stage.repo(account)
        assert (row["status"], row["reason"], row["attempts"]) == ("desynchronized", "chain-break", 2)
        assert row["last_error"].split(":")[0] == result
        assert row["wait"] == inf if result == "repo-not-found" else 80 < row["wait"] < 160
        await stage.healed(account)  # by hand: by itself it would be tried again at that time
        await stage.counted(0, "resync", result="synchronized")
        assert stage.metric("resync", result="synchronized") == 1
        assert (await stage.repo(account))["last_error"] is None
        assert not list((tmp_path / "spool").iterdir())
        await assert_nothing_doubled(database)


LAST = [f"zz{number:03}" for number in range(100) if height(f"{POST}/zz{number:03}") == 0][:6]


def lose_last_records(stage: Stage, account: Account, exports: int) -> list[Fault]:
    """The next exports have all tree nodes, and lack the last three records: two of them are new and not heard of."""
    sections = sum(1 for _ in account.repo.export()) - 1
    faults = [Fault(GET_REPO, sections=sections) for _ in range(exports)]
    account.pds.faults += faults
    stage.network.relay.drop(account.did)
    for rkey in LAST[4:]:
        account.create(POST, post(rkey), rkey=rkey)
    return faults


async def with_a_long_last_leaf(stage: Stage) -> Account:
    """An account whose exports end with records of one node, that come behind it."""
    account = stage.account("ada.test", records=20)
    for rkey in LAST[:4]:
        account.create(POST, post(rkey), rkey=rkey)
    await stage.equal()
    return account


@pytest.mark.slow
async def test_an_export_that_lacks_a_record_is_asked_for_again(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path, resync_source="pds") as stage:
        account = await with_a_long_last_leaf(stage)
        before = await stage.stored(account)
        [fault] = lose_last_records(stage, account, exports=1)
        await stage.counted(0, "resync", result="export-lacks-records")
        assert fault.fired == 1
        assert await stage.stored(account) == before
        assert (await stage.repo(account))["last_error"] == "export-lacks-records: 2 records"
        await stage.healed(account)
        assert [row["rkey"] for row in await stage.stored(account) if row["value"] is None] == []


@pytest.mark.slow
async def test_an_export_that_was_cut_before_says_nothing_of_the_records_that_the_next_one_lacks(
    database: str, tmp_path: Path
) -> None:
    async with staged(database, tmp_path, resync_source="pds") as stage:
        account = await with_a_long_last_leaf(stage)
        before = await stage.stored(account)
        account.pds.faults.append(Fault(GET_REPO, sections=3))
        lose_last_records(stage, account, exports=1)
        await stage.counted(0, "resync", result="export-incomplete")
        await stage.execute("update indexer.repo set next_attempt_at = null")
        await stage.counted(0, "resync", result="export-lacks-records")
        assert await stage.stored(account) == before
        await stage.healed(account)
        assert [row["rkey"] for row in await stage.stored(account) if row["value"] is None] == []


@pytest.mark.slow
async def test_a_record_that_no_export_has_keeps_its_cid_and_gets_its_value_later(
    database: str, tmp_path: Path
) -> None:
    async with staged(database, tmp_path, resync_source="pds") as stage:
        account = await with_a_long_last_leaf(stage)
        faults = lose_last_records(stage, account, exports=2)
        await stage.counted(0, "resync", result="export-lacks-records")
        await stage.healed(account)
        assert [fault.fired for fault in faults] == [1, 1]
        missing = [row for row in await stage.stored(account) if row["value"] is None]
        assert [(row["rkey"], row["value_problem"]) for row in missing] == [(rkey, "missing") for rkey in LAST[4:]]
        account.create(POST, post("life goes on"))
        await stage.equal()
        assert await stage.running.store.mark_missing(range(256), 0.0, time() + 1) == 1
        await stage.healed(account)
        assert [row["rkey"] for row in await stage.stored(account) if row["value"] is None] == []
        [action] = await stage.execute(
            "select action, live from atproto.changes where did = $1 and rkey is not null order by seq desc limit 1",
            account.did,
        )
        assert tuple(action) == ("update", False)
        assert await stage.running.store.mark_missing(range(256), 0.0, time() + 1) == 0


async def test_the_next_source_is_asked(database: str, tmp_path: Path) -> None:
    """The relay is asked first and sends us on to the host, which fails once; then the host itself is asked."""
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        fault = Fault(GET_REPO, status=500)
        account.pds.faults.append(fault)
        stage.lose_commit(account)
        await stage.equal()
        assert fault.fired == 1
        assert stage.network.relay.requests[GET_REPO] == 1
        assert account.pds.requests[GET_REPO] == 2
        await stage.counted(0, "resync", result="synchronized")
        assert stage.metric("resync", result="synchronized") == 1


@pytest.mark.slow
async def test_a_host_that_asks_for_a_pause_gets_it(database: str, tmp_path: Path) -> None:
    """It costs the repo no attempt, and a daemon that starts anew remembers it."""
    async with LocalNetwork() as network:
        async with staged(database, tmp_path, network, resync_source="pds") as first:
            account = first.account("ada.test")
            await first.equal()
            before = await first.stored(account)
            fault = Fault(GET_REPO, status=429, headers={"Retry-After": "100"})
            account.pds.faults.append(fault)
            first.lose_commit(account)
            await first.counted(0, "resync", result="throttled")
            assert fault.fired == 1
            row = await first.repo(account)
            assert (row["status"], row["attempts"]) == ("desynchronized", 1)
            assert row["last_error"].startswith("throttled")
            assert 90 < row["wait"] <= 100
            asked = account.pds.requests.total()
        async with staged(database, tmp_path, network, resync_source="pds") as second:
            await second.execute("update indexer.repo set next_attempt_at = null")
            await until(lambda: put_off(second, account))
            assert account.pds.requests.total() == asked, "no request before its time, whoever wants one"
            assert await second.stored(account) == before
            [(reason,)] = await second.execute("select pause_reason from atproto.hosts where paused_until is not null")
            assert reason == "throttled"
        await second.execute("update indexer.host set paused_until = now()")
        async with staged(database, tmp_path, network, resync_source="pds") as third:
            await third.execute("update indexer.repo set next_attempt_at = null")
            await third.equal()


@pytest.mark.slow
async def test_a_host_that_is_down_is_left_alone_and_its_repos_lose_no_attempt(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path, resync_source="pds") as stage:
        account = stage.account("ada.test")
        await stage.equal()
        fault = Fault("", status=502, times=None)
        account.pds.faults.append(fault)
        stage.lose_commit(account)
        while stage.metric("resync", result="host-paused") == 0:
            await stage.execute("update indexer.repo set next_attempt_at = null where status = 'desynchronized'")
            await asyncio.sleep(POLL)
        asked, attempts = fault.fired, (await stage.repo(account))["attempts"]
        assert asked >= FAILURES
        for _ in range(3):
            await stage.execute("update indexer.repo set next_attempt_at = null")
            await until(lambda: put_off(stage, account, 15))
        row = await stage.repo(account)
        assert row["last_error"].startswith("host-paused")
        assert (row["attempts"], fault.fired) == (attempts, asked)
        assert "host-paused for" in str(stage.running.status()["hosts paused"])


async def put_off(stage: Stage, account: Account, seconds: float = 80) -> bool:
    row = await stage.repo(account)
    return row["status"] == "desynchronized" and row["next_attempt_at"] is not None and row["wait"] > seconds


def held(account: Account) -> Fault:
    """The account's next export takes some seconds, and holds what it held when it was asked for."""
    fault = Fault(GET_REPO, rate=sum(map(len, account.repo.export())) // 3)
    account.pds.faults.append(fault)
    return fault


async def resyncing(stage: Stage, account: Account, fault: Fault) -> None:
    await until(lambda: fault.fired == 1)
    assert (await stage.repo(account))["status"] == "in-progress"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bound", "why"), [("export_rate", "1MB", " bytes in "), ("export_time", "500ms", ": TimeoutError")]
)
async def test_an_export_that_comes_more_slowly_than_is_allowed(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, bound: Any, why: str
) -> None:
    monkeypatch.setattr("indexer.outbound.client.Patience", lambda: Patience(judged_after=0.2))
    async with staged(database, tmp_path, resync_source="pds", **{name: bound}) as stage:
        account = stage.account("ada.test", records=20)
        await stage.equal()
        before = await stage.stored(account)
        held(account)
        stage.lose_commit(account)
        await stage.counted(0, "resync", result="timeout")
        assert why in (await stage.repo(account))["last_error"]
        assert await stage.stored(account) == before
        await stage.healed(account)


@pytest.mark.slow
async def test_large_repos_come_one_behind_the_other(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four are begun at once, and one may go on: the others are known by then, and not fetched before their turn."""
    monkeypatch.setattr("indexer.pds.client.LARGE_BYTES", 1_000)
    async with staged(database, tmp_path, resync_source="pds", resync_workers="4") as stage:
        accounts = [stage.account(f"a{number}.test", records=20) for number in range(6)]
        await stage.equal()
        fetches = [dripping(account) for account in accounts]
        for account in accounts:
            stage.lose_commit(account)
        await stage.equal()
        await stage.counted(5, "resync", result="synchronized")
        assert max(fault.fired for fault in fetches) == 2
        assert stage.metric("resync", result="put-off") > 0
        assert stage.total("resync") == 6 + stage.metric("resync", result="put-off"), "none failed"


def dripping(account: Account) -> Fault:
    """Each export of the account takes a second."""
    fault = Fault(GET_REPO, account.did, rate=sum(map(len, account.repo.export())), times=None)
    account.pds.faults.append(fault)
    return fault


@pytest.mark.slow
async def test_commits_during_a_resync_are_kept_and_drained(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test", records=30)
        await stage.equal()
        fault = held(account)
        stage.lose_commit(account)
        await resyncing(stage, account, fault)
        path = account.create(POST, post("while it is fetched"))
        account.update(path, post("changed"))
        account.delete(next(iter(account.records)))
        await stage.counted(2, "events", kind="commit", outcome="buffered")
        [(kept,)] = await stage.execute("select count(*) from indexer.kept_event")
        assert kept == 3
        assert (await stage.repo(account))["status"] == "in-progress"
        await stage.equal()
        await stage.counted(0, "resync", result="synchronized")
        assert stage.metric("resync", result="synchronized") == 1
        assert stage.exports == 1
        live = {action: stage.metric("record_changes", action=action, live="true") for action in ("update", "delete")}
        assert live == {"update": 1, "delete": 1}
        await assert_nothing_doubled(database)


@pytest.mark.slow
async def test_a_commit_is_lost_during_a_resync(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test", records=30)
        await stage.equal()
        fault = held(account)
        stage.lose_commit(account)
        await resyncing(stage, account, fault)
        stage.lose_commit(account)
        await stage.counted(0, "resync", result="drain-break")
        row = await stage.repo(account)
        assert (row["status"], row["reason"]) == ("desynchronized", "drain-break")
        assert row["rev"] < account.rev
        assert row["wait"] > 40
        await stage.healed(account)  # by hand: by itself within a minute
        assert stage.exports == 2
        await assert_nothing_doubled(database)


@pytest.mark.slow
async def test_more_commits_during_a_resync_than_may_be_kept(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path, kept_events="3") as stage:
        account = stage.account("ada.test", records=30)
        await stage.equal()
        fault = held(account)
        stage.lose_commit(account)
        await resyncing(stage, account, fault)
        for number in range(5):
            account.create(POST, post(number))
        await stage.read()
        row = await stage.repo(account)
        assert (row["status"], row["reason"]) == ("desynchronized", "buffer-overflow")
        assert stage.metric("events", kind="commit", outcome="buffered") == 3
        [(kept,)] = await stage.execute("select count(*) from indexer.kept_event")
        assert kept == 0
        await stage.counted(0, "resync", result="lost")
        await stage.healed(account)
        await assert_nothing_doubled(database)


@pytest.mark.slow
async def test_stopped_during_a_resync(database: str, tmp_path: Path) -> None:
    """The claim is given back at once, with no attempt lost, and the next daemon takes it up."""
    async with LocalNetwork() as network:
        async with staged(database, tmp_path, network) as stage:
            account = stage.account("ada.test", records=30)
            await stage.equal()
            fault = held(account)
            stage.lose_commit(account)
            await resyncing(stage, account, fault)
            await stage.read()
        row = await stage.repo(account)
        assert (row["status"], row["reason"], row["attempts"]) == ("desynchronized", "chain-break", 1)
        assert row["next_attempt_at"] is None
        async with staged(database, tmp_path, network) as stage:
            await stage.equal()
            await stage.counted(0, "resync", result="synchronized")
            assert stage.metric("resync", result="synchronized") == 1
        await assert_nothing_doubled(database)


@pytest.mark.slow
async def test_an_export_older_than_what_was_seen(database: str, tmp_path: Path) -> None:
    """A host that answers with an old export doesn't take the repo back."""
    async with staged(database, tmp_path, resync_source="pds") as stage:
        account = stage.account("ada.test")
        await stage.equal()
        before = await stage.stored(account)
        fault = Fault(
            GET_REPO,
            status=200,
            headers={"Content-Type": "application/vnd.ipld.car"},
            body=b"".join(account.repo.export()),
        )
        account.create(POST, post("behind the old export"))
        await stage.equal()
        account.pds.faults.append(fault)
        stage.lose_commit(account)
        await stage.counted(0, "resync", result="export-stale")
        assert fault.fired == 1
        assert len(await stage.stored(account)) == len(before) + 1
        await stage.healed(account)
