"""Migrations while other sessions hold locks that they need."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from indexer.store.migrate import migrate, schema_is_current
from tests.store.change_log_helpers import connected
from tests.store.test_migrate import role, with_user
from tests.waiting import until

pytestmark = pytest.mark.slow

BEFORE_NEW_VIEWS = "0029"
"""The migration after this one replaces public views."""
READ = "select count(*) from atproto.records"


@pytest.fixture
async def consumer(empty_database: str) -> AsyncIterator[asyncpg.Connection]:
    """Return the session of a consumer with an open transaction that has read a view of an earlier release."""
    await migrate(empty_database, BEFORE_NEW_VIEWS)
    async with (
        role(empty_database, "in role atproto_reader") as name,
        connected(with_user(empty_database, name)) as session,
    ):
        await session.execute(f"begin; {READ}")
        yield session


def waits(lines: list[MutableMapping[str, Any]], session: asyncpg.Connection) -> bool:
    """Return True if a line says that the migration waits for this session."""
    return any(
        (line["event"], line["pid"]) == ("database.migration-waiting", session.get_server_pid()) for line in lines
    )


async def test_a_migration_that_waits_for_a_consumer_names_it_and_lets_others_read(
    empty_database: str, consumer: asyncpg.Connection
) -> None:
    with capture_logs() as lines:
        migration = asyncio.create_task(migrate(empty_database))
        await until(lambda: migration.done() or waits(lines, consumer))
        assert not await schema_is_current(empty_database)
        async with connected(empty_database) as other:
            for _ in range(3):
                await other.execute(READ)
        await consumer.execute("commit")
        await migration
    assert await schema_is_current(empty_database)
    assert {line["event"] for line in lines} == {"database.migration-waiting"}
    assert await consumer.fetchval("select 1") == 1, "its session is as before"


async def test_a_consumer_whose_transaction_stays_open_does_not_prevent_a_migration(
    empty_database: str, consumer: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.store.migrate.CONSUMER_SECONDS", 1.0)
    with capture_logs() as lines:
        await migrate(empty_database)
    assert await schema_is_current(empty_database)
    assert [line["event"] for line in lines if line["pid"] == consumer.get_server_pid()][-1] == "consumer.session-ended"
    await until(consumer.is_closed)


async def test_only_sessions_of_consumers_are_ended_for_a_migration(
    empty_database: str, consumer: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.store.migrate.CONSUMER_SECONDS", 0.0)
    async with connected(empty_database) as backup:
        await backup.execute(f"begin; {READ}")
        with capture_logs() as lines:
            migration = asyncio.create_task(migrate(empty_database))
            await until(lambda: migration.done() or waits(lines, backup))
            assert not migration.done()
            assert await backup.fetchval("select 1") == 1
            await backup.execute("commit")
            await migration
    assert await schema_is_current(empty_database)
