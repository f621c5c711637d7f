import asyncpg
import pytest
from structlog.testing import capture_logs

from indexer.monitoring.metrics import Metrics
from indexer.service.background.change_log_retention import ChangeLogRetention
from indexer.store import RetentionPolicy, Store
from tests.store.change_log_helpers import change, connected, log


@pytest.mark.parametrize(("alarm", "limit", "event"), [(60, 0, "consumer.lagging"), (60, 120, "consumer.disconnected")])
async def test_lagging_consumer_is_logged_and_then_disconnected(
    database: str, alarm: float, limit: float, event: str
) -> None:
    store, metrics = await Store.open(database), Metrics()
    value = metrics.registry.get_sample_value
    retention = ChangeLogRetention(store, RetentionPolicy(0, 2**40, limit), metrics, lag_alarm=alarm)
    try:
        async with connected(database) as sql:
            await sql.execute("select atproto.register_reader('one'), atproto.register_reader('two')")
            await log(sql, change(1), change(2))
            await sql.execute("select count(*) from atproto.next_changes('two', 5)")
            await sql.execute("update indexer.change_batch set time = now() - interval '200 seconds'")
            with capture_logs() as lines:
                await retention.trim()
            assert [(line["event"], line["reader"], line["behind"]) for line in lines] == [(event, "one", 2)]
            assert retention.lagging == (["one"] if event == "consumer.lagging" else [])
            lag = value("indexer_consumer_lag_seconds")
            assert lag is not None
            assert (lag >= 200) == (event == "consumer.lagging")
            following = 2 if event == "consumer.lagging" else 1
            assert value("indexer_consumers", {"state": "following"}) == following
            assert value("indexer_consumers", {"state": "cut-off"}) == 2 - following
            assert (value("indexer_change_log_bytes") or 0) > 0
            with capture_logs() as lines:
                await retention.trim()
            assert [line["event"] for line in lines] == (["consumer.lagging"] if event == "consumer.lagging" else [])
            await assert_cut_off(sql, expected=event == "consumer.disconnected")
    finally:
        await store.close()


async def assert_cut_off(sql: asyncpg.Connection, *, expected: bool) -> None:
    assert await sql.fetchval("select cut_off_at is not null from atproto.readers where name = 'one'") == expected
