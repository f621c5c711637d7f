"""The daemon waits at its start for a database that does not answer."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs

from indexer.db.migrate import prepare_database
from indexer.errors import NoScopeError, SchemaVersionError, SettingsError
from tests.database_checks import schema_is_current
from tests.database_proxy import DatabaseProxy
from tests.db.change_log_helpers import connected
from tests.db.later_release import use_later_release
from tests.tcp_proxy import Messages
from tests.waiting import until

pytestmark = pytest.mark.slow

MAX_STOP_SECONDS = 8.0
WAITING = """
    select count(*) from pg_stat_activity
    where datname = current_database() and cardinality(pg_blocking_pids(pid)) > 0
"""


class HangsAtStatement(DatabaseProxy):
    """Hangs before the first message of a client that contains some bytes, as if the machine had stopped."""

    def __init__(self, dsn: str, part: bytes) -> None:
        super().__init__(dsn)
        self.part = part
        self.hangs = asyncio.Event()

    def messages(self) -> tuple[Messages, Messages]:
        of_client, of_server = super().messages()
        split = of_client.split

        def watched(data: bytes) -> Iterator[tuple[str, bytes]]:
            for kind, message in split(data):
                if self.part in message:
                    self.hang()
                    self.hangs.set()
                yield kind, message

        of_client.split = watched  # type: ignore[method-assign]
        return of_client, of_server


async def test_daemon_waits_until_the_database_answers_and_says_so(empty_database: str) -> None:
    """A stop ends the wait."""
    proxy = DatabaseProxy(empty_database)
    async with proxy.serve():
        proxy.refuse()
        dsn, stop = proxy.dsn.replace("//postgres@", "//postgres:hunter2@"), asyncio.Event()
        for stopped in (True, False):
            with capture_logs() as lines:
                waiting = asyncio.create_task(
                    prepare_database(dsn, stop, migrate_first=not stopped, changing=nullcontext)
                )
                await until(lambda: [line["event"] for line in lines] == ["database.waiting"])
                if stopped:
                    stop.set()
                    assert not await waiting
                    stop.clear()
        with capture_logs() as more:
            proxy.open()
            assert await waiting
    assert [line["event"] for line in more] == ["database.migrating", "database.migrated", "database.answered"]
    assert f"the database postgresql://postgres@127.0.0.1:{proxy.port}/" in lines[0]["error"]
    assert "hunter2" not in str([*lines, *more])
    assert await schema_is_current(empty_database)


@pytest.mark.parametrize("statement", [b"user", b"alembic_version", b"create schema if"])
async def test_stop_ends_a_start_on_a_server_that_hangs(empty_database: str, statement: bytes) -> None:
    """While it connects, checks the version, and migrates."""
    stop, proxy = asyncio.Event(), HangsAtStatement(empty_database, statement)
    async with proxy.serve():
        waiting = asyncio.create_task(prepare_database(proxy.dsn, stop, migrate_first=True, changing=nullcontext))
        await proxy.hangs.wait()
        stop.set()
        async with asyncio.timeout(MAX_STOP_SECONDS):
            assert not await waiting


async def test_stop_ends_the_wait_for_a_migration_of_another_process(empty_database: str) -> None:
    stop = asyncio.Event()
    # A transaction sees one snapshot of pg_stat_activity, so the one that blocks cannot watch.
    async with connected(empty_database) as other, connected(empty_database) as watcher:
        await other.execute("begin; create schema indexer")
        waiting = asyncio.create_task(prepare_database(empty_database, stop, migrate_first=True, changing=nullcontext))

        async def waits_for_the_lock() -> bool:
            return bool(await watcher.fetchval(WAITING))

        await until(waits_for_the_lock)
        stop.set()
        assert not await waiting
        await other.execute("rollback")


async def test_daemon_says_which_version_it_migrates_and_when_this_is_done(
    database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_later_release(monkeypatch, tmp_path, ["alter table indexer.cursor add column later integer"])
    prepare = partial(prepare_database, database, asyncio.Event(), migrate_first=True, changing=nullcontext)
    async with connected(database) as other:
        with capture_logs() as lines:
            await other.execute("begin; lock table indexer.alembic_version in exclusive mode")
            preparing = asyncio.create_task(prepare())
            await until(lambda: bool(lines))
            assert [(line["event"], line["release"]) for line in lines] == [("database.migrating", "9000")]
            await other.execute("rollback")
            assert await preparing
    assert [line["event"] for line in lines] == ["database.migrating", "database.migrated"]
    with capture_logs() as lines:
        assert await prepare()
    assert not lines, "nothing was migrated"


async def test_errors_that_the_operator_has_to_correct_end_the_start_at_once(empty_database: str) -> None:
    prepare = partial(prepare_database, stop=asyncio.Event(), migrate_first=False, changing=nullcontext)
    with pytest.raises(SettingsError, match=r'INDEXER_DATABASE_URL: .*: database "none" does not exist$'):
        await prepare(empty_database.replace(urlsplit(empty_database).path, "/none"))
    with pytest.raises(SettingsError, match=r'INDEXER_DATABASE_URL: .*: role "nobody" does not exist$'):
        await prepare(empty_database.replace("//postgres@", "//nobody@"))
    with pytest.raises(SchemaVersionError):
        await prepare(empty_database)


async def test_start_without_a_choice_needs_a_stored_scope(
    empty_database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is created or upgraded. A schema that this release cannot use is reported as such."""
    prepare = partial(prepare_database, empty_database, asyncio.Event(), changing=nullcontext)
    with pytest.raises(NoScopeError):
        await prepare(migrate_first=True, scope_chosen=False)
    async with connected(empty_database) as connection:
        assert await connection.fetchval("select to_regnamespace('indexer')") is None
        assert await prepare(migrate_first=True)
        with pytest.raises(NoScopeError):
            await prepare(migrate_first=False, scope_chosen=False)
        with monkeypatch.context() as later:
            use_later_release(later, tmp_path, ["drop table indexer.cursor"])
            with pytest.raises(NoScopeError):
                await prepare(migrate_first=True, scope_chosen=False)
        assert await connection.fetchval("select to_regclass('indexer.cursor')") is not None
        await connection.execute("insert into indexer.scope values (true, 1, 'all', '{*}', '{0}', '{}')")
        assert await prepare(migrate_first=False, scope_chosen=False)
        await connection.execute("drop table indexer.scope cascade")
        await connection.execute("update indexer.alembic_version set version_num = '0014'")
    with pytest.raises(SchemaVersionError):
        await prepare(migrate_first=True, scope_chosen=False)
