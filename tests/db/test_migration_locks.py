"""Migrations while other sessions hold locks that they need."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from indexer.db.migrate import migrate
from tests.background import running
from tests.database_checks import schema_is_current
from tests.db.change_log_helpers import connected
from tests.db.later_release import use_later_release
from tests.db.test_migrate import role, with_user
from tests.waiting import until

pytestmark = pytest.mark.slow

REPLACE_VIEWS = ["select indexer.adapt_public_schema()"]
READ = "select count(*) from atproto.records"
READ_SLOWLY = f"{READ}, pg_sleep(0.05)"
WAITS_FOR_VIEW = """
    select exists (select from pg_locks where not granted and mode = 'AccessExclusiveLock' and locktype = 'relation')
"""
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
        (line["event"], line.get("pid")) == ("database.migration-waiting", session.get_server_pid()) for line in lines
    )


@pytest.mark.proof("daemon")
async def test_consumers_whose_transactions_overlap_do_not_prevent_a_migration(
    database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """None waits for another one for longer than `HELD_SECONDS`, and without a migration one is open at any time."""
    use_later_release(monkeypatch, tmp_path, REPLACE_VIEWS)
    monkeypatch.setattr("indexer.db.migrate.LOCK_SECONDS", HELD_SECONDS / 2)
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
                async with running(migrate(database)) as [migration]:
                    await until(lambda: sql.fetchval(WAITS_FOR_VIEW))
                    await until(migration.done, lambda: lines)
        assert "consumer.session-ended" not in {line["event"] for line in lines}
    assert await schema_is_current(database)


async def test_only_sessions_of_consumers_that_block_a_migration_are_ended_for_it(
    database: str, consumer: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is ended while a session that stays blocks it, too. An administrator may be a member of their roles.

    A session with a lock that does not conflict, such as that of a long VACUUM, changes nothing. The sessions for which
    it waits are named, and others read meanwhile.
    """
    monkeypatch.setattr("indexer.db.migrate.LOCK_SECONDS", 0.3)
    monkeypatch.setattr("indexer.db.migrate.CONSUMER_SECONDS", 0.0)
    async with (
        role(database, "superuser", "administrator") as superuser,
        role(database, "createrole in role atproto_reader", "creator") as creator,
        connected(with_user(database, superuser)) as backup,
        connected(with_user(database, superuser)) as vacuum,
        connected(with_user(database, creator)) as report,
        role(database, "in role atproto_reader", "bystander") as bystander,
        connected(with_user(database, bystander)) as idle,
    ):
        await idle.execute("begin; select count(*) from pg_catalog.pg_class")
        await vacuum.execute("begin; lock table indexer.record in share update exclusive mode")
        await backup.execute(f"begin; {READ}")
        await report.execute(f"begin; {READ}")
        with capture_logs() as lines:
            migration = asyncio.create_task(migrate(database))
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
        assert [await session.fetchval("select 1") for session in (idle, vacuum)] == [1, 1]
    assert await schema_is_current(database)
    assert {line["pid"] for line in lines if line["event"] == "consumer.session-ended"} == {consumer.get_server_pid()}
    await until(consumer.is_closed)


async def test_migration_of_a_process_that_was_stopped_ends_after_a_minute(
    database: str, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Postgres ends it, and the locks that all daemons would wait for."""
    limit = "current_setting('idle_in_transaction_session_timeout')"
    use_later_release(monkeypatch, tmp_path, [f"create table indexer.seen as select {limit} as limit_in_migration"])
    await migrate(database)
    assert await sql.fetchval("select limit_in_migration from indexer.seen") == "1min"
