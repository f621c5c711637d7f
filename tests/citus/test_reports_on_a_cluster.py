"""The queries of commands and of the status page on a cluster: what they return, and how many shards they read."""

import asyncpg
import pytest

from indexer.db import Database, reports, tap_feed
from indexer.db.layout import load_parts
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import BUCKETS, bucket_of
from tests.citus.test_public_schema_on_a_cluster import plan_of, tasks_of
from tests.citus_server import SHARDS
from tests.db.repo_rows import did, insert, put, synchronized
from tests.db.test_reports import MANY_REPOS, assert_about

pytestmark = pytest.mark.proof("cluster")

MANY = 40_000


@pytest.fixture
async def many(db: Database, sql: asyncpg.Connection) -> Database:
    """Return a database with many repos, one of ten of them desynchronized."""
    await sql.execute(MANY_REPOS.replace("$1", str(MANY)))
    await sql.execute("vacuum analyze indexer.repo")
    return db


async def test_parts_are_the_shards_with_all_buckets(many: Database, sql: asyncpg.Connection) -> None:
    parts = await load_parts(sql, "indexer.repo")
    assert len(parts) == SHARDS
    assert sorted(bucket for part in parts for bucket in part.buckets) == list(range(BUCKETS))
    for part in parts:
        counted = "select count(*) from indexer.repo where bucket = any($1::smallint[])"
        assert tasks_of(await plan_of(sql, counted, part.buckets)) == 1
        assert part.estimated_rows == pytest.approx(await sql.fetchval(counted, part.buckets), rel=0.1)
        assert part.pages > part.estimated_rows * 100 // 8192
    [whole] = await load_parts(sql, "indexer.cursor")  # on the coordinator
    assert whole.buckets == list(range(BUCKETS))


async def test_the_parts_of_an_estimate_share_its_time_limit(
    many: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "MAX_COUNTED_PAGES", 200)
    statements: list[str] = []
    with sql.query_logger(lambda record: statements.append(record.query)):
        await reports.count_repos(sql, 102.0)
    assert sum("tablesample" in statement for statement in statements) == SHARDS
    assert f"set local statement_timeout = {reports.COUNT_MILLISECONDS // SHARDS}" in statements


async def test_repos_are_counted_and_estimated(
    many: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = await many.reports.counts(102.0)
    assert exact.counted_share == 1.0
    assert exact.statuses == {
        SyncStatus.SYNCHRONIZED: MANY * 9 // 10 - 1,
        SyncStatus.DESYNCHRONIZED: MANY // 10,
        SyncStatus.IN_PROGRESS: 1,
    }
    monkeypatch.setattr(reports, "MAX_COUNTED_PAGES", 200)
    monkeypatch.setattr(reports, "MAX_FEW", 100)
    counts = await many.reports.counts(102.0)
    pages = sum(part.pages for part in await load_parts(sql, "indexer.repo"))
    assert counts.counted_share == pytest.approx(200 / pages)
    assert (counts.statuses[SyncStatus.IN_PROGRESS], counts.parked, counts.unproven) == (1, 1, 1)
    assert_about(counts.statuses[SyncStatus.SYNCHRONIZED], MANY * 9 // 10)
    assert_about(counts.statuses[SyncStatus.DESYNCHRONIZED], MANY // 10)


async def test_a_sample_is_spread_over_the_shards_and_reads_little(
    many: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    percentages = []
    statement = reports.sample

    def recorded(percentage: float) -> str:
        percentages.append(percentage)
        return statement(percentage)

    monkeypatch.setattr(reports, "sample", recorded)
    monkeypatch.setattr(reports, "MAX_SAMPLE_PAGES", 160)
    sample = await many.reports.sample_synchronized(40)
    assert len(set(sample)) == 40
    assert max(percentages) < 50
    buckets = {int(name.rpartition(":")[2]) % BUCKETS for name in sample}
    parts = await load_parts(sql, "indexer.repo")
    assert all(buckets & set(part.buckets) for part in parts)


async def test_estimates_are_those_of_all_shards(db: Database, sql: asyncpg.Connection) -> None:
    for name in range(20):
        changes = tuple(put(f"app.{collection}/{rkey}") for collection in "ab" for rkey in range(20))
        await insert(db, synchronized(name), changes=changes)
    await sql.execute("vacuum analyze indexer.record")
    await sql.execute("vacuum analyze indexer.repo")
    assert_about((await db.reports.counts()).records, 800)
    assert_about(await db.repos.estimate_count(), 20)


async def test_large_tables_are_not_counted_for_clients_of_tap(
    many: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sql.execute("update indexer.repo set tracked = false where sync_status = 'desynchronized'")
    assert await many.feed.count_rows("repo") == MANY * 9 // 10
    monkeypatch.setattr(tap_feed, "MAX_COUNTED_ROWS", MANY // 2)
    assert await many.feed.count_rows("repo") >= MANY * 95 // 100, "the estimate contains untracked repos"


async def test_the_report_on_a_repo_reads_one_shard(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, synchronized(1), changes=(put("app.test/a"),))
    arguments = (did(1), bucket_of(did(1)), 100)
    assert tasks_of(await plan_of(sql, reports.REPO, *arguments)) == 1
    assert await sql.fetchval(f"select records from ({reports.REPO}) q", *arguments) == 1  # noqa: S608


async def test_records_of_a_repo_are_reported(db: Database) -> None:
    await insert(db, synchronized(1), changes=(put("app.test/a"),))
    record = await db.reports.record(did(1), "app.test", "a")
    assert record is not None
    assert list(await db.reports.visible_records(did(1))) == ["app.test/a"]
    account = await db.reports.repo(did(1))
    assert account is not None
    assert account["records"] == 1
    async with db.exports.rows("app.test") as (_, pages):
        exported = [row["uri"] async for page in pages for row in page]
    assert exported == [record["uri"]]
