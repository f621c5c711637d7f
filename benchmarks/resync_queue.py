"""Measure the time of a resync claim among millions of repos.

    python -m benchmarks.resync_queue [--repos 15000000] [--plan]

The database is created under the temporary directory (0.5 kB per repo), on a separate embedded Postgres, and removed at
the end. Two thirds of the repos are synchronized. Most of the others were never synchronized; one in ten is postponed,
and one in a hundred was synchronized before.
"""

import argparse
import asyncio
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, time

import asyncpg

from indexer import embedded
from indexer.db import Database
from indexer.db.migrate import migrate
from indexer.db.resync_queue import DUE
from indexer.sync.shard import BUCKETS

REPOS_PER_STATEMENT = 500_000
CLAIMS_PER_CASE = 200

INSERT_REPOS = """
    insert into indexer.repo (did, bucket, version, sync_status, sync_reason, rev, data, commit, active, hosting_seq,
        takedown, buffered_events, buffered_bytes, lease, attempts, next_attempt_at)
    select did, indexer.bucket_of(did), 1, status, case status when 'desynchronized' then 'new' end,
        case when has_head then '3laaaaaaaaaaa' end, case when has_head then sha256('a') || '\\x00000000' end,
        case when has_head then sha256('b') || '\\x00000000' end, true, 0, false, 0, 0, 0, 0,
        case when n % 10 = 0 then now() + interval '1 hour' when n % 10 = 1 then now() - n * interval '1 ms' end
    from (
        select n, 'did:plc:' || substr(md5(n::text), 1, 24) as did,
            case when n % 3 = 0 then 'desynchronized' else 'synchronized' end as status,
            n % 3 > 0 or n % 100 = 0 as has_head
        from generate_series($1::bigint, $2::bigint) n
    ) d
"""


async def insert_repos(connection: asyncpg.Connection, repos: int) -> None:
    """Insert the repos and print their size."""
    for first in range(1, repos + 1, REPOS_PER_STATEMENT):
        last = min(first + REPOS_PER_STATEMENT - 1, repos)
        await connection.execute(INSERT_REPOS, first, last, timeout=600)
        print(f"\r{last:,} repos", end="", flush=True)
    await connection.execute("vacuum analyze indexer.repo", timeout=1_800)
    size = await connection.fetchval("select pg_total_relation_size('indexer.repo')")
    print(f"\r{repos:,} repos, {size / repos:.0f} bytes each with their indexes")


async def measure(db: Database, count: int, buckets: range, concurrency: int) -> tuple[list[float], int]:
    """Claim `count` repos at a time, in concurrent tasks.

    Returns:
        The milliseconds of each of `CLAIMS_PER_CASE` claims, and how many claims returned fewer repos.
    """
    times, short = [], 0

    async def claim(rounds: int) -> None:
        nonlocal short
        for _ in range(rounds):
            began = perf_counter()
            claimed = await db.resyncs.claim(count, buckets, 120.0, time())
            times.append(1_000 * (perf_counter() - began))
            short += len(claimed) < count

    await asyncio.gather(*(claim(CLAIMS_PER_CASE // concurrency) for _ in range(concurrency)))
    return sorted(times), short


async def main(repos: int, *, plan: bool) -> None:
    """Run all measurements."""
    with TemporaryDirectory(prefix="indexer-queue-") as directory:
        async with embedded.database(None, Path(directory)) as dsn:
            await migrate(dsn)
            connection = await asyncpg.connect(dsn)
            await insert_repos(connection, repos)
            db = await Database.open(dsn)
            for count, concurrency in ((1, 1), (8, 1), (256, 1), (1, 8), (8, 8)):
                for name, buckets in (("all buckets", range(BUCKETS)), ("16 buckets", range(16))):
                    times, short = await measure(db, count, buckets, concurrency)
                    print(
                        f"claims of {count:3} from {name:11} {concurrency} at a time   "
                        f"median {statistics.median(times):6.2f} ms   p99 {times[int(len(times) * 0.99)]:6.2f} ms   "
                        f"{short} of {len(times)} claims returned fewer"
                    )
            if plan:
                rows = await connection.fetch(
                    f"explain (analyze, buffers, costs off) {DUE}", 8, list(range(BUCKETS)), time(), 77
                )
                print("\n".join(row[0] for row in rows))
            await db.close()
            await connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repos", type=int, default=15_000_000, help="number of repos (default: %(default)s)")
    parser.add_argument("--plan", action="store_true", help="print the plan of the query for due repos")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.repos, plan=arguments.plan))
