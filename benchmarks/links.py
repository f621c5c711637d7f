"""Measure links: the count of a post with many likes, the backfill, and how far counts are behind written batches.

    python -m benchmarks.links [--likes 1000000]

The database is created under the temporary directory (1.5 kB per like), on a separate embedded Postgres, and removed at
the end.
"""

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import asyncpg

from indexer import embedded
from indexer.atproto.cid import cid_of
from indexer.atproto.links import links_of
from indexer.db import Database
from indexer.db.links import LinkSession
from indexer.db.migrate import migrate
from indexer.readers.links import LinkReader
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from indexer.sync.repo import Head, Repo, SyncStatus

LIKES_PER_REPO = 20
COMMITS_PER_BATCH = 500
BATCHES = 60
QUERIES = 200
LAG_BATCHES, LAG_COMMITS, COMMITS_PER_SECOND = 400, 25, 1_000
RECOUNTED_REPOS = 100
LIKE, PATH = "app.bsky.feed.like", ".subject.uri"
AUTHOR = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"
POST = f"at://{AUTHOR}/app.bsky.feed.post/3laaaaaaaaa22"
REV = "3laaaaaaaaa22"
CID = "bafyreidfayvfuwqa7qlnopdjiqrxzs6blmoeu4rujcjtnci5beludirz2a"

INSERT_REPOS = f"""
    insert into indexer.repo (did, bucket, version, sync_status, rev, data, commit, active, hosting_seq, takedown,
        buffered_events, buffered_bytes, lease, attempts)
    select did, indexer.bucket_of(did), 1, 'synchronized', '{REV}', '\\x00', '\\x00', true, 0, false, 0, 0, 0, 0
    from (select 'did:plc:' || translate(substr(md5(n::text), 1, 24), '0189', 'wxyz') as did
        from generate_series(1, $1::integer) n) d
"""
INSERT_LIKES = f"""
    insert into indexer.record (did, collection, rkey, bucket, cid, rev, value)
    select r.did, '{LIKE}', '3l' || lpad(n::text, 11, '2'), r.bucket, '\\x00', '{REV}', jsonb_build_object('$type',
        '{LIKE}', 'subject', jsonb_build_object('uri', $2::text, 'cid', '{CID}'), 'createdAt', '2026-01-01T00:00:00Z')
    from indexer.repo r, generate_series(1, $1::integer) n
"""
COUNT = "select atproto.link_count($1, $2, $3)"
COUNT_ALL = "select count(*) from atproto.links where target = $1 and collection = $2 and path = $3"
LIKERS = """
    select did, rkey from atproto.links where target = $1 and collection = $2 and path = $3 order by did, rkey limit 50
"""
PARTS = {
    "the row of the count": """
        select count from indexer.target_count where target = $1 and collection = $2 and path = $3
            and bucket = indexer.bucket_of($1)
    """,
    "one repo that was just hidden": """
        select count(*) from indexer.record_link l
        where target = $1 and collection = $2 and path = $3 and not counted
            and (did, bucket) = (select did, bucket from indexer.links_to_recount limit 1)
    """,
}
"""The statements of `atproto.link_count`."""
VIEWER = "select rkey from atproto.links where target = $1 and collection = $2 and path = $3 and did = $4"
TABLES = ("record", "record_link", "target_count")


async def main() -> None:
    """Parse the arguments and run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--likes", type=int, default=1_000_000, help="likes of one post (default: %(default)s)")
    likes = parser.parse_args().likes
    with TemporaryDirectory(prefix="links-") as directory:
        async with embedded.database(None, Path(directory)) as dsn:
            await migrate(dsn)
            connection = await asyncpg.connect(dsn, server_settings={"jit": "off"})
            db = await Database.open(dsn)
            try:
                await generate(connection, likes)
                await measure_batches(db, range(BATCHES))
                async with db.links.session() as session:
                    await session.lock.claim()
                    await measure_backfill(session, connection)
                    await measure_queries(connection, session)
                    await measure_batches(db, range(BATCHES, 2 * BATCHES), session)
                await measure_lag(db, connection)
                measure_extraction()
                await print_sizes(connection)
            finally:
                await db.close()
                await connection.close()


async def generate(connection: asyncpg.Connection, likes: int) -> None:
    """Insert repos and their likes of one post."""
    began = perf_counter()
    await connection.execute(INSERT_REPOS, likes // LIKES_PER_REPO)
    await connection.execute(INSERT_LIKES, LIKES_PER_REPO, POST)
    await connection.execute("vacuum analyze")
    print(f"{likes:,} likes of one post inserted in {perf_counter() - began:.0f} s")


async def measure_backfill(session: LinkSession, connection: asyncpg.Connection) -> None:
    """Turn links on, and add those of the stored records."""
    await session.begin()
    began, cpu = perf_counter(), process_time()
    while await LinkReader.turn(session):
        pass
    seconds, used = perf_counter() - began, process_time() - cpu
    links = await connection.fetchval("select count(*) from indexer.record_link")
    rate = f"{links / seconds:,.0f}/s, {1e6 * used / links:.0f} µs of CPU per link in this process"
    print(f"backfill of {links:,} links in {seconds:.0f} s: {rate}")


async def measure_queries(connection: asyncpg.Connection, session: LinkSession) -> None:
    """Measure the count and two lists, also while repos are recounted."""
    await connection.execute("vacuum analyze indexer.record_link, indexer.target_count")
    target = (POST, LIKE, PATH)
    viewer = await connection.fetchval("select did from indexer.repo where did <> $1 limit 1", AUTHOR)
    await measure("link_count", lambda: connection.fetchval(COUNT, *target))
    for name, part in PARTS.items():
        await measure(f"  of which {name}", partial(connection.fetchval, part, *target))
    await measure("the first 50 likes", lambda: connection.fetch(LIKERS, *target))
    await measure("the likes of one account", lambda: connection.fetch(VIEWER, *target, viewer))
    hidden = await connection.fetch(f"select did from indexer.repo limit {RECOUNTED_REPOS}")
    await connection.executemany("select atproto.request_takedown($1, true)", [tuple(row) for row in hidden])
    while await session.read_changes():
        pass
    await measure(f"link_count, {RECOUNTED_REPOS} repos just hidden", lambda: connection.fetchval(COUNT, *target))
    await print_plans(connection, target)
    await measure("without link_count: count(*)", lambda: connection.fetchval(COUNT_ALL, *target), 5)
    await connection.executemany("select atproto.request_takedown($1, false)", [tuple(row) for row in hidden])


async def print_plans(connection: asyncpg.Connection, target: tuple[str, str, str]) -> None:
    """Print the plans of the statements of `atproto.link_count`, with the settings that the function has."""
    async with connection.transaction():
        await connection.execute("set local enable_seqscan = off")
        for name, part in PARTS.items():
            rows = await connection.fetch(f"explain (analyze, buffers, costs off, timing off) {part}", *target)
            print(f"plan of {name}:", *[f"    {row[0]}" for row in rows], sep="\n")


async def measure(name: str, query: Callable[[], Awaitable[object]], times: int = QUERIES) -> None:
    """Run a query several times; print the rate of one connection, median and maximum."""
    durations = []
    for _ in range(times):
        began = perf_counter()
        await query()
        durations.append(1000 * (perf_counter() - began))
    median = statistics.median(durations)
    print(f"{name:44} {1000 / median:8,.0f}/s  median {median:8.2f} ms  maximum {max(durations):8.2f} ms")


async def measure_batches(db: Database, numbers: range, session: LinkSession | None = None) -> None:
    """Write batches of commits that each like the same post; then follow them, if links are kept."""
    durations = []
    for number in numbers:
        batch = like_batch(number)
        began = perf_counter()
        await db.write(batch)
        durations.append(1e6 * (perf_counter() - began) / COMMITS_PER_BATCH)
    print(f"batches: {statistics.median(durations):.0f} µs per commit")
    if session is not None:
        began, cpu = perf_counter(), process_time()
        while await LinkReader.turn(session):
            pass
        links = len(numbers) * COMMITS_PER_BATCH
        seconds, used = perf_counter() - began, process_time() - cpu
        print(f"links of these: {links / seconds:,.0f}/s, {1e6 * used / links:.0f} µs of CPU per link in this process")


async def measure_lag(db: Database, connection: asyncpg.Connection) -> None:
    """Write 1,000 likes per second; measure how long after each batch the count contains it."""
    reading = asyncio.create_task(LinkReader(db, wanted=True).run())
    lags = []
    await asyncio.sleep(2)
    due = perf_counter()
    for number in range(2 * BATCHES, 2 * BATCHES + LAG_BATCHES):
        due += LAG_COMMITS / COMMITS_PER_SECOND
        await asyncio.sleep(due - perf_counter())
        before = await connection.fetchval("select atproto.latest_seq()")
        await db.write(like_batch(number, LAG_COMMITS))
        began = perf_counter()
        while await connection.fetchval("select seq from atproto.link_progress") < before + LAG_COMMITS:
            pass
        lags.append(1000 * (perf_counter() - began))
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    lags.sort()
    found = (
        f"median {statistics.median(lags):.0f} ms, p99 {lags[len(lags) * 99 // 100]:.0f} ms, maximum {lags[-1]:.0f} ms"
    )
    print(f"counts are behind at {COMMITS_PER_SECOND:,} commits/s: {found}")


def like_batch(number: int, commits: int = COMMITS_PER_BATCH) -> Batch:
    """Return a batch in which each of so many new repos likes the post."""
    writes = []
    for index in range(commits):
        head = Head(REV, cid_of(b"data"), cid_of(b"commit"))
        repo = Repo(
            f"did:plc:new{number}x{index}", 1, SyncStatus.SYNCHRONIZED, sync_reason=None, head=head, synchronized_at=1.0
        )
        text = json.dumps({"$type": LIKE, "subject": {"uri": POST, "cid": CID}, "createdAt": "2026-01-01T00:00:00Z"})
        change = RecordChange("create", LIKE, REV, REV, cid_of(text.encode()), text)
        writes.append(RepoWrite(Repo(repo.did), repo, (change,)))
    return Batch(tuple(writes))


def measure_extraction() -> None:
    """Measure how long it takes to find the links of a like and of a post without links."""
    values = {
        "a like": json.dumps({"$type": LIKE, "subject": {"uri": POST, "cid": CID}, "createdAt": "2026-01-01"}),
        "a post without links": json.dumps({"$type": "app.bsky.feed.post", "text": "hello " * 20, "langs": ["en"]}),
    }
    for name, value in values.items():
        began = process_time()
        for _ in range(100_000):
            links_of(value)
        print(f"links of {name}: {10 * (process_time() - began):.1f} µs")


async def print_sizes(connection: asyncpg.Connection) -> None:
    """Print the sizes of the tables with their indexes."""
    links = await connection.fetchval("select count(*) from indexer.record_link")
    for table in TABLES:
        [(heap, indexes)] = await connection.fetch(
            f"select pg_table_size('indexer.{table}'), pg_indexes_size('indexer.{table}')"
        )
        print(f"{table:12} {heap / links:6.0f} bytes and {indexes / links:6.0f} of indexes per link")
    print(f"{os.cpu_count()} cores")


if __name__ == "__main__":
    asyncio.run(main())
