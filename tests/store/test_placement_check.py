"""No process uses a database whose distribution was interrupted."""

import asyncpg
import pytest

from indexer.errors import SettingsError
from indexer.store import Store
from tests.cli.command_line import error_line, run_indexer

INTERRUPTED = "its distribution was interrupted; run `indexer distribute` again"


@pytest.mark.slow
async def test_an_interrupted_distribution_must_be_completed_first(database: str, sql: asyncpg.Connection) -> None:
    await sql.execute("delete from indexer.distribution")
    await sql.execute("insert into indexer.distribution (shards) values (4)")
    with pytest.raises(SettingsError, match=INTERRUPTED):
        await Store.open(database)
    for command in ("status", "run"):
        result = run_indexer(command, INDEXER_DATABASE_URL=database)
        assert result.returncode == 2
        assert INTERRUPTED in error_line(result)
    await sql.execute("update indexer.distribution set finished_at = now()")
    await (await Store.open(database)).close()
