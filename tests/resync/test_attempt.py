"""Attempts of resyncs: which exports complete them, and which do not."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from time import time

import asyncpg
import pytest

from indexer.db import Database
from indexer.demo.local_repo import Write
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.batch import ReceivedMessage
from indexer.sync.identity import StoredIdentity
from indexer.sync.repo import PARKED, Outcome, SyncStatus
from indexer.sync.shard import Shard
from tests.resync.resync_world import MIRROR, PDS, ResyncWorld
from tests.sync.signing_account import STORE_ALL, received_message

pytestmark = pytest.mark.slow

FORMER = "https://former-pds.test"


@pytest.fixture
def world(db: Database, sql: asyncpg.Connection, tmp_path: Path) -> ResyncWorld:
    """Return the world of an account, in which nothing happens at random."""
    return ResyncWorld(db, sql, tmp_path)


async def synchronized(world: ResyncWorld) -> ResyncWorld:
    """Synchronize the account, which has records."""
    await world.db.repos.add([world.owner.did])
    while len(world.owner.history[world.owner.rev]) < 3:
        world.owner.change(*world.owner.some_writes(world.random))
    assert await world.attempt()
    assert world.results.pop("synchronized") == 1
    return world


async def with_wrong_records(world: ResyncWorld) -> ResyncWorld:
    """Delete the records, although the stored head is right, and request a resync."""
    await synchronized(world)
    world.is_checked = False
    assert await world.query("delete from indexer.record where did = $1 returning rkey", world.owner.did)
    await world.db.repos.request_resyncs([world.owner.did])
    return world


async def with_lagging_mirror(world: ResyncWorld) -> ResyncWorld:
    """Add the repo, whose mirror lacks the newest commit."""
    world.hosts.missing[MIRROR] = 1
    await world.db.repos.add([world.owner.did])
    return world


async def deactivate_briefly(world: ResyncWorld) -> None:
    away, back = world.owner.account_event(active=False), world.owner.account_event(active=True)
    await world.live.deliver([received_message("account", away), received_message("account", back)])


async def test_requested_resync_compares_every_record(world: ResyncWorld) -> None:
    """The heads are equal, but a requested resync trusts no stored record."""
    await with_wrong_records(world)
    assert await world.attempt()
    assert await world.has_all_records()


@pytest.mark.parametrize("what", [Desync.LEASE_EXPIRED, Desync.REACTIVATED])
async def test_interrupted_resync_keeps_its_reason_requested(world: ResyncWorld, what: Desync) -> None:
    await with_wrong_records(world)
    assert len(await world.claim()) == 1
    if what is Desync.LEASE_EXPIRED:
        assert await world.db.resyncs.expire_leases(range(256), time()) == 1
    else:
        await deactivate_briefly(world)
    assert (await world.row()).sync_reason is Desync.REQUESTED
    assert await world.attempt()
    assert await world.has_all_records()


@pytest.mark.parametrize("reason", [Desync.LENIENT_COMMIT, Desync.CHAIN_BREAK])
async def test_equal_heads_do_not_complete_the_resync_of_an_unproven_repo(world: ResyncWorld, reason: Desync) -> None:
    await with_wrong_records(world)
    await world.query("update indexer.repo set sync_reason = $1, unproven_since = now()", reason)
    assert await world.attempt()
    assert await world.has_all_records()
    assert (await world.row()).unproven_since is None


async def test_equal_heads_complete_a_resync_and_drain_its_buffer(world: ResyncWorld) -> None:
    await synchronized(world)
    await deactivate_briefly(world)
    world.at["latest commit answered"] = world.deliver_commit
    assert await world.attempt()
    assert world.live.outcomes[Outcome.BUFFERED] == 1
    assert world.results == {"unchanged": 1}
    assert await world.has_all_records()
    await world.check_changes()


async def test_event_that_arrives_just_before_the_row_is_locked_is_drained(world: ResyncWorld) -> None:
    await synchronized(world)
    await world.db.repos.request_resyncs([world.owner.did])
    world.at["lock"] = world.deliver_commit
    assert await world.attempt()
    assert world.live.outcomes[Outcome.BUFFERED] == 1
    assert world.results == {"synchronized": 1}
    assert await world.has_all_records()


async def withheld(world: ResyncWorld) -> ResyncWorld:
    """Synchronize the account, let the relay withhold it, and subscribe to its host."""
    await synchronized(world)
    await world.live.deliver([throttled(world)])
    await world.db.identities.save([StoredIdentity(world.owner.did, None, PDS, None, time())])
    await world.db.subscribed_hosts.add(PDS, Shard())
    assert await world.db.subscribed_hosts.unpark(Shard()) == 1
    return world


def throttled(world: ResyncWorld) -> ReceivedMessage:
    return received_message("account", world.owner.account_event(active=False, status="throttled"))


async def test_new_withheld_repo_is_synchronized_by_its_first_export(world: ResyncWorld) -> None:
    await world.live.deliver([throttled(world)])
    await world.db.subscribed_hosts.add(PDS, Shard())
    assert await world.attempt()
    assert world.results == {"synchronized": 1}
    assert (await world.row()).withheld_since is not None


async def test_withheld_repo_is_synchronized_while_its_host_is_subscribed(world: ResyncWorld) -> None:
    """The mirror, which may lack what the stream of the host has sent before, is not asked."""
    await withheld(world)
    world.owner.change(*world.owner.some_writes(world.random))
    world.hosts.requests.clear()
    world.at["export fetched"] = world.deliver_commit
    assert await world.attempt()
    assert world.live.outcomes[Outcome.BUFFERED] == 1
    assert world.results == {"synchronized": 1}
    assert world.hosts.requests == [("head", PDS), ("export", PDS)]
    assert await world.has_all_records()
    row = await world.row()
    assert row.withheld_since is not None
    await world.deliver_commit()
    assert world.live.outcomes[Outcome.APPLIED] == 2, "the report, and the commit"


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("step", ["latest commit answered", "lock"])
async def test_withheld_repo_is_not_synchronized_if_messages_of_its_host_were_missed_meanwhile(
    world: ResyncWorld, step: str, again: bool
) -> None:
    await withheld(world)

    async def miss() -> None:
        assert await world.db.subscribed_hosts.remove(PDS, Shard()) == 0
        if again:
            await world.db.subscribed_hosts.add(PDS, Shard())

    world.at[step] = miss
    assert await world.attempt()
    assert world.results == {Desync.WITHHELD: 1}
    row = await world.row()
    assert (row.sync_status, row.next_attempt_at) == (SyncStatus.DESYNCHRONIZED, PARKED)


async def test_resync_that_began_before_the_scope_changed_writes_nothing(world: ResyncWorld) -> None:
    """The scope loses the collections of the repo just before the row is locked."""
    world.policy = replace(STORE_ALL, scope=await world.db.scope.begin(STORE_ALL.scope))
    await with_wrong_records(world)
    before = await world.query("select collection, rkey from indexer.record order by 1, 2")
    world.at["lock"] = partial(world.db.scope.change, collections=["com.example.other"])
    assert await world.attempt()
    assert await world.query("select collection, rkey from indexer.record order by 1, 2") == before
    assert world.results == {"postponed": 1}


async def test_export_with_a_rev_of_the_future_is_rejected(
    db: Database, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """The clock of this test is a day behind that of the account."""
    policy = replace(STORE_ALL, limits=replace(STORE_ALL.limits, clock_drift_seconds=-86_400))
    world = ResyncWorld(db, sql, tmp_path, policy=policy)
    await db.repos.add([world.owner.did])
    assert await world.attempt()
    assert world.results == {FetchFailure.EXPORT_REJECTED: 1}
    row = await world.row()
    assert row.head is None
    assert row.last_error == f"export-rejected: {Rejection.FUTURE_REV}: {world.owner.rev}"


async def test_mirror_behind_the_stored_state_is_not_used(world: ResyncWorld) -> None:
    await synchronized(world)
    await world.deliver_commit()
    world.hosts.missing[MIRROR] = 1
    await world.db.repos.request_resyncs([world.owner.did])
    assert await world.attempt()
    assert await world.has_all_records()
    assert world.results == {"synchronized": 1}


@pytest.mark.parametrize("verified", [True, False])
async def test_mirror_behind_a_commit_before_the_first_resync_is_not_used(world: ResyncWorld, verified: bool) -> None:
    """The commit is ignored. Without a key, its rev is noted as an unverified one."""
    await with_lagging_mirror(world)
    if verified:
        world.directory.fetch()
    await world.deliver_commit()
    assert (await world.row()).latest_unverified_rev == (None if verified else world.owner.rev)
    assert await world.attempt()
    assert await world.has_all_records()
    assert (await world.row()).latest_unverified_rev is None
    assert world.results == {"synchronized": 1}


async def test_mirror_behind_a_discarded_buffered_commit_is_not_used(world: ResyncWorld) -> None:
    """A failed resync discards its buffer, but the latest unverified rev remains on the row."""
    await with_lagging_mirror(world)
    world.directory.up = False
    assert len(await world.claim()) == 1
    await world.deliver_commit()
    assert world.live.outcomes[Outcome.BUFFERED] == 1
    assert await world.db.resyncs.expire_leases(range(256), time()) == 1
    world.directory.up = True
    assert await world.attempt()
    assert await world.has_all_records()


async def test_worker_that_lost_its_claim_writes_nothing_more(
    world: ResyncWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the worker that holds the claim would wait for the transaction."""
    monkeypatch.setattr("indexer.sync.export.CHUNK_RECORDS", 1)
    await world.db.repos.add([world.owner.did])
    for number in range(3):
        world.owner.change(Write.create(f"com.example.a/{number}", {"$type": "com.example.a"}))
    world.at["create done"] = partial(world.db.repos.request_resyncs, [world.owner.did])
    assert await world.attempt()
    assert world.results == {"lost": 1}
    assert world.steps["create"] == 1
    assert await world.attempt()
    assert await world.has_all_records()


ANSWERS = pytest.mark.parametrize("answer", [1, FetchFailure.REPO_DEACTIVATED], ids=["old head", "deactivated"])


async def that_has_moved(world: ResyncWorld, answer: int | FetchFailure = 1) -> ResyncWorld:
    """Let a relay list a rev that is not stored. The account has moved unnoticed, and its former PDS still answers."""
    await synchronized(world)
    world.directory.cached = world.directory.identity(FORMER, time() - 86_400)
    world.owner.change(Write.create("com.example.a/new", {"$type": "com.example.a"}))
    assert await world.db.crawls.desynchronize_behind({world.owner.did: world.owner.rev}, time()) == 1
    await world.query("update indexer.repo set attempts = 0")  # otherwise the attempt begins with a lookup
    world.hosts.missing[FORMER] = answer
    world.hosts.requests.clear()
    return world


@ANSWERS
async def test_former_pds_does_not_end_a_resync(world: ResyncWorld, answer: int | FetchFailure) -> None:
    """The limits of the directory allow no lookup, so only the relay leads to the present PDS."""
    await that_has_moved(world, answer)
    world.directory.refreshes = False
    assert await world.attempt()
    assert world.results == {"synchronized": 1}
    assert await world.has_all_records()


@ANSWERS
async def test_resync_that_finds_another_pds_begins_again_there(world: ResyncWorld, answer: int | FetchFailure) -> None:
    await that_has_moved(world, answer)
    world.hosts.missing[MIRROR] = FetchFailure.UNREACHABLE
    assert await world.attempt()
    assert world.results == {"postponed": 1}
    assert await world.attempt()
    assert await world.has_all_records()


@ANSWERS
async def test_resync_fails_while_only_a_former_pds_may_answer(world: ResyncWorld, answer: int | FetchFailure) -> None:
    """The failure is not permanent, so the repo is not parked."""
    await that_has_moved(world, answer)
    world.directory.refreshes = False
    world.hosts.missing[MIRROR] = FetchFailure.UNREACHABLE
    assert await world.attempt()
    assert world.results.keys().isdisjoint({"synchronized", "unchanged", FetchFailure.REPO_DEACTIVATED})
    row = await world.row()
    assert (row.sync_status, row.next_attempt_at == PARKED) == (SyncStatus.DESYNCHRONIZED, False)


async def test_made_up_rev_in_a_list_causes_no_export_if_the_pds_is_certain(world: ResyncWorld) -> None:
    await that_has_moved(world)
    world.hosts.missing[PDS] = 1
    world.directory.cached = world.directory.identity(PDS, time() - 86_400)
    assert await world.attempt()
    assert world.results == {"unchanged": 1}
    assert world.hosts.requests == [("head", PDS)]


async def test_permanent_failure_counts_if_the_pds_is_certain(world: ResyncWorld) -> None:
    await that_has_moved(world)
    world.hosts.missing |= {PDS: FetchFailure.REPO_DEACTIVATED, MIRROR: FetchFailure.UNREACHABLE}
    world.directory.cached = world.directory.identity(PDS, time() - 86_400)
    assert await world.attempt()
    assert world.results == {FetchFailure.REPO_DEACTIVATED: 1}
    assert (await world.row()).next_attempt_at == PARKED
