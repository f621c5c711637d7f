"""A full queue of notifications is reported, and the session that may have filled it is ended."""

import asyncpg
import pytest

from indexer.db import Database
from indexer.db.change_log_reads import ChangePages, Notified
from indexer.tasks.notifications import ChangeNotifier
from indexer.telemetry.conditions import NOTIFICATION_QUEUE_FILLS, Conditions
from indexer.telemetry.metrics import Metrics
from tests.db.change_log_helpers import connected
from tests.tasks.test_retention import with_user
from tests.waiting import until

pytestmark = pytest.mark.slow


class QueueOfUsage(ChangePages):
    """The change log of a server with this usage of its queue of notifications. That of the test server is empty."""

    usage = 0.0

    async def notify(self, after: int) -> Notified:
        seq = (await super().notify(after)).seq
        return Notified(seq if self.usage < 1 else None, self.usage)


async def test_oldest_transaction_is_named_and_that_of_a_consumer_is_ended_when_half_of_the_queue_is_full(
    database: str, sql: asyncpg.Connection
) -> None:
    await sql.execute("create role hostile_consumer login in role atproto_reader")
    db, conditions, metrics = await Database.open(database), Conditions(), Metrics()
    db.changes = queue = QueueOfUsage(db)
    patient = ChangeNotifier(db, metrics, conditions)
    strict = ChangeNotifier(db, metrics, conditions, max_transaction_seconds=0)
    await sql.execute("begin; select 1")  # an older transaction, of no consumer
    try:
        async with connected(with_user(database, "hostile_consumer")) as hostile:
            await hostile.execute("listen atproto_changes; begin; select 1")
            await patient.notify()
            assert conditions.active() == []
            for queue.usage, notifier in ((0.1, strict), (0.6, patient)):
                await notifier.notify()
                [condition] = conditions.active()
                assert condition.kind is NOTIFICATION_QUEUE_FILLS
                assert "of role hostile_consumer, open for" in condition.message
                assert metrics.registry.get_sample_value("indexer_notification_queue_ratio") == queue.usage
            assert await hostile.fetchval("select 1") == 1
            queue.usage = 1.0
            await ChangeNotifier(db, metrics, conditions, max_transaction_seconds=0).notify()
            await until(hostile.is_closed)
            queue.usage = 0.0
            await patient.notify()
            assert conditions.active() == []
    finally:
        await db.close()
        await sql.execute("rollback")
        await sql.execute("drop role hostile_consumer")
