"""The schema: migrations and metadata, functions, and the definition of a visible repo."""

import random
from itertools import product

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.schema import CreateSchema

from indexer.atproto.cid import cid_of, cid_text
from indexer.store import Store
from indexer.store.apply_batch import apply
from indexer.store.columns import storable, visible
from indexer.store.schema import metadata
from indexer.sync.changes import visibility_of
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


async def test_sql_and_python_compute_the_same_cids_and_buckets_and_order_of_hashes(sql: asyncpg.Connection) -> None:
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
    assert tuple(await sql.fetchval("select indexer.hash_order()")) == HASH_ORDER


async def test_a_commit_updates_no_index_of_the_repo_table(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, synchronized(1))
    async with sql.transaction():
        repo = synchronized(1, version=2, head=head("3lbbbbbbbbb22"), latest_verified_rev="3lbbbbbbbbb22")
        assert not (await apply(sql, Batch((RepoWrite(1, repo),)))).skipped
        assert await sql.fetchval("select pg_stat_get_xact_tuples_hot_updated('indexer.repo'::regclass)") == 1


async def test_python_sql_and_views_agree_on_visible_repos(store: Store, sql: asyncpg.Connection) -> None:
    repos = [
        synchronized(number, active=active, takedown=takedown, hosting_status=hosting_status)
        for number, (active, takedown, hosting_status) in enumerate(
            product([False, True], [False, True], [None, "deactivated", "deleted"])
        )
    ]
    await insert(store, *repos, changes=(put("app.test/a"),))
    await sql.execute("update indexer.record set original = 'abc'")
    conditions = f"select {visible('r')}, not {visible('r')} from indexer.repo r where did = $1"  # noqa: S608
    for repo in repos:
        expected = repo.active and not repo.takedown
        assert repo.visible is visibility_of(repo).visible is expected
        assert tuple(await sql.fetchrow(conditions, repo.did) or ()) == (expected, not expected)
        assert await sql.fetchval("select visible from atproto.repos where did = $1", repo.did) is expected
        assert await sql.fetchval("select count(*) from atproto.records where did = $1", repo.did) == expected
        found = await sql.fetchval("select atproto.record_bytes($1, 'app.test', 'a')", repo.did)
        assert found == (b"abc" if expected else None)
        report = await store.repo_report(repo.did)
        assert report is not None
        assert report["visible"] is expected


@pytest.mark.parametrize(
    ("text", "expected"), [("a\0b", "a\ufffdb"), ("\ud800", "?"), ("é 🦋", "é 🦋"), ("", ""), (None, None)]
)
def test_text_from_outside_is_made_storable(text: str | None, expected: str | None) -> None:
    assert storable(text) == expected
