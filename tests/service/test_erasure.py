"""Deleted accounts: hidden at once, erased after the time of grace, and not if they come back."""

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

from indexer.localnet.account import Account
from indexer.service.erasure import Erasure
from indexer.store import Store
from indexer.store.erasure import Erased
from indexer.sync.plan import Plan
from indexer.sync.planning import Ground, plan_event, plan_existence
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import Shard
from tests.daemon.stage import POST, Stage, post, staged
from tests.serving import until
from tests.store.following import connected
from tests.store.rows import did, held_up, insert, put, synchronized
from tests.sync.people import EVERYTHING, NOW, Person, event


async def deleted_account(stage: Stage, grace: float) -> Account:
    account = stage.account("ada.test", records=7)
    await stage.equal()
    account.delete_account()
    await stage.read()
    assert await stage.running.store.visible_records(account.did) == {}
    assert len(await stage.stored(account)) == 7
    row = await stage.repo(account)
    assert grace - 5 < row["erase_at"].timestamp() - time() <= grace
    return account


@pytest.mark.slow
async def test_a_deleted_account_is_hidden_at_once_and_erased_later(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.store.erasure.AT_ONCE", 3)
    async with staged(database, tmp_path, deletion_grace="1h") as stage:
        account = await deleted_account(stage, 3_600)
        erasure = Erasure(stage.running.store, Shard(), stage.running.metrics)
        assert not await erasure.erase_some(), "its time has not come"
        await stage.execute("update indexer.repo set erase_at = now()")
        assert [await erasure.erase_some() for _ in range(4)] == [True, True, True, False]
        assert await stage.stored(account) == []
        row = await stage.repo(account)
        assert (row["status"], row["reason"], row["rev"], row["erase_at"]) == ("desynchronized", "erased", None, None)
        assert stage.running.metrics.registry.get_sample_value("indexer_erased_records_total") == 7


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 3], ids=["before", "half-way", "after"])
async def test_an_account_that_comes_back_is_whole(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr("indexer.store.erasure.AT_ONCE", 3)
    async with staged(database, tmp_path) as stage:
        account = await deleted_account(stage, 604_800)
        erasure = Erasure(stage.running.store, Shard(), stage.running.metrics)
        await stage.execute("update indexer.repo set erase_at = now()")
        for _ in range(steps):
            assert await erasure.erase_some()
        assert len(await stage.stored(account)) == max(0, 7 - 3 * steps)
        account.activate()
        account.create(POST, post("back again"))
        await stage.equal()
        assert not await erasure.erase_some()
        assert len(await stage.stored(account)) == 8


async def test_a_replayed_deletion_erases_nothing(database: str) -> None:
    """The relay's word, the latest by its sequence: an older one that comes again changes nothing."""
    ann = Person()
    ground = Ground(EVERYTHING, "wss://relay", NOW)
    gone = event("account", ann.account(active=False, status="deleted"))
    back = event("account", ann.account(active=True))
    repo = Repo(ann.did, version=1)
    for message in (gone, back, gone):
        plan = plan_event(repo, message, 100, None, ground)
        assert isinstance(plan, Plan)
        repo = plan.repo
    assert (repo.active, repo.erase_at) == (True, None)
    store = await Store.open(database)
    try:
        assert await store.erase_some(range(256), NOW + 1e9) is None
    finally:
        await store.close()


async def test_an_account_that_comes_back_at_that_moment_loses_nothing(
    store: Store, database: str, sql: asyncpg.Connection
) -> None:
    """Between the look at what is due and the writing of its row."""
    gone = synchronized(1, active=False, hosting_status="deleted", erase_at=5.0)
    await insert(store, gone, changes=(put("app.test/a"), put("app.test/b")))
    async with connected(database) as live, live.transaction():
        await live.execute("update indexer.repo set version = 2, active = true, hosting_status = null, erase_at = null")
        erasing = asyncio.create_task(store.erase_some(range(256), 10.0))
        await until(partial(held_up, sql, 1))
    assert await erasing == Erased(did(1), 0, finished=False)
    assert await store.erase_some(range(256), 10.0) is None
    row = (await store.repos([did(1)]))[did(1)]
    assert row == replace(gone, version=2, active=True, hosting_status=None, erase_at=None)
    assert len(await store.visible_records(did(1))) == 2


STATUSES = [None, "deleted", "deactivated", "suspended", "takendown", "something-new"]


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from(STATUSES), st.booleans()), max_size=20))
def test_visibility_is_the_latest_word_of_upstream_and_our_own(steps: list[tuple[int, str | None, bool]]) -> None:
    """Any order of #account messages, replays among them, and of takedowns, against the plain rule."""
    ann = Person()
    ground = Ground(EVERYTHING, "wss://relay", NOW)
    repo = Repo(ann.did, version=1)
    latest, takedown, status = 0, False, None
    for seq, said, ours in steps:
        message = replace(event("account", ann.account(active=said is None, status=said)), seq=seq)
        plan = plan_event(repo, message, 100, None, ground)
        assert isinstance(plan, Plan)
        repo = replace(plan.repo, takedown=ours)
        if seq > latest:
            latest, status = seq, said
        takedown = ours
        assert (repo.active and not repo.takedown) == (status is None and not takedown)
        assert (repo.erase_at is not None) == (status == "deleted")
        assert repo.status is SyncStatus.DESYNCHRONIZED


@pytest.mark.slow
async def test_a_tombstoned_did_is_hidden_and_shown_when_it_is_back(database: str, tmp_path: Path) -> None:
    """Whether or not the account writes anything: an #identity message is enough."""
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test", records=3)
        await stage.equal()
        identity = stage.network.plc.identities[account.did]
        stage.network.plc.identities[account.did] = None
        stage.inject("#identity", {"did": account.did, "time": stage.network.clock.now()})
        await stage.read()
        await until(partial(renewed, stage, account, active=False))
        row = await stage.repo(account)
        assert (row["active"], row["hosting_status"], row["status"]) == (False, "tombstoned", "synchronized")
        assert row["erase_at"] is not None
        assert await stage.running.store.visible_records(account.did) == {}
        stage.network.plc.identities[account.did] = identity
        stage.inject("#identity", {"did": account.did, "time": stage.network.clock.now()})
        await stage.read()
        await until(partial(renewed, stage, account, active=True))
        await stage.equal()
        assert (await stage.repo(account))["erase_at"] is None


async def renewed(stage: Stage, account: Account, *, active: bool) -> bool:
    await stage.running.renewal.renew(account.did)
    return bool((await stage.repo(account))["active"]) == active


@pytest.mark.slow
async def test_a_repo_that_waits_for_its_resync_is_buried_with_its_did(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test", records=3)
        await stage.equal()
        stage.network.plc.identities[account.did] = None
        await stage.execute("delete from indexer.identity")
        stage.running.identities.mark_stale([account.did])
        await stage.execute("select atproto.request_resync($1)", account.did)
        await stage.counted(0, "resync", result="identity-gone")
        row = await stage.repo(account)
        assert (row["active"], row["hosting_status"], row["wait"]) == (False, "tombstoned", inf)
        assert row["last_error"].startswith("identity-gone")


def test_a_did_too_new_for_a_directory_is_hidden_from_nobody() -> None:
    repo = Repo("did:plc:x", version=1)
    assert plan_existence(repo, NOW, EVERYTHING, exists=False) is repo
    assert plan_existence(repo, NOW, EVERYTHING, exists=True) is repo
    left = replace(repo, active=False, hosting_status="deactivated")
    assert plan_existence(left, NOW, EVERYTHING, exists=True) is left, "only upstream can say that it is active"
