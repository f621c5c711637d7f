"""A daemon indexes random worlds with faults, and its database never contradicts them.

`make proof PART=simulation SEED=17` runs one world, `SEEDS=1000 FIRST=5000` many, and `RUNS=20` each of them so often.
A failed test names its seeds.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.database_server import DatabaseServer
from tests.simulation.simulation_run import WORLDS_AT_ONCE, run_seeds

FIRST = int(os.environ.get("SIMULATION_FIRST_SEED", "1"))
COUNT = int(os.environ.get("SIMULATION_SEEDS", "100"))
RUNS = int(os.environ.get("SIMULATION_RUNS", "1"))
SEEDS = [seed for seed in range(FIRST, FIRST + COUNT) for _ in range(RUNS)]
SAMPLE = (1, 2, 3)
"""The seeds of `make test`, besides the named ones."""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("fork_server"),
    pytest.mark.one_server("its observer reads all tables in one snapshot"),
]


@pytest.mark.slow
async def test_sample_of_worlds(postgres: DatabaseServer, tmp_path: Path) -> None:
    await run_seeds(SAMPLE, postgres, tmp_path)


@pytest.mark.proof("simulation")
@pytest.mark.parametrize(
    "seeds",
    [SEEDS[start : start + WORLDS_AT_ONCE] for start in range(0, len(SEEDS), WORLDS_AT_ONCE)],
    ids=lambda seeds: f"{seeds[0]} to {seeds[-1]}",
)
async def test_random_worlds(seeds: Sequence[int], postgres: DatabaseServer, tmp_path: Path) -> None:
    await run_seeds(seeds, postgres, tmp_path)
