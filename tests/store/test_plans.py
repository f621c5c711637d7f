"""Frequent queries use indexes, also inside the functions of the change log, and visibility needs no scan of repos."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from benchmarks import public_schema
from benchmarks.links import LIKERS
from indexer.store import Store
from indexer.store.apply_batch import ADVANCE_REPOS, UPDATE_REPOS
from indexer.store.apply_small_batch import apply_small, small_batch
from indexer.store.columns import buckets_of, head_arrays, repo_arrays, repo_of
from indexer.store.new_repos_transaction import ELIGIBLE
from indexer.store.report_queries import FEW_INCOMPLETE
from indexer.store.store import LOAD_REPOS
from indexer.sync.plans import Batch, Cursor, RepoWrite
from tests.database_server import DatabaseServer
from tests.store.change_log_helpers import connected
from tests.store.repo_rows import did, insert, put, synchronized

RECORDS = 40_000
SMALL_BATCHES = """
    with batch as (
        insert into indexer.change_batch (segment, size) select 0, 1 from generate_series(1, 20000) returning id
    )
    insert into indexer.change (segment, batch, ordinal, bucket, live, action, did)
    select 0, id, 0, 0, true, 'hidden', 'did:plc:a' from batch
"""
LINKS = """
    insert into indexer.link_bucket (bucket, done_at) select n, now() from generate_series(0, 255) n;
    insert into indexer.link (did, collection, rkey, number, bucket, target, kind, path, counted)
    select did, collection, rkey, 0, bucket, value #>> '{subject,uri}', 'strong-ref', '.subject.uri', true
    from indexer.record;
    insert into indexer.link_recount (did, bucket) select did, bucket from indexer.repo limit 3
"""


@pytest.fixture(scope="module")
def large(postgres: DatabaseServer) -> Iterator[str]:
    async def generate() -> None:
        connection = await asyncpg.connect(dsn)
        await public_schema.generate(connection, RECORDS)
        await connection.execute(SMALL_BATCHES)
        await connection.execute(LINKS)
        await connection.execute("analyze")
        await connection.close()

    dsn = postgres.create(migrated=True)
    postgres.run(generate())
    yield dsn
    postgres.drop(dsn)


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


async def plans(dsn: str, statement: str, *values: object, mode: str = "auto") -> str:
    """Run a statement and return its plan, and the plans of the statements in the functions that it calls."""
    async with explained(dsn, mode) as (connection, logged):
        for _ in range(7):  # from the sixth run on, the statements of a function have a generic plan
            logged.clear()
            assert await connection.fetch(statement, *values)
    return "\n".join(logged)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_batch_finds_its_repos_by_primary_key(store: Store, database: str, mode: str) -> None:
    """It does not use the condition on the buckets, which is there for Citus."""
    await insert(store, *[synchronized(number) for number in range(20_000)])
    async with connected(database) as sql:
        await sql.execute("analyze indexer.repo")
    repos = list((await store.repos([did(number) for number in range(50)])).values())
    dids, buckets = [repo.did for repo in repos], buckets_of(repo.did for repo in repos)
    found = await plans(database, LOAD_REPOS, dids, buckets, mode=mode)
    assert "Index Scan using repo_pkey" in found
    for statement, arrays, scans in ((UPDATE_REPOS, repo_arrays(repos), 2), (ADVANCE_REPOS, head_arrays(repos), 1)):
        found = await plans(database, statement, buckets, *arrays, [1] * len(repos), mode=mode)
        assert found.count("Index Scan using repo_pkey") == scans, found
        assert not re.search("Index Cond:.* ANY ", found), found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_small_batch_finds_its_records_by_primary_key(large: str, mode: str) -> None:
    """Its repos are found by the statement of the test above; here are too few of them for an index."""
    async with explained(large, mode) as (connection, logged):
        owner = await connection.fetchval("select did from indexer.repo limit 1")
        [row] = await connection.fetch(LOAD_REPOS, [owner], buckets_of([owner]))
        stored = await connection.fetch("select collection, rkey from indexer.record where did = $1", owner)
        changes = tuple(put(f"{collection}/{rkey}", "{}", "update") for collection, rkey in stored[:5])
        # The version stays, so that the batch can be written several times.
        write = RepoWrite(row["version"], repo_of(row), changes, advances=True)
        batch = small_batch(Batch((write,), cursor=Cursor("wss://relay.test", "0/1", 1)))
        assert batch is not None
        for _ in range(7):
            logged.clear()
            assert (await apply_small(connection, batch)).changes["update"] == 5
    found = "\n".join(logged)
    assert "Conflict Arbiter Indexes: record_pkey" in found, found
    assert re.search("Delete on record(?:.*\n){1,12}.*Index Scan using record_pkey", found), found
    assert "Seq Scan on record" not in found, found


@pytest.mark.slow
async def test_few_incomplete_repos_are_counted_with_an_index(store: Store, database: str) -> None:
    await insert(store, *[synchronized(number, scope_version=2) for number in range(20_000)])
    await insert(store, *[synchronized(f"incomplete {number}") for number in range(20)])
    async with connected(database) as sql:
        await sql.execute("vacuum analyze indexer.repo")
    found = await plans(database, FEW_INCOMPLETE, 100_000, list(range(256)), 2)
    assert "repo_scope" in found, found
    assert "Seq Scan" not in found, found


@pytest.mark.slow
async def test_links_and_their_count_are_read_with_an_index(large: str) -> None:
    """The count reads no links but those of the repos that are recounted."""
    async with connected(large) as sql:
        target = await sql.fetchval("select target from indexer.link where collection = 'app.bsky.feed.like' limit 1")
    values = target, "app.bsky.feed.like", ".subject.uri"
    found = await plans(large, "select atproto.link_count($1, $2, $3)", *values)
    assert {"link_count_pkey", "link_delta_pkey"} <= set(re.findall(r"link_\w+", found)), found
    assert "Seq Scan on link" not in found.replace("Seq Scan on link_bucket", ""), found
    found = await plans(large, LIKERS, *values)
    assert "using link_target" in found, found
    assert not re.search(r"Seq Scan|Sort", found), found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan"])
async def test_records_of_claimed_repos_are_looked_up_by_index(large: str, mode: str) -> None:
    async with connected(large) as connection:
        await connection.execute(f"set plan_cache_mode = {mode}")
        dids = [row["did"] for row in await connection.fetch("select did from indexer.repo limit 8")]
        found = "\n".join([row[0] for row in await connection.fetch(f"explain {ELIGIBLE}", buckets_of(dids), dids)])
    assert "using record_pkey on record" in found
    assert "Seq Scan on record" not in found
