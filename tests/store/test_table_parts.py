"""The sizes of tables, and estimates of their rows."""

import asyncio

import asyncpg
import pytest

from indexer.store.table_parts import estimate_rows, load_parts
from indexer.sync.shard import BUCKETS
from tests.store.change_log_helpers import connected
from tests.store.test_report_queries import MANY_REPOS
from tests.waiting import until

REPOS = 2_000
LOCK = 71_000_003
INSERT = MANY_REPOS.replace("$1", str(REPOS))
INSERT_AND_STAY_BUSY = f"""
    begin; {INSERT}; commit;
    select pg_advisory_lock({LOCK})
"""
"""The session reports what it has inserted when it becomes idle, which is after it has got the lock."""
COUNT = "select count(*) from indexer.repo"
COUNTED_BY_STATISTICS = "select pg_stat_get_live_tuples('indexer.repo'::regclass)"


async def test_a_plain_table_is_one_part_with_all_buckets(sql: asyncpg.Connection) -> None:
    [part] = await load_parts(sql, "indexer.cursor")
    assert (part.buckets, part.pages, part.estimated_rows) == (list(range(BUCKETS)), 0, 0)


@pytest.mark.one_server("the sessions on the nodes report the rows")
async def test_rows_are_estimated_before_the_first_vacuum(sql: asyncpg.Connection) -> None:
    await sql.execute("alter table indexer.repo set (autovacuum_enabled = false)")
    await sql.execute(INSERT)
    await sql.execute("select pg_stat_force_next_flush()")
    assert await estimate_rows(sql, "indexer.repo") == REPOS


async def test_estimate_grows_with_the_table(sql: asyncpg.Connection) -> None:
    await sql.execute(INSERT)
    await sql.execute("vacuum analyze indexer.repo")
    assert await estimate_rows(sql, "indexer.repo") == REPOS
    await sql.execute(INSERT.replace("'did:plc:'", "'did:plc:more'"))
    assert await estimate_rows(sql, "indexer.repo") == pytest.approx(2 * REPOS, rel=0.05)


@pytest.mark.one_server("the sessions on the nodes report the rows")
async def test_rows_that_a_session_reports_after_an_analyze_are_not_counted_twice(
    database: str, sql: asyncpg.Connection
) -> None:
    async def all_are_stored() -> bool:
        return bool(await sql.fetchval(COUNT) == REPOS)

    async def all_are_counted_twice() -> bool:
        return bool(await sql.fetchval(COUNTED_BY_STATISTICS) == 2 * REPOS)

    await sql.execute(f"select pg_advisory_lock({LOCK})")
    async with connected(database) as other, asyncio.TaskGroup() as group:
        group.create_task(other.execute(INSERT_AND_STAY_BUSY))
        await until(all_are_stored)
        await sql.execute("vacuum analyze indexer.repo")
        await sql.execute(f"select pg_advisory_unlock({LOCK})")
    await until(all_are_counted_twice)
    assert await estimate_rows(sql, "indexer.repo") == REPOS
