"""The Compose file passes the password in PGPASSWORD, so that the URL needs none."""

from pathlib import Path

import asyncpg
import pytest

from indexer.store.embedded import database
from tests.cli.command_line import run_indexer

PASSWORD = "of the test: /#@%"

pytestmark = pytest.mark.slow


async def test_password_of_the_database_can_come_from_its_own_variable(tmp_path: Path) -> None:
    async with database(None, tmp_path) as url:
        connection = await asyncpg.connect(url)
        await connection.execute(f"create role service login createrole password '{PASSWORD}'")
        await connection.execute("grant create on database indexer to service")
        await connection.close()
    access = tmp_path / "postgres/data/pg_hba.conf"
    access.write_text("local all service scram-sha-256\nlocal all all trust\n")
    async with database(None, tmp_path) as url:
        variables = {"INDEXER_DATABASE_URL": url.replace("//postgres@", "//service@")}
        refused = run_indexer("migrate", PGPASSWORD="wrong", **variables)
        migrated = run_indexer("migrate", PGPASSWORD=PASSWORD, **variables)
        status = run_indexer("status", "--json", PGPASSWORD=PASSWORD, **variables)
    assert (refused.returncode, migrated.returncode) == (2, 0), migrated.stderr
    assert PASSWORD not in status.stdout
