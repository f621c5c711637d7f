import asyncio
from pathlib import Path

import asyncpg
import pytest

from indexer.service.background.shard_ownership import ShardOwnership
from indexer.store import Store
from indexer.store.shard_lock import LOCK_CLASS
from indexer.sync.shard import Shard
from tests.daemon.running_daemon import POST, post, running_daemon
from tests.waiting import until

pytestmark = pytest.mark.slow

HOLDERS = "select distinct pid from pg_locks where locktype = 'advisory' and classid = $1"


async def test_overlapping_shards_wait_for_each_other(database: str) -> None:
    store = await Store.open(database)
    first, second, other = (
        ShardOwnership(store, Shard(0, 1)),
        ShardOwnership(store, Shard(1, 2)),
        ShardOwnership(store, Shard(0, 2)),
    )
    running = asyncio.create_task(first.run())
    await first.owned.wait()
    waiting = [asyncio.create_task(ownership.run()) for ownership in (second, other)]
    await until(lambda: second.last_error is not None and other.last_error is not None)
    assert "another process holds buckets of shard 1/2" in str(second.last_error)
    assert not second.owned.is_set()
    running.cancel()
    await asyncio.wait([running])
    await asyncio.wait_for(asyncio.gather(second.owned.wait(), other.owned.wait()), 20)
    assert not any(ownership.last_error for ownership in (second, other))
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await store.close()


async def test_locks_are_acquired_again_after_the_session_ends(database: str) -> None:
    sql = await asyncpg.connect(database)
    store = await Store.open(database)
    ownership = ShardOwnership(store, Shard(3, 4))
    running = asyncio.create_task(ownership.run())
    await ownership.owned.wait()
    [before] = await sql.fetch(HOLDERS, LOCK_CLASS)
    await sql.execute("select pg_terminate_backend($1)", before["pid"])

    async def held_by_another_session() -> bool:
        return [row["pid"] for row in await sql.fetch(HOLDERS, LOCK_CLASS)] not in ([], [before["pid"]])

    await until(held_by_another_session)
    assert ownership.last_error is None
    running.cancel()
    await asyncio.wait([running])
    await store.close()
    await sql.close()


async def test_nothing_is_written_while_another_process_holds_the_buckets(
    database: str, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        [holder] = await sql.fetch(HOLDERS, LOCK_CLASS)
        await sql.execute("select pg_terminate_backend($1)", holder["pid"])
        await until(lambda: not daemon.stages.shard_ownership.owned.is_set())
        await sql.execute("select pg_advisory_lock($1, bucket) from generate_series(0, 255) bucket", LOCK_CLASS)
        account.create(POST, post("meanwhile"))
        ownership, inbox = daemon.stages.shard_ownership, daemon.stages.inbox
        await until(lambda: "another process" in str(ownership.last_error) and inbox.unsettled == 1)
        assert daemon.stages.probe.ready() == "another process holds buckets of shard 0/1"
        assert daemon.stages.probe.alive() is None
        assert (await daemon.repo_row(account))["rev"] != account.rev
        await sql.execute("select pg_advisory_unlock_all()")
        await daemon.wait_until_equal()
