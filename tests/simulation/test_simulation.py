"""A daemon indexes random worlds with faults, and its database never contradicts them.

`make simulate SEED=17` runs one world, `make simulate SEEDS=1000 FIRST=5000` many. A failed test names its seeds.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.daemon_forks import start_fork_server
from tests.database_server import DatabaseServer
from tests.simulation.draw_schedule import draw_schedule
from tests.simulation.simulation_run import simulate

FIRST = int(os.environ.get("SIMULATION_FIRST_SEED", "1"))
COUNT = int(os.environ.get("SIMULATION_SEEDS", "100"))
WORLDS_AT_ONCE = 4
"""Worlds that one test runs at the same time: most of the time, a world waits for hosts that do not answer."""
SEEDS = range(FIRST, FIRST + COUNT)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.one_server("its observer reads all tables in one snapshot"),
]


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    start_fork_server()


@pytest.mark.parametrize(
    "seeds",
    [SEEDS[start : start + WORLDS_AT_ONCE] for start in range(0, COUNT, WORLDS_AT_ONCE)],
    ids=lambda seeds: f"{seeds[0]} to {seeds[-1]}",
)
async def test_random_worlds(seeds: Sequence[int], postgres: DatabaseServer, tmp_path: Path) -> None:
    dsns = [postgres.create(migrated=True) for _ in seeds]
    worlds = [run_seed(seed, dsn, tmp_path / str(seed)) for seed, dsn in zip(seeds, dsns, strict=True)]
    results = await asyncio.gather(*worlds, return_exceptions=True)
    for dsn in dsns:
        postgres.drop(dsn)
    failures = [result for result in results if isinstance(result, Exception)]
    if failures:
        raise ExceptionGroup("worlds that the database contradicts", failures)


async def run_seed(seed: int, dsn: str, directory: Path) -> None:
    """Run the world of a seed. Note on an exception how to replay it."""
    schedule = draw_schedule(seed)
    directory.mkdir()
    try:
        await simulate(schedule, dsn, directory)
    except Exception as error:
        faults = [" ".join(map(str, episode.faults)) for episode in schedule.episodes]
        error.add_note("\n".join([f"Replay with: make simulate SEED={seed}", "Its episodes:", *faults]))
        raise
