"""A rollout: the daemon of the previous release runs on the present schema, and the present one takes over."""

import asyncio
import signal
from pathlib import Path

import asyncpg
import pytest

from indexer.db.migrate import migrate
from indexer.demo.scenario import Scenario
from tests.daemon_process import daemon_environment, daemon_process, indexer_run, log_tail
from tests.database_checks import assert_change_log_consistent, fetch, schema_is_current, wait_until_equal
from tests.faulty_network import FaultyNetwork
from tests.previous_release import unpack_previous_release
from tests.waiting import until

STEPS = 40
"""Steps of the scenario in each phase of the rollout."""
PHASES = 4


@pytest.mark.proof("daemon")
@pytest.mark.timeout(900)
async def test_previous_release_runs_on_the_present_schema_until_the_present_daemon_takes_over(
    empty_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.waiting.TIMEOUT", 300.0)  # resyncs that are interrupted wait for their next attempt
    dsn, old_directory, new_directory = empty_database, tmp_path / "old", tmp_path / "new"
    old_directory.mkdir()
    new_directory.mkdir()
    async with FaultyNetwork() as network:
        scenario = Scenario(network, seed=11)
        steps = iter(range(PHASES * STEPS))

        def act() -> None:
            for _ in range(STEPS):
                scenario.perform(next(steps), PHASES * STEPS)

        release = unpack_previous_release(tmp_path)
        environment = daemon_environment(network, dsn, old_directory) | {"PYTHONPATH": str(release)}
        async with indexer_run(old_directory, environment, cwd=release) as old:  # it migrates to its own schema
            act()
            await until(lambda: is_migrated(dsn), lambda: log_tail(old_directory))
            await wait_until_stored(network, dsn, old_directory)
            await migrate(dsn)
            assert await schema_is_current(dsn)
            act()
            await wait_until_stored(network, dsn, old_directory)
            assert old.returncode is None, log_tail(old_directory)
            async with daemon_process(network, dsn, new_directory) as new:
                await until(lambda: "shard-lock.waiting" in log_tail(new_directory), lambda: log_tail(new_directory))
                act()
                await wait_until_stored(network, dsn, old_directory)
                old.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(old.wait(), 60) == 0, log_tail(old_directory)
                act()
                await wait_until_equal(network, dsn)
                assert new.returncode is None
        await assert_change_log_consistent(dsn)


async def is_migrated(dsn: str) -> bool:
    try:
        await stored_cursor(dsn)
    except asyncpg.PostgresError:  # nothing is there before the migration is committed
        return False
    return True


async def wait_until_stored(network: FaultyNetwork, dsn: str, directory: Path) -> None:
    """Wait until the cursor has reached the last message."""

    async def reached() -> bool:
        return await stored_cursor(dsn) >= network.relay.log[-1].seq

    await until(reached, lambda: log_tail(directory))


async def stored_cursor(dsn: str) -> int:
    """Return the stored cursor. Only the public schema is the same in both releases."""
    [(seq,)] = await fetch(dsn, "select coalesce(max(seq), 0) from atproto.cursors")
    return int(seq)
