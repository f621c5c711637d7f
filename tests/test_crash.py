"""A daemon that is killed or stopped at any point loses no message and stores no change twice."""

import asyncio
import signal
from functools import partial
from pathlib import Path
from random import Random

import asyncpg
import pytest

from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.scenario import Scenario
from tests.background import running
from tests.daemon_process import daemon_process, log_tail
from tests.database_checks import assert_change_log_consistent, wait_until_equal
from tests.passed_time import EXPIRE_LEASES, expire_waits
from tests.waiting import until

KILLS = 8
STEPS = 50
"""Steps of the scenario between two kills."""


async def saved_cursor(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("select coalesce(max(seq), 0) from indexer.cursor"))
    finally:
        await connection.close()


async def cursor_is_beyond(dsn: str, seq: int) -> bool:
    return await saved_cursor(dsn) > seq


async def expire_leases(dsn: str) -> None:
    """End the leases of killed workers, which takes two minutes otherwise."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(EXPIRE_LEASES)
    finally:
        await connection.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_daemon_killed_repeatedly_loses_nothing(database: str, tmp_path: Path) -> None:
    random = Random(7)
    async with LocalNetwork() as network:
        scenario = Scenario(network, seed=7)
        total = STEPS * (KILLS + 1)
        step, cursor = 0, 0
        for _ in range(KILLS):
            async with daemon_process(network, database, tmp_path) as process:
                for _ in range(STEPS):
                    scenario.perform(step, total)
                    step += 1
                await until(partial(cursor_is_beyond, database, cursor), partial(log_tail, tmp_path))
                await asyncio.sleep(random.random() * 0.2)  # a different point of the work each time
                assert process.returncode is None, log_tail(tmp_path)
                process.kill()
                assert await process.wait() == -signal.SIGKILL
            cursor = await saved_cursor(database)
        for _ in range(STEPS):
            scenario.perform(step, total)
            step += 1
        await expire_leases(database)
        async with daemon_process(network, database, tmp_path), running(expire_waits(database)):
            await wait_until_equal(network, database)
        assert {event.kind for event in scenario.report.events} == {
            "rotate key",
            "lose commit",
            "deactivate",
            "delete account",
        }
        await assert_change_log_consistent(database)


@pytest.mark.slow
async def test_first_signal_drains_and_exits(database: str, tmp_path: Path) -> None:
    async with LocalNetwork() as network:
        scenario = Scenario(network, seed=8)
        async with daemon_process(network, database, tmp_path) as process:
            for step in range(100):
                scenario.perform(step, 100)
            await until(lambda: cursor_is_beyond(database, 0))
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
        connection = await asyncpg.connect(database)
        try:
            assert await connection.fetchval("select count(*) from indexer.repo where sync_status = 'in-progress'") == 0
        finally:
            await connection.close()
