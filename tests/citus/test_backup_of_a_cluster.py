"""`indexer backup` of a cluster, and `indexer restore` into another one."""

from pathlib import Path

import asyncpg
import pytest

from indexer.db import Store
from indexer.db.distribute import distribute
from indexer.db.migrate import migrate
from indexer.errors import SettingsError
from tests.cli.command_line import run_indexer
from tests.db.change_log_helpers import connected
from tests.db.filled_tables import contents, fill
from tests.db.later_release import use_later_release

pytestmark = [pytest.mark.proof("cluster"), pytest.mark.timeout(300)]

CHANGED = ("alembic_version", "distribution", "shard_owner", "stored_setting")
"""Tables that `indexer distribute` itself writes."""


@pytest.fixture
async def programs(sql: asyncpg.Connection) -> str:
    """Return the folder of the programs of the server."""
    version = int(await sql.fetchval("show server_version_num")) // 10_000
    folder = Path(f"/usr/lib/postgresql/{version}/bin")
    if not (folder / "pg_restore").exists():
        pytest.skip(f"there is no {folder}/pg_restore")
    return str(folder)


async def test_a_backup_of_a_cluster_is_restored_and_distributed_again(
    database: str, empty_database: str, programs: str, tmp_path: Path
) -> None:
    file = tmp_path / "indexer.dump"
    await fill(database)
    before = await contents(database, without=CHANGED)
    for command, dsn in (("backup", database), ("restore", empty_database)):
        url = f"{dsn}?options=-c%20work_mem%3D5MB"  # beside the options that the command itself needs
        done = run_indexer(command, str(file), INDEXER_DATABASE_URL=url, INDEXER_PG_BINDIR=programs)
        assert done.returncode == 0, done.stderr
    with pytest.raises(SettingsError, match="run `indexer distribute` again"):
        await Store.open(empty_database)
    result = await distribute(empty_database, None, lambda *_: None)
    assert not result.was_complete
    assert result.tables["record"] > 0
    assert await contents(empty_database, without=CHANGED) == before
    await (await Store.open(empty_database)).close()


async def test_a_backup_of_an_earlier_release_is_migrated_before_it_is_distributed_again(
    empty_database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After the restore, the database says that it is distributed, and none of its tables is."""
    await migrate(empty_database)
    use_later_release(monkeypatch, tmp_path, ["alter table indexer.repo add column later integer"])
    async with connected(empty_database) as connection:
        await connection.execute("insert into indexer.distribution (shards, finished_at) values (4, now())")
    await migrate(empty_database)
    result = await distribute(empty_database, None, lambda *_: None)
    assert (result.shards, result.was_complete) == (4, False)
    await (await Store.open(empty_database)).close()
