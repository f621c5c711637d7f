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

from tests.examples.statusphere import ROOT, Page, command_of, running_example

VIEWS = """
    select string_agg(format('%s.%s', table_schema, table_name), ' ' order by table_name)
    from information_schema.role_table_grants where grantee = current_user
"""


@pytest.mark.proof("daemon")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "killed"), [("python", ("appview", "indexer", "appview")), ("sql", ("indexer", "indexer"))]
)
async def test_appview_loses_nothing_when_it_or_the_indexer_is_killed(name: str, killed: tuple[str, ...]) -> None:
    async def page_of_database() -> Page | None:
        try:
            connection = await asyncpg.connect(example.database)
        except (OSError, asyncpg.PostgresError):
            return None
        try:
            page: Page = json.loads(await connection.fetchval("select statusphere.page()"))
            return page
        finally:
            await connection.close()

    async with running_example(f"statusphere-{name}") as example:
        shown = page_of_database if name == "sql" else example.get_page
        await example.until_equal(shown)
        for process in killed:
            await example.kill(process)
            page = await example.until_equal(shown)
        assert len(page["statuses"]) >= 4
        assert {"🎉", "🧪"} <= {row["status"] for row in page["counts"]}
        if name == "sql":
            await assert_privileges(example.database)
        processes = [example.process_of(process) for process in set(killed)]
    assert [process for process in processes if Path(f"/proc/{process}").exists()] == []
    assert not Path(example.database.partition("host=")[2].partition("&")[0]).exists()


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
