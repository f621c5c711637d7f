"""Exports that fail, are slow, are out of date or are invalid: stored records change only at the end of a resync."""

import asyncio
import tracemalloc
from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path
from time import process_time, time

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.core.spool import Spool
from indexer.demo.local_pds import CAR_TYPE, GET_REPO
from indexer.demo.reference_tree import height
from indexer.errors import UnavailableError, UpstreamError
from indexer.sync.export import Snapshot, verify_snapshot
from tests.daemon.crafted_exports import (
    INVALID_EXPORTS,
    TOO_LARGE_EXPORTS,
    UNUSUAL_VALID_EXPORTS,
    SignedRepo,
    node_of_keys,
)
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.database_checks import assert_change_log_consistent
from tests.faulty_network import Fault, FaultyAccount
from tests.sync.signing_account import SigningAccount
from tests.waiting import until

pytestmark = pytest.mark.slow

MAX_CPU_SECONDS = 2.0
MAX_MEMORY_BYTES = 12 << 20
"""Memory in addition to the export itself."""
EXPORT_SECONDS = 60
"""The duration of an export that no test lets end."""
NO_LIMIT = 1 << 30
"""Bytes per second."""
RECORDS = "select * from indexer.record order by did, collection, rkey"
FAILED = "select count(*) from indexer.repo where sync_status = 'desynchronized' and last_error is not null"
REJECTED_BY_THE_RESYNC = {"last record missing", "rev in the future"}
"""Exports that are valid by themselves: the resync rejects them."""
FAILING_EXPORTS = {
    "status 500": (Fault(GET_REPO, status=500), "http-status"),
    "connection broken after 700 bytes": (Fault(GET_REPO, cut=700), "unreachable"),
    "connection broken at once": (Fault(GET_REPO, cut=0), "unreachable"),
    "HTML page with its type": (
        Fault(GET_REPO, status=200, headers={"Content-Type": "text/html"}, body=b"<html>"),
        "bad-answer",
    ),
    "RepoNotFound": (
        Fault(GET_REPO, status=400, body=b'{"error":"RepoNotFound","message":"?"}'),
        "repo-not-found",
    ),
}


@pytest.fixture(scope="module")
def source() -> SignedRepo:
    account = SigningAccount()
    for number in range(40):
        account.commit_post(f"{number:03}")
    return SignedRepo(account.repo, account.key)


def verify_export(export: bytes, source: SignedRepo, directory: Path) -> Snapshot:
    with closing(Spool(directory, DEFAULT_LIMITS)) as spool:
        for start in range(0, len(export), 65_536):
            spool.write(export[start : start + 65_536])
        spool.finish()
        return verify_snapshot(source.repo.did, spool.root, spool.block, source.key.public, DEFAULT_LIMITS, spool.size)


@pytest.mark.parametrize("name", sorted(INVALID_EXPORTS.keys() - REJECTED_BY_THE_RESYNC))
def test_invalid_export_is_rejected_within_bounds_of_time_and_memory(
    source: SignedRepo, tmp_path: Path, name: str
) -> None:
    make, reason = INVALID_EXPORTS[name]
    export = make(source)
    tracemalloc.start()
    began = process_time()
    try:
        with pytest.raises((UpstreamError, UnavailableError)) as error:
            verify_export(export, source, tmp_path)
        assert process_time() - began < MAX_CPU_SECONDS
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY_BYTES
    finally:
        tracemalloc.stop()
    assert f"export-rejected: {error.value}".startswith(reason) or str(error.value).startswith(reason)


@pytest.mark.parametrize("name", UNUSUAL_VALID_EXPORTS)
def test_unusual_export_is_accepted(source: SignedRepo, tmp_path: Path, name: str) -> None:
    snapshot = verify_export(UNUSUAL_VALID_EXPORTS[name](source), source, tmp_path)
    assert (snapshot.head.rev, snapshot.count) == (source.repo.head.rev, 40)


async def test_failed_and_invalid_exports_change_nothing_and_the_next_valid_ones_are_applied(
    database: str, tmp_path: Path
) -> None:
    narrow = {"repo_bytes": 20_000_000, "repo_blocks": 20_000}
    async with running_daemon(database, tmp_path, resync_source="pds", narrow=narrow) as daemon:
        crafted = INVALID_EXPORTS | TOO_LARGE_EXPORTS
        reasons = {name: reason for name, (_, reason) in (*crafted.items(), *FAILING_EXPORTS.items())}
        accounts = {name: daemon.create_account(f"a{number}.test", records=20) for number, name in enumerate(reasons)}
        await daemon.wait_until_equal()
        before = await daemon.execute(RECORDS)
        faults = {}
        for name, account in accounts.items():
            daemon.lose_commit(account)
            if name in crafted:
                body = crafted[name][0](SignedRepo(account.repo, account.key))
                fault = Fault(GET_REPO, account.did, status=200, headers={"Content-Type": CAR_TYPE}, body=body)
            else:
                fault = replace(FAILING_EXPORTS[name][0], did=account.did)
            faults[name] = fault
            account.pds.faults.append(fault)
            await asyncio.sleep(0)

        async def all_failed() -> bool:
            [(failed,)] = await daemon.execute(FAILED)
            return bool(failed == len(accounts))

        await until(all_failed, lambda: [name for name, fault in faults.items() if not fault.fired])
        for name, reason in reasons.items():
            row = await daemon.repo_row(accounts[name])
            assert row["last_error"].startswith(reason), (name, row["last_error"])
            assert (row["sync_status"], row["sync_reason"]) == ("desynchronized", "chain-break"), name
            assert row["attempts"] == 2, name
            assert row["wait"] == inf if reason == "repo-not-found" else 40 < row["wait"] < 160, name
        assert await daemon.execute(RECORDS) == before
        assert not list((tmp_path / "spool").iterdir())
        await daemon.execute("update indexer.repo set next_attempt_at = null where sync_status = 'desynchronized'")
        await daemon.wait_until_equal()
        assert {fault.fired for fault in faults.values()} == {1}
        await assert_change_log_consistent(database)


def slow_down_export(account: FaultyAccount) -> Fault:
    """Let the account's next export last until `finish_export`. Its content is the state at the time of the request."""
    fault = Fault(GET_REPO, account.did, rate=sum(map(len, account.repo.export())) // EXPORT_SECONDS)
    account.pds.faults.append(fault)
    return fault


def finish_export(fault: Fault) -> None:
    """Let the export be sent without further delay."""
    fault.rate = NO_LIMIT


async def wait_for_resync_start(daemon: RunningDaemon, account: FaultyAccount, fault: Fault) -> None:
    await until(lambda: fault.fired == 1)
    assert (await daemon.repo_row(account))["sync_status"] == "in-progress"


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
        assert daemon.counter("record_changes", action="create", live="false") > 0
        await assert_change_log_consistent(database)


@pytest.mark.proof("daemon")
async def test_lost_commit_and_full_buffer_end_a_resync(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path, narrow={"resync_buffer_events": 3}) as daemon:
        losing, flooding = (daemon.create_account(f"{name}.test", records=30) for name in ("ada", "eve"))
        await daemon.wait_until_equal()
        faults = [slow_down_export(account) for account in (losing, flooding)]
        for account, fault in zip((losing, flooding), faults, strict=True):
            daemon.lose_commit(account)
            await wait_for_resync_start(daemon, account, fault)
        daemon.lose_commit(losing)
        for number in range(5):
            flooding.create(POST, post(number))
        await daemon.wait_for_cursor()
        row = await daemon.repo_row(flooding)
        assert (row["sync_status"], row["sync_reason"]) == ("desynchronized", "buffer-overflow")
        for fault in faults:
            finish_export(fault)
        await daemon.wait_for_counter("resync", result="lost")
        await daemon.wait_for_counter("resync", result="drain-break")
        row = await daemon.repo_row(losing)
        assert (row["sync_status"], row["sync_reason"]) == ("desynchronized", "drain-break")
        assert row["rev"] < losing.rev
        assert row["wait"] > 40
        await daemon.execute("update indexer.repo set next_attempt_at = null where sync_status = 'desynchronized'")
        await daemon.wait_until_equal()
        await assert_change_log_consistent(database)


LAST_LEAF_KEYS = [f"zz{number:03}" for number in range(100) if height(f"{POST}/zz{number:03}") == 0][:6]


def omit_last_records(daemon: RunningDaemon, account: FaultyAccount, exports: int) -> list[Fault]:
    """Let the next exports contain all tree nodes but not the last three records; two of these were never announced."""
    sections = sum(1 for _ in account.repo.export()) - 1
    faults = [Fault(GET_REPO, sections=sections) for _ in range(exports)]
    account.pds.faults += faults
    daemon.network.relay.drop(account.did)
    for rkey in LAST_LEAF_KEYS[4:]:
        account.create(POST, post(rkey), rkey=rkey)
    return faults


async def account_with_long_last_leaf(daemon: RunningDaemon) -> FaultyAccount:
    """Create an account whose exports end with the records of one node, which comes before all of them."""
    account = daemon.create_account("ada.test", records=20)
    for rkey in LAST_LEAF_KEYS[:4]:
        account.create(POST, post(rkey), rkey=rkey)
    await daemon.wait_until_equal()
    return account


@pytest.mark.proof("daemon")
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
        assert await daemon.db.resyncs.request_missing_values(range(256), 0.0, time() + 1) == 1
        await daemon.resync_until_equal(account)
        assert [row["rkey"] for row in await daemon.record_rows(account) if row["value"] is None] == []
        [action] = await daemon.execute(
            "select action, live from atproto.changes where did = $1 and rkey is not null order by seq desc limit 1",
            account.did,
        )
        assert tuple(action) == ("update", False)
        assert await daemon.db.resyncs.request_missing_values(range(256), 0.0, time() + 1) == 0


@pytest.mark.proof("daemon")
async def test_second_state_with_the_same_rev_is_accepted_only_from_the_pds(database: str, tmp_path: Path) -> None:
    """The export of a mirror is rejected. The export of the PDS is stored and counted as equivocation."""
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        before = await daemon.record_rows(account)
        source = SignedRepo(account.repo, account.key)
        fault = Fault(
            GET_REPO,
            status=200,
            headers={"Content-Type": CAR_TYPE},
            body=source.export_tree(node_of_keys([f"{POST}/a"])),
        )
        daemon.network.relay.faults.append(fault)
        assert await daemon.db.repos.request_resyncs([account.did])
        await daemon.wait_for_counter("resync", result="synchronized")
        assert fault.fired == 1
        assert await daemon.record_rows(account) == before

        again = replace(fault, times=2, fired=0)  # the relay redirects to the PDS, then the PDS itself is asked
        account.pds.faults.append(again)
        assert await daemon.db.repos.request_resyncs([account.did])
        await daemon.wait_for_counter("resync", above=1, result="synchronized")
        assert again.fired == 2
        assert [row["rkey"] for row in await daemon.record_rows(account)] == ["a"]
        assert daemon.counter("desynchronized", reason="equivocation") == 1
        account.create(POST, post("a single history again"))
        await daemon.resync_until_equal(account)
