"""The schema: migrations and files, functions, and the definition of a visible repo."""

import random
from itertools import product
from pathlib import Path

import asyncpg
import pytest

from indexer.atproto.cid import cid_of, cid_text
from indexer.db import Database
from indexer.db.columns import storable
from indexer.db.migrate import migrate
from indexer.db.write import write
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.shard import BUCKETS, bucket_of
from tests.db.change_log_helpers import connected
from tests.db.later_release import use_later_release
from tests.db.repo_rows import did, head, insert, put, synchronized
from tests.previous_release import run_previous, unpack_previous_release

CATALOG = """
    with of_schema (oid) as (select oid from pg_namespace where nspname in ('indexer', 'atproto', 'lexicon'))
    select 'column' as kind, c.oid::regclass::text as relation, attname::text as name, concat_ws(
        ' ', format_type(atttypid, atttypmod), attcollation::regcollation, attnotnull, attidentity, attgenerated,
        attstorage, pg_get_expr(adbin, adrelid), col_description(c.oid, attnum)
    ) as definition
    from pg_attribute join pg_class c on c.oid = attrelid left join pg_attrdef on adrelid = attrelid and adnum = attnum
    where relnamespace in (select oid from of_schema) and relkind in ('r', 'p', 'v') and attnum > 0 and not attisdropped
    union all
    select 'relation', oid::regclass::text, relkind::text, concat_ws(
        ' ', reloptions, relacl, obj_description(oid, 'pg_class'), case relkind when 'v' then pg_get_viewdef(oid) end
    )
    from pg_class where relnamespace in (select oid from of_schema) and relkind in ('r', 'p', 'v', 'S')
    union all
    select 'constraint', conrelid::regclass::text, conname, replace(pg_get_constraintdef(oid), ' NOT VALID', '')
    from pg_constraint where connamespace in (select oid from of_schema) and contype not in ('n', 't')
    union all
    select 'index', tablename, indexname, indexdef from pg_indexes where schemaname = 'indexer'
    union all
    select 'trigger', tgrelid::regclass::text, tgname, pg_get_triggerdef(t.oid)
    from pg_trigger t join pg_class c on c.oid = tgrelid
    where relnamespace in (select oid from of_schema) and not tgisinternal
    union all
    select 'function', oid::regprocedure::text, '', concat_ws(
        ' ', pg_get_functiondef(oid), proacl, obj_description(oid, 'pg_proc')
    )
    from pg_proc where pronamespace in (select oid from of_schema)
    order by 1, 2, 3
"""


async def catalog(dsn: str) -> list[tuple[str, ...]]:
    async with connected(dsn) as sql:
        return [tuple(row) for row in await sql.fetch(CATALOG)]


async def test_database_of_the_previous_release_gets_the_schema_of_the_files(
    database: str, empty_database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A column that a version adds, and the files have not, is the only difference that the comparison finds."""
    previous = unpack_previous_release(tmp_path)
    migrated = run_previous(previous, "-m", "indexer", "migrate", INDEXER_DATABASE_URL=empty_database)
    assert migrated.returncode == 0, migrated.stderr
    await migrate(empty_database)
    async with connected(database) as connection:
        await connection.execute("drop function indexer.check_transition cascade")  # only tests have it
    expected = await catalog(database)
    assert len(expected) > 400
    assert await catalog(empty_database) == expected
    use_later_release(monkeypatch, tmp_path, ["alter table indexer.repo add column later integer"])
    await migrate(empty_database)
    added = {*await catalog(empty_database)} ^ {*expected}
    assert {row[:3] for row in added} == {("column", "indexer.repo", "later")}


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
    order = await sql.fetchval("select indexer.hash_order()")
    assert sorted(order) == list(range(BUCKETS))
    assert [*order[:4], *order[-4:]] == [60, 146, 139, 8, 107, 222, 75, 18]


async def test_a_commit_updates_no_index_of_the_repo_table(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, synchronized(1))
    async with sql.transaction():
        repo = synchronized(1, version=2, head=head("3lbbbbbbbbb22"), latest_verified_rev="3lbbbbbbbbb22")
        assert not (await write(sql, Batch((RepoWrite(synchronized(1), repo),)))).skipped
        assert await sql.fetchval("select pg_stat_get_xact_tuples_hot_updated('indexer.repo'::regclass)") == 1


async def test_python_sql_and_views_agree_on_visible_repos(db: Database, sql: asyncpg.Connection) -> None:
    repos = [
        synchronized(number, active=active, takedown=takedown, hosting_status=hosting_status)
        for number, (active, takedown, hosting_status) in enumerate(
            product([False, True], [False, True], [None, "deactivated", "deleted"])
        )
    ]
    await insert(db, *repos, changes=(put("app.test/a"),))
    await sql.execute("update indexer.record set original = 'abc'")
    for repo in repos:
        expected = repo.active and not repo.takedown
        assert repo.visible is expected
        assert await sql.fetchval("select visible from indexer.repo where did = $1", repo.did) is expected
        assert await sql.fetchval("select visible from atproto.repos where did = $1", repo.did) is expected
        assert await sql.fetchval("select count(*) from atproto.records where did = $1", repo.did) == expected
        found = await sql.fetchval("select atproto.record_bytes($1, 'app.test', 'a')", repo.did)
        assert found == (b"abc" if expected else None)
        report = await db.reports.repo(repo.did)
        assert report is not None
        assert report["visible"] is expected


@pytest.mark.parametrize(
    ("text", "expected"), [("a\0b", "a\ufffdb"), ("\ud800", "?"), ("é 🦋", "é 🦋"), ("", ""), (None, None)]
)
def test_text_from_outside_is_made_storable(text: str | None, expected: str | None) -> None:
    assert storable(text) == expected
