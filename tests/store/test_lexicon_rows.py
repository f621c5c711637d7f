# ruff: noqa: S608 - the names of the views are constants
"""Typed views of lexicons."""

import asyncio
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from indexer.atproto.lexicon import FieldKind, RecordField
from indexer.errors import SettingsError
from indexer.store import AddedState, DatabaseError, Store, ViewInUseError
from indexer.store import migrate as migrate_module
from indexer.store.lexicon_columns import KEY_COLUMNS, plan_columns
from indexer.store.migrate import migrate, migrations_folder
from tests.lexicons.samples import (
    CID,
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
from tests.store.change_log_helpers import connected
from tests.store.repo_rows import did, insert, put, synchronized, waiting_for_locks
from tests.waiting import until

pytestmark = pytest.mark.slow

VIEW = f'lexicon."{REVIEW}"'
LIKES = f'lexicon."{LIKE}"'
COLUMNS = """
    select attname as name, format_type(atttypid, atttypmod) as type, col_description(attrelid, attnum) as comment
    from pg_attribute where attrelid = $1::regclass and attnum > 0 order by attnum
"""


async def put_reviews(store: Store, *values: Any) -> None:
    """Insert a repo with a record of each value; the record keys are numbers from 0."""
    changes = [put(f"{REVIEW}/{number}", json.dumps(value)) for number, value in enumerate(values)]
    await insert(store, synchronized(1), changes=tuple(changes))


async def columns(sql: asyncpg.Connection, view: str) -> dict[str, str]:
    return {row["name"]: row["type"] for row in await sql.fetch(COLUMNS, view)}


@pytest.fixture
async def reviews(store: Store) -> Store:
    """Return a store with the view of reviews."""
    await store.add_lexicons(sourced(REVIEW_DOCUMENT, DEFS_DOCUMENT))
    return store


async def test_each_type_of_field_has_its_column(reviews: Store, sql: asyncpg.Connection) -> None:
    found = await columns(sql, VIEW)
    assert list(found)[:7] == list(KEY_COLUMNS)
    assert dict(list(found.items())[7:]) == {
        "title": "text",
        "stars": "bigint",
        "public": "boolean",
        "created_at": "timestamp with time zone",
        "tags": "text[]",
        "scores": "jsonb",
        "place": "jsonb",
        "details": "jsonb",
        "kind": "text",
        "mystery": "jsonb",
        "subject_uri": "text",
        "subject_cid": "text",
        "photo_cid": "text",
        "photo_mime_type": "text",
        "photo_size": "bigint",
        "previous": "text",
        "secret": "jsonb",
        "note": "text",
        "uri_2": "text",
        "foo_bar": "text",
        "foo_bar_2": "text",
        "a_b_": "text",
    }


async def test_row_has_the_values_of_its_record(reviews: Store, sql: asyncpg.Connection) -> None:
    await put_reviews(reviews, REVIEW_VALUE)
    row = await sql.fetchrow(f"select * from {VIEW}")
    assert row is not None
    values = dict(row)
    public = await sql.fetchrow("select did, rkey, uri, cid, rev, indexed_at from atproto.records")
    assert public is not None
    assert {name: values.pop(name) for name in public.keys()} == dict(public)  # noqa: SIM118 - a record of the driver
    objects = ("scores", "place", "details", "mystery", "secret")
    assert {name: json.loads(values.pop(name)) for name in objects} == {name: REVIEW_VALUE[name] for name in objects}
    assert values == {
        "lexicon_problem": None,
        "title": "Grüße",
        "stars": 5,
        "public": True,
        "created_at": datetime(2024, 2, 29, 10, 0, 0, 500_000, UTC),
        "tags": ["a", "b"],
        "kind": "a",
        "subject_uri": REVIEW_VALUE["subject"]["uri"],
        "subject_cid": CID,
        "photo_cid": CID,
        "photo_mime_type": "image/png",
        "photo_size": 1234,
        "previous": CID,
        "note": None,
        "uri_2": "https://example.com",
        "foo_bar": "1",
        "foo_bar_2": "2",
        "a_b_": "3",
    }


WRONG: dict[str, tuple[Any, str]] = {
    "title": (7, "expected string, found number"),
    "stars": (1.5, "not a 64-bit integer"),
    "public": ("true", "expected boolean, found string"),
    "createdAt": ("2024-02-30T12:00:00Z", "not a datetime"),
    "tags": (["a", 1], "an item is not a string"),
    "scores": ({}, "expected array, found object"),
    "place": ("here", "expected object, found string"),
    "details": ([], "expected object, found array"),
    "kind": (None, "null"),
    "subject": ({"uri": 1, "cid": CID}, "not a strong reference"),
    "photo": ({"$type": "blob"}, "not a blob"),
    "previous": ({"$link": 1}, "not a link"),
    "secret": ("AQI", "expected object, found string"),
    "uri": ("x" * 8_193, "longer than 8192 bytes"),
}


async def test_value_that_does_not_fit_is_null_with_the_reason(reviews: Store, sql: asyncpg.Connection) -> None:
    await put_reviews(reviews, *[REVIEW_VALUE | {name: value} for name, (value, _) in WRONG.items()])
    rows = await sql.fetch(f"select * from {VIEW} order by rkey::int")
    column_of = {"createdAt": "created_at", "subject": "subject_uri", "photo": "photo_cid", "uri": "uri_2"}
    assert len(rows) == len(WRONG)
    for row, (name, (_, problem)) in zip(rows, WRONG.items(), strict=True):
        assert row[column_of.get(name, name)] is None, name
        assert row["lexicon_problem"] == f"{name}: {problem}"


async def test_every_wrong_value_of_a_record_is_reported_at_once(reviews: Store, sql: asyncpg.Connection) -> None:
    wrong = {name: value for name, (value, _) in WRONG.items()}
    await put_reviews(reviews, REVIEW_VALUE | wrong, {"$type": REVIEW, "tags": ["x" * 11], "title": "é" * 11})
    first, second = [row[0] for row in await sql.fetch(f"select lexicon_problem from {VIEW} order by rkey")]
    assert first == "; ".join(f"{name}: {problem}" for name, (_, problem) in WRONG.items())
    assert second == (
        "title: longer than 20 bytes; stars: missing; createdAt: missing; tags: an item is longer than 10 bytes"
    )


async def test_required_field_that_may_be_null_must_be_present(store: Store, sql: asyncpg.Connection) -> None:
    document = copy_of(LIKE_DOCUMENT)
    document["defs"]["main"]["record"] |= {
        "required": ["a", "b"],
        "nullable": ["a", "c"],
        "properties": {name: {"type": "string"} for name in "abc"},
    }
    await store.add_lexicons(sourced(document))
    values = ({"a": None, "b": "b", "c": None}, {"b": None}, {"a": "a", "b": "b"}, {"a": 1, "b": "b", "c": 1})
    changes = [put(f"{LIKE}/{number}", json.dumps(value)) for number, value in enumerate(values)]
    await insert(store, synchronized(1), changes=tuple(changes))
    assert [row[0] for row in await sql.fetch(f"select lexicon_problem from {LIKES} order by rkey")] == [
        None,
        "a: missing; b: null",
        None,
        "a: expected string, found number; c: expected string, found number",
    ]


HOSTILE: tuple[Any, ...] = (
    *(0, 1e308, -1e-300, 9.3e18, "", "\ud7ff", "0000-02-29T00:00:00Z", "9999-12-31T23:59:59.9999999999Z", [], [[]]),
    *([None], {}, {"$link": []}, {"uri": {}, "cid": []}, {"ref": 1, "cid": 2, "size": "x", "mimeType": {}}, True, None),
    *({"ref": {"$link": {}}, "size": 1e30}, "2024-01-01T00:00:00+15:60", "0001-01-01T00:00:00+14:00", [1, "a", {}]),
)


async def test_no_record_makes_a_query_fail(reviews: Store, sql: asyncpg.Connection) -> None:
    """Not even one without a value, with another type, or that is no map."""
    values = [{name: value for name in REVIEW_VALUE if name != "$type"} for value in HOSTILE]
    await put_reviews(reviews, *values, "text", [1], 7, None)
    await sql.execute("update indexer.record set value = null, value_problem = 'too-large' where rkey = '0'")
    await sql.execute("update indexer.record set value_problem = 'other-type' where rkey = '1'")
    await sql.execute("update indexer.record set value_problem = 'not-a-map' where rkey = $1", str(len(values)))
    rows = {row["rkey"]: row for row in await sql.fetch(f"select * from {VIEW}")}
    assert len(rows) == len(values) + 4
    assert rows["0"]["lexicon_problem"] == "record: too-large"
    assert rows["1"]["lexicon_problem"].startswith("$type: other-type; title: ")
    assert rows[str(len(values))]["lexicon_problem"] == "record: not-a-map"
    assert all(row["lexicon_problem"] for row in rows.values())


async def test_blob_of_an_early_release_has_a_cid_and_no_size(reviews: Store, sql: asyncpg.Connection) -> None:
    await put_reviews(reviews, REVIEW_VALUE | {"photo": {"cid": CID, "mimeType": "image/jpeg"}})
    row = await sql.fetchrow(f"select lexicon_problem, photo_cid, photo_mime_type, photo_size from {VIEW}")
    assert tuple(row or ()) == (None, CID, "image/jpeg", None)


DATETIMES = {
    "1985-04-12T23:20:50.123Z": datetime(1985, 4, 12, 23, 20, 50, 123_000, UTC),
    "1985-04-12T23:20:50+01:45": datetime(1985, 4, 12, 21, 35, 50, 0, UTC),
    "1985-04-12T23:20:50.1234567899999Z": datetime(1985, 4, 12, 23, 20, 50, 123_457, UTC),
    "0001-01-01T00:00:00Z": datetime(1, 1, 1, tzinfo=UTC),
    "2000-02-29T00:00:00-15:59": datetime(2000, 2, 29, 15, 59, tzinfo=UTC),
    **dict.fromkeys(
        (
            "0000-01-01T00:00:00Z", "0000-02-29T00:00:00Z", "1900-02-29T00:00:00Z", "2023-02-29T00:00:00Z",
            "2023-04-31T00:00:00Z", "2023-13-01T00:00:00Z", "2023-01-01T24:00:00Z", "2023-01-01T00:60:00Z",
            "2023-01-01T00:00:60Z", "2023-01-01T00:00:00", "2023-01-01 00:00:00Z", "2023-01-01t00:00:00Z",
            "2023-01-01T00:00:00z", "2023-01-01T00:00:00-00:00", "2023-01-01T00:00:00+16:00", "2023-01-01T00:00Z",
            "2023-01-01T00:00:00.Z", "2023-01-01T00:00:00 UTC", "+002023-01-01T00:00:00Z", "now", "infinity",
            "2023-01-01T00:00:00Z\n", "٢٠٢٣-01-01T00:00:00Z", "0001-01-01T00:00:00+00:01", "9999-12-31T23:59:59-00:01",
        )
    ),
}  # fmt: skip


async def test_datetime_depends_on_no_setting(sql: asyncpg.Connection) -> None:
    """An index on it would otherwise be wrong for sessions with another setting."""
    for style, zone in (("German, DMY", "Asia/Kolkata"), ("SQL, MDY", "America/St_Johns"), ("ISO", "UTC")):
        await sql.execute(f"set datestyle = '{style}'")
        await sql.execute(f"set timezone = '{zone}'")
        found = {
            text: await sql.fetchval("select lexicon.to_timestamp(to_jsonb($1::text))", text) for text in DATETIMES
        }
        assert found == DATETIMES


async def test_functions_of_the_columns_are_immutable_and_parallel_safe(sql: asyncpg.Connection) -> None:
    rows = await sql.fetch(
        "select proname, provolatile, proparallel from pg_proc where pronamespace = 'lexicon'::regnamespace"
    )
    assert len(rows) >= 10
    assert {(row["provolatile"], row["proparallel"]) for row in rows} == {(b"i", b"s")}


async def test_hidden_repos_are_hidden_in_typed_views(reviews: Store, sql: asyncpg.Connection) -> None:
    await put_reviews(reviews, REVIEW_VALUE)
    await sql.execute("set role atproto_reader")
    assert await sql.fetchval(f"select count(*) from {VIEW}") == 1
    assert await reviews.set_takedown(did(1), on=True)
    assert await sql.fetchval(f"select count(*) from {VIEW}") == 0


async def test_public_roles_read_typed_views_and_change_nothing(database: str, reviews: Store) -> None:
    for role in ("atproto_reader", "atproto_operator"):
        async with connected(database) as connection:
            await connection.execute(f"set session authorization {role}")
            await connection.fetch(f"select * from {VIEW}")
            for forbidden in (
                "table indexer.lexicon",
                f"select indexer.create_lexicon_view('{REVIEW}')",
                f"select indexer.drop_lexicon_view('{REVIEW}')",
                f"drop view {VIEW}",
                "create view lexicon.own as select 1",
                f"delete from {VIEW}",
            ):
                with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.ObjectNotInPrerequisiteStateError)):
                    await connection.execute(forbidden)


async def test_everything_in_schema_lexicon_has_a_comment(reviews: Store, sql: asyncpg.Connection) -> None:
    rows = {row["name"]: row["comment"] for row in await sql.fetch(COLUMNS, VIEW)}
    assert rows["title"] == "title: It's the title."
    assert rows["subject_cid"] == "subject (CID)"
    assert all(rows.values())
    await reviews.add_lexicons(sourced(LIKE_DOCUMENT))
    assert await sql.fetchval(f"select obj_description('{LIKES}'::regclass)") == "A like."
    undocumented = await sql.fetch(
        "select proname from pg_proc where pronamespace = 'lexicon'::regnamespace "
        "and obj_description(oid, 'pg_proc') is null"
    )
    assert undocumented == []


async def test_new_optional_field_is_appended_while_a_query_reads_the_view(
    database: str, reviews: Store, sql: asyncpg.Connection
) -> None:
    """A view of a user stays valid, and columns keep their positions although the field is the first of the lexicon."""
    await sql.execute(f"create view public.own as select title, stars from {VIEW}")
    before = await columns(sql, VIEW)
    changed = copy_of(REVIEW_DOCUMENT)
    properties = properties_of(changed)
    changed["defs"]["main"]["record"]["properties"] = {"createdAT": {"type": "integer"}, **properties}
    async with connected(database) as reader, reader.transaction():
        await reader.fetch("select title from public.own")  # holds a lock until the transaction ends
        adding = asyncio.create_task(reviews.add_lexicons(sourced(changed)))
        await until(lambda: waiting_for_locks(sql, 1))
    results = {result.nsid: result.state for result in await adding}
    assert results[REVIEW] is AddedState.UPDATED
    after = await columns(sql, VIEW)
    assert list(after.items()) == [*before.items(), ("created_at_2", "bigint")]
    assert await sql.fetch("select * from public.own") == []


async def test_changed_type_replaces_the_view(reviews: Store, sql: asyncpg.Connection) -> None:
    changed = copy_of(REVIEW_DOCUMENT)
    properties_of(changed)["stars"] = {"type": "string"}
    del properties_of(changed)["public"]
    await reviews.add_lexicons(sourced(changed))
    found = await columns(sql, VIEW)
    assert found["stars"] == "text"
    assert "public" not in found
    await sql.execute("set role atproto_reader")
    await sql.fetch(f"select * from {VIEW}")


async def test_views_of_users_are_never_dropped(reviews: Store, sql: asyncpg.Connection) -> None:
    await sql.execute(f"create view public.own as select stars from {VIEW}")
    changed = copy_of(REVIEW_DOCUMENT)
    properties_of(changed)["stars"] = {"type": "string"}
    before = await columns(sql, VIEW)
    with pytest.raises(ViewInUseError, match=r"view public\.own depends on view lexicon"):
        await reviews.add_lexicons(sourced(changed, LIKE_DOCUMENT))
    with pytest.raises(ViewInUseError, match=r"view public\.own depends on view lexicon"):
        await reviews.remove_lexicons([REVIEW])
    assert await columns(sql, VIEW) == before
    assert LIKE not in await reviews.lexicons()


async def test_relation_of_a_user_is_never_replaced(store: Store, sql: asyncpg.Connection) -> None:
    await sql.execute(f"create view {VIEW} as select 1 as own")
    with pytest.raises(ViewInUseError, match="exists and is not a view of a lexicon"):
        await store.add_lexicons(sourced(REVIEW_DOCUMENT))
    assert await sql.fetchval(f"select own from {VIEW}") == 1


async def test_same_lexicon_again_changes_nothing_and_waits_for_no_reader(database: str, reviews: Store) -> None:
    async with connected(database) as reader, reader.transaction():
        await reader.fetch(f"select * from {VIEW}")
        results = await reviews.add_lexicons(sourced(REVIEW_DOCUMENT))
    assert {result.state for result in results} == {AddedState.UNCHANGED}


async def test_view_that_is_used_all_the_time_is_reported(database: str, reviews: Store) -> None:
    changed = copy_of(REVIEW_DOCUMENT)
    properties_of(changed)["new"] = {"type": "integer"}
    async with connected(database) as reader, reader.transaction():
        await reader.fetch(f"select * from {VIEW}")
        with pytest.raises(DatabaseError, match="open transactions use a typed view that has to change"):
            await reviews.add_lexicons(sourced(changed))


async def test_type_of_a_field_becomes_known_with_the_lexicon_that_it_refers_to(
    store: Store, sql: asyncpg.Connection
) -> None:
    [result] = await store.add_lexicons(sourced(REVIEW_DOCUMENT))
    assert result.unknown == ("com.elsewhere.defs", "com.example.defs")
    assert (await columns(sql, VIEW))["kind"] == "jsonb"
    results = {result.nsid: result for result in await store.add_lexicons(sourced(DEFS_DOCUMENT, QUERY_DOCUMENT))}
    assert {nsid: result.state for nsid, result in results.items()} == {
        REVIEW: AddedState.UPDATED,
        DEFS_DOCUMENT["id"]: AddedState.ADDED,
        QUERY_DOCUMENT["id"]: AddedState.SKIPPED,
    }
    assert (await columns(sql, VIEW))["kind"] == "text"
    assert set(await store.lexicons()) == {REVIEW, DEFS_DOCUMENT["id"]}


async def test_removal_drops_the_view_and_lexicons_that_only_it_refers_to(
    reviews: Store, sql: asyncpg.Connection
) -> None:
    await reviews.add_lexicons(sourced(LIKE_DOCUMENT))
    await reviews.remove_lexicons([REVIEW])
    assert list(await reviews.lexicons()) == [LIKE]
    assert await sql.fetchval("select to_regclass($1)", VIEW) is None


async def test_long_nsids_have_views_with_different_names(store: Store, sql: asyncpg.Connection) -> None:
    authority = ".".join(["com", "a" * 60, "b" * 60])
    documents = [copy_of(LIKE_DOCUMENT) | {"id": f"{authority}.{name}"} for name in ("one", "two")]
    await store.add_lexicons(sourced(*documents))
    names = [row[0] for row in await sql.fetch("select viewname from pg_views where schemaname = 'lexicon'")]
    assert len(names) == 2
    assert {len(name) for name in names} == {63}
    assert {name[:54] for name in names} == {authority[:54]}
    await insert(store, synchronized(1), changes=(put(f"{authority}.two/1"),))
    stored = (await store.lexicons())[f"{authority}.two"]
    assert await sql.fetchval(f'select count(*) from lexicon."{stored.view}"') == 1


MIGRATION = """
from alembic import op

revision, down_revision, branch_labels, depends_on = "9999", "{latest}", None, None


def upgrade() -> None:
    op.execute("create table public.definition as select pg_get_viewdef('atproto.records'::regclass) as query")
    op.execute("drop view atproto.records cascade")
    op.execute('''
        do $$ begin
            execute 'create view atproto.records as select *, 1 as added from (' ||
                (select rtrim(query, ';') from public.definition) || ') before';
        end $$
    ''')
"""


async def add_migration(
    sql: asyncpg.Connection, directory: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Let the next release have one migration more."""
    latest = await sql.fetchval("select version_num from indexer.alembic_version")
    folder = directory / "migrations"
    (folder / "versions").mkdir(parents=True)
    for path in (*migrations_folder().glob("*.*"), *migrations_folder().glob("versions/*.py")):
        (folder / path.relative_to(migrations_folder())).write_bytes(path.read_bytes())
    (folder / "versions" / "9999_new.py").write_text(content.format(latest=latest))
    monkeypatch.setattr(migrate_module, "migrations_folder", lambda: folder)


async def test_migration_that_replaces_the_public_view_recreates_typed_views(
    database: str,
    reviews: Store,
    sql: asyncpg.Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await put_reviews(reviews, REVIEW_VALUE)
    before = [tuple(row) for row in await sql.fetch(COLUMNS, VIEW)]
    await add_migration(sql, tmp_path, monkeypatch, MIGRATION)
    await migrate(database)
    assert await sql.fetchval("select added from atproto.records") == 1
    assert [tuple(row) for row in await sql.fetch(COLUMNS, VIEW)] == before
    await sql.execute("set role atproto_reader")
    assert await sql.fetchval(f"select title from {VIEW}") == "Grüße"


NEW_EXPRESSION = """
from alembic import op

revision, down_revision, branch_labels, depends_on = "9999", "{{latest}}", None, None


def upgrade() -> None:
    op.execute('create table public.half_way ()')
    op.execute('''
        do $$ begin
            execute replace(
                pg_get_functiondef('indexer.lexicon_expressions(jsonb)'::regprocedure),
                'lexicon.to_text(%s, %s)', '{expression}'
            );
        end $$
    ''')
"""


async def test_release_with_another_expression_of_the_same_type_keeps_the_views_of_users(
    database: str, reviews: Store, sql: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_reviews(reviews, REVIEW_VALUE)
    await sql.execute(f"create view public.titles as select title from {VIEW}")
    expression = "left(lexicon.to_text(%s, %s), 3)"
    await add_migration(sql, tmp_path, monkeypatch, NEW_EXPRESSION.format(expression=expression))
    await migrate(database)
    assert await sql.fetchval("select title from public.titles") == REVIEW_VALUE["title"][:3]


async def test_release_that_would_drop_a_view_of_a_user_migrates_nothing_and_names_it(
    database: str, reviews: Store, sql: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No release should change a type: see `SQL_TYPES`."""
    await put_reviews(reviews, REVIEW_VALUE)
    await sql.execute(f"create view public.titles as select title from {VIEW}")
    latest = await sql.fetchval("select version_num from indexer.alembic_version")
    expression = "lexicon.to_text(%s, %s)::varchar"
    await add_migration(sql, tmp_path, monkeypatch, NEW_EXPRESSION.format(expression=expression))
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


SQL_TYPES = {
    FieldKind.TEXT: ["text"],
    FieldKind.BIGINT: ["bigint"],
    FieldKind.BOOLEAN: ["boolean"],
    FieldKind.TIMESTAMP: ["timestamp with time zone"],
    FieldKind.TEXT_ARRAY: ["text[]"],
    FieldKind.ARRAY: ["jsonb"],
    FieldKind.OBJECT: ["jsonb"],
    FieldKind.LINK: ["text"],
    FieldKind.STRONG_REF: ["text", "text"],
    FieldKind.BLOB: ["text", "text", "bigint"],
    FieldKind.ANY: ["jsonb"],
}
"""The types of the columns of each kind of field. A release that changes one drops the view, which fails if views of
users depend on it: then nothing can be migrated. Add a kind instead."""


async def test_types_of_columns_stay_the_same_in_all_releases(sql: asyncpg.Connection) -> None:
    found = {}
    for kind in FieldKind:
        field = RecordField("field", kind, required=False, nullable=False, max_bytes=10, description="")
        [view] = plan_columns([field], {})
        expressions = await sql.fetchval("select indexer.lexicon_expressions($1)", json.dumps(view.to_json()))
        types = ", ".join(f"pg_typeof({expression})::text" for expression in expressions)
        found[kind] = list(await sql.fetchrow(f"select {types} from (select null::jsonb as value) r") or ())
    assert found == SQL_TYPES
