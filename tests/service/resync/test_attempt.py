"""Attempts of resyncs: which exports complete them, and which do not."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import time

import asyncpg
import pytest

from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.service.resync.admission import Postponed
from indexer.store import Store
from indexer.sync.repo_transitions import Outcome
from tests.service.resync.stepped_resync import KilledError, SteppedWorld
from tests.sync.signing_account import STORE_ALL, received_message

pytestmark = pytest.mark.slow


class WrongRecords(SteppedWorld):
    """A repo whose stored records are wrong although its stored head is right."""

    async def check(self) -> None:
        """Check nothing: the records are wrong until the end."""

    async def begin(self) -> None:
        self.event_rate = 0.0
        await super().begin()
        while not self.owner.history[self.owner.rev]:
            self.owner.change(*self.owner.some_writes(self.random))
        await self.settle()
        assert await self.query("delete from indexer.record where did = $1 returning rkey", self.owner.did)
        await self._store.request_resyncs([self.owner.did])


class LaggingMirror(SteppedWorld):
    """A repo whose mirror lacks the `lag` newest commits. Nothing happens at random."""

    lag = 1
    deliver_at = ""

    async def begin(self) -> None:
        self.event_rate = 0.0
        await self._store.add_repos([self.owner.did])

    def mirror_lag(self) -> int:
        return self.lag

    async def happen(self, where: str) -> None:
        if where == self.deliver_at:
            await self.deliver_commit()
        await super().happen(where)

    async def deliver_commit(self) -> None:
        """Deliver a commit on the live path."""
        await self.live.deliver([received_message("commit", self.owner.commit(*self.owner.some_writes(self.random)))])


async def synchronized_mirror(database: str, store: Store, sql: asyncpg.Connection, directory: Path) -> LaggingMirror:
    """Return a mirror that does not lag, and whose account is synchronized."""
    world = LaggingMirror(database, store, sql, directory, "ada")
    world.lag = 0
    await world.begin()
    await resync(world)
    return world


class NarrowedMeanwhile(WrongRecords):
    """The scope loses the collections of the repo just before its resync locks the row."""

    narrows = False

    async def happen(self, where: str) -> None:
        if where == "lock" and self.narrows:
            await self._store.set_collections(["com.example.other"])
        await super().happen(where)


class RequestedAgain(LaggingMirror):
    """A repo whose resync is requested again after the first chunk was written."""

    lag = 0
    written = 0

    async def begin(self) -> None:
        await super().begin()
        while len(self.owner.history[self.owner.rev]) < 3:
            self.owner.change(*self.owner.some_writes(self.random))

    async def happen(self, where: str) -> None:
        if where == "written":
            self.written += 1
            if self.written == 1:
                await self._store.request_resyncs([self.owner.did])
        await super().happen(where)


async def resync(world: SteppedWorld) -> None:
    """Run one attempt with a new worker."""
    async with world.worker() as worker:
        assert await worker.attempt()


async def has_all_records(world: SteppedWorld, sql: asyncpg.Connection) -> bool:
    rows = await sql.fetch("select collection || '/' || rkey from indexer.record where did = $1", world.owner.did)
    return {path for (path,) in rows} == world.owner.history[world.owner.rev].keys()


async def test_requested_resync_compares_every_record(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """The heads are equal, but a requested resync trusts no stored record."""
    world = WrongRecords(database, store, sql, tmp_path, "ada")
    await world.begin()
    assert not await has_all_records(world, sql)
    await resync(world)
    assert await has_all_records(world, sql)


@pytest.mark.parametrize("what", [Desync.LEASE_EXPIRED, Desync.REACTIVATED])
async def test_interrupted_resync_keeps_its_reason_requested(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path, what: Desync
) -> None:
    world = WrongRecords(database, store, sql, tmp_path, "ada")
    await world.begin()
    async with world.worker(last=1) as worker:
        with suppress(KilledError):
            await worker.attempt()
    if what is Desync.LEASE_EXPIRED:
        assert await store.expire_leases(range(256), time()) == 1
    else:
        away, back = world.owner.account_event(active=False), world.owner.account_event(active=True)
        await world.live.deliver([received_message("account", away), received_message("account", back)])
    repo = (await store.repos([world.owner.did]))[world.owner.did]
    assert repo.sync_reason is Desync.REQUESTED
    await resync(world)
    assert await has_all_records(world, sql)


@pytest.mark.parametrize("reason", [Desync.LENIENT_COMMIT, Desync.CHAIN_BREAK])
async def test_equal_heads_do_not_complete_the_resync_of_an_unproven_repo(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path, reason: Desync
) -> None:
    world = WrongRecords(database, store, sql, tmp_path, "ada")
    await world.begin()
    await sql.execute("update indexer.repo set sync_reason = $1, unproven_since = now()", reason)
    await resync(world)
    assert await has_all_records(world, sql)
    assert (await store.repos([world.owner.did]))[world.owner.did].unproven_since is None


async def test_equal_heads_complete_a_resync_and_drain_its_buffer(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    world = await synchronized_mirror(database, store, sql, tmp_path)
    away, back = world.owner.account_event(active=False), world.owner.account_event(active=True)
    await world.live.deliver([received_message("account", away), received_message("account", back)])
    world.deliver_at = "latest commit answered"
    await resync(world)
    assert world.live.outcomes[Outcome.BUFFERED] == 1
    assert world.results == {"synchronized": 1, "unchanged": 1}
    assert await has_all_records(world, sql)
    await world.check_changes()


async def test_event_that_arrives_just_before_the_row_is_locked_is_drained(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    world = await synchronized_mirror(database, store, sql, tmp_path)
    await store.request_resyncs([world.owner.did])
    world.deliver_at = "lock"
    await resync(world)
    assert world.live.outcomes[Outcome.BUFFERED] == 1
    assert world.results == {"synchronized": 2}
    assert await has_all_records(world, sql)


async def test_resync_that_began_before_the_scope_changed_writes_nothing(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    policy = replace(STORE_ALL, scope=await store.begin_scope(STORE_ALL.scope))
    world = NarrowedMeanwhile(database, store, sql, tmp_path, "ada", policy)
    await world.begin()
    before = await world.query("select collection, rkey from indexer.record order by 1, 2")
    world.narrows = True
    await resync(world)
    assert await world.query("select collection, rkey from indexer.record order by 1, 2") == before
    assert not await has_all_records(world, sql)
    assert world.results[str(Postponed())] == 1


async def test_export_with_a_rev_of_the_future_is_rejected(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """The clock of this test is a day behind that of the account."""
    policy = replace(STORE_ALL, limits=replace(STORE_ALL.limits, clock_drift_seconds=-86_400))
    world = LaggingMirror(database, store, sql, tmp_path, "ada", policy)
    await world.begin()
    await resync(world)
    assert world.results == {FetchFailure.EXPORT_REJECTED: 1}
    repo = (await store.repos([world.owner.did]))[world.owner.did]
    assert repo.head is None
    assert repo.last_error == f"export-rejected: {Rejection.FUTURE_REV}: {world.owner.rev}"


async def test_mirror_behind_the_stored_state_is_not_used(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    world = await synchronized_mirror(database, store, sql, tmp_path)
    await world.deliver_commit()
    world.lag = 1
    await store.request_resyncs([world.owner.did])
    await resync(world)
    assert await has_all_records(world, sql)
    assert world.results == {"synchronized": 2}


async def test_mirror_behind_an_ignored_commit_is_not_used(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    world = LaggingMirror(database, store, sql, tmp_path, "ada")
    await world.begin()
    world.directory.fetch_key()
    await world.deliver_commit()
    await resync(world)
    assert await has_all_records(world, sql)
    assert world.results == {"synchronized": 1}


async def test_mirror_behind_an_unverified_commit_is_not_used(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """No key has been looked up before the first resync. The resync asks the PDS after the mirror."""
    world = LaggingMirror(database, store, sql, tmp_path, "ada")
    await world.begin()
    await world.deliver_commit()
    assert (await store.repos([world.owner.did]))[world.owner.did].latest_unverified_rev == world.owner.rev
    await resync(world)
    assert await has_all_records(world, sql)
    assert (await store.repos([world.owner.did]))[world.owner.did].latest_unverified_rev is None


async def test_mirror_behind_a_discarded_buffered_commit_is_not_used(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """A failed resync discards its buffer, but the latest unverified rev remains on the row."""
    world = LaggingMirror(database, store, sql, tmp_path, "ada")
    await world.begin()
    world.directory.up = False
    assert len(await store.claim(1, range(256), 10.0, time())) == 1
    await world.deliver_commit()
    assert world.live.outcomes[Outcome.BUFFERED] == 1
    assert await store.expire_leases(range(256), time() + 11) == 1
    world.directory.up = True
    await resync(world)
    assert await has_all_records(world, sql)


async def test_worker_that_lost_its_claim_writes_nothing_more(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the worker that holds the claim would wait for the transaction."""
    monkeypatch.setattr("indexer.sync.new_records.CHUNK_RECORDS", 1)
    world = RequestedAgain(database, store, sql, tmp_path, "ada")
    await world.begin()
    await resync(world)
    assert world.results == {"lost": 1}
    assert world.written == 1
    await resync(world)
    assert await has_all_records(world, sql)
