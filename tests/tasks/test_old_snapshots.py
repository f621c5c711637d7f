"""A snapshot that stays open while many batches are written is named, and a consumer's is ended."""

import asyncpg
import pytest

from indexer.db import Database
from indexer.tasks.open_transactions import OpenTransactions
from indexer.telemetry.conditions import DEAD_ROWS_KEPT, Conditions
from indexer.telemetry.metrics import Metrics
from tests.db.change_log_helpers import connected
from tests.tasks.test_retention import with_user
from tests.waiting import until

pytestmark = pytest.mark.slow

BATCHES = 300
INSERT_CURSOR = "insert into indexer.cursor (relay, shard, epoch, seq) values ('wss://relay.test', '0/1', 0, 0)"
UPDATE_CURSOR = "do $$ begin for i in 1..{} loop update indexer.cursor set seq = seq + 1; commit; end loop; end $$"


async def write_batches(sql: asyncpg.Connection, count: int) -> None:
    """Update the cursor as this many batches do, and let the statistics of the server include it."""
    await sql.execute(UPDATE_CURSOR.format(count))
    await sql.execute("select pg_stat_force_next_flush()")


async def is_vacuumed(sql: asyncpg.Connection) -> bool:
    await sql.execute("vacuum indexer.cursor")
    dead: int = await sql.fetchval("select pg_stat_get_dead_tuples('indexer.cursor'::regclass)")
    return dead < BATCHES


async def test_consumers_snapshot_is_ended_after_many_batches_and_that_of_another_role_is_named(
    database: str, sql: asyncpg.Connection
) -> None:
    await sql.execute("create role hostile_consumer login in role atproto_reader")
    await sql.execute(INSERT_CURSOR)
    db, conditions = await Database.open(database), Conditions()
    watch = OpenTransactions(db, Metrics(), conditions, max_transaction_seconds=0, max_dead_cursors=BATCHES)
    try:
        async with connected(with_user(database, "hostile_consumer")) as hostile, connected(database) as backup:
            await hostile.execute("begin isolation level repeatable read; select 1")
            await write_batches(sql, BATCHES - 50)
            await watch.check_snapshots()
            assert conditions.active() == []
            await write_batches(sql, 100)
            await backup.execute("begin isolation level repeatable read; select 1")
            await watch.check_snapshots()
            await until(hostile.is_closed)
            [condition] = conditions.active()
            assert condition.kind is DEAD_ROWS_KEPT
            assert "of role hostile_consumer, " in condition.message
            assert ", ended" in condition.message
            await sql.execute("vacuum indexer.cursor")
            await write_batches(sql, BATCHES + 50)
            await watch.check_snapshots()
            [condition] = conditions.active()
            assert f"session {backup.get_server_pid()} of role" in condition.message
            assert await backup.fetchval("select 1") == 1
        await until(lambda: is_vacuumed(sql))
        await watch.check_snapshots()
        assert conditions.active() == []
    finally:
        await db.close()
        await sql.execute("drop role hostile_consumer")


async def test_old_prepared_transaction_is_named(database: str, db: Database, sql: asyncpg.Connection) -> None:
    conditions = Conditions()
    watch = OpenTransactions(db, Metrics(), conditions, max_dead_cursors=BATCHES)
    await sql.execute(INSERT_CURSOR)
    async with connected(database) as forgetful:
        await forgetful.execute("create table forgotten (); begin; insert into forgotten default values")
        await forgetful.execute("prepare transaction 'forgotten'")
    try:
        await write_batches(sql, BATCHES + 50)
        await watch.check_snapshots()
        [condition] = conditions.active()
        assert condition.kind is DEAD_ROWS_KEPT
        assert "prepared transaction forgotten" in condition.message
    finally:
        await sql.execute("rollback prepared 'forgotten'")
