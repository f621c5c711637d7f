"""Run the world of a schedule with a daemon, and check it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.background import running
from tests.database_server import DatabaseServer
from tests.simulation.draw_schedule import draw_schedule
from tests.simulation.event_counts import wait_until_settled
from tests.simulation.fault_injection import inject
from tests.simulation.fault_schedule import Episode, KilledAtPoint, RestartedSequence, Schedule
from tests.simulation.simulated_world import World
from tests.simulation.world_checks import Checks, Snapshot
from tests.simulation.world_oracle import Truth, truth_of
from tests.waiting import until

SAMPLE_SECONDS = 0.1
WORLDS_AT_ONCE = 4
"""Worlds that one test runs at the same time: most of the time, a world waits for hosts that do not answer."""


async def run_seeds(seeds: Sequence[int], postgres: DatabaseServer, directory: Path) -> None:
    """Run the worlds of these seeds at the same time, each on a database of its own.

    Raises:
        ExceptionGroup: The failures, each with the command that runs its world again.
    """
    dsns = [postgres.create(migrated=True) for _ in seeds]
    runs = [
        _run_seed(seed, dsn, directory / str(number))
        for number, (seed, dsn) in enumerate(zip(seeds, dsns, strict=True))
    ]
    results = await asyncio.gather(*runs, return_exceptions=True)
    for dsn in dsns:
        postgres.drop(dsn)
    failures = [result for result in results if isinstance(result, Exception)]
    if failures:
        raise ExceptionGroup("worlds that the database contradicts", failures)


async def _run_seed(seed: int, dsn: str, directory: Path) -> None:
    schedule = draw_schedule(seed)
    directory.mkdir()
    try:
        await simulate(schedule, dsn, directory)
    except Exception as error:
        faults = [" ".join(map(str, episode.faults)) for episode in (*schedule.episodes, schedule.ending)]
        again = f"Run it again: make proof PART=simulation SEED={seed}, with RUNS=20 if it does not always fail"
        error.add_note("\n".join([again, "Its episodes:", *faults]))
        raise


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
            await world.caught_up()
            await until(world.gaps_are_closed, world.daemon.log_tail)  # now the first bystander acts again
            await world.perform_all(schedule.last)
            await world.caught_up()
            await _wait_until_equal(checks, truth_of(schedule.before_ending))
            # A host that fails from now on must have served everything: also the exports of added collections.
            await until(world.all_quiet, world.daemon.log_tail)
            await _perform(world, schedule.ending)
            await world.caught_up()
            await _wait_until_equal(checks, checks.truth)
        await checks.check_commits(world.sql)
        await wait_until_settled(world.daemon)
        await checks.check_end()


async def _perform(world: World, episode: Episode) -> None:
    if any(isinstance(fault, KilledAtPoint) and fault.quiet for fault in episode.faults):
        await world.caught_up()
        await until(world.all_quiet, world.daemon.log_tail)  # before the directory may be unreachable
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
                await checks.check_commits(connection)
                await asyncio.sleep(SAMPLE_SECONDS)
        finally:
            await connection.close()

    async with running(sample()):
        yield


async def _wait_until_equal(checks: Checks, truth: Truth) -> None:
    found = ["not compared"]

    async def equal() -> bool:
        nonlocal found
        found = checks.differences(await Snapshot.take(checks.world.sql), truth)
        return not found

    await until(equal, lambda: "\n".join([*found, checks.world.daemon.log_tail()]))
