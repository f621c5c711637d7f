"""Rows for every table of the schema, and their comparison."""

from hashlib import sha256

import asyncpg

REPOS = 2_000
"""Number of accounts. They are in all buckets."""

_FILL = """
    create temporary table account as
    select did, get_byte(sha256(did::bytea), 0)::smallint as bucket, n
    from (select n, 'did:plc:' || left(md5(n::text), 24) as did from generate_series(1, $1) n) numbered;
    insert into indexer.repo (did, bucket, version, sync_status, rev, data, commit, active, hosting_seq, takedown,
        buffered_events, buffered_bytes, lease, attempts, updated_at)
    select did, bucket, n, 'synchronized', '3laaaaaaaaa22', 'data', 'commit', n % 7 > 0, n, n % 11 = 0,
        1, 9, 0, 0, now()
    from account;
    insert into indexer.resync_queue (bucket, priority)
    select b, p from generate_series(0, 255) b, generate_series(0, 2) p on conflict do nothing;
    insert into indexer.record (did, collection, rkey, bucket, cid, rev, value, value_problem, original)
    select did, 'app.test', r::text, bucket, 'cid', '3laaaaaaaaa22',
        case when r > 1 then jsonb_build_object('n', n) end,
        case when r = 1 then 'missing' end, case when r = 2 then '\\xff00'::bytea end
    from account, generate_series(1, 20) r;
    insert into indexer.identity (did, bucket, claimed_handle, pds, fetched_at, stale, handle, handle_attempts)
    select did, bucket, 'a' || n || '.test', 'https://pds.test', now(), false, 'a' || n || '.test', 0 from account;
    insert into indexer.buffered_event (did, bucket, relay, seq, frame)
    select did, bucket, 'wss://relay.test', n, 'frame' from account;
    insert into indexer.record_link (did, collection, rkey, bucket, target, kind, path, counted)
    select did, 'app.test', '2', bucket, 'did:plc:t', 'did', '.to', true from account;
    insert into indexer.target_count (target, collection, path, bucket, count)
    select did, 'app.test', '.to', bucket, n from account;
    insert into indexer.links_to_recount (did, bucket, seq) select did, bucket, n from account;
    insert into indexer.link_reader (seq) values (7);
    insert into indexer.dead_letter (bucket, relay, seq, did, kind, reason, detail, frame)
    select bucket, 'wss://relay.test', n, did, 'commit', 'too-large', '', 'frame' from account where n < 10;
    insert into indexer.cursor (relay, shard, seq, epoch) values ('wss://relay.test', '0/1', 2000, 0);
    insert into indexer.subscribed_host (pds, shard) values ('https://pds.test', '0/1');
    insert into indexer.gap (relay, shard, reason, closed_at) values ('wss://relay.test', '0/1', 'no-cursor', now());
    insert into indexer.crawl_progress
        (purpose, source, collection, listed, found, began_at, finished_at, shard, last_gap)
    values ('sweep', 'https://relay.test', '', 9, 1, now(), now(), '0/1', 0);
    insert into indexer.host (host, requests, failures, consecutive_failures) values ('pds.test', 9, 1, 0);
    insert into indexer.scope (version, track, collections, added_in, signal_collections)
    values (1, 'all', '{*}', '{1}', '{}');
    insert into indexer.consumer (name, seq, owner, slot) values
        ('feed', 5, current_user, 1), ('gone', 1, current_user, 2);
    insert into indexer.disconnected_consumer (id) select id from indexer.consumer where name = 'gone';
    insert into indexer.feed_delivery (consumer_id, delivered_to, undelivered)
    select id, 3, '{4,5}' from indexer.consumer where name = 'feed';
    insert into indexer.feed_set_aside
        (consumer_id, reason, did, collection, rkey, rev, action, attempts, since, failure)
    select id, 'hidden', did, 'app.test', '2', '3laaaaaaaaa22', 'create', 0, now(), '' from indexer.consumer, account
    where name = 'feed' and n = 1;
    insert into indexer.change_batch (segment, size) select current_segment, $1 from indexer.change_log;
    insert into indexer.change (batch, ordinal, segment, bucket, live, action, did, collection, rkey, rev, cid)
    select b.id, n - 1, b.segment, bucket, true, 'create', did, 'app.test', '2', '3laaaaaaaaa22', 'cid'
    from account, indexer.change_batch b;
    drop table account;
"""
_TABLES = """
    select relname from pg_class
    where relnamespace = 'indexer'::regnamespace and relkind in ('r', 'p') and not relispartition and relnatts > 0
        and relname <> 'alembic_version' and relname !~ '_[0-9]+$'  -- shards
    order by relname
"""
UNFILLED = {
    "distribution": "`distribute` fills it",
    "lexicon": "a test adds a lexicon",
    "process_report": "has a row while a process of the daemon runs",
    "shard_owner": "has a row while a process owns the shard",
    "unnumbered_batch": "has rows for a moment on a distributed database",
}
"""Tables that stay empty here, with the reason. Tables without columns, which are only locked, never have rows."""


async def fill(dsn: str) -> None:
    """Insert rows into all tables."""
    sql = await asyncpg.connect(dsn)
    try:
        async with sql.transaction():
            await sql.execute(_FILL.replace("$1", str(REPOS)))
    finally:
        await sql.close()


async def contents(dsn: str, *, without: tuple[str, ...] = ()) -> dict[str, tuple[int, str]]:
    """Return the number of rows of each table, and a hash of them."""
    sql = await asyncpg.connect(dsn)
    try:
        return {name: await _content(sql, f"indexer.{name}") for name in await tables(sql) if name not in without}
    finally:
        await sql.close()


async def tables(sql: asyncpg.Connection) -> list[str]:
    """Return the names of the tables that have columns."""
    return [name for (name,) in await sql.fetch(_TABLES)]


async def _content(sql: asyncpg.Connection, table: str) -> tuple[int, str]:
    rows = sorted(repr(tuple(row)) for row in await sql.fetch(f"select * from {table}"))  # noqa: S608
    return len(rows), sha256("\n".join(rows).encode()).hexdigest()
