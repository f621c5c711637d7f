"""The queue of resyncs: what a claim costs among millions of repos.

    python -m benchmarks.queue [--repos 15000000] [--plan]

Makes a scratch database under the temporary directory (0.5 kB a repo), on an embedded Postgres of its own, and removes
it in the end. Two thirds of the repos are synchronized; of the others most have never been, one in ten is put off, one
in a hundred broke.
"""

import argparse
import asyncio
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, time

import asyncpg

from indexer.store import Store, embedded
from indexer.store.migrate import migrate
from indexer.store.resync import DUE
from indexer.sync.shard import BUCKETS

CHUNK = 500_000
ROUNDS = 200

REPOS = """
    insert into indexer.repo (did, bucket, version, status, reason, rev, data, commit, active, hosting_seq, takedown,
        buffered_events, buffered_bytes, lease, attempts, next_attempt_at)
    select did, indexer.bucket_of(did), 1, status, case status when 'desynchronized' then 'new' end,
        case when shown then '3laaaaaaaaaaa' end, case when shown then sha256('a') || '\\x00000000' end,
        case when shown then sha256('b') || '\\x00000000' end, true, 0, false, 0, 0, 0, 0,
        case when n % 10 = 0 then now() + interval '1 hour' when n % 10 = 1 then now() - n * interval '1 ms' end
    from (
        select n, 'did:plc:' || substr(md5(n::text), 1, 24) as did,
            case when n % 3 = 0 then 'desynchronized' else 'synchronized' end as status,
            n % 3 > 0 or n % 100 = 0 as shown
        from generate_series($1::bigint, $2::bigint) n
    ) d
"""


async def fill(connection: asyncpg.Connection, repos: int) -> None:
    for first in range(1, repos + 1, CHUNK):
        await connection.execute(REPOS, first, min(first + CHUNK - 1, repos), timeout=600)
        print(f"\r{first + CHUNK - 1:,} repos", end="", flush=True)
    await connection.execute("vacuum analyze indexer.repo", timeout=1_800)
    size = await connection.fetchval("select pg_total_relation_size('indexer.repo')")
    print(f"\r{repos:,} repos, {size / repos:.0f} bytes each with their indexes")


async def measure(store: Store, count: int, buckets: range, hands: int) -> tuple[list[float], int]:
    """Milliseconds of each of `ROUNDS` claims of so many repos, so many at a time; and how many came back with less."""
    times, short = [], 0

    async def claim(rounds: int) -> None:
        nonlocal short
        for _ in range(rounds):
            began = perf_counter()
            claimed = await store.claim(count, buckets, 120.0, time())
            times.append(1_000 * (perf_counter() - began))
            short += len(claimed) < count

    await asyncio.gather(*(claim(ROUNDS // hands) for _ in range(hands)))
    return sorted(times), short


async def main(repos: int, *, plan: bool) -> None:
    with TemporaryDirectory(prefix="indexer-queue-") as directory:
        async with embedded.database(None, Path(directory)) as dsn:
            await migrate(dsn)
            connection = await asyncpg.connect(dsn)
            await fill(connection, repos)
            store = await Store.open(dsn)
            for count, hands in ((1, 1), (8, 1), (256, 1), (1, 8), (8, 8)):
                for name, buckets in (("all buckets", range(BUCKETS)), ("a shard of 16", range(16))):
                    times, short = await measure(store, count, buckets, hands)
                    print(
                        f"claim of {count:3} from {name:13} {hands} at a time   "
                        f"median {statistics.median(times):6.2f} ms   p99 {times[int(len(times) * 0.99)]:6.2f} ms   "
                        f"{short} of {len(times)} got less"
                    )
            if plan:
                rows = await connection.fetch(
                    f"explain (analyze, buffers, costs off) {DUE}", 8, list(range(BUCKETS)), time(), 77
                )
                print("\n".join(row[0] for row in rows))
            await store.close()
            await connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repos", type=int, default=15_000_000)
    parser.add_argument("--plan", action="store_true", help="show the plan of the look for what is due")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.repos, plan=arguments.plan))
