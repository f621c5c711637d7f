"""A short soak is flat, and one with leaks is not."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from indexer import crash_points
from tests import waiting
from tests.daemon_forks import start_fork_server
from tests.simulation.fault_schedule import (
    BrokenConnection,
    DamagedCommit,
    Fault,
    FaultyExport,
    Forgery,
    KilledDaemon,
    LostCommit,
    RepeatedMessages,
    UnreachableDatabase,
)
from tests.soak import soak_faults, soak_world
from tests.soak.resource_use import MIB
from tests.soak.soak_report import result_lines
from tests.soak.soak_run import SoakPlan, soak
from tests.soak.soak_world import SoakWorld, WorldSize, reach_limits_soon

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.one_server("it reads the sizes of the tables of one server"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory and files are read from /proc"),
]

QUICK_FAULTS: tuple[type[Fault], ...] = (
    BrokenConnection, DamagedCommit, KilledDaemon, LostCommit, RepeatedMessages, UnreachableDatabase,
)  # fmt: skip
PLAN = SoakPlan(
    duration=20.0,
    warm_up=6.0,
    sample_interval=0.5,
    fault_interval=1.0,
    fault_duration=0.5,
    faults=QUICK_FAULTS,
    size=WorldSize(accounts=10, records=10, large=100),
)


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    start_fork_server()


@pytest.fixture(autouse=True)
def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "TIMEOUT", 400.0)


@pytest.mark.parametrize("links", [False, True])
async def test_world_of_constant_size_with_faults_is_flat(database: str, tmp_path: Path, links: bool) -> None:
    plan = replace(PLAN, links=links)
    result = await soak(plan, database, tmp_path, tmp_path / "samples", asyncio.Event(), lambda _: None)
    assert result.differences == []
    assert result.growing == []
    assert {"memory (RSS)", "tasks", "file descriptors", "connections", "rows of record"} <= {
        trend.name for trend in result.trends
    }
    assert set(result.fired) == {kind.__name__ for kind in QUICK_FAULTS}
    assert result.commits > PLAN.size.accounts
    assert result.changes > result.commits
    assert (result.small_batches > 0) is not links


def leak() -> None:
    """Let a daemon keep a file, a task and a megabyte for each batch."""
    reach_limits_soon()
    kept: list[object] = []

    def keep(point: str) -> None:
        if point == "batch.settled":
            os.dup(2)
            kept.append(asyncio.create_task(asyncio.sleep(1e6)))
            kept.append(b"x" * int(MIB))

    crash_points.hooks.append(keep)


async def test_leaks_are_found_with_their_names(database: str, tmp_path: Path) -> None:
    plan = replace(PLAN, duration=15.0, faults=(RepeatedMessages,), prepare=leak)
    result = await soak(plan, database, tmp_path, tmp_path / "samples", asyncio.Event(), lambda _: None)
    assert result.differences == []
    assert {"file descriptors", "memory (RSS)", "tasks"} <= {trend.name for trend in result.growing}
    assert any(line.startswith("GROWS: tasks, by ") for line in result_lines(result))


async def test_export_that_is_slow_twice_is_fetched_twice(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon ends the first one before it is complete, although the repo has the usual size."""
    draw = {FaultyExport: lambda _, did: FaultyExport(did, "slow", 2)}
    monkeypatch.setattr(soak_faults, "ACCOUNT_FAULTS", soak_faults.ACCOUNT_FAULTS | draw)
    plan = replace(PLAN, duration=10.0, fault_interval=4.0, faults=(FaultyExport,), size=WorldSize(10, large=100))
    result = await soak(plan, database, tmp_path, tmp_path / "samples", asyncio.Event(), lambda _: None)
    assert result.differences == []
    assert result.fired["FaultyExport"] > 0


async def test_forged_message_is_rejected_however_long_it_has_waited(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits longer than its rev is ahead, and meanwhile its account commits."""
    monkeypatch.setattr(soak_world, "AHEAD", 500_000)
    plan = replace(PLAN, fault_duration=2.0, faults=(Forgery,))
    result = await soak(plan, database, tmp_path, tmp_path / "samples", asyncio.Event(), lambda _: None)
    assert result.differences == []
    assert result.fired["Forgery"] > 1


async def test_no_record_of_the_large_account_is_old(database: str, tmp_path: Path) -> None:
    plan = SoakPlan(duration=0.0, warm_up=0.0)
    seconds_of_commit = (plan.size.accounts + 1) / plan.rate
    world = SoakWorld(database, tmp_path, plan.size, plan.seed, plan.prepare)
    async with world.running():
        first = set(world.large.records)
        for _ in range(int(15 * 60 / seconds_of_commit)):
            world.commit(world.large)
        assert first.isdisjoint(world.large.records)
        assert len(world.large.records) == len(first)


async def test_sigint_ends_a_soak_with_its_figures(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.soak", "--minutes", "1", "--samples", str(tmp_path / "samples"),
        stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert b"min left" in await process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        output = (await process.stdout.read()).decode()
        assert await process.wait() == 0, output
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert "no trend: the soak ended before its warm-up did" in output
    assert "The database equals the world" in output
    assert "Nothing grows" not in output
    assert len((tmp_path / "samples").read_text().splitlines()) > 0
