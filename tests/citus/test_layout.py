"""The layout on a real cluster: the order of the buckets, and what a process touches."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from indexer.db.apply_versions import SCHEMA_FOLDER
from indexer.sync.shard import BUCKETS, PLAIN, Layout, Shard
from tests.citus_server import CitusServer

HASHES = "select bucket, worker_hash(bucket::smallint) as hash from generate_series(0, $1 - 1) bucket order by 2"
SHARD_OF = "select get_shard_id_for_distribution_column('numbers', $1::smallint)"
ROWS = "select result from run_command_on_shards('numbers', 'select count(*) from %s')"
PLAN = "explain (costs off) select * from numbers where bucket = any($1::smallint[])"
WORKERS = "select nodeid from pg_dist_node where isactive and noderole = 'primary' and shouldhaveshards order by 1"

pytestmark = pytest.mark.proof("cluster")


@pytest.fixture
async def sql(postgres: CitusServer) -> AsyncIterator[asyncpg.Connection]:
    """Open a connection to an empty database of the cluster."""
    dsn = postgres.create(migrated=False)
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()
    postgres.drop(dsn)


async def create_table(sql: asyncpg.Connection, shards: int) -> None:
    """Create a table of buckets, and cut its shards after every 256/shards hashes of buckets."""
    await sql.execute("create table numbers (bucket smallint)")
    await sql.execute("select create_distributed_table('numbers', 'bucket', shard_count => 1)")
    [(shard,)] = await sql.fetch("select shardid from pg_dist_shard where logicalrelid = 'numbers'::regclass")
    hashes = [row["hash"] for row in await sql.fetch(HASHES, BUCKETS)]
    ends = [str(hashes[number * BUCKETS // shards - 1]) for number in range(1, shards)]
    nodes = [row["nodeid"] for row in await sql.fetch(WORKERS)]
    placed = [nodes[number % len(nodes)] for number in range(shards)]
    split = "select citus_split_shard_by_split_points($1, $2::text[], $3::int[], 'block_writes')"
    await sql.execute(split, shard, ends, placed)
    await sql.execute(f"insert into numbers select generate_series(0, {BUCKETS - 1})")


async def hash_order(sql: asyncpg.Connection) -> list[int]:
    """Return the order that the schema has, from the text of its file: the database has no schema of ours."""
    function = (SCHEMA_FOLDER / "01_foundations.sql").read_text().partition("function indexer.hash_order()")[2]
    array = function.partition("return ")[2].partition(";")[0]
    order: list[int] = await sql.fetchval(f"select {array}")
    return order


async def test_the_order_of_the_buckets_is_that_of_their_hashes(sql: asyncpg.Connection) -> None:
    assert [row["bucket"] for row in await sql.fetch(HASHES, BUCKETS)] == await hash_order(sql)


@pytest.mark.parametrize("shards", [4, 8, 32])
async def test_shards_that_are_cut_at_hashes_have_equally_many_neighbours(sql: asyncpg.Connection, shards: int) -> None:
    await create_table(sql, shards)
    found = [await sql.fetchval(SHARD_OF, bucket) for bucket in await hash_order(sql)]
    size = BUCKETS // shards
    parts = [set(found[first : first + size]) for first in range(0, BUCKETS, size)]
    assert all(len(part) == 1 for part in parts), "a shard is cut within a part"
    assert len(set(found)) == shards, "two parts are in one shard"
    assert [int(rows) for (rows,) in await sql.fetch(ROWS)] == [size] * shards


async def test_a_process_touches_only_its_shards(sql: asyncpg.Connection) -> None:
    """With as many processes as shards, each statement of a process is for one shard."""
    shards = 8
    await create_table(sql, shards)
    layout = Layout(tuple(await hash_order(sql)), shards)
    for processes in (1, 2, 4, 8):
        for index in range(processes):
            own = Shard(index, processes, layout)
            assert await task_count(sql, own) == shards // processes
    assert await task_count(sql, Shard(0, 8, PLAIN)) > 1, "the plan shows no difference"


async def task_count(sql: asyncpg.Connection, shard: Shard) -> int:
    """Return the number of shards of the table that a statement on the buckets of this shard is sent to."""
    [line] = [line for (line,) in await sql.fetch(PLAN, shard.buckets) if "Task Count" in line]
    return int(line.partition(":")[2])
