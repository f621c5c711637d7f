"""A daemon whose database role has only the privileges that docs/operations.md lists."""

from pathlib import Path

import asyncpg
import pytest

from indexer.cluster.distribute import distribute
from indexer.db.layout import load_layout
from indexer.demo.scenario import Scenario
from tests.daemon_process import daemon_process
from tests.database_checks import wait_until_equal
from tests.db.test_migrate import GRANTS, role, with_user
from tests.faulty_network import FaultyNetwork

STEPS = 40


@pytest.mark.proof("daemon")
async def test_daemon_runs_with_the_documented_grants(database: str, sql: asyncpg.Connection, tmp_path: Path) -> None:
    async with FaultyNetwork() as network, role(database) as name:
        await sql.execute(GRANTS.format(role=name))
        if not (await load_layout(sql)).commit_numbers:
            await distribute(database, None, lambda *_: None)
        scenario = Scenario(network, seed=5)
        async with daemon_process(network, with_user(database, name), tmp_path):
            for step in range(STEPS):
                scenario.perform(step, STEPS)
            await wait_until_equal(network, database, min_records=10)
