"""Migrations while other sessions hold locks that they need."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from indexer.db.migrate import migrate
from indexer.db.migration_locks import LockTimes
from indexer.db.schema_version import schema_is_current
from tests.background import running
from tests.db.change_log_helpers import connected
from tests.db.later_release import use_later_release
from tests.db.test_migrate import role, with_user
from tests.waiting import until

pytestmark = pytest.mark.slow

CHANGE_TABLE = ["alter table indexer.repo add column later integer"]
REPLACE_VIEWS = ["select indexer.adapt_public_schema()"]
READ = "select count(*) from atproto.records"
READ_SLOWLY = f"{READ}, pg_sleep(0.05)"
READ_REPOS = "select count(*) from atproto.repos"
WAITS_FOR_VIEW = """
    select exists (select from pg_locks where not granted and mode = 'AccessExclusiveLock' and locktype = 'relation')
"""
WAITS = "select exists (select from pg_stat_activity where application_name = $1 and wait_event_type = 'Lock')"
STEADY = "steady reader"
HELD_SECONDS = 0.5


@pytest.fixture
async def consumer(database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[asyncpg.Connection]:
    """Return the session of a consumer with an open transaction that has read a view that `migrate` replaces."""
    use_later_release(monkeypatch, tmp_path, REPLACE_VIEWS)
    async with role(database, "in role atproto_reader") as name, connected(with_user(database, name)) as session:
        await session.execute(f"begin; {READ}")
        yield session


def waits(lines: list[MutableMapping[str, Any]], session: asyncpg.Connection) -> bool:
    """Return True if a line says that the migration waits for this session."""
    return any(
        (line["event"], line["pid"]) == ("database.migration-waiting", session.get_server_pid()) for line in lines
    )


@pytest.mark.proof("daemon")
async def test_consumers_whose_transactions_overlap_do_not_prevent_a_migration(
    database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """None waits for another one for longer than `HELD_SECONDS`, and without a migration one is open at any time."""
    use_later_release(monkeypatch, tmp_path, REPLACE_VIEWS)
    has_read = [asyncio.Event(), asyncio.Event()]

    async def consume(dsn: str, own: asyncio.Event, other: asyncio.Event) -> None:
        async with connected(dsn) as session:
            while True:
                async with session.transaction():
                    await session.execute(READ_SLOWLY)
                    own.set()
                    other.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(other.wait(), HELD_SECONDS)

    async with role(database, "in role atproto_reader") as name, connected(database) as sql:
        dsn = with_user(database, name)
        with capture_logs() as lines:
            async with running(consume(dsn, *has_read), consume(dsn, *has_read[::-1])):
                await until(lambda: any(event.is_set() for event in has_read))
                async with running(migrate(database, times=LockTimes(HELD_SECONDS / 2))) as [migration]:
                    await until(lambda: sql.fetchval(WAITS_FOR_VIEW))
                    await until(migration.done, lambda: lines)
        assert "consumer.session-ended" not in {line["event"] for line in lines}
    assert await schema_is_current(database)


async def test_only_sessions_of_consumers_that_block_a_migration_are_ended_for_it(
    database: str, consumer: asyncpg.Connection
) -> None:
    """None is ended while a session that stays blocks it, too. An administrator may be a member of their roles.

    The sessions for which it waits are named, and others read meanwhile.
    """
    async with (
        role(database, "superuser", "administrator") as superuser,
        role(database, "createrole in role atproto_reader", "creator") as creator,
        connected(with_user(database, superuser)) as backup,
        connected(with_user(database, creator)) as report,
        role(database, "in role atproto_reader", "bystander") as bystander,
        connected(with_user(database, bystander)) as idle,
    ):
        await idle.execute("begin; select count(*) from pg_catalog.pg_class")
        await backup.execute(f"begin; {READ}")
        await report.execute(f"begin; {READ}")
        with capture_logs() as lines:
            migration = asyncio.create_task(migrate(database, times=LockTimes(0.3, 0.0)))
            for session in (backup, report):
                await until(lambda: migration.done() or waits(lines, session))  # noqa: B023
                assert not migration.done()
                assert waits(lines, consumer), "to end its session would be in vain"
                async with connected(database) as other:
                    await other.execute(READ)
                assert not await schema_is_current(database)
                await session.execute("commit")
                lines.clear()
            await migration
        assert await idle.fetchval("select 1") == 1
    assert await schema_is_current(database)
    assert {line["pid"] for line in lines if line["event"] == "consumer.session-ended"} == {consumer.get_server_pid()}
    await until(consumer.is_closed)


async def test_a_reader_of_a_view_and_a_migration_do_not_wait_for_each_other(
    database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The reader begins when the table is changed, and before the view is replaced."""
    use_later_release(monkeypatch, tmp_path, CHANGE_TABLE, REPLACE_VIEWS)
    applied: list[int] = []
    readers: list[Future[int]] = []
    with ThreadPoolExecutor() as threads:

        def on_version(number: int, _total: int) -> None:
            """Begin to read when the first migration has run; return when the reader waits."""
            applied.append(number)
            if number == 1:
                readers.append(threads.submit(asyncio.run, read_repos(database)))
                threads.submit(asyncio.run, wait_for_reader(database)).result()

        await migrate(database, on_version=on_version)
    assert [reader.result() for reader in readers] == [0]
    assert applied.count(0) == 1, "the migration was not repeated"


async def read_repos(dsn: str) -> int:
    sql = await asyncpg.connect(dsn, server_settings={"application_name": STEADY})
    try:
        number: int = await sql.fetchval(READ_REPOS)
        return number
    finally:
        await sql.close()


async def wait_for_reader(dsn: str) -> None:
    async with connected(dsn) as sql:
        await until(lambda: sql.fetchval(WAITS, STEADY))


async def test_migration_of_a_process_that_was_stopped_ends_after_a_minute(
    database: str, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Postgres ends it, and the locks that all daemons would wait for."""
    limit = "current_setting('idle_in_transaction_session_timeout')"
    use_later_release(monkeypatch, tmp_path, [f"create table indexer.seen as select {limit} as limit_in_migration"])
    await migrate(database)
    assert await sql.fetchval("select limit_in_migration from indexer.seen") == "1min"
