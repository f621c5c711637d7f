"""A pool dies before or after any of its own writes, as by kill -9: those that follow end with every repo right."""

import asyncio
from collections import Counter
from itertools import count
from pathlib import Path
from typing import get_args

import asyncpg
import pytest

from indexer.store import Store
from indexer.sync.repo import PARKED, Repo, SyncStatus
from tests.service.dying import Point, Village, When, process

RENEWAL = "_renew renew"
PLACES = [
    "_expire expire_leases",
    "claim",
    "run _begin apply",
    "_begin _end apply",
    "_held _end apply",
    "_fail _end apply",
    "_attempt resync",
    RENEWAL,
    "give_back _end apply",
    "_sweep _sweep_once mark_missing",
    "_sweep _sweep_once wake_parked",
]
MARKED = {"orphan", "lacking"}  # what was done to them costs an attempt, once, though nobody failed


async def life(village: Village, dsn: str, last: Point | None = None, *, renewing: bool = False) -> set[Point]:
    """From the beginning to the end, whatever that is; gives where it came by."""

    async def done() -> bool:
        return await village.settled() and (not renewing or first.store.written[RENEWAL] > 0)

    await village.begin()
    async with process(village, dsn, last) as first:
        await first.live(done)
    return first.store.reached


def check_death(village: Village, rows: dict[str, Repo]) -> None:
    """What failed counts as an attempt, as soon as it is written; nothing else does, least of all to be put off."""
    for name, repo in rows.items():
        cost, held = village.costs[repo.did], repo.status is SyncStatus.IN_PROGRESS
        assert cost - held <= repo.attempts <= cost + (name in MARKED), name


async def survive(village: Village, dsn: str) -> None:
    """Two others go on, once its leases have run out, and again when all pauses are over."""
    async with process(village, dsn) as one, process(village, dsn) as other:
        for _ in range(2):
            await village.heal()
            await asyncio.gather(one.live(village.settled), other.live(village.settled))


async def check_end(village: Village, dead: dict[str, Repo], costs: Counter[str]) -> None:
    """Every repo is as its account, no claim is unaccounted for, and each that was cut off cost an attempt."""
    for name, repo in (await village.rows()).items():
        owner, since = village.owners[repo.did], village.costs[repo.did] - costs[repo.did]
        assert repo.lease == village.claims[repo.did], name
        assert repo.attempts == dead[name].attempts + (dead[name].status is SyncStatus.IN_PROGRESS) + since, name
        if name == "unknown":
            assert (repo.status, repo.next_attempt_at) == (SyncStatus.DESYNCHRONIZED, PARKED)
            assert (repo.last_error or "").startswith("repo-not-found")
        else:
            assert (repo.status, repo.head and repo.head.rev) == (SyncStatus.SYNCHRONIZED, owner.rev), name
            assert await village.records(repo.did) == owner.history[owner.rev], name
    assert await village.ask("select from indexer.kept_event") == []
    assert await village.ask("select from indexer.record where value_problem = 'missing'") == []


@pytest.mark.slow
async def test_a_life_comes_by_every_place_and_leaves_nothing_claimed(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """A write that the list lacks is found here."""
    village = Village(store, sql, tmp_path)
    reached = await life(village, database, renewing=True)
    assert {(when, place) for when, place, _ in reached} == {
        (when, place) for when in get_args(When) for place in PLACES
    }
    rows = await village.rows()
    check_death(village, rows)
    assert SyncStatus.IN_PROGRESS not in {repo.status for repo in rows.values()}
    await survive(village, database)


@pytest.mark.slow
@pytest.mark.parametrize("when", get_args(When))
@pytest.mark.parametrize("place", PLACES)
async def test_killed_at_each_of_its_writes(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path, place: str, when: When
) -> None:
    """At the first, at the second, and so on, as long as there is one."""
    for number in count():
        village, last = Village(store, sql, tmp_path), (when, place, number)
        died = last in await life(village, database, last, renewing=place == RENEWAL)
        dead, costs = await village.rows(), village.costs.copy()
        check_death(village, dead)
        await survive(village, database)
        await check_end(village, dead, costs)
        if not died:
            assert number > 0
            return
