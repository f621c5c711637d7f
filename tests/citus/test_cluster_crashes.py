"""Daemon, coordinator and workers are killed, alone and together: nothing is lost, and the change log has no holes."""

import asyncio
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.citus.crash_world import DAEMON, crash_world
from tests.citus.daemon_forks import start_fork_server
from tests.citus_cluster import COORDINATOR, WORKERS, Cluster, running_cluster
from tests.database_server import memory_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FIRST, SECOND = WORKERS
VICTIMS = (
    (DAEMON,),
    (COORDINATOR,),
    (FIRST,),
    (SECOND,),
    (FIRST, SECOND),
    (COORDINATOR, SECOND),
    (DAEMON, COORDINATOR),
    (DAEMON, FIRST),
    (DAEMON, COORDINATOR, FIRST, SECOND),
)
"""The processes that are killed at the same time."""
RANDOM_DEATHS = 39
"""For each of two seeds. With those between the two phases, there are 96."""
GROUP = 13
"""Deaths after which everything is compared."""
STEPS = 4
"""Steps of the scenario before a death."""


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    start_fork_server()


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Run a cluster that belongs to this test."""
    monkeypatch.setattr("tests.waiting.TIMEOUT", 120.0)
    with memory_directory() as directory, running_cluster(directory or tmp_path_factory.mktemp("citus")) as cluster:
        yield cluster


@pytest.mark.parametrize("seed", [1, 2])
async def test_deaths_at_random_times_lose_nothing(cluster: Cluster, tmp_path: Path, seed: int) -> None:
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
        assert world.deaths.total() == RANDOM_DEATHS
        assert world.deaths.keys() == set(VICTIMS)
        assert world.consumer.checks > GROUP
        assert world.consumer.failures > 0


UNDECIDED, DECIDED = SECOND, COORDINATOR
"""The node that keeps an answer. The second worker: the others have prepared, and nothing is decided.

The coordinator: it has decided to commit, and no worker knows.
"""


async def test_deaths_between_the_two_phases_of_a_commit_lose_nothing(cluster: Cluster, tmp_path: Path) -> None:
    points = [*product((UNDECIDED, DECIDED), VICTIMS)]
    async with crash_world(cluster, tmp_path, seed=3, steps=STEPS * len(points)) as world:
        world.random.shuffle(points)
        for number, (node, victims) in enumerate(points, start=1):
            world.act(STEPS)
            await world.wait_for_progress()  # first, because the daemon reads from the nodes before it writes
            await (world.hold_commit() if node == DECIDED else world.hold_prepare(node))
            await world.kill(victims)
            if node not in victims:
                await world.release(node)
            await world.restart(victims)
            if node in victims:
                await world.release(node)
            if number % (len(points) // 3) == 0:
                await world.settle()
        assert world.deaths.total() == len(points)
