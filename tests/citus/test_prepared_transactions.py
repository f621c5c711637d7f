"""Transactions that other programs have prepared on a node of the cluster."""

import asyncpg
import pytest

from indexer.monitoring.conditions import TRANSACTIONS_IN_DOUBT, Conditions
from indexer.monitoring.metrics import Metrics
from indexer.service.background.change_numbering import IN_DOUBT_SECONDS, ChangeNumbering
from indexer.store import Store
from tests.citus_cluster import WORKERS
from tests.citus_server import CitusServer
from tests.database_server import dsn_of
from tests.store.change_log_helpers import connected
from tests.waiting import until

pytestmark = pytest.mark.slow

OLD = "select count(*) from pg_prepared_xacts where clock_timestamp() - prepared > make_interval(secs => $1)"


async def test_a_transaction_of_another_program_is_not_in_doubt(
    citus: CitusServer, store: Store, sql: asyncpg.Connection
) -> None:
    """Only Citus completes those of its own, so `/readyz` would fail for as long as another program likes."""
    name = await sql.fetchval("select current_database()")
    conditions = Conditions()
    async with connected(dsn_of(citus.cluster.url_of(WORKERS[0]), name)) as worker:
        await worker.execute("begin; select txid_current(); prepare transaction 'of another program'")
        try:

            async def is_old() -> bool:
                return bool(await worker.fetchval(OLD, IN_DOUBT_SECONDS) == 1)

            await until(is_old)
            async with store.numbering_session() as session:
                assert await ChangeNumbering(store, Metrics(), conditions).number(session) == []
        finally:
            await worker.execute("rollback prepared 'of another program'")
    assert not conditions.is_active(TRANSACTIONS_IN_DOUBT)
