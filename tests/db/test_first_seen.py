# ruff: noqa: S608 - the names of the views are constants
"""When a record was first seen, if it was found live, and the time to sort by."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.db import Database
from indexer.db.write import MIN_COPIED
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from indexer.sync.repo import Repo
from tests.db.lexicon_views import LIKES, VIEW, columns
from tests.db.repo_rows import completed, delete, did, insert, put, synchronized
from tests.db.test_lexicon_indexes import INSERT_LIKES, plan
from tests.lexicons.samples import LIKE, LIKE_DOCUMENT, REVIEW, REVIEW_DOCUMENT, copy_of, properties_of, sourced

ALL = range(256)
Seen = dict[str, tuple[datetime, bool | None]]


async def seen(sql: asyncpg.Connection) -> Seen:
    rows = await sql.fetch("select rkey, first_seen, first_seen_live, indexed_at from atproto.records")
    assert all(row["first_seen"] <= row["indexed_at"] for row in rows)
    return {row["rkey"]: (row["first_seen"], row["first_seen_live"]) for row in rows}


async def apply(db: Database, repo: Repo, *changes: RecordChange, **fields: Any) -> Repo:
    """Write changes of a synchronized repo, as the live path does; return its row."""
    after = repo._replace(version=repo.version + 1, **fields)
    assert not (await db.write(Batch((RepoWrite(repo, after, changes),)))).skipped
    return after


async def resync(db: Database, repo: Repo, *changes: RecordChange, drained: Sequence[RecordChange] = ()) -> Repo:
    """Write differences that an export shows, and changes of buffered events; return the row."""
    await db.repos.request_resyncs([repo.did])
    [claimed] = await db.resyncs.claim(1, ALL, 10.0, 1e9)
    async with db.resyncs.transaction(claimed) as transaction:
        await transaction.write(changes, "export")
        if drained:
            await transaction.write(drained, "commit", live=True)
        assert await transaction.finish(Batch((RepoWrite(claimed, completed(claimed), live=False),)))
    return completed(claimed)


async def test_first_seen_time_stays_when_the_record_changes(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, synchronized(1), changes=(put("app.test/live"), put("app.test/other")))
    repo = await resync(db, synchronized(1), put("app.test/found"), drained=[put("app.test/buffered")])
    first = await seen(sql)
    assert {rkey: live for rkey, (_, live) in first.items()} == {
        "live": True, "other": True, "found": False, "buffered": True,
    }  # fmt: skip
    for text in ("[1]", "[2]"):
        changes = [put(f"app.test/{rkey}", text, "update") for rkey in ("live", "found", "buffered")]
        repo = await resync(db, repo, *changes)
        assert await seen(sql) == first
        repo = await apply(db, repo, *(change._replace(cid=put("a/b", f"{text}x").cid) for change in changes))
        assert await seen(sql) == first
    rows = await sql.fetch("select distinct first_seen < indexed_at from indexer.record where rkey <> 'other'")
    assert [tuple(row) for row in rows] == [(True,)]
    assert await sql.fetchval("select first_seen is null from indexer.record where rkey = 'other'")


@pytest.mark.parametrize("copied", [False, True])
async def test_commit_that_is_written_again_keeps_the_time(
    db: Database, sql: asyncpg.Connection, *, copied: bool
) -> None:
    """The stored records of an unproven repo may be there already. So may those of a COPY that fails."""
    changes = tuple(put(f"app.test/{number}") for number in range(MIN_COPIED))
    await insert(db, synchronized(1), changes=changes[:3])
    first = await seen(sql)
    await apply(db, synchronized(1), *(changes if copied else changes[:5]), unproven_since=None if copied else 1.0)
    after = await seen(sql)
    assert {rkey: after[rkey] for rkey in first} == first
    assert len(after) == (MIN_COPIED if copied else 5)


async def test_record_that_is_deleted_and_created_again_is_a_new_one(db: Database, sql: asyncpg.Connection) -> None:
    """In one batch, too."""
    paths = [f"app.test/{name}" for name in "abc"]
    await insert(db, synchronized(1), changes=tuple(put(path) for path in paths))
    first = await seen(sql)
    repo = await apply(db, synchronized(1), delete(paths[0]))
    again = [put(paths[0]), delete(paths[1]), put(paths[1]), put(paths[1], "[]", "update")]
    repo = await apply(db, repo, *again, put(paths[2], "[1]", "update"), put(paths[2], "[2]", "update"))
    second = await seen(sql)
    assert [second[name][0] > first[name][0] for name in "abc"] == [True, True, False]
    changes = await sql.fetch("select rkey, action from atproto.changes where rkey = 'b' order by seq")
    assert [action for _, action in changes] == ["create", "delete", "create", "update"]
    await apply(db, repo, *[put(paths[1], "[3]", "update"), delete(paths[1])])
    assert (await seen(sql)).keys() == {"a", "c"}


async def test_record_of_an_earlier_release_shows_when_it_was_last_written(
    db: Database, sql: asyncpg.Connection
) -> None:
    await insert(db, synchronized(1), changes=(put("app.test/a"),))
    time = datetime(2026, 1, 2, tzinfo=UTC)
    await sql.execute("update indexer.record set indexed_at = $1, proof = null", time)
    assert await seen(sql) == {"a": (time, None)}
    await apply(db, synchronized(1), put("app.test/a", "[]", "update"))
    assert await seen(sql) == {"a": (time, None)}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
DATETIME_LIKE = st.from_regex(
    r"[-+]?[0-9]{1,6}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})?\n?"
)
VALUES = JSON | st.builds(lambda time: {"createdAt": time}, JSON | DATETIME_LIKE)


@pytest.mark.slow
async def test_no_created_at_makes_a_query_fail_or_sorts_after_first_seen(sql: asyncpg.Connection) -> None:
    statement = await sql.prepare("select lexicon.sort_at($1::text::jsonb, $2, $3)")
    first, last = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    texts: list[str] = []
    given(VALUES)(lambda value: texts.append(json.dumps(value).replace("\\u0000", "0")))()
    assert len(texts) >= 50
    for text in texts:
        for first_seen in (first, None):
            found = await statement.fetchval(text, first_seen, last)
            assert found <= (first_seen or last), text
            value = json.loads(text)
            if not isinstance(value, dict) or not isinstance(value.get("createdAt"), str):
                assert found == (first_seen or last)


CREATED_AT: dict[str, datetime | None] = {
    '"2025-06-01T10:00:00+02:00"': datetime(2025, 6, 1, 8, tzinfo=UTC),
    '"0001-01-01T00:00:00Z"': datetime(1, 1, 1, tzinfo=UTC),
    '"2999-01-01T00:00:00Z"': None,
    '"2025-06-01T10:00:00"': None,
    '"2025-06-31T10:00:00Z"': None,
    '"infinity"': None,
    "1": None,
    "null": None,
    "{}": None,
}


async def test_sort_time_is_created_at_but_not_later_than_first_seen(db: Database, sql: asyncpg.Connection) -> None:
    """In both views. A value that is no object, or is not stored, has first_seen."""
    await db.lexicons.add(sourced(REVIEW_DOCUMENT))
    values = [f'{{"createdAt": {text}}}' for text in CREATED_AT] + ["{}", "[]", '"createdAt"']
    changes = [put(f"{REVIEW}/{number:02}", value) for number, value in enumerate(values)]
    changes.append(changes[0]._replace(rkey="99", value=None, problem="missing"))
    await insert(db, synchronized(1), changes=tuple(changes))
    for view in ("atproto.records", VIEW):
        rows = await sql.fetch(f"select sort_at, first_seen from {view} order by rkey")
        expected = [*CREATED_AT.values(), None, None, None, None]
        assert [row["sort_at"] for row in rows] == [
            time or row["first_seen"] for time, row in zip(expected, rows, strict=True)
        ]
    before = await sql.fetch(f"select rkey, sort_at from {VIEW}")
    await apply(db, synchronized(1), *(change._replace(action="update", rev="3lb") for change in changes))
    assert await sql.fetch(f"select rkey, sort_at from {VIEW}") == before


@pytest.mark.slow
async def test_newest_rows_by_sort_time_are_read_from_an_index(db: Database, sql: asyncpg.Connection) -> None:
    """Also those of one account, and from the public view."""
    await insert(db, synchronized(1))
    await sql.execute(INSERT_LIKES, did(1), b"\x01\x71\x12\x20" + bytes(32))
    await db.lexicons.add(sourced(LIKE_DOCUMENT))
    queries = {
        "did,sort_at": f"select rkey, sort_at from {LIKES} where did = '{did(1)}' order by sort_at desc limit 50",
        "sort_at": f"select rkey, sort_at from {LIKES} order by sort_at desc limit 50",
    }
    for names, query in queries.items():
        without = await sql.fetch(query)
        index = await db.lexicon_indexes.build(LIKE, names.split(","))
        assert index is not None
        of_records = query.replace(LIKES, f"(select * from atproto.records where collection = '{LIKE}') r")
        await sql.execute("set role atproto_reader")
        for text in (query, of_records):
            found = await plan(sql, text)
            assert index.name in found, found
            assert "Sort" not in found, found
        assert await sql.fetch(query) == without
        await sql.execute("reset role")
        if names != "sort_at":
            await sql.execute(f"drop index indexer.{index.name}")
    next_page = f"select * from {LIKES} where (sort_at, did, rkey) < ('2024-01-01T01:00Z', 'e', 'f')"
    found = await plan(sql, f"{next_page} order by sort_at desc, did desc, rkey desc limit 50")
    assert "Index Cond: (LEAST(" in found, "a page is read from where the one before it ended"
    await db.lexicons.remove([LIKE])
    assert [index.columns for index in await db.lexicon_indexes.drop_outdated()] == ["sort_at"]


@pytest.mark.slow
async def test_view_of_an_earlier_release_gets_the_columns_at_its_end(db: Database, sql: asyncpg.Connection) -> None:
    """Also if the lexicon has a field of that name. Views of users stay, then and with each new field."""
    changed = copy_of(REVIEW_DOCUMENT)
    properties_of(changed)["sortAt"] = {"type": "integer"}
    await db.lexicons.add(sourced(changed))
    assert (await columns(sql, VIEW))["sort_at_2"] == "bigint"
    kept = [name for name in await columns(sql, VIEW) if name not in ("first_seen", "first_seen_live", "sort_at")]
    kept[kept.index("sort_at_2")] = "sort_at_2 as sort_at"
    query = f"select {', '.join(kept)} from {VIEW}"
    definition = await sql.fetchval("select definition from indexer.lexicon where view_name is not null")
    definition = definition.replace(
        "first_seen as first_seen, first_seen_live as first_seen_live, sort_at as sort_at, ", ""
    )
    await sql.execute(f"drop view {VIEW}")
    await sql.execute(f"create view {VIEW} as {definition.replace('as sort_at_2', 'as sort_at')}")
    await sql.execute(
        "update indexer.lexicon set definition = 'earlier', "
        "fields = replace(fields::text, 'sort_at_2', 'sort_at')::jsonb"
    )
    before = await columns(sql, VIEW)
    assert [*before] == [name.split()[-1] for name in kept]
    await sql.execute(f"create view public.own as {query.replace('sort_at_2 as ', '')}")
    assert await sql.fetchval("select indexer.recreate_lexicon_views()") == 1
    upgraded = {**before, "first_seen": "timestamp with time zone", "first_seen_live": "boolean"}
    assert list((await columns(sql, VIEW)).items()) == list(upgraded.items())
    assert await sql.fetchval("select indexer.recreate_lexicon_views()") == 0
    index = await db.lexicon_indexes.build(REVIEW, ["sort_at"])
    assert index is not None
    assert "to_bigint" in await sql.fetchval("select pg_get_indexdef($1::text::regclass)", f"indexer.{index.name}")
    properties_of(changed)["firstSeen"] = {"type": "string"}
    await db.lexicons.add(sourced(changed))
    after = {**upgraded, "first_seen_2": "text"}
    assert list((await columns(sql, VIEW)).items()) == list(after.items())
    await sql.fetch("select * from public.own")
