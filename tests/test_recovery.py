"""Backups: a restored database ends equal to the network, whether or not the relay still has what is missing."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.scenario import Scenario
from tests.cli.command_line import error_line, run_indexer
from tests.daemon_process import daemon_process, log_tail
from tests.database_checks import assert_change_log_consistent, wait_until_equal
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 60
GAPS = "select reason, closed_at is not null as closed from atproto.gaps"


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    # A reconciliation checks a repo that seems behind again after half a minute.
    monkeypatch.setattr("tests.waiting.TIMEOUT", 400.0)


async def indexer(*arguments: str, **environment: str) -> Any:
    """Run a command that must succeed; return its result."""
    result = await asyncio.to_thread(partial(run_indexer, *arguments, "--json", **environment))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


async def rows(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(dsn)
    try:
        return [tuple(row) for row in await connection.fetch(statement)]
    finally:
        await connection.close()


@pytest.mark.proof("daemon")
@pytest.mark.parametrize("relay_window", [None, 30])
async def test_restored_database_ends_equal_to_the_network(
    database: str, empty_database: str, tmp_path: Path, relay_window: int | None
) -> None:
    """With a window of 30 messages, the relay no longer has the ones after the cursor of the backup."""
    backup = tmp_path / "indexer.dump"
    async with LocalNetwork(relay_window=relay_window) as network:
        scenario = Scenario(network, seed=21)
        async with daemon_process(network, database, tmp_path):
            for step in range(STEPS):
                scenario.perform(step, 3 * STEPS)
            await wait_until_equal(network, database, min_records=20)
            made = await indexer("backup", str(backup), INDEXER_DATABASE_URL=database)
            assert made == {"file": str(backup), "bytes": backup.stat().st_size}
            for step in range(STEPS, 2 * STEPS):
                scenario.perform(step, 3 * STEPS)
        for step in range(2 * STEPS, 3 * STEPS):
            scenario.perform(step, 3 * STEPS)
        await indexer("restore", str(backup), INDEXER_DATABASE_URL=empty_database)
        [(restored,)] = await rows(empty_database, "select seq from atproto.cursors")
        assert restored < network.relay.seq - 30
        async with daemon_process(network, empty_database, tmp_path):
            await wait_until_equal(network, empty_database)
            expected = [] if relay_window is None else [("cursor-outdated", True)]

            async def closed() -> bool:
                return await rows(empty_database, GAPS) == expected

            await until(closed, lambda: log_tail(tmp_path))
        await assert_change_log_consistent(empty_database)


@pytest.mark.proof("daemon")
async def test_embedded_database_moves_to_a_server(empty_database: str, tmp_path: Path) -> None:
    backup = tmp_path / "indexer.dump"
    embedded = {"INDEXER_DATA_DIR": str(tmp_path / "data")}
    dids = [f"did:web:{number}.example" for number in range(20)]
    await indexer("migrate", **embedded)
    await indexer("add", *dids, **embedded)
    await indexer("backup", str(backup), **embedded)
    await indexer("restore", str(backup), INDEXER_DATABASE_URL=empty_database)
    assert {did for (did,) in await rows(empty_database, "select did from atproto.repos")} == set(dids)
    async with LocalNetwork() as network:
        account = network.create_account("ada.test")
        account.create("com.example.note", {"text": "hello"})
        async with daemon_process(network, empty_database, tmp_path):

            async def indexed() -> bool:
                return await rows(empty_database, "select did from atproto.records") == [(account.did,)]

            await until(indexed, lambda: log_tail(tmp_path))
        privileges = "select has_table_privilege('atproto_reader', 'atproto.records', 'select')"
        assert await rows(empty_database, privileges) == [(True,)]


async def test_restore_changes_nothing_in_a_database_that_is_in_use(database: str, tmp_path: Path) -> None:
    backup = tmp_path / "indexer.dump"
    await indexer("backup", str(backup), INDEXER_DATABASE_URL=database)
    result = run_indexer("restore", str(backup), INDEXER_DATABASE_URL=database)
    assert result.returncode == 2
    assert "it already has the schema atproto, indexer, lexicon; restore into an empty database" in error_line(result)
    assert [path.name for path in tmp_path.iterdir()] == ["indexer.dump"]


@pytest.mark.proof("daemon")
async def test_restore_into_the_embedded_database_names_its_directory(database: str, tmp_path: Path) -> None:
    backup, data = tmp_path / "indexer.dump", {"INDEXER_DATA_DIR": str(tmp_path / "data")}
    await indexer("backup", str(backup), INDEXER_DATABASE_URL=database)
    await indexer("restore", str(backup), **data)
    result = run_indexer("restore", str(backup), **data)
    assert result.returncode == 2
    assert error_line(result).startswith("INDEXER_DATA_DIR: cannot use the database ")
    assert "it already has the schema atproto, indexer, lexicon" in error_line(result)
    assert "INDEXER_DATABASE_URL" not in result.stderr


@pytest.mark.proof("daemon")
async def test_backup_and_restore_use_the_options_in_the_url(
    database: str, empty_database: str, tmp_path: Path
) -> None:
    backup = tmp_path / "indexer.dump"
    for command, dsn in (("backup", database), ("restore", empty_database)):
        url = f"{dsn}{'&' if '?' in dsn else '?'}options=-c%20work_mem%3D5MB%20-c%20jit%3Doff"
        await indexer(command, str(backup), INDEXER_DATABASE_URL=url)
    assert await rows(empty_database, "select count(*) from indexer.repo") == [(0,)]


async def test_incomplete_backup_is_restored_not_at_all(database: str, empty_database: str, tmp_path: Path) -> None:
    backup = tmp_path / "indexer.dump"
    await indexer("backup", str(backup), INDEXER_DATABASE_URL=database)
    backup.write_bytes(backup.read_bytes()[: backup.stat().st_size // 2])
    result = run_indexer("restore", str(backup), INDEXER_DATABASE_URL=empty_database)
    assert result.returncode == 1
    assert "pg_restore" in error_line(result)
    schemas = "select nspname from pg_namespace where nspname in ('indexer', 'atproto', 'lexicon')"
    assert await rows(empty_database, schemas) == []
