# ruff: noqa: S608 - the names of the views are constants
"""The columns and rows of typed views."""

import json
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any

import asyncpg
import pytest

from indexer.atproto.lexicon import FieldKind, RecordField
from indexer.db import Database
from indexer.db.lexicons import plan_columns
from tests.db.change_log_helpers import connected
from tests.db.lexicon_views import LIKES, VIEW, put_reviews
from tests.db.repo_rows import did, insert, put, synchronized
from tests.lexicons.samples import (
    CID,
    LIKE,
    LIKE_DOCUMENT,
    REVIEW,
    REVIEW_VALUE,
    copy_of,
    sourced,
)
from tests.vectors import vectors

pytestmark = pytest.mark.slow


async def test_row_has_the_values_of_its_record(reviews: Database, sql: asyncpg.Connection) -> None:
    await put_reviews(reviews, REVIEW_VALUE)
    row = await sql.fetchrow(f"select * from {VIEW}")
    assert row is not None
    values = dict(row)
    public = await sql.fetchrow(
        "select did, rkey, uri, cid, rev, indexed_at, bucket, first_seen, first_seen_live, sort_at from atproto.records"
    )
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
    "tags": ("a", "expected array, found string"),
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


async def test_value_that_does_not_fit_is_null_with_the_reason(reviews: Database, sql: asyncpg.Connection) -> None:
    """Every wrong value of a record is reported. A blob of an early release fits: it has a CID and no size."""
    wrong = [{name: value} for name, (value, _) in WRONG.items()]
    early = {"photo": {"cid": CID, "mimeType": "image/jpeg"}}
    all_wrong = {name: value for name, (value, _) in WRONG.items()}
    await put_reviews(
        reviews,
        *[REVIEW_VALUE | fields for fields in (*wrong, early, all_wrong)],
        {"$type": REVIEW, "tags": ["x" * 11], "title": "é" * 11},
    )
    *rows, row, every, short = await sql.fetch(f"select * from {VIEW} order by rkey::int")
    column_of = {"createdAt": "created_at", "subject": "subject_uri", "photo": "photo_cid", "uri": "uri_2"}
    problems = [f"{name}: {problem}" for name, (_, problem) in WRONG.items()]
    assert [row["lexicon_problem"] for row in rows] == problems
    assert [row[column_of.get(name, name)] for row, name in zip(rows, WRONG, strict=True)] == [None] * len(WRONG)
    found = [row[name] for name in ("lexicon_problem", "photo_cid", "photo_mime_type", "photo_size")]
    assert found == [None, CID, "image/jpeg", None]
    assert every["lexicon_problem"] == "; ".join(problems)
    assert short["lexicon_problem"] == (
        "title: longer than 20 bytes; stars: missing; createdAt: missing; tags: an item is longer than 10 bytes"
    )


async def test_required_field_that_may_be_null_must_be_present(db: Database, sql: asyncpg.Connection) -> None:
    document = copy_of(LIKE_DOCUMENT)
    document["defs"]["main"]["record"] |= {
        "required": ["a", "b"],
        "nullable": ["a", "c"],
        "properties": {name: {"type": "string"} for name in "abc"},
    }
    await db.lexicons.add(sourced(document))
    values = ({"a": None, "b": "b", "c": None}, {"b": None}, {"a": "a", "b": "b"}, {"a": 1, "b": "b", "c": 1})
    changes = [put(f"{LIKE}/{number}", json.dumps(value)) for number, value in enumerate(values)]
    await insert(db, synchronized(1), changes=tuple(changes))
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


async def test_no_record_makes_a_query_fail(reviews: Database, sql: asyncpg.Connection) -> None:
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


DATETIMES = {
    "1985-04-12T23:20:50.123Z": datetime(1985, 4, 12, 23, 20, 50, 123_000, UTC),
    "1985-04-12T23:20:50+01:45": datetime(1985, 4, 12, 21, 35, 50, 0, UTC),
    "1985-04-12T23:20:50.1234567899999Z": datetime(1985, 4, 12, 23, 20, 50, 123_457, UTC),
    f"1985-04-12T23:20:50.{'1' * 38}+23:59": datetime(1985, 4, 11, 23, 21, 50, 111_111, UTC),
    "0001-01-01T00:00:00Z": datetime(1, 1, 1, tzinfo=UTC),
    "2000-02-29T00:00:00-15:59": datetime(2000, 2, 29, 15, 59, tzinfo=UTC),
    "2000-03-01T15:00:00.25+16:00": datetime(2000, 2, 29, 23, 0, 0, 250_000, UTC),
    "2023-12-31T23:00:00-19:30": datetime(2024, 1, 1, 18, 30, tzinfo=UTC),
    "2023-01-01T00:00:00+23:59": datetime(2022, 12, 31, 0, 1, tzinfo=UTC),
    "2023-01-01T00:00:00-23:59": datetime(2023, 1, 1, 23, 59, tzinfo=UTC),
    **dict.fromkeys(
        (
            "0000-01-01T00:00:00Z", "0000-02-29T00:00:00Z", "1900-02-29T00:00:00Z", "2023-02-29T00:00:00Z",
            "2023-04-31T00:00:00Z", "2023-13-01T00:00:00Z", "2023-01-01T24:00:00Z", "2023-01-01T00:60:00Z",
            "2023-01-01T00:00:60Z", "2023-01-01T00:00:00", "2023-01-01 00:00:00Z", "2023-01-01t00:00:00Z",
            "2023-01-01T00:00:00z", "2023-01-01T00:00:00-00:00", "2023-01-01T00:00:00+24:00", "2023-01-01T00:00Z",
            "2023-01-01T00:00:00.Z", "2023-01-01T00:00:00 UTC", "+002023-01-01T00:00:00Z", "now", "infinity",
            "2023-01-01T00:00:00Z\n", "٢٠٢٣-01-01T00:00:00Z", "0001-01-01T00:00:00+00:01", "9999-12-31T23:59:59-00:01",
            "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2023-01-01T00:00:00-16:60",
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


async def test_every_published_datetime_with_a_year_has_its_time_and_no_invalid_one_has(
    sql: asyncpg.Connection,
) -> None:
    """Python has no year 0, so drivers could not return it."""
    folder = vectors("atproto-interop-tests/syntax")
    texts = {
        file.name: [line for line in file.read_text().split("\n") if line and not line.startswith("#")]
        for file in folder.glob("datetime_*")
    }
    valid = texts["datetime_syntax_valid.txt"]
    rows = await sql.fetch(
        "select t, lexicon.to_timestamp(to_jsonb(t)) from unnest($1::text[]) t", [*chain(*texts.values())]
    )
    shown = {text: found for text, found in map(tuple, rows) if found is not None}
    assert len(valid) > 20
    assert shown.keys() == {text for text in valid if not text.startswith("0000")}
    for text, found in shown.items():
        assert abs(datetime.fromisoformat(text) - found) <= timedelta(microseconds=1)


async def test_odd_item_or_size_hides_nothing_beside_it(reviews: Database, sql: asyncpg.Connection) -> None:
    """The sizes of blobs are the same in both views: a number of bytes, or null."""
    sizes: list[tuple[Any, int | None]] = [(12, 12), (0, 0), (3.0, 3), (2**63 - 1, 2**63 - 1)]
    sizes += [(size, None) for size in (-1, 1.5, 2**63, 1e300, "12", None, True, [1])]
    blob = {"$type": "blob", "ref": {"$link": CID}, "mimeType": "image/png"}
    values = [REVIEW_VALUE | {"photo": blob | {"size": size}} for size, _ in sizes]
    tags = {("a", 1, "b"): ["a", None, "b"], ("a", "x" * 11): ["a", None], (None,): [None], (): []}
    await put_reviews(reviews, *values, *(REVIEW_VALUE | {"tags": list(items)} for items in tags))
    query = f"select photo_cid, photo_size, tags, lexicon_problem from {VIEW} order by rkey::int"
    rows = await sql.fetch(query)
    with_size = rows[: len(values)]
    assert [row["photo_size"] for row in with_size] == [size for _, size in sizes]
    assert {row["photo_cid"] for row in rows} == {CID}
    assert [row["lexicon_problem"] for row in with_size] == [
        None if size is not None else "photo: its size is not a number of bytes" for _, size in sizes
    ]
    public = await sql.fetch("select size from atproto.blobs order by rkey::int")
    assert [row["size"] for row in public][: len(values)] == [row["photo_size"] for row in with_size]
    assert [row["tags"] for row in rows[len(values) :]] == list(tags.values())
    assert [row["lexicon_problem"] for row in rows[len(values) :]] == [
        "tags: an item is not a string",
        "tags: an item is longer than 10 bytes",
        "tags: an item is not a string",
        None,
    ]


async def test_public_roles_read_the_rows_of_visible_repos_and_change_nothing(database: str, reviews: Database) -> None:
    await put_reviews(reviews, REVIEW_VALUE)
    async with connected(database) as connection:
        for role in ("atproto_reader", "atproto_operator"):
            await connection.execute(f"set session authorization {role}")
            assert await connection.fetchval(f"select count(*) from {VIEW}") == 1
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
        assert await reviews.repos.set_takedown(did(1), on=True)
        assert await connection.fetchval(f"select count(*) from {VIEW}") == 0


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
