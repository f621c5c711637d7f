"""The example AppViews in Python and in SQL show the truth of the network, also after they were killed."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.status_activity import STATUS, StatusActivity
from tests.examples.statusphere import ROOT, Page, RunningExample, command_of, running_example

VIEWS = """
    select string_agg(format('%s.%s', table_schema, table_name), ' ' order by table_name)
    from information_schema.role_table_grants where grantee = current_user
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_python_appview_loses_nothing_when_it_or_the_indexer_is_killed() -> None:
    async with running_example("statusphere-python") as example:
        await example.until_equal(example.get_page)
        for name in ("appview", "indexer", "appview"):
            await example.kill(name)
            page = await example.until_equal(example.get_page)
        assert len(page["statuses"]) >= 4
        assert {"🎉", "🧪"} <= {row["status"] for row in page["counts"]}
        processes = [example.process_of(name) for name in ("appview", "indexer")]
    assert_nothing_remains(example, processes)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_sql_appview_loses_nothing_when_the_indexer_is_killed() -> None:
    async def page_of() -> Page | None:
        try:
            connection = await asyncpg.connect(example.database)
        except (OSError, asyncpg.PostgresError):
            return None
        try:
            page: Page = json.loads(await connection.fetchval("select statusphere.page()"))
            return page
        finally:
            await connection.close()

    async with running_example("statusphere-sql") as example:
        await example.until_equal(page_of)
        for _ in range(2):
            await example.kill("indexer")
            page = await example.until_equal(page_of)
        assert len(page["statuses"]) >= 4
        assert {"🎉", "🧪"} <= {row["status"] for row in page["counts"]}
        await assert_privileges(example.database)
        processes = [example.process_of("indexer")]
    assert_nothing_remains(example, processes)


async def assert_privileges(database: str) -> None:
    """Assert that the role of the web server reads the views of the AppView, and nothing else."""
    connection = await asyncpg.connect(database)
    try:
        assert await connection.fetchval("select current_user") == "statusphere"
        granted = await connection.fetchval(VIEWS)
        assert granted == "statusphere.counts statusphere.latest statusphere.status"
        for statement in ("select * from atproto.records", 'select * from lexicon."xyz.statusphere.status"'):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.fetch(statement)
    finally:
        await connection.close()


def assert_nothing_remains(example: RunningExample, processes: list[int]) -> None:
    assert [process for process in processes if Path(f"/proc/{process}").exists()] == []
    socket = example.database.partition("host=")[2].partition("&")[0]
    assert not Path(socket).exists()


@pytest.mark.slow
def test_start_on_a_port_in_use_names_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = subprocess.run(
            [ROOT / command_of("statusphere-sql"), "--first-port", str(port - 5)],
            env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert result.returncode == 1
    message = "Cannot use port [0-9]+: Address already in use. Choose others with --first-port.\n"
    assert re.fullmatch(message, result.stderr), result.stderr


@pytest.mark.parametrize("example", ["statusphere-python", "statusphere-sql"])
def test_readme_starts_an_example_with_one_command(example: str) -> None:
    """The tests above run this command."""
    assert command_of(example) == f"examples/{example}/run"
    assert os.access(ROOT / command_of(example), os.X_OK)


def test_requirements_of_the_python_example_are_the_tested_versions() -> None:
    required = (ROOT / "examples" / "statusphere-python" / "requirements.txt").read_text().splitlines()
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert len(required) == 3
    assert {line.replace("[asyncio]", "") for line in required} < set(pins)


def test_readme_writes_statuses_as_an_account_of_the_network() -> None:
    readme = (ROOT / "examples" / "statusphere-python" / "README.md").read_text()
    network = LocalNetwork(first_port=2_470)
    StatusActivity(network)
    alice = next(account for account in network.accounts.values() if account.handle == "alice.test")
    assert f'"repo": "{alice.did}", "collection": "{STATUS}"' in readme
    assert f"{alice.pds.url}/xrpc/com.atproto.repo.createRecord" in readme
