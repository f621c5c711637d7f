"""Worlds that once showed a bug, each with what it showed. `make proof PART=simulation SEED=…` runs one of them.

A seed that failed is added here, with the faults that its bug needs. If the drawing of schedules changes, a seed may
lose them: then another seed has to take its place.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.database_server import DatabaseServer
from tests.simulation.draw_schedule import draw_schedule
from tests.simulation.fault_schedule import (
    AccountChange,
    BrokenConnection,
    BrokenHost,
    ChangedScope,
    DamagedCommit,
    Fault,
    Forgery,
    HostProblem,
    LostWindow,
    UndecodableMessages,
)
from tests.simulation.simulation_run import run_seeds


class NamedSeed(NamedTuple):
    """A seed whose world shows bugs.

    Attributes:
        shows: What the bugs do.
        faults: The kinds of faults that they need.
        host: What has to be wrong with the host that fails at the end; None: anything.
    """

    shows: tuple[str, ...]
    faults: tuple[type[Fault], ...]
    host: HostProblem | None = None


NAMED = {
    7: NamedSeed(
        ("an old #account message of another relay shows a deleted account again",), (BrokenConnection, AccountChange)
    ),
    13: NamedSeed(
        ("all repos are fetched after a change of the scope, as the stream is lost",), (BrokenConnection, ChangedScope)
    ),
    22: NamedSeed(
        (
            "a reconciliation fetches repos that are not behind",
            "a gap is closed before the repos behind are desynchronized",
            "an export older than a verified commit completes a resync",
        ),
        (LostWindow,),
        "old exports",
    ),
    102: NamedSeed(
        (
            "a repo that its host denies is not parked",
            "rejected messages leave no dead letter",
            "outcomes are counted for another kind of message",
            "a forged message causes a fetch",
        ),
        (Forgery, UndecodableMessages),
        "denying",
    ),
    288: NamedSeed(
        ("a commit that was buffered before its account was hidden is ignored at the end of the fetch",),
        (AccountChange, DamagedCommit),
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("fork_server")
@pytest.mark.one_server("its observer reads all tables in one snapshot")
async def test_named_seeds(postgres: DatabaseServer, tmp_path: Path) -> None:
    for seed, named in NAMED.items():
        faults = draw_schedule(seed).faults
        assert set(named.faults) <= {type(fault) for fault in faults}, f"seed {seed} has lost its faults"
        assert named.host in (None, *(fault.kind for fault in faults if isinstance(fault, BrokenHost)))
    await run_seeds(list(NAMED), postgres, tmp_path)
