"""Daemon, coordinator and workers are killed, alone and together: nothing is lost, and the change log has no holes."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.citus.crash_world import DAEMON, crash_world
from tests.citus.own_cluster import own_cluster
from tests.citus_cluster import COORDINATOR, WORKERS, Cluster
from tests.daemon_forks import start_fork_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RecordProperty = Callable[[str, object], None]

FIRST, SECOND = WORKERS
VICTIMS = (
    (DAEMON,),
    (COORDINATOR,),
    (FIRST,),
    (SECOND,),
    (FIRST, SECOND),
    (COORDINATOR, FIRST),
    (COORDINATOR, SECOND),
    (DAEMON, COORDINATOR),
    (DAEMON, FIRST),
    (DAEMON, SECOND),
    (DAEMON, COORDINATOR, FIRST, SECOND),
)
"""The processes that are killed at the same time."""
SEEDS = (1, 2, 3)
RANDOM_DEATHS = 58
"""For each seed."""
GROUP = 29
"""Deaths after which everything is compared."""
MIN_DEATHS = 200
STEPS = 4
"""Steps of the scenario before a death."""


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    start_fork_server()


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Run a cluster that belongs to this test."""
    monkeypatch.setattr("tests.waiting.TIMEOUT", 120.0)
    with own_cluster(tmp_path_factory) as cluster:
        yield cluster


@pytest.mark.parametrize("seed", SEEDS)
async def test_deaths_at_random_times_lose_nothing(
    cluster: Cluster, tmp_path: Path, seed: int, record_property: RecordProperty
) -> None:
    async with crash_world(cluster, tmp_path, seed=seed, steps=STEPS * RANDOM_DEATHS) as world:
        for death in range(RANDOM_DEATHS):
            world.act(STEPS)
            if world.random.random() < 0.5:
                await world.wait_for_progress()
            await asyncio.sleep(world.random.random() * 0.3)
            victims = VICTIMS[death] if death < len(VICTIMS) else world.random.choice(VICTIMS)
            await world.kill(victims)
            await world.restart(victims)
            if (death + 1) % GROUP == 0:
                await world.settle()
        record_property("deaths", world.deaths.total())
        assert world.deaths.total() == RANDOM_DEATHS
        assert world.deaths.keys() == set(VICTIMS)
        assert world.consumer.checks > GROUP
        assert world.consumer.failures > 0


UNDECIDED, DECIDED = WORKERS, COORDINATOR
"""The nodes that keep an answer. A worker: the other one has prepared, and nothing is decided.

The coordinator: it has decided to commit, and no worker knows.
"""
POINTS = tuple(product((*UNDECIDED, DECIDED), VICTIMS))
REPORTED = [victims for victims in VICTIMS if SECOND not in victims]
"""The victims after whose restart the second worker still keeps an answer, until the daemon has reported it."""
MAX_SECONDS_IN_DOUBT = 10.0
"""Seconds within which the daemon must be ready again, apart from the time in which Citus had to wait for the end of a
transaction with the same number. Seen: 0.2 to 1.8, on two cores with other work."""


async def test_deaths_between_the_two_phases_of_a_commit_lose_nothing(
    cluster: Cluster, tmp_path: Path, record_property: RecordProperty
) -> None:
    """While a transaction stays prepared on a node, the daemon says so and is not ready. Soon after, it is."""
    async with crash_world(cluster, tmp_path, seed=4, steps=STEPS * len(POINTS)) as world:
        points = world.random.sample(POINTS, len(POINTS))
        for number, (node, victims) in enumerate(points, start=1):
            world.act(STEPS)
            await world.wait_for_progress()  # first, because the daemon reads from the nodes before it writes
            await (world.hold_commit() if node == DECIDED else world.hold_prepare(node))
            await world.kill(victims)
            is_reported = node == SECOND and victims in REPORTED
            if node not in victims and not is_reported:
                await world.release(node)
            await world.restart(victims)
            if is_reported:
                await world.release_after_report(node)
            elif node in victims:
                await world.release(node)
            if number % (len(POINTS) // 3) == 0:
                await world.settle()
        record_property("deaths", world.deaths.total())
        record_property("seconds in doubt", [round(seconds, 1) for seconds, _ in world.in_doubt])
        assert world.deaths.total() == len(POINTS)
        assert len(world.in_doubt) == len(REPORTED)
        assert max(seconds - seconds_in_use for seconds, seconds_in_use in world.in_doubt) < MAX_SECONDS_IN_DOUBT


def test_the_planned_deaths_are_enough() -> None:
    """Each test above fails if fewer than its share occurred."""
    assert len(SEEDS) * RANDOM_DEATHS + len(POINTS) >= MIN_DEATHS
