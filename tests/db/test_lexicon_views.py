# ruff: noqa: S608 - the names of the views are constants
"""Typed views are added, changed, removed, and made again by a release, while others use them."""

import asyncio
import re
from pathlib import Path

import asyncpg
import pytest

from indexer.db import Database, DatabaseError
from indexer.db.lexicons import AddedState
from indexer.db.migrate import migrate
from indexer.errors import SettingsError, ViewInUseError
from tests.db.change_log_helpers import connected
from tests.db.later_release import use_later_release
from tests.db.lexicon_views import COLUMNS, LIKES, VIEW, columns, put_reviews
from tests.db.repo_rows import waiting_for_locks
from tests.lexicons.samples import (
    DEFS_DOCUMENT,
    LIKE,
    LIKE_DOCUMENT,
    QUERY_DOCUMENT,
    REVIEW,
    REVIEW_DOCUMENT,
    REVIEW_VALUE,
    copy_of,
    properties_of,
    sourced,
)
from tests.waiting import until

pytestmark = pytest.mark.slow


async def test_new_optional_field_is_appended_while_a_query_reads_the_view(
    database: str, reviews: Database, sql: asyncpg.Connection
) -> None:
    """A view of a user stays valid, and columns keep their positions although the field is the first of the lexicon."""
    await sql.execute(f"create view public.own as select title, stars from {VIEW}")
    before = await columns(sql, VIEW)
    changed = copy_of(REVIEW_DOCUMENT)
    properties = properties_of(changed)
    changed["defs"]["main"]["record"]["properties"] = {"createdAT": {"type": "integer"}, **properties}
    async with connected(database) as reader, reader.transaction():
        await reader.fetch("select title from public.own")  # holds a lock until the transaction ends
        adding = asyncio.create_task(reviews.lexicons.add(sourced(changed)))
        await until(lambda: waiting_for_locks(sql, 1))
    results = {result.nsid: result.state for result in await adding}
    assert results[REVIEW] is AddedState.UPDATED
    after = await columns(sql, VIEW)
    assert list(after.items()) == [*before.items(), ("created_at_2", "bigint")]
    assert await sql.fetch("select * from public.own") == []


async def test_changed_type_replaces_the_view(reviews: Database, sql: asyncpg.Connection) -> None:
    changed = copy_of(REVIEW_DOCUMENT)
    properties_of(changed)["stars"] = {"type": "string"}
    del properties_of(changed)["public"]
    await reviews.lexicons.add(sourced(changed))
    found = await columns(sql, VIEW)
    assert found["stars"] == "text"
    assert "public" not in found
    await sql.execute("set role atproto_reader")
    await sql.fetch(f"select * from {VIEW}")


async def test_views_of_users_are_never_dropped(reviews: Database, sql: asyncpg.Connection) -> None:
    await sql.execute(f"create view public.own as select stars from {VIEW}")
    changed = copy_of(REVIEW_DOCUMENT)
    properties_of(changed)["stars"] = {"type": "string"}
    before = await columns(sql, VIEW)
    with pytest.raises(ViewInUseError, match=r"view public\.own depends on view lexicon"):
        await reviews.lexicons.add(sourced(changed, LIKE_DOCUMENT))
    with pytest.raises(ViewInUseError, match=r"view public\.own depends on view lexicon"):
        await reviews.lexicons.remove([REVIEW])
    assert await columns(sql, VIEW) == before
    assert LIKE not in await reviews.lexicons.load()
    await sql.execute(f"create view {LIKES} as select 1 as own")
    with pytest.raises(ViewInUseError, match="exists and is not a view of a lexicon"):
        await reviews.lexicons.add(sourced(LIKE_DOCUMENT))
    assert await sql.fetchval(f"select own from {LIKES}") == 1


async def test_two_lexicons_whose_views_would_have_one_name_are_refused(reviews: Database) -> None:
    """An authority has found two long NSIDs with the same hash."""
    authority = f"com.example.{50 * 'x'}"
    first, second = (copy_of(LIKE_DOCUMENT) | {"id": f"{authority}.a{number}"} for number in (128_547, 139_186))
    await reviews.lexicons.add(sourced(first))
    before = await reviews.lexicons.load()
    with pytest.raises(ViewInUseError, match=r"view of another lexicon has this name: .*_07fdd347\)"):
        await reviews.lexicons.add(sourced(second, LIKE_DOCUMENT))
    assert await reviews.lexicons.load() == before


async def test_only_a_change_of_a_view_waits_for_its_readers_and_not_forever(database: str, reviews: Database) -> None:
    changed = copy_of(REVIEW_DOCUMENT)
    properties_of(changed)["new"] = {"type": "integer"}
    async with connected(database) as reader, reader.transaction():
        await reader.fetch(f"select * from {VIEW}")
        results = await reviews.lexicons.add(sourced(REVIEW_DOCUMENT))
        assert {result.state for result in results} == {AddedState.UNCHANGED}
        with pytest.raises(DatabaseError, match="open transactions use a typed view that has to change"):
            await reviews.lexicons.add(sourced(changed))


async def test_type_of_a_field_becomes_known_with_the_lexicon_that_it_refers_to(
    db: Database, sql: asyncpg.Connection
) -> None:
    [result] = await db.lexicons.add(sourced(REVIEW_DOCUMENT))
    assert result.unknown == ("com.elsewhere.defs", "com.example.defs")
    assert (await columns(sql, VIEW))["kind"] == "jsonb"
    results = {result.nsid: result for result in await db.lexicons.add(sourced(DEFS_DOCUMENT, QUERY_DOCUMENT))}
    assert {nsid: result.state for nsid, result in results.items()} == {
        REVIEW: AddedState.UPDATED,
        DEFS_DOCUMENT["id"]: AddedState.ADDED,
        QUERY_DOCUMENT["id"]: AddedState.SKIPPED,
    }
    assert (await columns(sql, VIEW))["kind"] == "text"
    assert set(await db.lexicons.load()) == {REVIEW, DEFS_DOCUMENT["id"]}


async def test_removal_drops_the_view_and_lexicons_that_only_it_refers_to(
    reviews: Database, sql: asyncpg.Connection
) -> None:
    await reviews.lexicons.add(sourced(LIKE_DOCUMENT))
    await reviews.lexicons.remove([REVIEW])
    assert list(await reviews.lexicons.load()) == [LIKE]
    assert await sql.fetchval("select to_regclass($1)", VIEW) is None


REPLACE_VIEW = [
    "create table public.definition as select pg_get_viewdef('atproto.records'::regclass) as query",
    "drop view atproto.records cascade",
    """
    do $$ begin
        execute 'create view atproto.records as select *, 1 as added from (' ||
            (select rtrim(query, ';') from public.definition) || ') before';
    end $$
    """,
]


async def test_migration_that_replaces_the_public_view_recreates_typed_views(
    database: str,
    reviews: Database,
    sql: asyncpg.Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await put_reviews(reviews, REVIEW_VALUE)
    before = [tuple(row) for row in await sql.fetch(COLUMNS, VIEW)]
    use_later_release(monkeypatch, tmp_path, REPLACE_VIEW)
    await migrate(database)
    assert await sql.fetchval("select added from atproto.records") == 1
    assert [tuple(row) for row in await sql.fetch(COLUMNS, VIEW)] == before
    await sql.execute("set role atproto_reader")
    assert await sql.fetchval(f"select title from {VIEW}") == "Grüße"


NEW_TYPE = [
    "create table public.half_way ()",
    """
    do $$ begin
        execute replace(
            pg_get_functiondef('indexer.lexicon_expressions(jsonb)'::regprocedure),
            'lexicon.to_text(%s, %s)', 'lexicon.to_text(%s, %s)::varchar'
        );
    end $$
    """,
]


async def test_release_that_would_drop_a_view_of_a_user_migrates_nothing_and_names_it(
    database: str, reviews: Database, sql: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No release should change a type: see `SQL_TYPES`."""
    await put_reviews(reviews, REVIEW_VALUE)
    await sql.execute(f"create view public.titles as select title from {VIEW}")
    latest = await sql.fetchval("select version_num from indexer.alembic_version")
    use_later_release(monkeypatch, tmp_path, NEW_TYPE)
    with pytest.raises(SettingsError) as error:
        await migrate(database)
    assert re.search(
        rf'view (public.)?titles depends on view lexicon."{REVIEW}"; nothing was changed', str(error.value)
    )
    assert "CASCADE" not in str(error.value)
    assert await sql.fetchval("select version_num from indexer.alembic_version") == latest
    assert await sql.fetchval("select to_regclass('public.half_way')") is None
    assert await sql.fetchval("select title from public.titles") == REVIEW_VALUE["title"]
    await sql.execute("drop view public.titles")
    await migrate(database)
    assert (await columns(sql, VIEW))["title"] == "character varying"
