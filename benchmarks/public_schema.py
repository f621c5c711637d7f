"""Measure queries of the public schema on millions of records, and the cost of its indexes.

    python -m benchmarks.public_schema [--records 5000000] [--plans]

The database is created under the temporary directory (1 kB per record), on a separate embedded Postgres, and removed at
the end. The records are distributed over accounts and collections as on the real network, and inserted in time order.
"""

import argparse
import asyncio
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import asyncpg

from indexer import embedded
from indexer.atproto.cid import cid_of
from indexer.db import Database
from indexer.db.migrate import migrate
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from indexer.sync.repo import Head, Repo, SyncStatus

RECORDS_PER_REPO = 100
RECORDS_PER_STATEMENT = 250_000
CHANGES_PER_BATCH = 500
COMMITS_PER_BATCH = 500
QUERIES = 200
INDEX = "record_collection"
"""The index for queries of a collection across all repos."""

# Replace the hexadecimal digits of a number by 16 characters of the TID alphabet in the same order.
TID = "'3l' || translate(lpad(to_hex({}), 11, '0'), '0123456789abcdef', '234567abcdefghij')"

INSERT_REPOS = f"""
    insert into indexer.repo (did, bucket, version, sync_status, rev, data, commit, active, hosting_seq, takedown,
        buffered_events, buffered_bytes, lease, attempts)
    select did, indexer.bucket_of(did), 1, 'synchronized', {TID.format("n")}, sha256('a') || '\\x00000000',
        sha256('b') || '\\x00000000', n % 100 <> 0, 0, n % 1000 = 1, 0, 0, 0, 0
    from (select n, 'did:plc:' || substr(md5(n::text), 1, 24) as did from generate_series(1, $1::integer) n) d
"""

# The records number $1 to $2 of $3 repos. Records of one account are far apart, as with live events.
NUMBERED_RECORDS = f"""
    select n, did, collection, indexer.bucket_of(did) as bucket, {TID.format("n * 1000")} as rev,
        case when collection = 'app.bsky.actor.profile' then 'self' else {TID.format("n * 1000")} end as rkey,
        '\\x01711220'::bytea || sha256(n::text::bytea) as cid
    from (
        select n,
            'did:plc:' || substr(md5((1 + case when n <= $3 then n - 1 else n * 7919 % $3 end)::text), 1, 24) as did,
            case when n <= $3 then 'app.bsky.actor.profile' when n % 20 < 11 then 'app.bsky.feed.like'
                when n % 20 < 15 then 'app.bsky.feed.post' when n % 20 < 19 then 'app.bsky.graph.follow'
                else 'app.bsky.feed.repost' end as collection
        from generate_series($1::bigint, $2::bigint) n
    ) r
"""

INSERT_RECORDS = f"""
    insert into indexer.record (did, collection, rkey, bucket, cid, rev, value, indexed_at)
    select did, collection, rkey, bucket, cid, rev,
        jsonb_build_object('$type', collection, 'createdAt', '2026-01-01T00:00:00.000Z', 'subject', jsonb_build_object(
            'uri', 'at://did:plc:' || substr(md5((n / 7)::text), 1, 24) || '/app.bsky.feed.post/3laaaaaaaaaaa',
            'cid', 'bafyrei' || md5(n::text) || substr(md5(n::text), 1, 20))),
        timestamptz '2026-01-01' + n / 300 * interval '0.3 s'
    from ({NUMBERED_RECORDS}) r
"""

INSERT_CHANGES = f"""
    with opened as (
        insert into indexer.change_batch (segment, size)
        select current_segment, $2::bigint - $1::bigint + 1 from indexer.change_log
        returning segment, id
    )
    insert into indexer.change (segment, batch, ordinal, bucket, live, action, did, collection, rkey, rev, cid)
    select o.segment, o.id, n - $1::bigint, bucket, true, 'create', did, collection, rkey, rev, cid
    from opened o, ({NUMBERED_RECORDS}) r
"""

ONE_RECORD = "select uri, cid, value from atproto.records where did = $1 and collection = $2 and rkey = $3"
RECORDS_OF_REPO = """
    select rkey, cid, value from atproto.records
    where did = $1 and collection = 'app.bsky.feed.like' and rkey > $2 order by rkey limit 50
"""
NEWEST = """
    select uri, value from atproto.records where collection = 'app.bsky.feed.post'
    order by indexed_at desc, did desc, rkey desc limit 50
"""
NEXT_PAGE = """
    select uri, value from atproto.records
    where collection = 'app.bsky.feed.post' and (indexed_at, did, rkey) < ($1, $2, $3)
    order by indexed_at desc, did desc, rkey desc limit 50
"""
REPO_STATE = "select * from atproto.repos where did = $1"
CHANGES = "select * from atproto.changes_after($1, 1000)"
CHANGES_WITH_VALUES = """
    select c.*, r.value from atproto.changes_after($1, 1000) c left join atproto.records r using (did, collection, rkey)
"""


async def main() -> None:
    """Parse the arguments and run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=5_000_000, help="number of records (default: %(default)s)")
    parser.add_argument("--plans", action="store_true", help="print the query plans")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="public-schema-") as directory:
        async with embedded.database(None, Path(directory)) as dsn:
            await migrate(dsn)
            connection = await asyncpg.connect(dsn, server_settings={"jit": "off"})
            try:
                await generate(connection, arguments.records)
                await print_sizes(connection)
                await measure_queries(connection, plans=arguments.plans)
                await measure_writes(connection, dsn)
            finally:
                await connection.close()


async def generate(connection: asyncpg.Connection, records: int) -> None:
    """Insert repos and records, and log the last fifth of the records as changes."""
    began = perf_counter()
    repos = records // RECORDS_PER_REPO
    await connection.execute(INSERT_REPOS, repos)
    for first in range(1, records + 1, RECORDS_PER_STATEMENT):
        await connection.execute(INSERT_RECORDS, first, min(first + RECORDS_PER_STATEMENT - 1, records), repos)
    print(f"{records:,} records of {repos:,} repos inserted in {perf_counter() - began:.0f} s")
    began = perf_counter()
    for first in range(records - records // 5 + 1, records + 1, CHANGES_PER_BATCH):
        await connection.execute(INSERT_CHANGES, first, first + CHANGES_PER_BATCH - 1, repos)
    print(f"{records // 5:,} changes in batches of {CHANGES_PER_BATCH} logged in {perf_counter() - began:.0f} s")
    await connection.execute("vacuum analyze")
    await connection.execute("checkpoint")


async def print_sizes(connection: asyncpg.Connection) -> None:
    """Print the size of the table of records, of its indexes, and of the change log."""
    count = await connection.fetchval("select count(*) from indexer.record")
    rows = await connection.fetch(
        "select relname, pg_table_size(oid) as bytes from pg_class where relkind in ('r', 'i') and "
        "(oid = 'indexer.record'::regclass or oid in (select indexrelid from pg_index "
        "where indrelid = 'indexer.record'::regclass)) order by relname"
    )
    for name, size in rows:
        print(f"{name:24} {size / 2**20:8,.0f} MiB  {size / count:6.1f} bytes per record")
    rows = await connection.fetch(
        "select p.relname, sum(pg_total_relation_size(inhrelid)) as bytes from pg_inherits join pg_class p on p.oid = "
        "inhparent where p.relname in ('change_batch', 'change') group by 1 order by 1"
    )
    changes = await connection.fetchval("select sum(size) from indexer.change_batch")
    for name, size in rows:
        print(f"{name:24} {size / 2**20:8,.0f} MiB  {size / changes:6.1f} bytes per change")


async def measure_queries(connection: asyncpg.Connection, *, plans: bool) -> None:
    """Print the median and the 99th percentile of the time of each query."""
    sample = await connection.fetch(
        "select * from indexer.record tablesample system (1) where rkey <> 'self' order by random() limit $1", QUERIES
    )
    last = await connection.fetchval("select atproto.latest_seq()")
    cases = (
        ("one record", ONE_RECORD, [(row["did"], row["collection"], row["rkey"]) for row in sample]),
        ("state of a repo", REPO_STATE, [(row["did"],) for row in sample]),
        ("50 records of a repo", RECORDS_OF_REPO, [(row["did"], "3l") for row in sample]),
        ("50 newest of a collection", NEWEST, [() for _ in sample]),
        ("the next 50", NEXT_PAGE, [(row["indexed_at"], row["did"], row["rkey"]) for row in sample]),
        ("1,000 changes", CHANGES, [(last * n // QUERIES,) for n in range(QUERIES)]),
        ("1,000 changes with values", CHANGES_WITH_VALUES, [(last * n // QUERIES,) for n in range(QUERIES)]),
    )
    print(f"\n{'':28} {'median':>9} {'p99':>9}")
    for name, statement, arguments in cases:
        times = []
        for values in arguments:
            began = perf_counter()
            await connection.fetch(statement, *values)
            times.append(1_000 * (perf_counter() - began))
        print(f"{name:28} {statistics.median(times):6.2f} ms {sorted(times)[len(times) * 99 // 100]:6.2f} ms")
        if plans:
            for (line,) in await connection.fetch(f"explain (analyze, buffers, costs off) {statement}", *arguments[-1]):
                print(f"    {line}")


async def measure_writes(connection: asyncpg.Connection, dsn: str) -> None:
    """Print the rate of commits with one operation, each of a different account, with and without the index."""
    dids = [row[0] for row in await connection.fetch("select did from indexer.repo order by bucket, did limit 20000")]
    definition = await connection.fetchval("select pg_get_indexdef(to_regclass($1))", f"indexer.{INDEX}")
    db = await Database.open(dsn)
    print()
    try:
        for round_, with_index in enumerate((True, False, True, False)):
            if definition is not None:
                await connection.execute(f"drop index if exists indexer.{INDEX}")
                await connection.execute(definition if with_index else "select")
            await connection.execute("checkpoint")
            began = perf_counter()
            for start in range(0, len(dids), COMMITS_PER_BATCH):
                repos = await db.repos.load(dids[start : start + COMMITS_PER_BATCH])
                writes = [commit(repo, round_) for repo in repos.values()]
                assert not (await db.write(Batch(tuple(writes)))).skipped
            rate = len(dids) / (perf_counter() - began)
            print(f"{'with' if with_index else 'without':8} {INDEX}: {rate:8,.0f} commits/s")
    finally:
        await db.close()


def commit(repo: Repo, number: int) -> RepoWrite:
    """Return the write of one new record. `number` gives the rev: a higher one for each round."""
    rev = f"3m{'abcd'[number]}2222222222"
    head = Head(rev, cid_of(rev.encode()), cid_of(rev.encode()))
    value = '{"$type": "app.bsky.feed.post", "text": "' + "x" * 150 + '"}'
    change = RecordChange("create", "app.bsky.feed.post", rev, rev, head.data, value)
    after = Repo(repo.did, repo.version + 1, SyncStatus.SYNCHRONIZED, None, head, active=repo.active)
    return RepoWrite(repo, after, (change,))


if __name__ == "__main__":
    asyncio.run(main())
