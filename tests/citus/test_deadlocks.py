"""Deadlocks of transactions on several nodes of a cluster. Citus cancels the youngest one."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest

from indexer.db import Database, DatabaseError
from indexer.live.batch_writer import MAX_FAILURES
from indexer.sync.shard import bucket_of
from tests.citus.own_cluster import own_distributed_cluster
from tests.citus_cluster import COORDINATOR, Cluster
from tests.daemon.running_daemon import POST, post, running_daemon
from tests.db.change_log_helpers import connected
from tests.waiting import until

pytestmark = [pytest.mark.proof("cluster"), pytest.mark.timeout(600)]

DEADLOCKS = 3 * MAX_FAILURES
"""After so many other errors in a row, the batch is halved, and then its message is rejected."""
LOCK_CURSOR = "update indexer.cursor set updated_at = updated_at"
LOCK_REPO = "update indexer.repo set updated_at = updated_at where did = $1 and bucket = $2"
LOCK_IF_FREE = "select did from indexer.repo where did = $1 and bucket = $2 for update skip locked"
READ_REPO = "select from indexer.repo where did = $1 and bucket = $2"
"""Begins the transaction on the node, so that the batch is younger."""
WAITS = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%indexer.cursor%'"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"deadlock_timeout": "200ms"}  # Citus looks for deadlocks every two of them
    with own_distributed_cluster(tmp_path_factory, settings) as cluster:
        yield cluster


async def test_message_whose_batches_end_in_deadlocks_is_stored_and_not_rejected(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of one message locks its repo on a worker, then the cursor on the coordinator."""
    dsn, failures = cluster.url_of(COORDINATOR), list[BaseException | None]()
    answers_after = Database.answers_after

    async def recorded(db: Database, error: DatabaseError) -> bool:
        failures.append(error.__cause__)
        return await answers_after(db, error)

    monkeypatch.setattr(Database, "answers_after", recorded)
    async with running_daemon(dsn, tmp_path, roles="live") as daemon, connected(dsn) as sql, connected(dsn) as other:
        account = daemon.create_account("alice.test")
        await daemon.wait_until_equal()
        repo = (account.did, bucket_of(account.did))

        def deadlocks() -> list[BaseException | None]:
            return [error for error in failures if isinstance(error, asyncpg.DeadlockDetectedError)]

        async def one_waits() -> bool:
            return bool(await other.fetchval(WAITS))

        while (before := len(deadlocks())) < DEADLOCKS:
            await sql.execute("begin")
            await sql.execute(READ_REPO, *repo)
            await sql.execute(LOCK_CURSOR)
            account.create(POST, post(f"written after {before} deadlocks"))
            await until(one_waits, lambda: failures)
            if not await other.fetch(LOCK_IF_FREE, *repo):  # it is not an idle writer, which saves only the cursor
                with suppress(asyncpg.DeadlockDetectedError):  # the batch began before
                    await sql.execute(LOCK_REPO, *repo)
                    await until(lambda: len(deadlocks()) > before, lambda: failures)
            await sql.execute("rollback")
        await daemon.wait_until_equal()
        assert await daemon.dead_letters() == []
        assert failures == deadlocks()
