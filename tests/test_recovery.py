"""A backup: the restored database ends equal to the network."""

from pathlib import Path

import pytest

from indexer.demo.scenario import Scenario
from tests.background import running
from tests.backups import back_up, restore
from tests.daemon.running_daemon import running_daemon
from tests.database_checks import assert_change_log_consistent, fetch
from tests.faulty_network import FaultyNetwork
from tests.passed_time import expire_waits

STEPS = 60


@pytest.mark.slow
async def test_restored_database_ends_equal_to_the_network(database: str, empty_database: str, tmp_path: Path) -> None:
    """The relay no longer has the messages after the cursor of the backup."""
    backup = tmp_path / "indexer.dump"
    async with FaultyNetwork() as network:
        scenario = Scenario(network, seed=21)
        async with running_daemon(database, tmp_path, network) as daemon:
            for step in range(STEPS):
                scenario.perform(step, 2 * STEPS)
            await daemon.wait_until_equal()
        network.relay.window = 10
        back_up(database, backup)
        restore(empty_database, backup)
        for step in range(STEPS, 2 * STEPS):
            scenario.perform(step, 2 * STEPS)
        async with running_daemon(empty_database, tmp_path, network) as daemon, running(expire_waits(empty_database)):
            await daemon.wait_until_equal()
        assert [tuple(row) for row in await fetch(empty_database, "select reason from atproto.gaps")] == [
            ("cursor-outdated",)
        ]
        await assert_change_log_consistent(empty_database)
