"""Worlds that once showed a bug, each with what it showed. `make simulate SEED=…` runs one of them.

A seed that failed is added here, with the faults that its bug needs. If the drawing of schedules changes, a seed may
lose them: then another seed has to take its place.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.database_server import DatabaseServer
from tests.simulation.draw_schedule import draw_schedule
from tests.simulation.fault_schedule import BrokenConnection, ChangedScope, Fault, LostWindow
from tests.simulation.simulation_run import run_seeds

pytestmark = pytest.mark.one_server("its observer reads all tables in one snapshot")


class NamedSeed(NamedTuple):
    """A seed whose world once showed a bug.

    Attributes:
        shows: What the bug did.
        faults: The kinds of faults that it needs.
    """

    shows: str
    faults: tuple[type[Fault], ...]


NAMED = {
    13: NamedSeed(
        "all repos were fetched after a change of the scope, as the stream was lost", (BrokenConnection, ChangedScope)
    ),
    102: NamedSeed("a reconciliation fetched repos that were not behind", (LostWindow,)),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", NAMED)
async def test_named_seed(seed: int, postgres: DatabaseServer, tmp_path: Path) -> None:
    await run_seeds([seed], postgres, tmp_path)


@pytest.mark.parametrize("seed", NAMED)
def test_named_seed_still_has_the_faults_that_its_bug_needs(seed: int) -> None:
    assert set(NAMED[seed].faults) <= {type(fault) for fault in draw_schedule(seed).faults}
