"""`indexer status` says what `/readyz` says, and at once that no daemon runs."""

import asyncio
from pathlib import Path

import pytest

from indexer.db import Database
from indexer.serve.status_reader import StatusReader
from indexer.sync.shard import Shard
from tests.daemon.health_checks import health_checks
from tests.daemon.running_daemon import running_daemon
from tests.daemon_process import daemon_process
from tests.faulty_network import Fault, FaultyNetwork
from tests.waiting import until


async def reasons_in(db: Database) -> list[str]:
    """Return the codes of the reasons that `indexer status` gives."""
    reader = StatusReader(db, Shard())
    await reader.read()
    return [reason.code for reason in reader.document().reasons]


@pytest.mark.slow
async def test_status_says_what_readyz_says(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon, health_checks(daemon) as checks:
        daemon.create_account("ada.test", records=1)
        await daemon.wait_until_equal()
        await checks.wait_until_ready()
        await until(lambda: _is_ready(daemon.db))
        daemon.network.plc.faults.append(Fault("", status=500, times=None))
        for number in range(10):
            daemon.create_account(f"a{number}.test", records=1)
        await checks.wait_for_reason("identity lookups fail")

        async def says_the_same() -> bool:
            _, ready = await checks.get("/readyz")
            shown = await reasons_in(daemon.db)
            return shown == [reason["code"] for reason in ready["reasons"]] == ["identity-lookups-failing"]

        await until(says_the_same)


async def _is_ready(db: Database) -> bool:
    return await reasons_in(db) == []


@pytest.mark.slow
async def test_status_says_at_once_that_a_killed_daemon_does_not_run(db: Database, tmp_path: Path) -> None:
    """It said that the indexer was ready until the lag had passed its limit, a minute later."""
    dsn = db.dsn
    async with FaultyNetwork() as network:
        async with daemon_process(network, dsn, tmp_path):
            await until(lambda: _is_ready(db))
        async with asyncio.timeout(20):
            await until(lambda: _has_ended(db))


async def _has_ended(db: Database) -> bool:
    return await reasons_in(db) == ["no-daemon"]
