"""The face as a reader sees it: plans and times on millions of records, and what its indexes cost.

    python -m benchmarks.face [--records 5000000] [--plans]

Makes a scratch database under the temporary directory (1 kB a record), on an embedded Postgres of its own, and removes
it in the end. Records are spread over accounts and collections about as on the network, written in the order of time.
"""

import argparse
import asyncio
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import asyncpg

from indexer.atproto.cid import cid_of
from indexer.store import Store, embedded
from indexer.store.migrate import migrate
from indexer.sync.plan import Batch, RecordChange, RepoWrite
from indexer.sync.repo import Head, Repo, SyncStatus

PER_REPO = 100
CHUNK = 250_000
ROUNDS = 200
INDEX = "record_collection"

# Sixteen of the digits of a TID, in its order: a hexadecimal number sorts like one.
TID = "'3l' || translate(lpad(to_hex({}), 11, '0'), '0123456789abcdef', '234567abcdefghij')"

REPOS = f"""
    insert into indexer.repo (did, bucket, version, status, rev, data, commit, active, hosting_seq, takedown,
        buffered_events, buffered_bytes, lease, attempts)
    select did, indexer.bucket_of(did), 1, 'synchronized', {TID.format("n")}, sha256('a') || '\\x00000000',
        sha256('b') || '\\x00000000', n % 100 <> 0, 0, n % 1000 = 1, 0, 0, 0, 0
    from (select n, 'did:plc:' || substr(md5(n::text), 1, 24) as did from generate_series(1, $1::integer) n) d
"""

# The records number $1 to $2, of $3 repos. Those of one account lie far from each other, as those that come live do.
NUMBERED = f"""
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

RECORDS = f"""
    insert into indexer.record (did, collection, rkey, bucket, cid, rev, value, indexed_at)
    select did, collection, rkey, bucket, cid, rev,
        jsonb_build_object('$type', collection, 'createdAt', '2026-01-01T00:00:00.000Z', 'subject', jsonb_build_object(
            'uri', 'at://did:plc:' || substr(md5((n / 7)::text), 1, 24) || '/app.bsky.feed.post/3laaaaaaaaaaa',
            'cid', 'bafyrei' || md5(n::text) || substr(md5(n::text), 1, 20))),
        timestamptz '2026-01-01' + n / 300 * interval '0.3 s'
    from ({NUMBERED}) r
"""

LOG = f"""
    with opened as (
        insert into indexer.batch (segment, size) select segment, $2::bigint - $1::bigint + 1 from indexer.feed
        returning segment, id
    )
    insert into indexer.change (segment, batch, place, bucket, live, action, did, collection, rkey, rev, cid)
    select o.segment, o.id, n - $1::bigint, bucket, true, 'create', did, collection, rkey, rev, cid
    from opened o, ({NUMBERED}) r
"""

ONE = "select uri, cid, value from atproto.records where did = $1 and collection = $2 and rkey = $3"
REPO = """
    select rkey, cid, value from atproto.records
    where did = $1 and collection = 'app.bsky.feed.like' and rkey > $2 order by rkey limit 50
"""
NEWEST = """
    select uri, value from atproto.records where collection = 'app.bsky.feed.post'
    order by indexed_at desc, did desc, rkey desc limit 50
"""
OLDER = """
    select uri, value from atproto.records
    where collection = 'app.bsky.feed.post' and (indexed_at, did, rkey) < ($1, $2, $3)
    order by indexed_at desc, did desc, rkey desc limit 50
"""
STATE = "select * from atproto.repos where did = $1"
CHANGES = "select * from atproto.changes_after($1, 1000)"
FOLLOW = """
    select c.*, r.value from atproto.changes_after($1, 1000) c left join atproto.records r using (did, collection, rkey)
"""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--plans", action="store_true", help="print the plans")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="face-") as directory:
        async with embedded.database(None, Path(directory)) as dsn:
            await migrate(dsn)
            connection = await asyncpg.connect(dsn, server_settings={"jit": "off"})
            try:
                await generate(connection, arguments.records)
                await sizes(connection)
                await read(connection, plans=arguments.plans)
                await write(connection, dsn)
            finally:
                await connection.close()


async def generate(connection: asyncpg.Connection, records: int) -> None:
    began = perf_counter()
    repos = records // PER_REPO
    await connection.execute(REPOS, repos)
    for first in range(1, records + 1, CHUNK):
        await connection.execute(RECORDS, first, min(first + CHUNK - 1, records), repos)
    print(f"{records:,} records of {repos:,} repos made in {perf_counter() - began:.0f} s")
    began = perf_counter()
    for first in range(records - records // 5 + 1, records + 1, 500):
        await connection.execute(LOG, first, first + 499, repos)
    print(f"{records // 5:,} changes in batches of 500 logged in {perf_counter() - began:.0f} s")
    await connection.execute("vacuum analyze")
    await connection.execute("checkpoint")


async def sizes(connection: asyncpg.Connection) -> None:
    count = await connection.fetchval("select count(*) from indexer.record")
    rows = await connection.fetch(
        "select relname, pg_table_size(oid) as bytes from pg_class where relkind in ('r', 'i') and "
        "(oid = 'indexer.record'::regclass or oid in (select indexrelid from pg_index "
        "where indrelid = 'indexer.record'::regclass)) order by relname"
    )
    for name, size in rows:
        print(f"{name:24} {size / 2**20:8,.0f} MiB  {size / count:6.1f} bytes a record")
    rows = await connection.fetch(
        "select p.relname, sum(pg_total_relation_size(inhrelid)) as bytes from pg_inherits join pg_class p on p.oid = "
        "inhparent where p.relname in ('batch', 'change') group by 1 order by 1"
    )
    changes = await connection.fetchval("select sum(size) from indexer.batch")
    for name, size in rows:
        print(f"{name:24} {size / 2**20:8,.0f} MiB  {size / changes:6.1f} bytes a change")


async def read(connection: asyncpg.Connection, *, plans: bool) -> None:
    sample = await connection.fetch(
        "select * from indexer.record tablesample system (1) where rkey <> 'self' order by random() limit $1", ROUNDS
    )
    last = await connection.fetchval("select atproto.latest_seq()")
    cases = (
        ("one record", ONE, [(row["did"], row["collection"], row["rkey"]) for row in sample]),
        ("a repo's state", STATE, [(row["did"],) for row in sample]),
        ("a repo's collection, 50", REPO, [(row["did"], "3l") for row in sample]),
        ("newest of a collection, 50", NEWEST, [() for _ in sample]),
        ("the next 50", OLDER, [(row["indexed_at"], row["did"], row["rkey"]) for row in sample]),
        ("changes_after, 1,000", CHANGES, [(last * n // ROUNDS,) for n in range(ROUNDS)]),
        ("the same with values", FOLLOW, [(last * n // ROUNDS,) for n in range(ROUNDS)]),
    )
    print(f"\n{'':28} {'median':>9} {'99 %':>9}")
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


async def write(connection: asyncpg.Connection, dsn: str) -> None:
    """One-op commits in batches of 500, each of another account, with and without the index across repos."""
    dids = [row[0] for row in await connection.fetch("select did from indexer.repo order by bucket, did limit 20000")]
    definition = await connection.fetchval("select pg_get_indexdef(to_regclass($1))", f"indexer.{INDEX}")
    store = await Store.open(dsn)
    print()
    try:
        for round_, there in enumerate((True, False, True, False)):
            if definition is not None:
                await connection.execute(f"drop index if exists indexer.{INDEX}")
                await connection.execute(definition if there else "select")
            await connection.execute("checkpoint")
            began = perf_counter()
            for start in range(0, len(dids), 500):
                repos = await store.repos(dids[start : start + 500])
                writes = [commit(repo, round_) for repo in repos.values()]
                assert not await store.apply(Batch(tuple(writes)))
            rate = len(dids) / (perf_counter() - began)
            print(f"{'with' if there else 'without':8} {INDEX}: {rate:8,.0f} commits a second")
    finally:
        await store.close()


def commit(repo: Repo, number: int) -> RepoWrite:
    rev = f"3m{'abcd'[number]}2222222222"
    head = Head(rev, cid_of(rev.encode()), cid_of(rev.encode()))
    value = '{"$type": "app.bsky.feed.post", "text": "' + "x" * 150 + '"}'
    change = RecordChange("create", "app.bsky.feed.post", rev, rev, head.data, value)
    after = Repo(repo.did, repo.version + 1, SyncStatus.SYNCHRONIZED, None, head, active=repo.active)
    return RepoWrite(repo.version, after, (change,))


if __name__ == "__main__":
    asyncio.run(main())
