"""Resyncs interleaved with random events: after every step, the stored records are those of one rev.

Every world is seeded with its number, so that a failing one can be repeated.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from indexer.atproto.syntax import CollectionFilter
from indexer.db import Database
from tests.resync.resync_world import ResyncWorld
from tests.sync.signing_account import STORE_ALL

ROUNDS = 8
ENDS = {"synchronized", "lost", "drain-break", "repo-deactivated"}  # a hundred worlds reach all of them
CONNECTIONS = 16
"""Enough for workers that take over from each other."""
NARROW = replace(STORE_ALL, limits=replace(STORE_ALL.limits, resync_buffer_events=2))
SOME = CollectionFilter(["com.example.a", "com.example.note.*"])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.db.resync_transaction.CHUNK_SIZE", 3)
    monkeypatch.setattr("indexer.resync.apply.CHUNK_RECORDS", 2)
    monkeypatch.setattr("indexer.sync.export.CHUNK_RECORDS", 2)
    monkeypatch.setattr("indexer.resync.apply.LOCKED_BYTES", 0)  # drain before the lock, too


async def run_world(world: ResyncWorld) -> None:
    await world.begin()
    for _ in range(ROUNDS):
        await world.step("between resyncs")
        await world.attempt()
        await world.finish_blocked()
        await world.check_changes()
    await world.settle()


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(range(16), marks=pytest.mark.slow),
        pytest.param(range(16, 116), marks=[pytest.mark.proof("simulation"), pytest.mark.timeout(600)]),
    ],
    ids=str,
)
async def test_random_events_between_all_steps(
    database: str, sql: asyncpg.Connection, tmp_path: Path, numbers: Sequence[int]
) -> None:
    """Messages are lost, delayed and repeated, keys change, and workers take over from others."""
    results, requests, db = Counter[str](), Counter[str](), await Database.open(database, connections=CONNECTIONS)
    try:
        for number in numbers:
            policy = NARROW if number % 5 == 0 else STORE_ALL
            if number % 2:  # resyncs fetch only these records
                policy = replace(policy, scope=replace(policy.scope, collections=SOME))
            world = ResyncWorld(db, sql, tmp_path, f"world {number}", policy, event_rate=0.2)
            await run_world(world)
            results += world.results
            requests += Counter(kind for kind, _ in world.hosts.requests)
    finally:
        await db.close()
    assert requests["blocks"] > len(numbers)
    assert results.keys() >= (ENDS if len(numbers) == 100 else {"synchronized", "lost"})
