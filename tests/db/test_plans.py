# ruff: noqa: S608 - tables and columns are constants
"""Frequent queries use indexes, also inside the functions of the change log, and visibility needs no scan of repos."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from benchmarks import public_schema
from benchmarks.links import LIKERS
from indexer.db import Database, reports
from indexer.db.columns import buckets_of, head_arrays, repo_arrays, repo_of
from indexer.db.exports import SeenRecord, set_first_seen
from indexer.db.identities import DUE_HANDLES
from indexer.db.reports import FEW_INCOMPLETE, REPO
from indexer.db.repos import LOAD_REPOS
from indexer.db.resync_queue import CLAIM, DUE, INCOMPLETE, PARKED, UNPROVEN
from indexer.db.resync_transaction import ELIGIBLE
from indexer.db.subscribed_hosts import COUNT, STALE, WAITING
from indexer.db.write import ADVANCE_REPOS, UPDATE_REPOS, write
from indexer.sync.changes import Batch, RepoWrite
from tests.database_server import DatabaseServer
from tests.db.change_log_helpers import connected
from tests.db.repo_rows import delete, did, put

pytestmark = pytest.mark.slow

ALL = list(range(256))
RECORDS = 20_000
REPOS = 20_000
MODES = pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
CHANGE_BATCHES = """
    with batch as (
        insert into indexer.change_batch (segment, size) select 0, 1 from generate_series(1, 20000) returning id
    )
    insert into indexer.change (segment, batch, ordinal, bucket, live, action, did)
    select 0, id, 0, 0, true, 'hidden', 'did:plc:a' from batch
"""
LINKS = """
    insert into indexer.link_reader (seq, done_at) values (0, now());
    insert into indexer.record_link (did, collection, rkey, bucket, target, kind, path, counted)
    select did, collection, rkey, bucket, value #>> '{subject,uri}', 'strong-ref', '.subject.uri', true
    from indexer.record;
    insert into indexer.links_to_recount (did, bucket, seq) select did, bucket, 0 from indexer.repo limit 3
"""


@pytest.fixture(scope="module")
def large(postgres: DatabaseServer) -> Iterator[str]:
    async def generate() -> None:
        async with connected(dsn) as connection:
            await public_schema.generate(connection, RECORDS)
            for statement in (CHANGE_BATCHES, LINKS, "analyze"):
                await connection.execute(statement)

    dsn = postgres.create(migrated=True)
    postgres.run(generate())
    yield dsn
    postgres.drop(dsn)


async def add_repos(sql: asyncpg.Connection, **values: str) -> None:
    """Insert repos with these expressions as values of columns; by default they are synchronized. Analyze the table."""
    values = {
        "did": "did", "bucket": "indexer.bucket_of(did)", "version": "1", "sync_status": "'synchronized'",
        "rev": "'3l'", "data": "''", "commit": "''", "active": "true", "hosting_seq": "0", "takedown": "false",
        "buffered_events": "0", "buffered_bytes": "0", "lease": "0", "attempts": "0",
    } | values  # fmt: skip
    await sql.execute(
        f"insert into indexer.repo ({', '.join(values)}) select {', '.join(values.values())} "
        f"from generate_series(1, {REPOS}) n, concat('did:plc:', n) did"
    )
    await sql.execute("analyze indexer.repo")


async def explain(sql: asyncpg.Connection, statement: str, *values: object) -> str:
    """Execute the statement, and return its plan."""
    rows = await sql.fetch(f"explain (analyze, costs off, timing off) {statement}", *values)
    return "\n".join(row[0] for row in rows)


@asynccontextmanager
async def explained(dsn: str, mode: str) -> AsyncIterator[tuple[asyncpg.Connection, list[str]]]:
    """Open a connection that logs the plan of each statement, and of those in the functions that it calls."""
    logged: list[str] = []
    async with connected(dsn) as connection:
        await connection.execute(
            "load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on; "
            "set auto_explain.log_analyze = on; set auto_explain.log_timing = off; set client_min_messages = log"
            f"; set plan_cache_mode = {mode}"
        )
        connection.add_log_listener(lambda _, message: logged.append(str(message)))
        yield connection, logged


async def plans(dsn: str, statement: str, *values: object) -> str:
    """Run a statement and return its plan, and the plans of the statements in the functions that it calls."""
    async with explained(dsn, "auto") as (connection, logged):
        for _ in range(7):  # from the sixth run on, the statements of a function have a generic plan
            logged.clear()
            assert await connection.fetch(statement, *values)
    return "\n".join(logged)


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        (public_schema.ONE_RECORD, "record_pkey"),
        (public_schema.RECORDS_OF_REPO, "record_pkey"),
        (public_schema.NEWEST, "record_collection"),
        (public_schema.NEXT_PAGE, "record_collection"),
        (public_schema.REPO_STATE, "repo_pkey"),
        (public_schema.CHANGES, "change_"),
        ("select atproto.latest_seq() where $1 = 0", "change_batch_"),
        ("select * from atproto.next_changes('one', 1000) where $1 = 0", "change_"),
    ],
    ids=["one", "repo", "newest", "older", "state", "changes_after", "latest_seq", "next_changes"],
)
async def test_public_queries_use_indexes(large: str, statement: str, index: str) -> None:
    connection = await asyncpg.connect(large)
    row = await connection.fetchrow("select * from indexer.record where collection = 'app.bsky.feed.like' limit 1")
    last = await connection.fetchval("select atproto.latest_seq()")
    await connection.execute("select atproto.unregister_reader('one'), atproto.register_reader('one', 0)")
    await connection.close()
    assert row is not None
    values: dict[str, tuple[object, ...]] = {
        public_schema.ONE_RECORD: (row["did"], row["collection"], row["rkey"]),
        public_schema.RECORDS_OF_REPO: (row["did"], "3l"),
        public_schema.NEWEST: (),
        public_schema.NEXT_PAGE: (row["indexed_at"].replace(year=2027), row["did"], row["rkey"]),
        public_schema.REPO_STATE: (row["did"],),
        public_schema.CHANGES: (last - 1_500,),
    }
    found = await plans(large, statement, *values.get(statement, (0,)))
    assert index in found, found
    scanned = set(re.findall(r"Seq Scan on (?:indexer\.)?(\w+)", found))
    assert not {name for name in scanned if name.startswith(("record", "repo", "change"))}, found
    for rows in re.findall(r"Scan.* using (?:change|record|repo)\w* on .*rows=([\d.]+) loops=1\)", found):
        assert float(rows) <= 2_000, found


@MODES
async def test_the_next_changes_are_found_without_statistics(db: Database, sql: asyncpg.Connection, mode: str) -> None:
    """The plan of a long session may even be of the time when the log was empty."""
    await sql.execute("alter table indexer.change_0 set (autovacuum_enabled = off)")
    await sql.execute("analyze")
    async with explained(db.dsn, mode) as (connection, logged):
        await connection.fetch(public_schema.CHANGES, 0)
        await sql.execute(CHANGE_BATCHES)
        last = await sql.fetchval("select atproto.latest_seq()")
        logged.clear()
        assert len(await connection.fetch(public_schema.CHANGES, last - 50)) == 50
    found = "\n".join(logged)
    assert "change_0_pkey" in found
    for rows in re.findall(r"\(actual rows=([\d.]+) loops=1\)", found):
        assert float(rows) <= 51, found


@MODES
async def test_a_batch_finds_its_repos_by_primary_key(db: Database, sql: asyncpg.Connection, mode: str) -> None:
    """It does not use the condition on the buckets, which is there for Citus."""
    await add_repos(sql)
    dids = [row["did"] for row in await sql.fetch("select did from indexer.repo limit 50")]
    repos, buckets = list((await db.repos.load(dids)).values()), buckets_of(dids)
    await sql.execute(f"set plan_cache_mode = {mode}")
    assert "Index Scan using repo_pkey" in await explain(sql, LOAD_REPOS, dids, buckets)
    buckets = buckets_of(repo.did for repo in repos)
    for statement, arrays in ((UPDATE_REPOS, repo_arrays(repos)), (ADVANCE_REPOS, head_arrays(repos))):
        found = await explain(sql, statement, buckets, *arrays, [1] * len(repos))
        assert found.count("Index Scan using repo_pkey") == 1, found
        assert not re.search("Index Cond:.* ANY ", found), found


@MODES
async def test_a_batch_finds_its_records_by_primary_key(large: str, mode: str) -> None:
    async with explained(large, mode) as (connection, logged):
        owner = await connection.fetchval("select did from indexer.repo limit 1")
        [row] = await connection.fetch(LOAD_REPOS, [owner], buckets_of([owner]))
        stored = await connection.fetch("select collection, rkey from indexer.record where did = $1 limit 6", owner)
        *updated, last = (f"{collection}/{rkey}" for collection, rkey in stored)
        changes = (*(put(path, "{}", "update") for path in updated), delete(last))
        batch = Batch((RepoWrite(repo_of(row), repo_of(row), changes, advances=True),))
        for _ in range(7):
            logged.clear()
            transaction = connection.transaction()
            await transaction.start()
            assert (await write(connection, batch)).changes == {"update": 5, "delete": 1}
            await transaction.rollback()
    found = "\n".join(logged)
    assert "Conflict Arbiter Indexes: record_pkey" in found, found
    assert re.search("Delete on record(?:.*\n){1,12}.*Index Scan using record_pkey", found), found
    assert "Seq Scan on record" not in found, found


async def test_statements_of_the_queue_read_few_rows(sql: asyncpg.Connection) -> None:
    """The statistics of the planner may be older than a request for millions of repos: it expects none."""
    await add_repos(sql)
    await sql.execute("update indexer.repo set sync_status = 'desynchronized'")
    for mode in ("force_custom_plan", "force_generic_plan"):
        await sql.execute(f"set plan_cache_mode = {mode}")
        due = await sql.fetch(DUE, 8, ALL, 5.0, 77)
        found = await explain(sql, CLAIM, [row["bucket"] for row in due], [row["did"] for row in due], 5.0, 60.0, 5.0)
        removed = [int(rows) for rows in re.findall(r"Rows Removed by Filter: (\d+)", found)]
        assert "Seq Scan" not in found and sum(removed) < 20, found  # noqa: PT018
        assert "repo_due" not in found, found
    await sql.execute("analyze indexer.repo")
    for buckets in ([3], ALL):
        found = await explain(sql, DUE, 1, buckets, 5.0, 77)
        assert "Seq Scan on repo" not in found
        reads = re.findall(r"Index Scan using repo_due .*rows=(\d+)\S* loops=(\d+)", found)
        assert len(reads) == 1, found
        assert all(int(rows) <= 1 and int(loops) <= 3 * len(buckets) for rows, loops in reads), found


async def test_maintenance_of_the_queue_reads_only_rows_that_are_due(sql: asyncpg.Connection) -> None:
    """Half of all repos are parked, a hundredth of them long enough.

    Few repos lack values, few are unproven or withheld, and few lack a collection that was added to the scope.
    """
    await add_repos(
        sql,
        sync_status="case when n % 2 = 0 then 'synchronized' else 'desynchronized' end",
        next_attempt_at="case when n % 2 = 1 then 'infinity'::timestamptz end",
        synchronized_at="to_timestamp(0)",
        updated_at="to_timestamp(n)",
        unproven_since="case when did like '%78' then now() end",
        withheld_since="case when did like '%79' then now() end",
        scope_version="case when n % 1000 = 0 then 1 else 2 end",
    )
    await sql.execute(
        "insert into indexer.record (did, collection, rkey, bucket, cid, rev, value_problem) select did, 'a.b', 'c', "
        "bucket, '', '3l', case when did like '%77' then 'missing' end from indexer.repo"
    )
    await sql.execute("vacuum analyze indexer.repo, indexer.record")
    found = await explain(sql, FEW_INCOMPLETE, 100_000, ALL, 2)
    assert "repo_scope" in found, found
    assert "Seq Scan" not in found, found
    await sql.execute("set plan_cache_mode = force_generic_plan")
    found = await explain(sql, UNPROVEN, 200.0, ALL, 60)
    assert re.search(r"Index Scan using repo_unproven .*rows=60\b", found), found
    hosts = ["https://pds.test"]
    for query, arguments in ((STALE, [hosts, 500]), (WAITING, [hosts, 500]), (COUNT, [])):
        found = await explain(sql, query, ALL, *arguments)
        assert re.search(r"Index Scan using repo_withheld|Bitmap Index Scan on repo_withheld", found), found
    found = await explain(sql, PARKED, 200.0, ALL, 50)
    assert re.search(r"Limit .*rows=50\b", found), found
    assert re.search(r"Index Scan using repo_parked .*rows=50\b", found), found
    found = await explain(sql, INCOMPLETE, 5.0, ALL, 500, ALL)
    assert "Seq Scan" not in found
    assert re.search(r"record_missing .*rows=200\b", found), found


async def test_due_handles_and_accounts_with_a_handle_are_found_by_index(sql: asyncpg.Connection) -> None:
    await sql.execute(
        "insert into indexer.identity (did, bucket, claimed_handle, fetched_at, stale, handle_attempts, handle_due_at) "
        "select 'did:plc:' || n, n % 256, 'h' || n || '.test', now(), false, 0, to_timestamp(n) "
        "from generate_series(1, 20000) n"
    )
    await sql.execute("analyze indexer.identity")
    found = await explain(sql, DUE_HANDLES, ALL, 10, 1e4)
    assert "identity_handle_due" in found
    assert "Seq Scan" not in found
    found = await explain(
        sql, "select did from indexer.identity where handle = 'h7.test' and handle <> 'handle.invalid'"
    )
    assert "identity_handle" in found


async def test_no_query_of_the_status_page_scans_repos_records_or_identities(sql: asyncpg.Connection) -> None:
    """With tables that are not empty, a sequential scan would read all of them."""
    await sql.execute("set enable_seqscan = off")
    account = (await explain(sql, REPO, did(1), 3, 10)).splitlines()
    rejections = (await explain(sql, reports.REJECTIONS, 50)).splitlines()
    assert [line for line in account if "Seq Scan" in line] == []
    assert sum("Index" in line and " on " in line for line in account) == 3
    large_tables = (" on repo ", " on record ", " on identity ")
    assert [line for line in rejections if any(table in line for table in large_tables)] == []
    assert "record_pkey" in await explain(sql, "select * from atproto.blobs where did = $1", did(1))


async def test_links_and_their_count_are_read_with_an_index(large: str) -> None:
    """The count reads no links but those of the repos that are recounted."""
    async with connected(large) as sql:
        target = await sql.fetchval("select target from indexer.record_link where collection = 'app.bsky.feed.like'")
    values = target, "app.bsky.feed.like", ".subject.uri"
    found = await plans(large, "select atproto.link_count($1, $2, $3)", *values)
    assert "target_count_pkey" in found, found
    assert "Seq Scan on record_link" not in found, found
    found = await plans(large, LIKERS, *values)
    assert "using record_link_target" in found, found
    assert not re.search(r"Seq Scan|Sort", found), found


async def test_imported_first_seen_times_find_their_records_by_primary_key(large: str) -> None:
    async with explained(large, "auto") as (connection, logged):
        rows = await connection.fetch("select did, collection, rkey, indexed_at from indexer.record limit 20")
        logged.clear()
        assert await set_first_seen(connection, [SeenRecord._make((*row, None)) for row in rows]) == (20, 0)
    found = "\n".join(logged)
    assert found.count("Index Scan using record_pkey") + found.count("Index Only Scan using record_pkey") == 2, found
    assert "Seq Scan on record" not in found, found


@MODES
async def test_records_of_claimed_repos_are_looked_up_by_index(large: str, mode: str) -> None:
    async with connected(large) as connection:
        await connection.execute(f"set plan_cache_mode = {mode}")
        dids = [row["did"] for row in await connection.fetch("select did from indexer.repo limit 8")]
        found = await explain(connection, ELIGIBLE, buckets_of(dids), dids)
    assert "using record_pkey on record" in found
    assert "Seq Scan on record" not in found
