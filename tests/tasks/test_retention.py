import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest
from sqlalchemy import make_url
from structlog.testing import capture_logs

from indexer.db import Database
from indexer.db.blocking_sessions import BlockingSessions
from indexer.db.change_log_segments import RetentionPolicy, load_state
from indexer.tasks.retention import ChangeLogRetention
from indexer.telemetry.metrics import Metrics
from tests.db.change_log_helpers import change, connected, log
from tests.waiting import until

pytestmark = pytest.mark.slow

BATCH_SIZE = 500


@pytest.mark.parametrize(("limit", "event"), [(0, "consumer.lagging"), (120, "consumer.disconnected")])
async def test_lagging_consumer_is_logged_once_and_then_disconnected(
    db: Database, sql: asyncpg.Connection, limit: float, event: str
) -> None:
    """Without a limit, it is logged again when it has caught up."""
    metrics, lags = Metrics(), event == "consumer.lagging"
    value = metrics.registry.get_sample_value
    retention = ChangeLogRetention(db, RetentionPolicy(0, 2**40, limit), metrics, lag_alarm=60)
    await sql.execute("select atproto.register_reader('one'), atproto.register_reader('two')")
    await log(sql, change(1), change(2))
    await sql.execute("select count(*) from atproto.next_changes('two', 5)")
    await sql.execute("update indexer.change_batch set time = now() - interval '200 seconds'")
    with capture_logs() as lines:
        for _ in range(3):
            await retention.trim()
    assert [(line["event"], line["reader"], line["behind"]) for line in lines] == [(event, "one", 2)]
    assert retention.lagging == (["one"] if lags else [])
    assert ((value("indexer_consumer_lag_seconds") or 0) >= 200) == lags
    assert value("indexer_consumers", {"state": "following"}) == (2 if lags else 1)
    assert value("indexer_consumers", {"state": "cut-off"}) == (0 if lags else 1)
    assert (value("indexer_change_log_bytes") or 0) > 0
    cut_off = await sql.fetchval("select cut_off_at is not null from atproto.readers where name = 'one'")
    assert cut_off != lags
    if lags:
        await sql.execute("select count(*) from atproto.next_changes('one', 5)")
        with capture_logs() as lines:
            for _ in range(3):
                await retention.trim()
        assert [(line["event"], line["reader"]) for line in lines] == [("consumer.caught-up", "one")]


async def test_each_lagging_consumer_has_a_series_and_their_number_is_bounded(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.tasks.retention.MAX_LISTED", 3)
    metrics = Metrics()
    retention = ChangeLogRetention(db, RetentionPolicy(0, 2**40, 0), metrics, lag_alarm=60)
    await sql.execute("select atproto.register_reader('c' || n) from generate_series(1, 9) n")
    await log(sql, change(1), change(2))
    await retention.trim()

    def listed() -> list[float]:
        families = metrics.registry.collect()
        samples = [sample for family in families for sample in family.samples]
        return [sample.value for sample in samples if sample.name == "indexer_consumer_behind_changes"]

    assert listed() == [2] * 3
    await sql.execute("select atproto.unregister_reader('c' || n) from generate_series(1, 9) n")
    await retention.trim()
    assert listed() == []


async def test_a_transaction_that_read_the_view_is_ended_when_the_change_log_has_twice_its_size(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    """Only the session of the consumer, and only then. A backup, here of a superuser, is never ended."""
    await sql.execute("create role hostile_consumer login in role atproto_reader")
    try:
        async with connected(with_user(database, "hostile_consumer")) as hostile, connected(database) as backup:
            await log(sql, *[change(1, n) for n in range(12_000)])
            for session in (hostile, backup):
                await session.execute("begin; select count(*) from atproto.changes")
            await sql.execute("update indexer.change_log set current_segment = 1")
            await log(sql, change(2))
            policy, metrics = RetentionPolicy(604_800, 2**20, 0), Metrics()
            patient = ChangeLogRetention(db, policy, metrics, lag_alarm=60)
            strict = ChangeLogRetention(db, policy, metrics, lag_alarm=60, max_transaction_seconds=0)
            large = ChangeLogRetention(db, replace(policy, max_bytes=2**22), metrics, lag_alarm=60)
            with capture_logs() as lines:
                await large.trim()
                await patient.trim()
                assert lines == [], "the log is not large enough, or the transaction is not old enough"
                await strict.trim()
                assert [(line["event"], line["role"]) for line in lines] == [
                    ("consumer.session-ended", "hostile_consumer")
                ]
            await until(hostile.is_closed)
            assert await backup.fetchval("select 1") == 1
            await backup.execute("rollback")
            with capture_logs() as lines:
                await patient.trim()
            assert [line["event"] for line in lines] == ["change-log.trimmed", "change-log.size-limit"]
    finally:
        await sql.execute("drop role hostile_consumer")


async def test_a_session_that_may_not_be_ended_is_reported(database: str, sql: asyncpg.Connection) -> None:
    """The daemon's role needs pg_signal_backend to end the sessions of other roles."""
    await sql.execute("create role hostile_consumer login in role atproto_reader; create role plain_daemon login")
    try:
        await sql.execute("grant usage on schema indexer to plain_daemon; grant pg_read_all_stats to plain_daemon")
        async with (
            connected(with_user(database, "hostile_consumer")) as hostile,
            connected(with_user(database, "plain_daemon")) as daemon,
        ):
            await hostile.execute("begin; select count(*) from atproto.changes")
            any_pool: Any = SimpleNamespace(connection=lambda: nullcontext(daemon))
            [session] = await BlockingSessions(any_pool).end_users_of_segments((0,), 0)
            assert (session.role, session.ended) == ("hostile_consumer", False)
            assert await hostile.fetchval("select 1") == 1
    finally:
        await sql.execute("revoke usage on schema indexer from plain_daemon")
        await sql.execute("drop role hostile_consumer; drop role plain_daemon")


@asynccontextmanager
async def running(retention: ChangeLogRetention) -> AsyncIterator[None]:
    task = asyncio.create_task(retention.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_change_log_above_its_limit_is_trimmed_although_it_no_longer_grows(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    """The first trim comes while a transaction holds the row with the current segment, so it frees nothing."""
    policy, metrics = RetentionPolicy(604_800, 2**20, 0), Metrics()
    retention = ChangeLogRetention(db, policy, metrics, lag_alarm=3_600)
    await log(sql, *[change(1, n) for n in range(12_000)])
    assert (await load_state(sql)).bytes > policy.max_bytes

    async def below_limit() -> bool:
        return (await load_state(sql)).bytes <= policy.max_bytes

    async with running(retention):
        async with connected(database) as writer:
            await writer.execute("begin; select from indexer.change_log for update")
            await until(lambda: bool(metrics.registry.get_sample_value("indexer_change_log_bytes")))
            assert not await below_limit(), "the first trim freed the space"
            await writer.execute("rollback")
        await until(below_limit)


async def test_a_locked_segment_does_not_delay_the_trims_of_the_others(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small log is trimmed every 0.2 s, so that it keeps its limit, whatever a consumer has locked."""
    retention, trims = ChangeLogRetention(db, RetentionPolicy(604_800, 2**20, 0), Metrics(), retry=60), count(1)
    done = asyncio.Event()

    async def trim() -> Sequence[int]:
        if next(trims) == 4:
            done.set()
        return [0]

    monkeypatch.setattr(retention, "trim", trim)
    async with running(retention), asyncio.timeout(30):
        await done.wait()


async def test_the_change_log_keeps_its_size_limit_while_it_grows(db: Database, sql: asyncpg.Connection) -> None:
    """A consumer that never reads lets it grow to twice that size. One that reads gets every change meanwhile."""
    limit, received = 2**21, 0
    await sql.execute("select atproto.register_reader('bystander')")

    async def write(batches: int, max_bytes: int) -> int:
        """Write batches of about 100 kB, each when the log is below the limit; return its largest size."""

        async def within() -> bool:
            return (await load_state(sql)).bytes <= max_bytes

        nonlocal received
        largest = 0
        for number in range(batches):
            await log(sql, *[change(number, n) for n in range(BATCH_SIZE)])
            received += await sql.fetchval("select count(*) from atproto.next_changes('bystander', 1000)")
            largest = max(largest, (await load_state(sql)).bytes)
            await until(within)
        return largest

    async with running(ChangeLogRetention(db, RetentionPolicy(604_800, limit, 0), Metrics(), lag_alarm=3_600)):
        assert await write(60, limit) <= 1.2 * limit
        await sql.execute("select atproto.register_reader('behind')")
        assert await write(80, 2 * limit) <= 2.2 * limit
    assert received == 140 * BATCH_SIZE
    rows = await sql.fetch("select name, cut_off_at is not null as cut_off from atproto.readers order by name")
    assert [tuple(row) for row in rows] == [("behind", True), ("bystander", False)]


def with_user(dsn: str, role: str) -> str:
    """Return the DSN for a login as the role."""
    return make_url(dsn).set(username=role, password=None).render_as_string(hide_password=False)
