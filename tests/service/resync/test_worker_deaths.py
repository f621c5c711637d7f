"""A worker pool dies before or after any of its writes, as by kill -9. Its successors leave every repo correct."""

import asyncio
from collections import Counter
from itertools import count
from pathlib import Path
from typing import get_args

import asyncpg
import pytest

from indexer.store import Store
from indexer.sync.repo_state import PARKED, Repo, SyncStatus
from tests.service.resync.killed_workers import KINDS, RENEW, Point, ResyncWorld, When, process

WITHOUT_FAILURE = {"orphan", "lacking"}  # one attempt of theirs counts, although no fetch failed


async def live_until_settled_or_dead(
    world: ResyncWorld, dsn: str, last: Point | None = None, *, renewing: bool = False
) -> set[Point]:
    """Run one process on a new world until all repos are settled or it dies; return the points that it passed."""

    async def done() -> bool:
        return await world.settled() and (not renewing or first.store.written[RENEW] > 0)

    await world.begin()
    async with process(world, dsn, last) as first:
        await first.live(done)
    return first.store.reached


def check_death(world: ResyncWorld, rows: dict[str, Repo]) -> None:
    """Check that attempts count failures once they are written, and nothing else, in particular no postponement."""
    for name, repo in rows.items():
        cost, held = world.costs[repo.did], repo.sync_status is SyncStatus.IN_PROGRESS
        assert cost - held <= repo.attempts <= cost + (name in WITHOUT_FAILURE), name


async def run_successors(world: ResyncWorld, dsn: str) -> None:
    """Run two other processes after the leases have expired, and again after all back-offs are over."""
    async with process(world, dsn) as one, process(world, dsn) as other:
        for _ in range(2):
            await world.heal()
            await asyncio.gather(one.live(world.settled), other.live(world.settled))


async def check_end(world: ResyncWorld, dead: dict[str, Repo], costs: Counter[str]) -> None:
    """Check that every repo equals its account, and that every claim and every interrupted attempt was counted."""
    for name, repo in (await world.rows()).items():
        owner, since = world.owners[repo.did], world.costs[repo.did] - costs[repo.did]
        assert repo.lease == world.claims[repo.did], name
        assert repo.attempts == dead[name].attempts + (dead[name].sync_status is SyncStatus.IN_PROGRESS) + since, name
        if name == "unknown":
            assert (repo.sync_status, repo.next_attempt_at) == (SyncStatus.DESYNCHRONIZED, PARKED)
            assert (repo.last_error or "").startswith("repo-not-found")
        else:
            assert (repo.sync_status, repo.head and repo.head.rev) == (SyncStatus.SYNCHRONIZED, owner.rev), name
            assert await world.records(repo.did) == owner.history[owner.rev], name
    assert await world.query("select from indexer.buffered_event") == []
    assert await world.query("select from indexer.record where value_problem = 'missing'") == []


@pytest.mark.slow
async def test_every_kind_of_write_is_reached_and_nothing_stays_claimed(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """Fails if the list of kinds misses one."""
    world = ResyncWorld(store, sql, tmp_path)
    reached = await live_until_settled_or_dead(world, database, renewing=True)
    assert {(when, kind) for when, kind, _ in reached} == {(when, kind) for when in get_args(When) for kind in KINDS}
    rows = await world.rows()
    check_death(world, rows)
    assert SyncStatus.IN_PROGRESS not in {repo.sync_status for repo in rows.values()}
    await run_successors(world, database)


@pytest.mark.slow
@pytest.mark.parametrize("when", get_args(When))
@pytest.mark.parametrize("kind", KINDS)
async def test_killed_before_and_after_each_write(
    database: str, store: Store, sql: asyncpg.Connection, tmp_path: Path, kind: str, when: When
) -> None:
    """Die at the first write of the kind, at the second, and so on, as long as there is one."""
    for number in count():
        world, last = ResyncWorld(store, sql, tmp_path), (when, kind, number)
        died = last in await live_until_settled_or_dead(world, database, last, renewing=kind == RENEW)
        dead, costs = await world.rows(), world.costs.copy()
        check_death(world, dead)
        await run_successors(world, database)
        await check_end(world, dead, costs)
        if not died:
            assert number > 0
            return
