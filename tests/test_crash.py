"""kill -9 at any point loses nothing and doubles nothing."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import asyncpg
import pytest

from indexer.demo import Comparison, compare
from indexer.localnet.load import Scenario
from indexer.localnet.network import LocalNetwork
from indexer.store import Store
from tests.serving import until

KILLS = 8
STEPS = 50  # of the scenario, a life


def environment_of(network: LocalNetwork, dsn: str, directory: Path) -> dict[str, str]:
    """Nothing of whoever runs the tests, and the settings of a daemon on this network."""
    return {name: value for name, value in os.environ.items() if not name.startswith("INDEXER_")} | {
        "INDEXER_DATABASE_URL": dsn,
        "INDEXER_DATA_DIR": str(directory),
        "INDEXER_RELAYS": network.relay_url,
        "INDEXER_PLC_URL": network.plc_url,
        "INDEXER_START": "oldest",
        "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
        "INDEXER_PLC_RATE": "1000",
        "INDEXER_HANDLE_RATE": "0",
        "INDEXER_HOST_RATE": "1000",
        "INDEXER_HTTP_BIND": "127.0.0.1:0",
    }


@asynccontextmanager
async def daemon_process(network: LocalNetwork, dsn: str, directory: Path) -> AsyncIterator[Process]:
    """`indexer run` as its own process; killed at the end of the block, whatever it is doing."""
    with (directory / "daemon.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "indexer", "run", "--no-migrate",
            env=environment_of(network, dsn, directory), stderr=log, stdout=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def log_of(directory: Path) -> str:
    return (directory / "daemon.log").read_text()[-2_000:]


async def progressed(dsn: str, beyond: int) -> bool:
    connection = await asyncpg.connect(dsn)
    try:
        return bool(await connection.fetchval("select coalesce(max(seq), 0) > $1 from indexer.cursor", beyond))
    finally:
        await connection.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_killed_again_and_again(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.serving.PATIENCE", 400.0)  # a claim of the killed one has to run out, and then a pause
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
                await until(partial(progressed, database, cursor), partial(log_of, tmp_path))
                await asyncio.sleep(random.random() * 0.2)  # somewhere in the middle of what it does
                assert process.returncode is None, log_of(tmp_path)
                process.kill()
                assert await process.wait() == -signal.SIGKILL
            cursor = await saved_cursor(database)
        for _ in range(STEPS):
            scenario.perform(step, total)
            step += 1
        async with daemon_process(network, database, tmp_path):
            await equal(network, database)
        assert {happening.what for happening in scenario.report.happenings} == {
            "rotate key",
            "lose commit",
            "deactivate",
            "delete account",
        }
        await assert_nothing_doubled(database)


async def saved_cursor(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("select coalesce(max(seq), 0) from indexer.cursor"))
    finally:
        await connection.close()


async def equal(network: LocalNetwork, dsn: str, least: int = 100) -> None:
    """Waits until all of the network, which has `least` records or more, is in the database."""
    store = await Store.open(dsn)
    comparison = Comparison(0, 0, ["not compared"])

    async def same() -> bool:
        nonlocal comparison
        comparison = await compare(network, store)
        last = network.relay.log[-1].seq
        return not comparison.differences and await store.cursor(network.relay_url, "0/1") == last

    try:
        await until(same, lambda: comparison.differences[:5])
        assert comparison.records >= least
    finally:
        await store.close()


async def assert_nothing_doubled(dsn: str) -> None:
    """No change stands twice in the log, and the log, played, gives the records."""
    connection = await asyncpg.connect(dsn)
    try:
        doubled = await connection.fetch(
            "select did, collection, rkey, rev from indexer.change where rkey is not null "
            "group by 1, 2, 3, 4 having count(*) > 1"
        )
        assert doubled == []
        unexplained = await connection.fetch("""
            with last as (
                select distinct on (did, collection, rkey) did, collection, rkey, action, cid
                from atproto.changes where rkey is not null order by did, collection, rkey, seq desc
            )
            select did, collection, rkey from last full join indexer.record using (did, collection, rkey)
            where (last.action is distinct from 'delete') <> (record.cid is not null)
                or last.cid <> atproto.cid_text(record.cid)
        """)
        assert unexplained == []
        kept = await connection.fetchval("select count(*) from indexer.kept_event")
        assert kept == 0
    finally:
        await connection.close()


@pytest.mark.slow
async def test_a_signal_drains_and_the_second_is_not_needed(database: str, tmp_path: Path) -> None:
    async with LocalNetwork() as network:
        scenario = Scenario(network, seed=8)
        async with daemon_process(network, database, tmp_path) as process:
            for step in range(100):
                scenario.perform(step, 100)
            await until(lambda: progressed(database, 0))
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
        connection = await asyncpg.connect(database)
        try:
            assert await connection.fetchval("select count(*) from indexer.repo where status = 'in-progress'") == 0
        finally:
            await connection.close()
