import asyncio

import asyncpg

from indexer.service.tenure import Tenure
from indexer.store import Store
from indexer.sync.shard import Shard
from tests.serving import until


async def test_overlapping_shards_wait_for_each_other(database: str) -> None:
    store = await Store.open(database)
    first, second, other = Tenure(store, Shard(0, 1)), Tenure(store, Shard(1, 2)), Tenure(store, Shard(0, 2))
    running = asyncio.create_task(first.run())
    await first.begun.wait()
    waiting = [asyncio.create_task(tenure.run()) for tenure in (second, other)]
    await until(lambda: second.trouble is not None and other.trouble is not None)
    assert "another process holds buckets of shard 1/2" in str(second.trouble)
    assert not second.begun.is_set()
    running.cancel()
    await asyncio.wait([running])
    await asyncio.wait_for(asyncio.gather(second.begun.wait(), other.begun.wait()), 20)
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
    await tenure.begun.wait()
    holders = "select distinct pid from pg_locks where locktype = 'advisory' and classid = $1"
    [before] = await sql.fetch(holders, 0x6275636B)
    await sql.execute("select pg_terminate_backend($1)", before["pid"])

    async def held_anew() -> bool:
        return [row["pid"] for row in await sql.fetch(holders, 0x6275636B)] not in ([], [before["pid"]])

    await until(held_anew)
    assert tenure.trouble is None
    running.cancel()
    await asyncio.wait([running])
    await store.close()
    await sql.close()
