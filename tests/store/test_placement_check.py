"""No process uses a database whose distribution is not complete."""

import asyncpg
import pytest

from indexer.errors import SettingsError
from indexer.store import Store
from tests.cli.command_line import error_line, run_indexer

pytestmark = pytest.mark.slow

INCOMPLETE = "its distribution is not complete; run `indexer distribute` again"
COMPLETE_ROW = "insert into indexer.distribution (shards, finished_at) values (4, now())"
PRETEND_SHARDS = """
    create or replace function indexer.is_distributed(relation regclass) returns boolean language sql return true
"""
"""With both, a plain database counts as distributed. Statements on shards do not work in it."""


async def test_an_interrupted_distribution_must_be_completed_first(database: str, sql: asyncpg.Connection) -> None:
    await sql.execute("delete from indexer.distribution")
    await sql.execute("insert into indexer.distribution (shards) values (4)")
    await sql.execute(PRETEND_SHARDS)
    with pytest.raises(SettingsError, match=INCOMPLETE):
        await Store.open(database)
    for command in ("status", "run"):
        result = run_indexer(command, INDEXER_DATABASE_URL=database)
        assert result.returncode == 2
        assert INCOMPLETE in error_line(result)
    await sql.execute("update indexer.distribution set finished_at = now()")
    await (await Store.open(database)).close()


@pytest.mark.one_server("the database of a cluster has shards")
async def test_a_restored_backup_of_a_cluster_must_be_distributed_first(database: str, sql: asyncpg.Connection) -> None:
    """Also if the restore was killed when the tables were complete."""
    await sql.execute(COMPLETE_ROW)
    with pytest.raises(SettingsError, match=INCOMPLETE):
        await Store.open(database)
