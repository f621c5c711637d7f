"""What readers ask most is an index scan, inside the feed's functions, too; visibility costs no scan of the repos."""

import re
from collections.abc import Iterator

import asyncpg
import pytest

from benchmarks import face
from indexer.store import Store
from indexer.store.apply import _UPDATE_REPOS
from indexer.store.rows import buckets_of, repo_arrays
from indexer.store.store import _REPOS
from tests.conftest import Server
from tests.store.following import connected
from tests.store.rows import did, insert, synchronized

RECORDS = 40_000
SMALL_BATCHES = """
    with opened as (insert into indexer.batch (segment, size) select 0, 1 from generate_series(1, 20000) returning id)
    insert into indexer.change (segment, batch, place, bucket, live, action, did)
    select 0, id, 0, 0, true, 'hidden', 'did:plc:a' from opened
"""


@pytest.fixture(scope="module")
def large(postgres: Server) -> Iterator[str]:
    async def generate() -> None:
        connection = await asyncpg.connect(dsn)
        await face.generate(connection, RECORDS)
        await connection.execute(SMALL_BATCHES)
        await connection.execute("analyze")
        await connection.close()

    dsn = postgres.create(migrated=True)
    postgres.run(generate())
    yield dsn
    postgres.drop(dsn)


async def plans(dsn: str, statement: str, *values: object, mode: str = "auto") -> str:
    """The plans of a statement and of those within the functions that it calls, as they were run."""
    heard: list[str] = []
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(
            "load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on; "
            "set auto_explain.log_analyze = on; set auto_explain.log_timing = off; set client_min_messages = log"
            f"; set plan_cache_mode = {mode}"
        )
        connection.add_log_listener(lambda _, message: heard.append(str(message)))
        for _ in range(7):  # from the sixth on, a function's statements have a plan for any argument
            heard.clear()
            assert await connection.fetch(statement, *values)
    finally:
        await connection.close()
    return "\n".join(heard)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "index"),
    [
        (face.ONE, "record_pkey"),
        (face.REPO, "record_pkey"),
        (face.NEWEST, "record_collection"),
        (face.OLDER, "record_collection"),
        (face.STATE, "repo_pkey"),
        (face.CHANGES, "change_"),
        ("select atproto.latest_seq() where $1 = 0", "batch_"),
        ("select * from atproto.next_changes('one', 1000) where $1 = 0", "change_"),
    ],
    ids=["one", "repo", "newest", "older", "state", "changes_after", "latest_seq", "next_changes"],
)
async def test_readers_find_rows_by_index(large: str, statement: str, index: str) -> None:
    connection = await asyncpg.connect(large)
    row = await connection.fetchrow("select * from indexer.record where collection = 'app.bsky.feed.like' limit 1")
    last = await connection.fetchval("select atproto.latest_seq()")
    await connection.execute("select atproto.unregister_reader('one'), atproto.register_reader('one', 0)")
    await connection.close()
    assert row is not None
    values: dict[str, tuple[object, ...]] = {
        face.ONE: (row["did"], row["collection"], row["rkey"]),
        face.REPO: (row["did"], "3l"),
        face.NEWEST: (),
        face.OLDER: (row["indexed_at"].replace(year=2027), row["did"], row["rkey"]),
        face.STATE: (row["did"],),
        face.CHANGES: (last - 1_500,),
    }
    found = await plans(large, statement, *values.get(statement, (0,)))
    assert index in found, found
    scanned = set(re.findall(r"Seq Scan on (?:indexer\.)?(\w+)", found))
    assert not {name for name in scanned if name.startswith(("record", "repo", "change", "batch"))}, found
    for rows in re.findall(r"Scan.* using (?:change|batch|record|repo)\w* on .*rows=([\d.]+) loops=1\)", found):
        assert float(rows) <= 2_000, found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_batch_finds_its_repos_by_key(store: Store, database: str, mode: str) -> None:
    """And not by their buckets, which it names for others' sake."""
    await insert(store, *[synchronized(number) for number in range(20_000)])
    async with connected(database) as sql:
        await sql.execute("analyze indexer.repo")
    repos = list((await store.repos([did(number) for number in range(50)])).values())
    dids, buckets = [repo.did for repo in repos], buckets_of(repo.did for repo in repos)
    found = await plans(database, _REPOS, dids, buckets, mode=mode)
    assert "Index Scan using repo_pkey" in found
    found = await plans(database, _UPDATE_REPOS, buckets, *repo_arrays(repos), [1] * len(repos), mode=mode)
    assert found.count("Index Scan using repo_pkey") == 2, found
    assert not re.search("Index Cond:.* ANY ", found), found
