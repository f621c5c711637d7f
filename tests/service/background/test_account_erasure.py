"""Deleted accounts: hidden at once, erased after the grace period, and intact if they become active again."""

import asyncio
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from time import time

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.localnet.local_account import LocalAccount
from indexer.service.background.account_erasure import AccountErasure
from indexer.store import Store
from indexer.store.erase_records import ErasedBatch
from indexer.sync.plan_event import plan_event, plan_existence
from indexer.sync.plans import Plan
from indexer.sync.policy import PlanContext
from indexer.sync.repo_state import Repo, SyncStatus
from indexer.sync.shard import Shard
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.store.change_log_helpers import connected
from tests.store.repo_rows import did, insert, put, synchronized, waiting_for_locks
from tests.sync.signing_account import NOW, STORE_ALL, SigningAccount, decoded_event
from tests.waiting import until


async def deleted_account(daemon: RunningDaemon, grace: float) -> LocalAccount:
    account = daemon.create_account("ada.test", records=7)
    await daemon.wait_until_equal()
    account.delete_account()
    await daemon.wait_for_cursor()
    assert await daemon.store.visible_records(account.did) == {}
    assert len(await daemon.record_rows(account)) == 7
    row = await daemon.repo_row(account)
    assert grace - 5 < row["erase_at"].timestamp() - time() <= grace
    return account


@pytest.mark.slow
async def test_deleted_account_is_hidden_at_once_and_erased_later(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.store.erase_records.BATCH_SIZE", 3)
    async with running_daemon(database, tmp_path, deletion_grace="1h") as daemon:
        account = await deleted_account(daemon, 3_600)
        erasure = AccountErasure(daemon.store, Shard(), daemon.stages.metrics)
        assert not await erasure.erase_batch(), "the grace period is not over"
        await daemon.execute("update indexer.repo set erase_at = now()")
        assert [await erasure.erase_batch() for _ in range(4)] == [True, True, True, False]
        assert await daemon.record_rows(account) == []
        row = await daemon.repo_row(account)
        assert (row["sync_status"], row["sync_reason"], row["rev"], row["erase_at"]) == (
            "desynchronized",
            "erased",
            None,
            None,
        )
        assert daemon.stages.metrics.registry.get_sample_value("indexer_erased_records_total") == 7


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 3], ids=["before", "half-way", "after"])
async def test_reactivated_account_has_all_its_records(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr("indexer.store.erase_records.BATCH_SIZE", 3)
    async with running_daemon(database, tmp_path) as daemon:
        account = await deleted_account(daemon, 604_800)
        erasure = AccountErasure(daemon.store, Shard(), daemon.stages.metrics)
        await daemon.execute("update indexer.repo set erase_at = now()")
        for _ in range(steps):
            assert await erasure.erase_batch()
        assert len(await daemon.record_rows(account)) == max(0, 7 - 3 * steps)
        account.activate()
        account.create(POST, post("back again"))
        await daemon.wait_until_equal()
        assert not await erasure.erase_batch()
        assert len(await daemon.record_rows(account)) == 8


async def test_replayed_deletion_erases_nothing(database: str) -> None:
    """Of the events of one relay, the one with the highest seq counts."""
    ann = SigningAccount()
    context = PlanContext(STORE_ALL, "wss://relay", NOW)
    gone = decoded_event("account", ann.account_event(active=False, status="deleted"))
    back = decoded_event("account", ann.account_event(active=True))
    repo = Repo(ann.did, version=1)
    for message in (gone, back, gone):
        plan = plan_event(repo, message, 100, None, context)
        assert isinstance(plan, Plan)
        repo = plan.repo
    assert (repo.active, repo.erase_at) == (True, None)
    store = await Store.open(database)
    try:
        assert await store.erase_batch(range(256), NOW + 1e9) is None
    finally:
        await store.close()


async def test_account_reactivated_during_the_erasure_loses_nothing(
    store: Store, database: str, sql: asyncpg.Connection
) -> None:
    """The row changes between the query for due accounts and the lock of the row."""
    gone = synchronized(1, active=False, hosting_status="deleted", erase_at=5.0)
    await insert(store, gone, changes=(put("app.test/a"), put("app.test/b")))
    async with connected(database) as live, live.transaction():
        await live.execute("update indexer.repo set version = 2, active = true, hosting_status = null, erase_at = null")
        erasing = asyncio.create_task(store.erase_batch(range(256), 10.0))
        await until(partial(waiting_for_locks, sql, 1))
    assert await erasing == ErasedBatch(did(1), 0, finished=False)
    assert await store.erase_batch(range(256), 10.0) is None
    row = (await store.repos([did(1)]))[did(1)]
    assert row == replace(gone, version=2, active=True, hosting_status=None, erase_at=None)
    assert len(await store.visible_records(did(1))) == 2


STATUSES = [None, "deleted", "deactivated", "suspended", "takendown", "something-new"]


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from(STATUSES), st.booleans()), max_size=20))
def test_visibility_follows_the_latest_account_event_and_the_takedown(
    steps: list[tuple[int, str | None, bool]],
) -> None:
    """Compare any order of #account events, replayed ones too, and takedowns with the rule stated directly."""
    ann = SigningAccount()
    context = PlanContext(STORE_ALL, "wss://relay", NOW)
    repo = Repo(ann.did, version=1)
    latest, takedown, status = 0, False, None
    for seq, sent_status, takes_down in steps:
        message = replace(
            decoded_event("account", ann.account_event(active=sent_status is None, status=sent_status)), seq=seq
        )
        plan = plan_event(repo, message, 100, None, context)
        assert isinstance(plan, Plan)
        repo = replace(plan.repo, takedown=takes_down)
        if seq > latest:
            latest, status = seq, sent_status
        takedown = takes_down
        assert repo.visible == (status is None and not takedown)
        assert (repo.erase_at is not None) == (status == "deleted")
        assert repo.sync_status is SyncStatus.DESYNCHRONIZED


@pytest.mark.slow
async def test_tombstoned_did_is_hidden_and_shown_when_it_exists_again(database: str, tmp_path: Path) -> None:
    """An #identity event is enough; the account need not commit anything."""
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test", records=3)
        await daemon.wait_until_equal()
        identity = daemon.network.plc.identities[account.did]
        daemon.network.plc.identities[account.did] = None
        daemon.inject("#identity", {"did": account.did, "time": daemon.network.clock.now()})
        await daemon.wait_for_cursor()
        await until(partial(refreshed, daemon, account, active=False))
        row = await daemon.repo_row(account)
        assert (row["active"], row["hosting_status"], row["sync_status"]) == (False, "tombstoned", "synchronized")
        assert row["erase_at"] is not None
        assert await daemon.store.visible_records(account.did) == {}
        daemon.network.plc.identities[account.did] = identity
        daemon.inject("#identity", {"did": account.did, "time": daemon.network.clock.now()})
        await daemon.wait_for_cursor()
        await until(partial(refreshed, daemon, account, active=True))
        await daemon.wait_until_equal()
        assert (await daemon.repo_row(account))["erase_at"] is None


async def refreshed(daemon: RunningDaemon, account: LocalAccount, *, active: bool) -> bool:
    await daemon.stages.identity_refresh.refresh(account.did)
    return bool((await daemon.repo_row(account))["active"]) == active


@pytest.mark.slow
async def test_repo_that_waits_for_a_resync_is_parked_when_its_did_is_gone(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test", records=3)
        await daemon.wait_until_equal()
        daemon.network.plc.identities[account.did] = None
        await daemon.execute("delete from indexer.identity")
        daemon.stages.identities.mark_stale([account.did])
        await daemon.execute("select atproto.request_resync($1)", account.did)
        await daemon.wait_for_counter("resync", result="identity-gone")
        row = await daemon.repo_row(account)
        assert (row["active"], row["hosting_status"], row["wait"]) == (False, "tombstoned", inf)
        assert row["last_error"].startswith("identity-gone")


def test_missing_did_hides_no_repo_without_records() -> None:
    repo = Repo("did:plc:x", version=1)
    assert plan_existence(repo, NOW, STORE_ALL, exists=False) is repo
    assert plan_existence(repo, NOW, STORE_ALL, exists=True) is repo
    left = replace(repo, active=False, hosting_status="deactivated")
    assert plan_existence(left, NOW, STORE_ALL, exists=True) is left, (
        "only the relay can say that the account is active"
    )
