# ruff: noqa: S608 - the names of the views are constants
"""Indexes on the columns of typed views."""

import asyncio
import json
from typing import Any

import asyncpg
import pytest

from indexer.db import Database, DatabaseError
from indexer.db.lexicon_indexes import UnknownColumnError
from tests.db.change_log_helpers import connected
from tests.db.lexicon_views import LIKES, VIEW
from tests.db.repo_rows import did, insert, put, synchronized
from tests.db.test_migrate import GRANTS, role, with_user
from tests.lexicons.samples import (
    CID,
    DEFS_DOCUMENT,
    LIKE,
    LIKE_DOCUMENT,
    REVIEW,
    REVIEW_DOCUMENT,
    REVIEW_VALUE,
    copy_of,
    properties_of,
    sourced,
)
from tests.waiting import until

pytestmark = pytest.mark.slow

INSERT_LIKES = f"""
    insert into indexer.record (did, collection, rkey, bucket, cid, rev, value)
    select $1, '{LIKE}', n::text, indexer.bucket_of($1), $2, '3laaaaaaaaa22', jsonb_build_object(
        '$type', '{LIKE}', 'createdAt', to_char(timestamp '2024-01-01' + n * interval '1 s', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'),
        'subject', jsonb_build_object('uri', 'at://' || $1 || '/app.bsky.feed.post/' || n % 1000, 'cid', '{CID}')
    )
    from generate_series(1, 10000) n
"""  # noqa: E501
URI = f"at://{did(1)}/app.bsky.feed.post/7"
QUERIES = {
    "subject_uri": f"select count(*) from {LIKES} where subject_uri = '{URI}'",
    "created_at": f"select * from {LIKES} order by created_at desc limit 10",
    "subject_uri,created_at": (
        f"select did, rkey from {LIKES} where subject_uri = '{URI}' order by created_at desc limit 10"
    ),
}


async def plan(sql: asyncpg.Connection, query: str) -> str:
    return "\n".join(row[0] for row in await sql.fetch(f"explain {query}"))


async def indexes(db: Database) -> dict[str, tuple[str, bool]]:
    """Return the name and the validity of each index by its columns."""
    return {index.columns: (index.name, index.valid) for index in await db.lexicon_indexes.load()}


async def test_queries_on_the_view_use_the_index(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, synchronized(1))
    await sql.execute(INSERT_LIKES, did(1), b"\x01\x71\x12\x20" + bytes(32))
    await sql.execute("analyze indexer.record")
    await db.lexicons.add(sourced(LIKE_DOCUMENT))
    for columns, query in QUERIES.items():
        without = await sql.fetch(query)
        assert "lexicon_" not in await plan(sql, query)
        index = await db.lexicon_indexes.build(LIKE, columns.split(","))
        assert index is not None
        found = await plan(sql, query)
        assert index.name in found
        assert "Sort" not in found
        assert await sql.fetch(query) == without
        await sql.execute("set role atproto_reader")
        assert index.name in await plan(sql, query)
        await sql.execute("reset role")
        await sql.execute(f"drop index indexer.{index.name}")


KINDS = {
    "stars": (f"{VIEW} where stars = 5", "btree"),
    "public": (f"{VIEW} where public", "btree"),
    "title": (f"{VIEW} where title = 'Grüße'", "btree"),
    "note": (f"{VIEW} where note = 'Grüße'", "hash"),
    "uri_2": (f"{VIEW} where uri_2 = 'https://example.com'", "hash"),
    "tags": (f"{VIEW} where tags @> array['a']", "gin"),
    "place": (f'{VIEW} where place @> \'{{"$type": "com.example.review#cafe"}}\'', "gin"),
    "photo_size": (f"{VIEW} where photo_size between 1 and 2", "btree"),
    "did,created_at": (f"{VIEW} where did = 'did:plc:a' order by created_at", "btree"),
}


async def test_every_type_of_column_has_a_suitable_index(db: Database, sql: asyncpg.Connection) -> None:
    await db.lexicons.add(sourced(REVIEW_DOCUMENT, DEFS_DOCUMENT))
    await insert(db, synchronized(1), changes=(put(f"{REVIEW}/1", json.dumps(REVIEW_VALUE)),))
    # On one row, each other way to find it would do as well.
    await sql.execute("alter table indexer.record drop constraint record_pkey")
    await sql.execute("drop index indexer.record_collection")
    await sql.execute("set enable_seqscan = off")
    for columns, (query, method) in KINDS.items():
        index = await db.lexicon_indexes.build(REVIEW, columns.split(","))
        assert index is not None
        definition = await sql.fetchval(f"select pg_get_indexdef('indexer.{index.name}'::regclass)")
        assert f"USING {method} " in definition
        assert f"WHERE (collection = '{REVIEW}'::text)" in definition
        assert index.name in await plan(sql, f"select 1 from {query}"), columns
        await sql.execute(f"drop index indexer.{index.name}")


async def test_records_with_long_strings_are_stored_although_an_index_contains_their_column(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    """A B-tree has no room for them: without a limit in the view, nobody could store such a record any more.

    The role of the daemon needs no grant for the functions of an index.
    """
    await db.lexicons.add(sourced(REVIEW_DOCUMENT, DEFS_DOCUMENT))
    for columns in (*KINDS, "subject_uri", "subject_uri,created_at", "photo_cid", "photo_mime_type"):
        await db.lexicon_indexes.build(REVIEW, columns.split(","))
    noise = await sql.fetchval("select string_agg(md5(n::text), '') from generate_series(1, 3000) n")
    long: dict[str, Any] = dict.fromkeys(REVIEW_VALUE, noise) | {
        "subject": {"uri": noise, "cid": noise},
        "photo": {"ref": {"$link": noise}, "mimeType": noise, "size": 1},
        "tags": [noise, *map(str, range(1000))],
        "place": {"$type": noise, "x": [noise]},
    }
    async with role(database) as name:
        await sql.execute(GRANTS.format(role=name))
        other = await Database.open(with_user(database, name), connections=1)
        await insert(other, synchronized(1), changes=(put(f"{REVIEW}/1", json.dumps(long)),))
        await other.close()
    row = await sql.fetchrow(f"select note, title, subject_uri, tags, lexicon_problem from {VIEW}")
    assert row is not None
    assert (row["note"], row["title"], row["subject_uri"], row["tags"][0]) == (noise, None, None, None)
    assert "title: longer than 20 bytes" in row["lexicon_problem"]


async def test_columns_that_no_index_can_contain_are_reported(reviews: Database) -> None:
    for columns, problem in {
        "nothing": "has no column nothing; the columns are title, stars, public, created_at, ",
        "did": "an index needs a column of the lexicon",
        "did,subject_uri": "no index can contain did,subject_uri together",
        "tags,stars": "no index can contain tags,stars together",
        "stars,note": "no index can contain stars,note together",
        "uri": "has no column uri",
    }.items():
        with pytest.raises(UnknownColumnError, match=problem):
            await reviews.lexicon_indexes.build(REVIEW, columns.split(","))
    assert await indexes(reviews) == {}


async def test_same_index_is_built_once(db: Database) -> None:
    await db.lexicons.add(sourced(LIKE_DOCUMENT))
    both = await asyncio.gather(*[db.lexicon_indexes.build(LIKE, ["created_at"]) for _ in range(2)])
    assert both.count(None) == 1
    assert await db.lexicon_indexes.build(LIKE, ["created_at"]) is None
    assert [valid for _, valid in (await indexes(db)).values()] == [True]


async def test_interrupted_index_is_built_again_and_the_daemon_writes_meanwhile(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    await db.lexicons.add(sourced(LIKE_DOCUMENT))
    await insert(db, synchronized(1), changes=(put(f"{LIKE}/1"),))

    waits = (
        "query like 'create index concurrently lexicon%' and wait_event_type = 'Lock' and datname = current_database()"
    )

    async def builds() -> bool:
        return bool(await sql.fetchval(f"select exists (select from pg_stat_activity where {waits})"))

    async with connected(database) as other, other.transaction():
        await other.execute("update indexer.record set rev = rev")  # the index waits for the end of this transaction
        task = asyncio.create_task(db.lexicon_indexes.build(LIKE, ["created_at"]))
        await until(builds)
        await insert(db, synchronized(2), changes=(put(f"{LIKE}/2"),))
        assert await sql.fetchval(f"select pg_terminate_backend(pid) from pg_stat_activity where {waits}")
        with pytest.raises(DatabaseError, match=r"terminat|clos"):
            await task
    [(name, valid)] = (await indexes(db)).values()
    assert not valid
    assert await db.lexicon_indexes.build(LIKE, ["created_at"])
    assert await indexes(db) == {"created_at": (name, True)}


async def test_indexes_without_a_column_are_dropped(db: Database) -> None:
    """They would cost writes and serve no query."""
    await db.lexicons.add(sourced(REVIEW_DOCUMENT, DEFS_DOCUMENT, LIKE_DOCUMENT))
    for nsid, column in ((REVIEW, "stars"), (REVIEW, "title"), (LIKE, "created_at")):
        await db.lexicon_indexes.build(nsid, [column])
    changed = copy_of(REVIEW_DOCUMENT)
    properties_of(changed)["stars"] = {"type": "string"}
    await db.lexicons.add(sourced(changed))
    assert [index.columns for index in await db.lexicon_indexes.drop_outdated()] == ["stars"]
    await db.lexicons.remove([REVIEW])
    assert [index.columns for index in await db.lexicon_indexes.drop_outdated()] == ["title"]
    assert list(await indexes(db)) == ["created_at"]
