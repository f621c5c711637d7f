import asyncio
from pathlib import Path

import asyncpg

from indexer.service.tenure import Tenure
from indexer.store import Store
from indexer.store.tenure import CLASS
from indexer.sync.shard import Shard
from tests.daemon.stage import POST, post, staged
from tests.serving import until

HOLDERS = "select distinct pid from pg_locks where locktype = 'advisory' and classid = $1"


async def test_overlapping_shards_wait_for_each_other(database: str) -> None:
    store = await Store.open(database)
    first, second, other = Tenure(store, Shard(0, 1)), Tenure(store, Shard(1, 2)), Tenure(store, Shard(0, 2))
    running = asyncio.create_task(first.run())
    await first.held.wait()
    waiting = [asyncio.create_task(tenure.run()) for tenure in (second, other)]
    await until(lambda: second.trouble is not None and other.trouble is not None)
    assert "another process holds buckets of shard 1/2" in str(second.trouble)
    assert not second.held.is_set()
    running.cancel()
    await asyncio.wait([running])
    await asyncio.wait_for(asyncio.gather(second.held.wait(), other.held.wait()), 20)
    assert not any(tenure.trouble for tenure in (second, other))
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await store.close()


async def test_a_session_that_ends_lets_go_and_is_begun_again(database: str) -> None:
    sql = await asyncpg.connect(database)
    store = await Store.open(database)
    tenure = Tenure(store, Shard(3, 4))
    running = asyncio.create_task(tenure.run())
    await tenure.held.wait()
    [before] = await sql.fetch(HOLDERS, CLASS)
    await sql.execute("select pg_terminate_backend($1)", before["pid"])

    async def held_anew() -> bool:
        return [row["pid"] for row in await sql.fetch(HOLDERS, CLASS)] not in ([], [before["pid"]])

    await until(held_anew)
    assert tenure.trouble is None
    running.cancel()
    await asyncio.wait([running])
    await store.close()
    await sql.close()


async def test_nothing_is_written_while_another_has_the_buckets(
    database: str, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        [holder] = await sql.fetch(HOLDERS, CLASS)
        await sql.execute("select pg_terminate_backend($1)", holder["pid"])
        await until(lambda: not stage.running.tenure.held.is_set())
        await sql.execute("select pg_advisory_lock($1, bucket) from generate_series(0, 255) bucket", CLASS)
        account.create(POST, post("meanwhile"))
        await until(lambda: "another process" in str(stage.running.tenure.trouble) and stage.running.inbox.held == 1)
        assert stage.running.ready() == "another process holds buckets of shard 0/1"
        assert stage.running.alive() is None
        assert (await stage.repo(account))["rev"] != account.rev
        await sql.execute("select pg_advisory_unlock_all()")
        await stage.equal()
