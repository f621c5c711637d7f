"""Run the world of a schedule with a daemon, and check it."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx

from tests.background import running
from tests.daemon_forks import DaemonFork
from tests.simulation.fault_injection import inject
from tests.simulation.fault_schedule import Episode, RestartedSequence, Schedule
from tests.simulation.simulated_world import World
from tests.simulation.world_checks import Checks, Snapshot
from tests.simulation.world_oracle import truth_of
from tests.waiting import until

SAMPLE_SECONDS = 0.1

_COUNTED = re.compile(r"^indexer_(events|events_received)_total(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE)


async def simulate(schedule: Schedule, dsn: str, directory: Path) -> None:
    """Run the whole world on an empty database with the latest schema; fail if the database ever contradicts it."""
    world = World(schedule, dsn, directory)
    async with world.running():
        checks = Checks(world, truth_of(schedule))
        await world.perform_all(schedule.first)
        await world.caught_up()
        await until(lambda: _all_synchronized(world), world.daemon.log_tail)
        checks.fetched_before = world.fetched()
        async with _sampling(checks):
            for episode in schedule.episodes:
                await _perform(world, episode)
            await world.perform_all(schedule.last)
            await world.caught_up()
            await _wait_until_equal(checks)
        await wait_until_settled(world.daemon)
        await checks.check_end()


async def _perform(world: World, episode: Episode) -> None:
    async with AsyncExitStack() as stack:
        # The context that is entered first ends last: other faults wait until the daemon has read all of the sequence.
        for fault in sorted(episode.faults, key=lambda fault: not isinstance(fault, RestartedSequence)):
            await stack.enter_async_context(inject(world, fault))
        await world.perform_all(episode.actions)
    await world.perform_all(episode.after)
    await world.finish_faults()


async def _all_synchronized(world: World) -> bool:
    rows = await world.sql.fetch("select sync_status from indexer.repo")
    return len(rows) == len(world.accounts) and all(status == "synchronized" for (status,) in rows)


@asynccontextmanager
async def _sampling(checks: Checks) -> AsyncIterator[None]:
    """Check the database again and again during the block."""

    async def sample() -> None:
        connection = await checks.world.connect()
        try:
            while True:
                checks.check_snapshot(await Snapshot.take(connection))
                await asyncio.sleep(SAMPLE_SECONDS)
        finally:
            await connection.close()

    async with running(sample()):
        yield


async def _wait_until_equal(checks: Checks) -> None:
    found = ["not compared"]

    async def equal() -> bool:
        nonlocal found
        found = checks.differences(await Snapshot.take(checks.world.sql))
        return not found

    await until(equal, lambda: "\n".join([*found, checks.world.daemon.log_tail()]))


async def wait_until_settled(daemon: DaemonFork) -> None:
    """Wait until the present process of the daemon has counted one outcome for each received message."""
    url = f"{daemon.health_url()}/metrics"
    counts = {"events_received": 0.0, "events": 0.0}

    async def settled() -> bool:
        counts.update(events_received=0.0, events=0.0)
        for name, value in _COUNTED.findall((await client.get(url)).text):
            counts[name] += float(value)
        return counts["events_received"] == counts["events"] > 0

    async with httpx.AsyncClient() as client:
        await until(settled, lambda: counts)
