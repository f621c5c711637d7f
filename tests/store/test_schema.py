"""The schema: migrations and metadata, functions, visibility, and the plans of queue statements."""

import asyncio
import random
import re
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.schema import CreateSchema

from indexer.atproto.cid import cid_of, cid_text
from indexer.store import DatabaseError, Store
from indexer.store.apply_batch import apply
from indexer.store.migrate import migrate
from indexer.store.resync_queue import CLAIM, DUE, INCOMPLETE, PARKED, UNPROVEN
from indexer.store.schema import metadata
from indexer.store.schema_version import schema_is_current
from indexer.sync.plans import Batch, RepoWrite
from indexer.sync.shard import HASH_ORDER, bucket_of
from tests.store.repo_rows import did, head, insert, put, synchronized

CATALOG = """
    select 'column', attrelid::regclass::text, attname, format_type(atttypid, atttypmod),
        attnotnull::text || attidentity::text
            || coalesce(pg_get_serial_sequence(attrelid::regclass::text, attname), ''),
        coalesce(pg_get_expr(adbin, adrelid), ''), coalesce(collname, '')
    from pg_attribute
    join pg_class c on c.oid = attrelid left join pg_attrdef d on adrelid = attrelid and adnum = attnum
    left join pg_collation o on o.oid = attcollation
    where c.relnamespace = 'indexer'::regnamespace and c.relkind in ('r', 'p') and not relispartition
        and attnum > 0 and not attisdropped
        and relname <> 'alembic_version'
    union all
    select 'constraint', conrelid::regclass::text, conname,
        replace(pg_get_constraintdef(oid), ' NOT VALID', ''), '', '', ''
    from pg_constraint where connamespace = 'indexer'::regnamespace and conparentid = 0 and contype not in ('n', 't')
        and conrelid::regclass::text !~ 'alembic_version|_[0-9]+$'
    union all
    select 'index', tablename, indexname, indexdef, '', '', ''
    from pg_indexes where schemaname = 'indexer' and tablename <> 'alembic_version' and tablename !~ '_[0-9]+$'
    union all
    select 'options', oid::regclass::text, '', coalesce(reloptions::text, ''), '', '', ''
    from pg_class where relnamespace = 'indexer'::regnamespace and relkind in ('r', 'p') and not relispartition
        and relname <> 'alembic_version'
    order by 1, 2, 3
"""

VIEWS = {
    "repos": "did handle pds sync_status sync_reason rev data hosting_status takedown visible resync_attempts "
    "next_attempt_at last_error synchronized_at updated_at bucket",
    "records": "did collection rkey uri cid rev value value_problem indexed_at bucket",
    "changes": "seq did collection rkey action cid rev live time",
    "cursors": "relay shard seq event_time updated_at caught_up_at",
    "hosts": "host requests failures failures_in_a_row paused_until pause_reason last_error last_success_at updated_at",
    "rejected": "id relay seq did kind reason time",
    "blobs": "did cid mime_type size collection rkey uri bucket",
    "links": "target target_kind did collection rkey path bucket",
    "link_progress": "state buckets_done buckets repos_done enabled_at completed_at",
}


async def catalog(dsn: str) -> list[tuple[str, ...]]:
    connection = await asyncpg.connect(dsn)
    try:
        return [tuple(row) for row in await connection.fetch(CATALOG)]
    finally:
        await connection.close()


async def test_the_migrations_give_the_schema_of_the_metadata(database: str, empty_database: str) -> None:
    async def connect() -> asyncpg.Connection:
        return await asyncpg.connect(empty_database)

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect)
    async with engine.begin() as connection:
        await connection.execute(CreateSchema("indexer"))
        await connection.run_sync(metadata.create_all)
    await engine.dispose()
    migrated = await catalog(database)
    assert len(migrated) > 80
    assert migrated == await catalog(empty_database)


@pytest.mark.slow
async def test_concurrent_migrations_succeed(empty_database: str) -> None:
    assert not await schema_is_current(empty_database)
    await asyncio.gather(*[migrate(empty_database) for _ in range(3)])
    assert await schema_is_current(empty_database)


async def test_a_schema_of_another_version_is_not_current(database: str, sql: asyncpg.Connection) -> None:
    assert await schema_is_current(database)
    await sql.execute("update indexer.alembic_version set version_num = 'later'")
    assert not await schema_is_current(database)


async def test_a_missing_database_is_a_database_error(tmp_path: Path) -> None:
    dsn = f"postgresql://postgres@/none?host={tmp_path}"
    with pytest.raises(DatabaseError):
        await migrate(dsn)
    with pytest.raises(DatabaseError):
        await schema_is_current(dsn)


async def test_the_public_views_have_their_columns(sql: asyncpg.Connection) -> None:
    for view, columns in VIEWS.items():
        rows = await sql.fetch(
            "select column_name from information_schema.columns where table_schema = 'atproto' and table_name = $1 "
            "order by ordinal_position",
            view,
        )
        assert [row[0] for row in rows] == columns.split()


async def test_every_table_view_function_and_public_column_has_a_comment(sql: asyncpg.Connection) -> None:
    undocumented = await sql.fetch(
        "select relname from pg_class where relnamespace::regnamespace::text in ('indexer', 'atproto') "
        "and relkind in ('r', 'v') and obj_description(oid, 'pg_class') is null and relname <> 'alembic_version' "
        "union all select proname from pg_proc where pronamespace::regnamespace::text in ('indexer', 'atproto') "
        "and obj_description(oid, 'pg_proc') is null "
        "union all select attrelid::regclass || '.' || attname from pg_attribute where attnum > 0 and not attisdropped "
        "and attrelid in (select oid from pg_class where relnamespace = 'atproto'::regnamespace) "
        "and col_description(attrelid, attnum) is null"
    )
    assert undocumented == []


async def test_sql_and_python_compute_the_same_cids_and_buckets(sql: asyncpg.Connection) -> None:
    numbers = random.Random(7)
    cids = [cid_of(numbers.randbytes(8)) for _ in range(300)] + [b"\x01\x55\x12\x20" + b"\xff" * 32, bytes(36)]
    texts = await sql.fetchval(
        "select array_agg(atproto.cid_text(c) order by n) from unnest($1::bytea[]) with ordinality as t(c, n)", cids
    )
    assert texts == [cid_text(cid) for cid in cids]
    dids = [did(number) for number in range(300)] + ["did:web:bücher.example"]
    buckets = await sql.fetchval(
        "select array_agg(indexer.bucket_of(d) order by n) from unnest($1::text[]) with ordinality as t(d, n)", dids
    )
    assert buckets == [bucket_of(one) for one in dids]


async def test_role_atproto_reader_reads_the_public_schema_only(store: Store, sql: asyncpg.Connection) -> None:
    repo = synchronized(1)
    await insert(store, repo, changes=(put("app.test/a"),))
    await sql.execute("update indexer.record set original = 'abc'")
    await sql.execute("set role atproto_reader")
    for view in VIEWS:
        await sql.fetch(f"select * from atproto.{view}")  # noqa: S608
    assert await sql.fetchval("select uri from atproto.records") == f"at://{repo.did}/app.test/a"
    assert await sql.fetchval("select atproto.record_bytes($1, 'app.test', 'a')", repo.did) == b"abc"
    for forbidden in (
        "select * from indexer.record",
        "select indexer.bucket_of('did:plc:a')",
        "select atproto.request_resync('did:plc:a')",
        "select atproto.request_takedown('did:plc:a', true)",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await sql.execute(forbidden)


async def test_records_of_invisible_repos_are_not_shown(store: Store, sql: asyncpg.Connection) -> None:
    await insert(
        store,
        synchronized("shown"),
        synchronized("inactive", active=False, hosting_status="deactivated"),
        synchronized("taken down", takedown=True),
        changes=(put("app.test/a"),),
    )
    await sql.execute("update indexer.record set original = 'abc'")
    assert set(await store.visible_repos()) == {did("shown")}
    assert {row[0] for row in await sql.fetch("select did from atproto.records")} == {did("shown")}
    for name, expected in {"shown": b"abc", "inactive": None, "taken down": None}.items():
        assert await sql.fetchval("select atproto.record_bytes($1, 'app.test', 'a')", did(name)) == expected
    hosting = {tuple(row) for row in await sql.fetch("select did, hosting_status from atproto.repos")}
    assert hosting == {(did("shown"), "active"), (did("inactive"), "deactivated"), (did("taken down"), "active")}


async def test_a_takedown_hides_records_and_can_be_reversed(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, synchronized(1), changes=(put("app.test/a"),))
    assert await store.set_takedown(did(1), on=True)
    assert await store.visible_records(did(1)) == {}
    assert (await store.repos([did(1)]))[did(1)].version == 2
    assert await store.set_takedown(did(1), on=False)
    assert list(await store.visible_records(did(1))) == ["app.test/a"]
    assert not await store.set_takedown(did("unknown"), on=True)


async def test_a_commit_updates_no_index_of_the_repo_table(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, synchronized(1))
    async with sql.transaction():
        repo = synchronized(1, version=2, head=head("3lbbbbbbbbb22"), latest_verified_rev="3lbbbbbbbbb22")
        assert not (await apply(sql, Batch((RepoWrite(1, repo),)))).skipped
        assert await sql.fetchval("select pg_stat_get_xact_tuples_hot_updated('indexer.repo'::regclass)") == 1


@pytest.mark.slow
async def test_a_claim_reads_few_rows_although_the_planner_expects_none(store: Store, sql: asyncpg.Connection) -> None:
    """The statistics of the planner may be older than a request for millions of repos."""
    await insert(store, *[synchronized(n) for n in range(20_000)])
    await sql.execute("analyze indexer.repo")
    await sql.execute("update indexer.repo set sync_status = 'desynchronized'")
    for mode in ("force_custom_plan", "force_generic_plan"):
        await sql.execute(f"set plan_cache_mode = {mode}")
        due = await sql.fetch(DUE, 8, list(range(256)), 5.0, 77)
        explain = "explain (analyze, costs off, timing off) " + CLAIM
        rows = await sql.fetch(explain, [row["bucket"] for row in due], [row["did"] for row in due], 5.0, 60.0)
        plan = "\n".join(row[0] for row in rows)
        removed = [int(rows) for rows in re.findall(r"Rows Removed by Filter: (\d+)", plan)]
        assert "Seq Scan" not in plan and sum(removed) < 20, plan  # noqa: PT018
        assert "repo_due" not in plan, plan


@pytest.mark.slow
async def test_frequent_statements_use_indexes(store: Store, sql: asyncpg.Connection) -> None:
    """They are a query for due repos, and `where did = …` on a public view."""
    await sql.execute(
        "insert into indexer.repo (did, bucket, version, sync_status, active, hosting_seq, takedown, buffered_events, "
        "buffered_bytes, lease, attempts) select 'did:plc:' || n, indexer.bucket_of('did:plc:' || n), 1, "
        "'desynchronized', true, 0, false, 0, 0, 0, 0 from generate_series(1, 20000) n"
    )
    await sql.execute("analyze indexer.repo")
    await sql.execute("set plan_cache_mode = force_generic_plan")
    explain = "explain (analyze, costs off, timing off) " + DUE
    for buckets in ([3], list(range(256))):
        plan = "\n".join(row[0] for row in await sql.fetch(explain, 1, buckets, 5.0, 77))
        assert "Seq Scan on repo" not in plan
        reads = re.findall(r"Index Scan using repo_due .*rows=(\d+)\S* loops=(\d+)", plan)
        assert len(reads) == 1, plan
        assert all(int(rows) <= 1 and int(loops) <= 3 * len(buckets) for rows, loops in reads), plan
    plan = "\n".join(row[0] for row in await sql.fetch("explain select * from atproto.repos where did = 'did:plc:7'"))
    assert "repo_pkey" in plan


@pytest.mark.slow
async def test_maintenance_of_the_queue_reads_only_rows_that_are_due(store: Store, sql: asyncpg.Connection) -> None:
    """Half of all repos are parked, a hundredth of them long enough. Few repos lack values, and few are unproven."""
    await sql.execute(
        "insert into indexer.repo (did, bucket, version, sync_status, rev, data, commit, active, hosting_seq, "
        "takedown, buffered_events, buffered_bytes, lease, attempts, next_attempt_at, synchronized_at, updated_at) "
        "select did, indexer.bucket_of(did), 1, case when n % 2 = 0 then 'synchronized' else 'desynchronized' end, "
        "'3l', '', '', true, 0, false, 0, 0, 0, 0, case when n % 2 = 1 then 'infinity'::timestamptz end, "
        "'epoch', to_timestamp(n) from generate_series(1, 20000) n, concat('did:plc:', n) did"
    )
    await sql.execute(
        "insert into indexer.record (did, collection, rkey, bucket, cid, rev, value_problem) select did, 'a.b', 'c', "
        "bucket, '', '3l', case when did like '%77' then 'missing' end from indexer.repo"
    )
    await sql.execute("update indexer.repo set unproven_since = now() where did like '%78'")
    await sql.execute("analyze indexer.repo, indexer.record; set plan_cache_mode = force_generic_plan")
    explain = "explain (analyze, costs off, timing off) "
    plan = "\n".join(row[0] for row in await sql.fetch(explain + UNPROVEN, 200.0, list(range(256)), 60))
    assert re.search(r"Index Scan using repo_unproven .*rows=60\b", plan), plan
    plan = "\n".join(row[0] for row in await sql.fetch(explain + PARKED, 200.0, list(range(256)), 50))
    assert re.search(r"Limit .*rows=50\b", plan), plan
    assert re.search(r"Index Scan using repo_parked .*rows=50\b", plan), plan
    every = list(range(256))
    plan = "\n".join(row[0] for row in await sql.fetch(explain + INCOMPLETE, 5.0, every, 500, every))
    assert "Seq Scan" not in plan
    assert re.search(r"record_missing .*rows=200\b", plan), plan


async def test_sql_and_python_have_the_same_order_of_hashes(sql: asyncpg.Connection) -> None:
    assert tuple(await sql.fetchval("select indexer.hash_order()")) == HASH_ORDER
