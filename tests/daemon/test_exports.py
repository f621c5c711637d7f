"""Resyncs whose exports fail, are slow, are interrupted or are out of date: stored records change only at the end."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from time import time
from typing import Any

import pytest

from indexer.localnet.http_server import Fault
from indexer.localnet.local_account import LocalAccount
from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.local_pds import GET_REPO
from indexer.localnet.reference_tree import height
from indexer.outbound.host_limits import FAILURE_THRESHOLD
from indexer.outbound.http_client import Timeouts
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.database_checks import assert_change_log_consistent
from tests.waiting import until

pytestmark = pytest.mark.slow

EXPORT_SECONDS = 60
"""The duration of an export that no test lets end."""
NO_LIMIT = 1 << 30
"""Bytes per second."""

FAILING_EXPORTS: dict[str, tuple[Callable[[LocalAccount], Fault], str]] = {
    "status 500": (lambda _: Fault(GET_REPO, status=500), "http-status"),
    "no response": (lambda _: Fault(GET_REPO, hang=True), "timeout"),
    "connection broken after 700 bytes": (lambda _: Fault(GET_REPO, cut=700), "unreachable"),
    "connection broken at once": (lambda _: Fault(GET_REPO, cut=0), "unreachable"),
    "empty body": (lambda _: Fault(GET_REPO, sections=0), "export-incomplete"),
    "only the header": (lambda _: Fault(GET_REPO, sections=1), "export-rejected"),
    "only the commit": (lambda _: Fault(GET_REPO, sections=2), "export-incomplete"),
    "only the root node": (lambda _: Fault(GET_REPO, sections=3), "export-incomplete"),
    "HTML page": (
        lambda _: Fault(GET_REPO, status=200, headers={"Content-Type": "text/html"}, body=b"<html>"),
        "bad-answer",
    ),
    "zeros": (lambda _: Fault(GET_REPO, status=200, body=bytes(1_000)), "export-rejected"),
    "RepoNotFound": (
        lambda _: Fault(GET_REPO, status=400, body=b'{"error":"RepoNotFound","message":"?"}'),
        "repo-not-found",
    ),
}


@pytest.mark.parametrize(("make_fault", "result"), FAILING_EXPORTS.values(), ids=FAILING_EXPORTS.keys())
async def test_failed_export_changes_nothing_and_is_retried(
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_fault: Callable[[LocalAccount], Fault],
    result: str,
) -> None:
    if result == "timeout":  # a short limit would also end requests that are answered on a slow machine
        monkeypatch.setattr("indexer.clients.TIMEOUTS", Timeouts(read=3.0))
    async with running_daemon(database, tmp_path, resync_source="pds") as daemon:
        account = daemon.create_account("ada.test", records=20)
        await daemon.wait_until_equal()
        before = await daemon.record_rows(account)
        fault = make_fault(account)
        account.pds.faults.append(fault)
        daemon.lose_commit(account)
        await daemon.wait_for_counter("resync", result=result)
        assert fault.fired == 1
        assert await daemon.record_rows(account) == before
        row = await daemon.repo_row(account)
        assert (row["sync_status"], row["sync_reason"], row["attempts"]) == ("desynchronized", "chain-break", 2)
        assert row["last_error"].split(":")[0] == result
        assert row["wait"] == inf if result == "repo-not-found" else 80 < row["wait"] < 160
        await daemon.resync_until_equal(account)
        await daemon.wait_for_counter("resync", result="synchronized")
        assert daemon.counter("resync", result="synchronized") == 1
        assert (await daemon.repo_row(account))["last_error"] is None
        assert not list((tmp_path / "spool").iterdir())
        await assert_change_log_consistent(database)


LAST_LEAF_KEYS = [f"zz{number:03}" for number in range(100) if height(f"{POST}/zz{number:03}") == 0][:6]


def omit_last_records(daemon: RunningDaemon, account: LocalAccount, exports: int) -> list[Fault]:
    """Let the next exports contain all tree nodes but not the last three records; two of these were never announced."""
    sections = sum(1 for _ in account.repo.export()) - 1
    faults = [Fault(GET_REPO, sections=sections) for _ in range(exports)]
    account.pds.faults += faults
    daemon.network.relay.drop(account.did)
    for rkey in LAST_LEAF_KEYS[4:]:
        account.create(POST, post(rkey), rkey=rkey)
    return faults


async def account_with_long_last_leaf(daemon: RunningDaemon) -> LocalAccount:
    """Create an account whose exports end with the records of one node, which comes before all of them."""
    account = daemon.create_account("ada.test", records=20)
    for rkey in LAST_LEAF_KEYS[:4]:
        account.create(POST, post(rkey), rkey=rkey)
    await daemon.wait_until_equal()
    return account


async def test_export_with_missing_records_is_rejected_once_and_fetched_again(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path, resync_source="pds") as daemon:
        account = await account_with_long_last_leaf(daemon)
        before = await daemon.record_rows(account)
        [fault] = omit_last_records(daemon, account, exports=1)
        await daemon.wait_for_counter("resync", result="export-lacks-records")
        assert fault.fired == 1
        assert await daemon.record_rows(account) == before
        assert (await daemon.repo_row(account))["last_error"] == "export-lacks-records: 2 records"
        await daemon.resync_until_equal(account)
        assert [row["rkey"] for row in await daemon.record_rows(account) if row["value"] is None] == []


async def test_truncated_export_does_not_count_as_one_with_missing_records(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path, resync_source="pds") as daemon:
        account = await account_with_long_last_leaf(daemon)
        before = await daemon.record_rows(account)
        account.pds.faults.append(Fault(GET_REPO, sections=3))
        omit_last_records(daemon, account, exports=1)
        await daemon.wait_for_counter("resync", result="export-incomplete")
        await daemon.execute("update indexer.repo set next_attempt_at = null")
        await daemon.wait_for_counter("resync", result="export-lacks-records")
        assert await daemon.record_rows(account) == before
        await daemon.resync_until_equal(account)
        assert [row["rkey"] for row in await daemon.record_rows(account) if row["value"] is None] == []


async def test_record_missing_in_two_exports_is_stored_without_value_and_completed_later(
    database: str, tmp_path: Path
) -> None:
    async with running_daemon(database, tmp_path, resync_source="pds") as daemon:
        account = await account_with_long_last_leaf(daemon)
        faults = omit_last_records(daemon, account, exports=2)
        await daemon.wait_for_counter("resync", result="export-lacks-records")
        await daemon.resync_until_equal(account)
        assert [fault.fired for fault in faults] == [1, 1]
        missing = [row for row in await daemon.record_rows(account) if row["value"] is None]
        assert [(row["rkey"], row["value_problem"]) for row in missing] == [
            (rkey, "missing") for rkey in LAST_LEAF_KEYS[4:]
        ]
        account.create(POST, post("after the resync"))
        await daemon.wait_until_equal()
        assert await daemon.store.request_missing_values(range(256), 0.0, time() + 1) == 1
        await daemon.resync_until_equal(account)
        assert [row["rkey"] for row in await daemon.record_rows(account) if row["value"] is None] == []
        [action] = await daemon.execute(
            "select action, live from atproto.changes where did = $1 and rkey is not null order by seq desc limit 1",
            account.did,
        )
        assert tuple(action) == ("update", False)
        assert await daemon.store.request_missing_values(range(256), 0.0, time() + 1) == 0


async def test_next_source_is_asked_after_a_failure(database: str, tmp_path: Path) -> None:
    """The relay redirects to the PDS, which fails once. The second request goes directly to the PDS."""
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        fault = Fault(GET_REPO, status=500)
        account.pds.faults.append(fault)
        daemon.lose_commit(account)
        await daemon.wait_until_equal()
        assert fault.fired == 1
        assert daemon.network.relay.requests[GET_REPO] == 1
        assert account.pds.requests[GET_REPO] == 2
        await daemon.wait_for_counter("resync", result="synchronized")
        assert daemon.counter("resync", result="synchronized") == 1


async def test_retry_after_pauses_the_host_across_restarts(database: str, tmp_path: Path) -> None:
    """The pause does not count as an attempt of the repo."""
    async with LocalNetwork() as network:
        async with running_daemon(database, tmp_path, network, resync_source="pds") as first:
            account = first.create_account("ada.test")
            await first.wait_until_equal()
            before = await first.record_rows(account)
            fault = Fault(GET_REPO, status=429, headers={"Retry-After": "1000"})
            account.pds.faults.append(fault)
            first.lose_commit(account)
            await first.wait_for_counter("resync", result="throttled")
            assert fault.fired == 1
            row = await first.repo_row(account)
            assert (row["sync_status"], row["attempts"]) == ("desynchronized", 1)
            assert row["last_error"].startswith("throttled")
            assert 900 < row["wait"] <= 1_000
            requests = account.pds.requests.total()
        async with running_daemon(database, tmp_path, network, resync_source="pds") as second:
            await second.execute("update indexer.repo set next_attempt_at = null")
            await until(lambda: postponed(second, account))
            assert account.pds.requests.total() == requests, "no request during the pause"
            assert await second.record_rows(account) == before
            [(reason,)] = await second.execute("select pause_reason from atproto.hosts where paused_until is not null")
            assert reason == "throttled"
        await second.execute("update indexer.host set paused_until = now()")
        async with running_daemon(database, tmp_path, network, resync_source="pds") as third:
            await third.execute("update indexer.repo set next_attempt_at = null")
            await third.wait_until_equal()


async def test_failing_host_is_paused_and_the_pause_does_not_count_as_attempt(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.outbound.host_limits.FIRST_PAUSE", 600.0)  # it must not end before the test
    async with running_daemon(database, tmp_path, resync_source="pds") as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        fault = Fault("", status=502, times=None)
        account.pds.faults.append(fault)
        daemon.lose_commit(account)

        async def paused() -> bool:
            await daemon.execute("update indexer.repo set next_attempt_at = null where sync_status = 'desynchronized'")
            return daemon.counter("resync", result="host-paused") > 0

        await until(paused)
        requests, attempts = fault.fired, (await daemon.repo_row(account))["attempts"]
        assert requests >= FAILURE_THRESHOLD
        for _ in range(3):
            await daemon.execute("update indexer.repo set next_attempt_at = null")
            await until(lambda: postponed(daemon, account, 15))
        row = await daemon.repo_row(account)
        assert row["last_error"].startswith("host-paused")
        assert (row["attempts"], fault.fired) == (attempts, requests)
        [host] = daemon.stages.status.snapshot().hosts
        assert (host.host, host.pause_reason) == (account.pds.url.removeprefix("http://"), "host-paused")


async def postponed(daemon: RunningDaemon, account: LocalAccount, seconds: float = 80) -> bool:
    """Return True if the next attempt is due in more than this many seconds."""
    row = await daemon.repo_row(account)
    return row["sync_status"] == "desynchronized" and row["next_attempt_at"] is not None and row["wait"] > seconds


def slow_down_export(account: LocalAccount) -> Fault:
    """Let the account's next export last until `finish_export`. Its content is the state at the time of the request."""
    fault = Fault(GET_REPO, rate=sum(map(len, account.repo.export())) // EXPORT_SECONDS)
    account.pds.faults.append(fault)
    return fault


def finish_export(fault: Fault) -> None:
    """Let the export be sent without further delay."""
    fault.rate = NO_LIMIT


async def wait_for_resync_start(daemon: RunningDaemon, account: LocalAccount, fault: Fault) -> None:
    await until(lambda: fault.fired == 1)
    assert (await daemon.repo_row(account))["sync_status"] == "in-progress"


@pytest.mark.parametrize(
    ("setting", "value", "error"), [("export_rate", "1MB", " bytes in "), ("export_time", "500ms", ": TimeoutError")]
)
async def test_export_slower_than_the_limit_is_aborted_and_retried(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: Any, error: str
) -> None:
    if setting == "export_rate":  # otherwise the rate could end the export before the time does
        monkeypatch.setattr("indexer.clients.TIMEOUTS", Timeouts(rate_grace=0.2))
    async with running_daemon(database, tmp_path, resync_source="pds", **{setting: value}) as daemon:
        account = daemon.create_account("ada.test", records=20)
        await daemon.wait_until_equal()
        before = await daemon.record_rows(account)
        slow_down_export(account)
        daemon.lose_commit(account)
        await daemon.wait_for_counter("resync", result="timeout")
        assert error in (await daemon.repo_row(account))["last_error"]
        assert await daemon.record_rows(account) == before
        await daemon.resync_until_equal(account)


async def test_large_repos_are_fetched_one_at_a_time(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four fetches start together. One continues; the others are now known to be large and wait for a slot."""
    monkeypatch.setattr("indexer.service.resync.attempt.LARGE_BYTES", 1_000)
    async with running_daemon(database, tmp_path, resync_source="pds", resync_workers="4") as daemon:
        accounts = [daemon.create_account(f"a{number}.test", records=20) for number in range(6)]
        await daemon.wait_until_equal()
        faults = [slow_down_all_exports(account) for account in accounts]
        for account in accounts:
            daemon.lose_commit(account)
        await daemon.wait_until_equal()
        await daemon.wait_for_counter("resync", above=5, result="synchronized")
        assert max(fault.fired for fault in faults) == 2
        assert daemon.counter("resync", result="postponed") > 0
        assert daemon.counter_sum("resync") == 6 + daemon.counter("resync", result="postponed"), "no attempt failed"


def slow_down_all_exports(account: LocalAccount) -> Fault:
    """Let each export of the account take one second."""
    fault = Fault(GET_REPO, account.did, rate=sum(map(len, account.repo.export())), times=None)
    account.pds.faults.append(fault)
    return fault


async def test_commits_during_a_resync_are_buffered_and_applied(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test", records=30)
        await daemon.wait_until_equal()
        fault = slow_down_export(account)
        daemon.lose_commit(account)
        await wait_for_resync_start(daemon, account, fault)
        path = account.create(POST, post("while it is fetched"))
        account.update(path, post("changed"))
        account.delete(next(iter(account.records)))
        await daemon.wait_for_counter("events", above=2, kind="commit", outcome="buffered")
        [(buffered,)] = await daemon.execute("select count(*) from indexer.buffered_event")
        assert buffered == 3
        assert (await daemon.repo_row(account))["sync_status"] == "in-progress"
        finish_export(fault)
        await daemon.wait_until_equal()
        await daemon.wait_for_counter("resync", result="synchronized")
        assert daemon.counter("resync", result="synchronized") == 1
        assert daemon.export_requests == 1
        live = {action: daemon.counter("record_changes", action=action, live="true") for action in ("update", "delete")}
        assert live == {"update": 1, "delete": 1}
        await assert_change_log_consistent(database)


async def test_commit_lost_during_a_resync_causes_another_resync(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test", records=30)
        await daemon.wait_until_equal()
        fault = slow_down_export(account)
        daemon.lose_commit(account)
        await wait_for_resync_start(daemon, account, fault)
        daemon.lose_commit(account)
        await daemon.wait_for_cursor()
        finish_export(fault)
        await daemon.wait_for_counter("resync", result="drain-break")
        row = await daemon.repo_row(account)
        assert (row["sync_status"], row["sync_reason"]) == ("desynchronized", "drain-break")
        assert row["rev"] < account.rev
        assert row["wait"] > 40
        await daemon.resync_until_equal(account)
        assert daemon.export_requests == 2
        await assert_change_log_consistent(database)


async def test_full_resync_buffer_aborts_the_resync(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path, resync_buffer_events="3") as daemon:
        account = daemon.create_account("ada.test", records=30)
        await daemon.wait_until_equal()
        fault = slow_down_export(account)
        daemon.lose_commit(account)
        await wait_for_resync_start(daemon, account, fault)
        for number in range(5):
            account.create(POST, post(number))
        await daemon.wait_for_cursor()
        row = await daemon.repo_row(account)
        assert (row["sync_status"], row["sync_reason"]) == ("desynchronized", "buffer-overflow")
        assert daemon.counter("events", kind="commit", outcome="buffered") == 3
        [(buffered,)] = await daemon.execute("select count(*) from indexer.buffered_event")
        assert buffered == 0
        finish_export(fault)
        await daemon.wait_for_counter("resync", result="lost")
        await daemon.resync_until_equal(account)
        await assert_change_log_consistent(database)


async def test_stop_during_a_resync_gives_the_claim_back(database: str, tmp_path: Path) -> None:
    """The interruption does not count as an attempt, and the next daemon resyncs the repo."""
    async with LocalNetwork() as network:
        async with running_daemon(database, tmp_path, network) as daemon:
            account = daemon.create_account("ada.test", records=30)
            await daemon.wait_until_equal()
            fault = slow_down_export(account)
            daemon.lose_commit(account)
            await wait_for_resync_start(daemon, account, fault)
            await daemon.wait_for_cursor()
        row = await daemon.repo_row(account)
        assert (row["sync_status"], row["sync_reason"], row["attempts"]) == ("desynchronized", "chain-break", 1)
        assert row["next_attempt_at"] is None
        async with running_daemon(database, tmp_path, network) as daemon:
            await daemon.wait_until_equal()
            await daemon.wait_for_counter("resync", result="synchronized")
            assert daemon.counter("resync", result="synchronized") == 1
        await assert_change_log_consistent(database)


async def test_export_older_than_the_stored_head_is_rejected(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path, resync_source="pds") as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        before = await daemon.record_rows(account)
        fault = Fault(
            GET_REPO,
            status=200,
            headers={"Content-Type": "application/vnd.ipld.car"},
            body=b"".join(account.repo.export()),
        )
        account.create(POST, post("after the old export"))
        await daemon.wait_until_equal()
        account.pds.faults.append(fault)
        daemon.lose_commit(account)
        await daemon.wait_for_counter("resync", result="export-stale")
        assert fault.fired == 1
        assert len(await daemon.record_rows(account)) == len(before) + 1
        await daemon.resync_until_equal(account)
