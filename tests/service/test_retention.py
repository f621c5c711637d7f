import asyncpg
import pytest
from structlog.testing import capture_logs

from indexer.metrics import Metrics
from indexer.service.retention import Retention
from indexer.store import Keep, Store
from tests.store.following import change, connected, log


@pytest.mark.parametrize(("alarm", "limit", "event"), [(60, 0, "reader.lags"), (60, 120, "reader.cut-off")])
async def test_a_reader_that_lags_is_told_of_and_at_last_cut_off(
    database: str, alarm: float, limit: float, event: str
) -> None:
    store, metrics = await Store.open(database), Metrics()
    value = metrics.registry.get_sample_value
    retention = Retention(store, Keep(0, 2**40, limit), metrics, alarm=alarm)
    try:
        async with connected(database) as sql:
            await sql.execute("select atproto.register_reader('one'), atproto.register_reader('two')")
            await log(sql, change(1), change(2))
            await sql.execute("select count(*) from atproto.next_changes('two', 5)")
            await sql.execute("update indexer.batch set time = now() - interval '200 seconds'")
            with capture_logs() as lines:
                await retention.look()
            assert [(line["event"], line["reader"], line["behind"]) for line in lines] == [(event, "one", 2)]
            assert retention.lagging == (["one"] if event == "reader.lags" else [])
            lag = value("indexer_reader_lag_seconds")
            assert lag is not None
            assert (lag >= 200) == (event == "reader.lags")
            followed = 2 if event == "reader.lags" else 1
            assert value("indexer_readers", {"state": "following"}) == followed
            assert value("indexer_readers", {"state": "cut-off"}) == 2 - followed
            assert (value("indexer_change_log_bytes") or 0) > 0
            with capture_logs() as lines:
                await retention.look()
            assert [line["event"] for line in lines] == (["reader.lags"] if event == "reader.lags" else [])
            await assert_told(sql, cut_off=event == "reader.cut-off")
    finally:
        await store.close()


async def assert_told(sql: asyncpg.Connection, *, cut_off: bool) -> None:
    assert await sql.fetchval("select cut_off_at is not null from atproto.readers where name = 'one'") == cut_off
