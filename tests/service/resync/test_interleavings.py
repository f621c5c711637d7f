"""Resyncs interleaved with random events: after every step, the stored records are those of one rev.

Every world is seeded with its number, so that a failing one can be repeated.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from indexer.store import Store
from tests.service.resync.stepped_resync import KilledError, SteppedWorld
from tests.sync.signing_account import STORE_ALL

pytestmark = pytest.mark.slow

ROUNDS = 8
MANY = 50  # enough random cases to reach all these results
ENDS = {"synchronized", "lost", "drain-break", "repo-deactivated"}
LEAST_STEPS = 18
NARROW = replace(STORE_ALL, limits=replace(STORE_ALL.limits, resync_buffer_events=2))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.store.resync_transaction.CHUNK_SIZE", 3)
    monkeypatch.setattr("indexer.service.resync.attempt.CHUNK_RECORDS", 2)
    monkeypatch.setattr("indexer.sync.new_records.CHUNK_RECORDS", 2)
    monkeypatch.setattr("indexer.service.resync.attempt.LOCKED_BYTES", 0)  # drain before the lock, too


async def run_world(world: SteppedWorld) -> None:
    await world.begin()
    for _ in range(ROUNDS):
        await world.happen("between resyncs")
        async with world.worker() as worker:
            await worker.attempt()
        await world.finish_blocked()
        await world.check()
        await world.check_changes()
    await world.settle()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("numbers", [range(2), pytest.param(range(2, 60), marks=pytest.mark.slow)], ids=str)
async def test_random_events_between_all_steps(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path, numbers: Sequence[int]
) -> None:
    results = Counter[str]()
    for number in numbers:
        world = SteppedWorld(
            database, store, sql, tmp_path, f"world {number}", NARROW if number % 5 == 0 else STORE_ALL
        )
        await run_world(world)
        results += world.results
    assert results.keys() >= (ENDS if len(numbers) > MANY else {"synchronized"})


@pytest.mark.parametrize("event_rate", [0.0, 0.3])
async def test_worker_killed_between_every_two_steps(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path, event_rate: float
) -> None:
    """Its connections break and nothing of it continues. Another worker claims the repo after the lease expired."""
    deaths: list[str | None] = []
    while len(deaths) < LEAST_STEPS or deaths[-1] is not None:
        world = SteppedWorld(database, store, sql, tmp_path, f"killed {len(deaths)}", seed="killed")
        await world.begin()
        await world.settle()
        for _ in range(4):
            world.owner.change(*world.owner.some_writes(world.random))
        await store.request_resyncs([world.owner.did])
        world.event_rate = event_rate
        async with world.worker(len(deaths) + 1) as worker:
            with suppress(KilledError):
                await worker.attempt()
        deaths.append(worker.died_at)
        await world.finish_blocked()
        await world.check()
        await world.check_changes()
        await world.settle()
    assert event_rate or "committed" in deaths
