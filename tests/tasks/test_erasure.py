"""Deleted accounts: hidden at once, erased after the grace period, and intact if they become active again."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from math import inf
from pathlib import Path
from time import time

import asyncpg
import pytest

from indexer.app.tuning import Tuning
from indexer.db import Database
from indexer.db.repos import ErasedBatch
from indexer.demo.local_pds import GET_LATEST_COMMIT
from indexer.net.identity.identity_cache import IdentityLifetimes
from tests.daemon.running_daemon import POST, RunningDaemon, post, publish_key_silently, running_daemon
from tests.database_checks import assert_change_log_consistent
from tests.db.change_log_helpers import connected
from tests.db.repo_rows import did, insert, put, synchronized, waiting_for_locks
from tests.faulty_network import Fault, FaultyAccount
from tests.waiting import until

pytestmark = pytest.mark.slow


GRACE = 3_600.0


@pytest.fixture
async def daemon(database: str, tmp_path: Path) -> AsyncIterator[RunningDaemon]:
    """Run a daemon that may look up an identity again at once."""
    tuning = Tuning(identities=IdentityLifetimes(refresh_interval=0.0, changed_interval=0.0))
    async with running_daemon(database, tmp_path, tuning=tuning, deletion_grace="1h") as running:
        yield running


async def deleted_account(daemon: RunningDaemon) -> FaultyAccount:
    account = daemon.create_account("ada.test", records=7)
    await daemon.wait_until_equal()
    account.delete_account()
    await daemon.wait_for_cursor()
    assert await daemon.db.reports.visible_records(account.did) == {}
    assert len(await daemon.record_rows(account)) == 7
    row = await daemon.repo_row(account)
    assert GRACE - 60 < row["erase_at"].timestamp() - time() <= GRACE
    return account


async def test_deleted_account_is_hidden_at_once_and_erased_later(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.db.repos.ERASED_RECORDS", 3)
    account = await deleted_account(daemon)
    erasure = daemon.stages.account_erasure
    assert not await erasure.erase_batch(), "the grace period is not over"
    await daemon.execute("update indexer.repo set erase_at = now()")
    assert [await erasure.erase_batch() for _ in range(4)] == [True, True, True, False]
    assert await daemon.record_rows(account) == []
    row = await daemon.repo_row(account)
    assert [row[name] for name in ("sync_status", "sync_reason", "rev", "erase_at")] == [
        "desynchronized",
        "erased",
        None,
        None,
    ]


@pytest.mark.parametrize("steps", [1, 3], ids=["half-way", "after"])
async def test_reactivated_account_has_all_its_records(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr("indexer.db.repos.ERASED_RECORDS", 3)
    account = await deleted_account(daemon)
    erasure = daemon.stages.account_erasure
    await daemon.execute("update indexer.repo set erase_at = now()")
    for _ in range(steps):
        assert await erasure.erase_batch()
        await assert_change_log_consistent(daemon.dsn)
    assert len(await daemon.record_rows(account)) == max(0, 7 - 3 * steps)
    account.activate()
    account.create(POST, post("back again"))
    await daemon.wait_until_equal()
    assert not await erasure.erase_batch()
    assert len(await daemon.record_rows(account)) == 8
    await assert_change_log_consistent(daemon.dsn)


async def test_account_reactivated_during_the_erasure_loses_nothing(
    db: Database, database: str, sql: asyncpg.Connection
) -> None:
    """The row changes between the query for due accounts and the lock of the row."""
    gone = synchronized(1, active=False, hosting_status="deleted", erase_at=5.0)
    await insert(db, gone, changes=(put("app.test/a"), put("app.test/b")))
    async with connected(database) as live, live.transaction():
        await live.execute("update indexer.repo set version = 2, active = true, hosting_status = null, erase_at = null")
        erasing = asyncio.create_task(db.repos.erase_batch(range(256), 10.0))
        await until(partial(waiting_for_locks, sql, 1))
    assert await erasing == ErasedBatch(did(1), 0, finished=False)
    assert await db.repos.erase_batch(range(256), 10.0) is None
    row = (await db.repos.load([did(1)]))[did(1)]
    assert row == gone._replace(version=2, active=True, hosting_status=None, erase_at=None)
    assert len(await db.reports.visible_records(did(1))) == 2


@pytest.mark.parametrize("sign", ["#identity", "#commit"])
async def test_tombstoned_did_is_hidden_and_shown_when_it_exists_again(daemon: RunningDaemon, sign: str) -> None:
    """An #identity event is enough, and so is a commit."""
    account = daemon.create_account("ada.test", records=3)
    await daemon.wait_until_equal()
    await tombstone(daemon, account)
    row = await daemon.repo_row(account)
    assert (row["hosting_status"], row["sync_status"]) == ("tombstoned", "synchronized")
    assert row["erase_at"] is not None
    assert await daemon.db.reports.visible_records(account.did) == {}
    publish_key_silently(daemon.network, account)
    if sign == "#identity":
        announce_identity(daemon, account)
    else:
        account.create(POST, post("the DID exists again"))
    await daemon.wait_for_cursor()

    async def shown() -> bool:
        await daemon.stages.identity_refresh.refresh_batch("plc")
        return bool((await daemon.repo_row(account))["active"])

    await until(shown)
    await daemon.wait_until_equal()
    assert (await daemon.repo_row(account))["erase_at"] is None
    assert len(await daemon.record_rows(account)) == (3 if sign == "#identity" else 4)


def announce_identity(daemon: RunningDaemon, account: FaultyAccount) -> None:
    daemon.inject("#identity", {"did": account.did, "time": daemon.network.clock.now()})


async def tombstone(daemon: RunningDaemon, account: FaultyAccount) -> None:
    """Let the directory answer that the DID has a tombstone, and wait until the account is hidden."""
    daemon.network.plc.end(account.did)
    announce_identity(daemon, account)
    await daemon.wait_for_cursor()
    await until(partial(refreshed, daemon, account, active=False))


async def refreshed(daemon: RunningDaemon, account: FaultyAccount, *, active: bool) -> bool:
    await daemon.stages.identity_refresh.refresh(account.did)
    return bool((await daemon.repo_row(account))["active"]) == active


async def test_repo_that_waits_for_a_resync_is_parked_when_its_did_is_gone(daemon: RunningDaemon) -> None:
    account = daemon.create_account("ada.test", records=3)
    await daemon.wait_until_equal()
    daemon.network.plc.end(account.did)
    await daemon.execute("delete from indexer.identity")
    daemon.stages.identities.mark_stale([account.did])
    await daemon.execute("select atproto.request_resync($1)", account.did)
    await daemon.wait_for_counter("resync", result="identity-gone")
    row = await daemon.repo_row(account)
    assert (row["active"], row["hosting_status"], row["wait"]) == (False, "tombstoned", inf)
    assert row["last_error"].startswith("identity-gone")


async def identity_row(daemon: RunningDaemon, account: FaultyAccount) -> asyncpg.Record:
    [row] = await daemon.execute("select * from indexer.identity where did = $1", account.did)
    return row


async def refreshed_since(daemon: RunningDaemon, account: FaultyAccount, before: asyncpg.Record) -> bool:
    await daemon.stages.identity_refresh.refresh(account.did)
    return bool((await identity_row(daemon, account))["fetched_at"] > before["fetched_at"])


async def test_one_denial_by_the_directory_hides_no_account(daemon: RunningDaemon) -> None:
    """The records stay visible until the denial is certain. New commits wait, because the key may be outdated."""
    account, bystander = daemon.create_account("ada.test", records=3), daemon.create_account("bob.test")
    await daemon.wait_until_equal()
    denial = json.dumps({"message": f"DID not registered: {account.did}"}).encode()
    fault = Fault(f"/{account.did}/log/audit", times=None, status=404, body=denial)
    before = await identity_row(daemon, account)
    daemon.network.plc.faults.append(fault)
    announce_identity(daemon, account)
    await daemon.wait_for_cursor()
    await until(partial(refreshed_since, daemon, account, before))
    stored = await daemon.record_rows(account)
    assert len(await daemon.db.reports.visible_records(account.did)) == 3, "hidden by one answer of the directory"
    for number in range(5):
        account.create(POST, post(f"while the directory denies the DID {number}"))
    bystander.create(POST, post("not affected"))
    await daemon.wait_for_cursor()
    row = await daemon.repo_row(account)
    assert (row["active"], row["erase_at"], row["sync_reason"]) == (True, None, "identity")
    assert len(await daemon.db.reports.visible_records(account.did)) == 3
    assert await daemon.record_rows(account) == stored, "commits were applied although the DID may not exist"
    assert len(await daemon.db.reports.visible_records(bystander.did)) == 6
    assert await daemon.dead_letters() == []
    await daemon.wait_for_counter("resync", result="identity-doubtful")
    after = await identity_row(daemon, account)
    assert (after["denials"], after["pds"]) == (1, before["pds"])
    daemon.network.plc.faults.remove(fault)
    await until(partial(refreshed_since, daemon, account, after))
    await daemon.resync_until_equal(account)
    assert len(await daemon.record_rows(account)) == 8
    assert (await identity_row(daemon, account))["denials"] == 0


async def let_grace_period_end(daemon: RunningDaemon, account: FaultyAccount) -> None:
    """End the grace period, with the last lookup of the identity so long ago that another one is allowed."""
    await daemon.execute("update indexer.repo set erase_at = now() where did = $1", account.did)
    await daemon.execute("update indexer.identity set stale = true where did = $1", account.did)
    daemon.stages.identities.mark_stale([account.did])


async def erased_or_postponed(daemon: RunningDaemon, account: FaultyAccount) -> bool:
    """Check the account, and erase it if it is gone; return True if the erasure is over or postponed for a day."""
    await daemon.stages.account_erasure.check_gone()
    while await daemon.stages.account_erasure.erase_batch():
        pass
    row = await daemon.repo_row(account)
    if row["erase_at"] is None or row["erase_at"].timestamp() > time() + 80_000:
        return True
    await daemon.execute("update indexer.repo set erase_at = now() where did = $1", account.did)
    return False


@pytest.mark.parametrize("case", ["served by its host", "denied by its host", "exists again"])
async def test_account_of_a_gone_did_is_erased_only_if_its_directory_and_its_host_deny_it(
    daemon: RunningDaemon, case: str
) -> None:
    account = daemon.create_account("ada.test", records=3)
    await daemon.wait_until_equal()
    await tombstone(daemon, account)
    if case == "denied by its host":
        denial = Fault(GET_LATEST_COMMIT, account.did, times=None, status=400, body=b'{"error":"RepoNotFound"}')
        account.pds.faults.append(denial)
    elif case == "exists again":
        publish_key_silently(daemon.network, account)
    await let_grace_period_end(daemon, account)
    lookups = daemon.network.plc.requests.total()
    await until(partial(erased_or_postponed, daemon, account))
    assert len(await daemon.record_rows(account)) == (0 if case == "denied by its host" else 3)
    assert daemon.network.plc.requests.total() > lookups, "the directory was not asked before the erasure"
    assert (await daemon.repo_row(account))["active"] == (case == "exists again")
    if case == "exists again":
        await daemon.wait_until_equal()
