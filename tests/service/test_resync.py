"""What a resync may take for the end, and what it may not."""

from contextlib import suppress
from pathlib import Path
from time import time

import asyncpg
import pytest

from indexer.reasons import Desync
from indexer.store import Store
from indexer.sync.repo import Outcome
from tests.service.resyncing import Killed, World
from tests.sync.people import received


class Damaged(World):
    """Our copy of its records is wrong, and its head is not."""

    async def check(self) -> None:
        """There is nothing to be checked before the end."""

    async def begin(self) -> None:
        self.restless = 0.0
        await super().begin()
        while not self.owner.history[self.owner.rev]:
            self.owner.change(*self.owner.some_writes(self.random))
        await self.settle()
        assert await self.ask("delete from indexer.record where did = $1 returning rkey", self.owner.did)
        await self._store.mark_resync([self.owner.did])


class Behind(World):
    """Its mirror lacks so many of the newest commits; nothing happens but what a test does."""

    lag = 1
    heard_at = ""

    async def begin(self) -> None:
        self.restless = 0.0
        await self._store.add([self.owner.did])

    def behind(self) -> int:
        return self.lag

    async def happen(self, where: str) -> None:
        if where == self.heard_at:
            await self.hear()
        await super().happen(where)

    async def hear(self) -> None:
        """A commit arrives."""
        await self.live.deliver([received("commit", self.owner.write(*self.owner.some_writes(self.random)))])


class Contested(Behind):
    """Somebody asks for another resync once a first chunk is written."""

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
                await self._store.mark_resync([self.owner.did])
        await super().happen(where)


async def resync(world: World) -> None:
    """One attempt, by a worker of its own."""
    async with world.worker() as worker:
        assert await worker.attempt()


async def whole(world: World, sql: asyncpg.Connection) -> bool:
    rows = await sql.fetch("select collection || '/' || rkey from indexer.record where did = $1", world.owner.did)
    return {path for (path,) in rows} == world.owner.history[world.owner.rev].keys()


async def test_a_resync_that_was_asked_for_compares_every_record(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """Though the heads are equal: what is asked for is doubted."""
    world = Damaged(database, store, sql, tmp_path, "ada")
    await world.begin()
    assert not await whole(world, sql)
    await resync(world)
    assert await whole(world, sql)


@pytest.mark.parametrize("what", [Desync.LEASE_EXPIRED, Desync.REACTIVATED])
async def test_what_ends_a_resync_early_doesnt_end_the_doubt(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path, what: Desync
) -> None:
    world = Damaged(database, store, sql, tmp_path, "ada")
    await world.begin()
    async with world.worker(last=1) as dying:
        with suppress(Killed):
            await dying.attempt()
    if what is Desync.LEASE_EXPIRED:
        assert await store.expire_leases(range(256), time()) == 1
    else:
        away, back = world.owner.account(active=False), world.owner.account(active=True)
        await world.live.deliver([received("account", away), received("account", back)])
    repo = (await store.repos([world.owner.did]))[world.owner.did]
    assert repo.reason is Desync.REQUESTED
    await resync(world)
    assert await whole(world, sql)


async def test_equal_heads_end_a_resync_and_what_came_meanwhile_is_kept(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    world = Behind(database, store, sql, tmp_path, "ada")
    world.lag = 0
    await world.begin()
    await resync(world)
    away, back = world.owner.account(active=False), world.owner.account(active=True)
    await world.live.deliver([received("account", away), received("account", back)])
    world.heard_at = "latest commit answered"
    await resync(world)
    assert world.live.outcomes[Outcome.BUFFERED] == 1
    assert world.results == {"synchronized": 1, "unchanged": 1}
    assert await whole(world, sql)
    await world.check_changes()


async def test_a_mirror_behind_our_own_state(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    world = Behind(database, store, sql, tmp_path, "ada")
    world.lag = 0
    await world.begin()
    await resync(world)
    await world.hear()
    world.lag = 1
    await store.mark_resync([world.owner.did])
    await resync(world)
    assert await whole(world, sql)
    assert world.results == {"synchronized": 2}


async def test_a_mirror_behind_a_commit_that_was_ignored(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    world = Behind(database, store, sql, tmp_path, "ada")
    await world.begin()
    world.directory.ask()
    await world.hear()
    await resync(world)
    assert await whole(world, sql)
    assert world.results == {"synchronized": 1}


async def test_a_mirror_behind_a_commit_that_was_ignored_unchecked(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """The repo waits for its first resync, so nobody has looked its key up yet: its own host is asked."""
    world = Behind(database, store, sql, tmp_path, "ada")
    await world.begin()
    await world.hear()
    assert (await store.repos([world.owner.did]))[world.owner.did].heard_rev == world.owner.rev
    await resync(world)
    assert await whole(world, sql)
    assert (await store.repos([world.owner.did]))[world.owner.did].heard_rev is None


async def test_a_mirror_behind_a_commit_that_was_kept_unchecked_and_lost(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """What is kept goes with a resync that comes to nothing; that it was heard does not."""
    world = Behind(database, store, sql, tmp_path, "ada")
    await world.begin()
    world.directory.up = False
    assert len(await store.claim(1, range(256), 10.0, time())) == 1
    await world.hear()
    assert world.live.outcomes[Outcome.BUFFERED] == 1
    assert await store.expire_leases(range(256), time() + 11) == 1
    world.directory.up = True
    await resync(world)
    assert await whole(world, sql)


async def test_a_worker_that_lost_its_claim_writes_nothing_more(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the repo now would wait for the end of its transaction."""
    monkeypatch.setattr("indexer.service.resync.CHUNK", 1)
    world = Contested(database, store, sql, tmp_path, "ada")
    await world.begin()
    await resync(world)
    assert world.results == {"lost": 1}
    assert world.written == 1
    await resync(world)
    assert await whole(world, sql)
