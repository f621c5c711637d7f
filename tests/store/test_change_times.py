"""Times of changes: each change has a time of its own, in the order of the change log."""

import asyncio
from itertools import pairwise

import asyncpg
import pytest

from tests.store.change_log_helpers import change, connected, log

pytestmark = pytest.mark.slow

BATCHES = """
    select first_seq, size, (extract(epoch from time) * 1000000)::bigint as time from indexer.change_batch
    where first_seq is not null order by first_seq
"""


async def batches(sql: asyncpg.Connection) -> list[tuple[int, int, int]]:
    return [tuple(row) for row in await sql.fetch(BATCHES)]


async def test_no_two_changes_have_the_same_time(database: str, sql: asyncpg.Connection) -> None:
    """Batches are so large that the next one commits before as many microseconds have passed."""

    async def write(name: str) -> None:
        async with connected(database) as connection:
            for _ in range(10):
                await log(connection, *[change(name, number) for number in range(50)])

    await asyncio.gather(write("a"), write("b"), write("c"))
    await log(sql, *[change("d", number) for number in range(20_000)])
    await log(sql, change("e"))
    found = await batches(sql)
    assert len(found) == 32
    for (first, size, time), (next_first, _, next_time) in pairwise(found):
        assert next_first >= first + size
        assert next_time >= time + size


async def test_times_do_not_go_back_with_the_clock(sql: asyncpg.Connection) -> None:
    await log(sql, change(1), change(2))
    await sql.execute("select setval('indexer.change_time', last_value + 3600000000) from indexer.change_time")
    later = await sql.fetchval("select last_value from indexer.change_time")
    await log(sql, change(3), change(4))
    await log(sql, change(5))
    assert [time for _, _, time in await batches(sql)][1:] == [later + 1, later + 3]
