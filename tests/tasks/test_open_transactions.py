"""A full queue of notifications is reported, and the session that may have filled it is ended."""

import asyncio
from pathlib import Path

import asyncpg
import pytest

from indexer import embedded
from indexer.db import Database
from indexer.db.migrate import migrate
from indexer.tasks.open_transactions import OpenTransactions
from indexer.telemetry.conditions import NOTIFICATION_QUEUE_FILLS, Conditions
from indexer.telemetry.metrics import Metrics
from tests.database_server import SERVER_SETTINGS
from tests.db.change_log_helpers import change, connected, log
from tests.tasks.test_retention import with_user
from tests.waiting import until

pytestmark = pytest.mark.slow


async def test_oldest_transaction_is_named_and_that_of_a_consumer_is_ended_when_half_of_the_queue_is_full(
    database: str, sql: asyncpg.Connection
) -> None:
    await sql.execute("create role hostile_consumer login in role atproto_reader")
    db, conditions, metrics = await Database.open(database), Conditions(), Metrics()
    patient = OpenTransactions(db, metrics, conditions)
    strict = OpenTransactions(db, metrics, conditions, max_transaction_seconds=0)
    await sql.execute("begin; select 1")  # an older transaction, of no consumer
    try:
        async with connected(with_user(database, "hostile_consumer")) as hostile:
            await hostile.execute("listen atproto_changes; begin; select 1")
            await patient.check()  # the queue of the test server is empty
            assert conditions.active() == []
            for usage, watch in ((0.1, strict), (0.6, patient)):
                await watch.check_queue(usage)
                [condition] = conditions.active()
                assert condition.kind is NOTIFICATION_QUEUE_FILLS
                assert "of role hostile_consumer, open for" in condition.message
                assert metrics.registry.get_sample_value("indexer_notification_queue_ratio") == usage
            assert await hostile.fetchval("select 1") == 1
            await strict.check_queue(1.0)
            await until(hostile.is_closed)
            await patient.check_queue(0.0)
            assert conditions.active() == []
    finally:
        await db.close()
        await sql.execute("rollback")
        await sql.execute("drop role hostile_consumer")


async def test_commit_succeeds_while_the_queue_of_notifications_is_full(tmp_path: Path) -> None:
    settings = SERVER_SETTINGS | {"max_notify_queue_pages": "64"}  # from Postgres 17 on
    async with embedded.database(None, tmp_path, settings) as dsn:
        await migrate(dsn)
        async with connected(dsn) as listening, connected(dsn) as flooding, connected(dsn) as sql:
            await listening.execute("listen atproto_changes")
            await listening.execute("begin; select 1")
            with pytest.raises(asyncpg.ProgramLimitExceededError, match="too many notifications"):
                await flood(flooding)
            await log(sql, change("a"))
            assert await sql.fetchval("select atproto.latest_seq()") == 1
            notified = asyncio.Event()
            await listening.execute("rollback")
            await until(lambda: _has_room(sql))
            await listening.add_listener("atproto_changes", lambda *_: notified.set())
            await log(sql, change("b"))
            await asyncio.wait_for(notified.wait(), 30)


async def flood(sql: asyncpg.Connection) -> None:
    """Fill the queue of notifications, if it is a small one."""
    for number in range(1_000):
        await sql.execute("select pg_notify('other', $1)", str(number).ljust(7_000))


async def _has_room(sql: asyncpg.Connection) -> bool:
    return bool(await sql.fetchval("select pg_notification_queue_usage() < 0.5"))
