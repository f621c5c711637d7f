"""Resyncs while the account goes on: whatever comes at whatever moment, our records are those of one revision.

A world follows from its number, so that one that fails can be had again.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from indexer.store import Store
from tests.service.resyncing import Killed, World
from tests.sync.people import EVERYTHING

ROUNDS = 8
MANY = 50  # worlds, in which all of this happens
ENDS = {"synchronized", "lost", "drain-break", "repo-deactivated"}
LEAST_STEPS = 18
NARROW = replace(EVERYTHING, limits=replace(EVERYTHING.limits, kept_events=2))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.store.resync.CHUNK", 3)
    monkeypatch.setattr("indexer.service.resync.CHUNK", 2)


async def live(world: World) -> None:
    await world.begin()
    for _ in range(ROUNDS):
        await world.happen("between resyncs")
        async with world.worker() as worker:
            await worker.attempt()
        await world.rest()
        await world.check()
        await world.check_changes()
    await world.settle()


@pytest.mark.parametrize("numbers", [range(6), pytest.param(range(6, 60), marks=pytest.mark.slow)], ids=str)
async def test_anything_at_any_moment(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path, numbers: Sequence[int]
) -> None:
    results = Counter[str]()
    for number in numbers:
        world = World(database, store, sql, tmp_path, f"world {number}", NARROW if number % 5 == 0 else EVERYTHING)
        await live(world)
        results += world.results
    assert results.keys() >= (ENDS if len(numbers) > MANY else {"synchronized"})


@pytest.mark.slow
@pytest.mark.parametrize("restless", [0.0, 0.3])
async def test_killed_between_every_two_steps(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path, restless: float
) -> None:
    """Its connections break and nothing of it goes on; another worker has the repo once the lease has run out."""
    deaths: list[str | None] = []
    while len(deaths) < LEAST_STEPS or deaths[-1] is not None:
        world = World(database, store, sql, tmp_path, f"killed {len(deaths)}", seed="killed")
        await world.begin()
        await world.settle()
        for _ in range(4):
            world.owner.change(*world.owner.some_writes(world.random))
        await store.mark_resync([world.owner.did])
        world.restless = restless
        async with world.worker(len(deaths) + 1) as worker:
            with suppress(Killed):
                await worker.attempt()
        deaths.append(worker.died_at)
        await world.rest()
        await world.check()
        await world.check_changes()
        await world.settle()
    assert restless or "committed" in deaths
