# ruff: noqa: S608 - a view cannot be a parameter
"""The public schema on a cluster: what roles may read there, and which queries read one shard."""

import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from docs.generate import VIEWS
from indexer.atproto.syntax import CollectionFilter
from indexer.cluster.numbering import ChangeNumbering
from indexer.db import Database
from indexer.sync.scope import Scope, Track
from indexer.sync.shard import bucket_of
from indexer.telemetry.conditions import Conditions
from tests.citus_server import SHARDS
from tests.db.link_steps import LIKE, PATH, like, post, settle, turn_on
from tests.db.repo_rows import did, insert, put, synchronized
from tests.lexicons.samples import DEFS_DOCUMENT, REVIEW, REVIEW_DOCUMENT, REVIEW_VALUE, sourced

pytestmark = pytest.mark.proof("cluster")

REPOS = 12
"""Repos with records; with so many, each shard has some."""
REVIEWS = f'lexicon."{REVIEW}"'
BLOB = '{"image": {"$type": "blob", "ref": {"$link": "a"}, "mimeType": "image/png", "size": 1}}'
READER_CALLS = {
    "bucket_of": "select atproto.bucket_of($1)",
    "changes_after": "select count(*) from atproto.changes_after(0, 10) where did <> $1",
    "cid_text": "select atproto.cid_text(sha256('a') || '\\x00000000') where $1 <> ''",
    "did_of": "select atproto.did_of($1)",
    "latest_seq": "select atproto.latest_seq() where $1 <> ''",
    "link_count": "select atproto.link_count($1, 'a.b.c', '.d')",
    "next_changes": "select count(*) from atproto.next_changes('test', 10) where did <> $1",
    "record_bytes": "select atproto.record_bytes($1, 'app.test', 'a')",
    "register_reader": "select atproto.register_reader('test') where $1 <> ''",
    "unregister_reader": "select atproto.unregister_reader('test') where $1 <> ''",
}
OPERATOR_CALLS = {
    "request_resync": "select atproto.request_resync($1)",
    "request_takedown": "select atproto.request_takedown($1, true)",
    "set_collections": "select atproto.set_collections(array['*']) where $1 <> ''",
    "set_signal_collections": "select atproto.set_signal_collections('{}') where $1 <> ''",
    "set_track": "select atproto.set_track('listed') where $1 <> ''",
    "track": "select atproto.track(array[$1])",
    "untrack": "select atproto.untrack(array[$1])",
}


@pytest.fixture
async def filled(db: Database) -> Database:
    """Return a store with links, a typed view, and repos with a review, a like and a blob each."""
    await db.scope.begin(Scope(1, Track.ALL, CollectionFilter(["*"]), (0,)))
    await db.lexicons.add(sourced(REVIEW_DOCUMENT, DEFS_DOCUMENT))
    await turn_on(db)
    changes = put(f"{REVIEW}/a", json.dumps(REVIEW_VALUE)), put("app.test/a", BLOB), like("a")
    for name in range(REPOS):
        await insert(db, synchronized(name), changes=changes)
    await ChangeNumbering(db, Conditions()).finish()
    await settle(db)
    return db


@pytest.fixture
async def reader(filled: Database, database: str, sql: asyncpg.Connection) -> AsyncIterator[asyncpg.Connection]:
    """Log in as a role that is a member of atproto_reader."""
    name = f"test_reader_{secrets.token_hex(4)}"
    await sql.execute(f"create role {name} login in role atproto_reader")
    connection = await asyncpg.connect(database, user=name)
    yield connection
    await connection.close()
    await sql.execute(f"drop role {name}")


async def plan_of(sql: asyncpg.Connection, query: str, *values: object) -> str:
    """Return the plan of a query."""
    return "\n".join(line for (line,) in await sql.fetch(f"explain (costs off) {query}", *values))


def tasks_of(plan: str) -> int:
    """Return how many shards a plan reads."""
    [tasks] = [line.rpartition(" ")[2] for line in plan.splitlines() if "Task Count" in line]
    return int(tasks)


@pytest.mark.parametrize("view", ["atproto.repos", "atproto.records", "atproto.blobs", "atproto.links", REVIEWS])
async def test_a_query_by_did_and_bucket_reads_one_shard(filled: Database, sql: asyncpg.Connection, view: str) -> None:
    wanted = f"select * from {view} where did = $1 and bucket = atproto.bucket_of($1)"
    plan = await plan_of(sql, wanted, did(1))
    assert tasks_of(plan) == 1
    every = await sql.fetch(f"select * from {view} where did = $1", did(1))
    assert await sql.fetch(wanted, did(1)) == every
    assert {row["bucket"] for row in every} == {bucket_of(did(1))}
    assert tasks_of(await plan_of(sql, f"select * from {view} where did = $1", did(1))) == SHARDS, "without the bucket"


async def test_views_joined_by_did_and_bucket_read_one_shard(filled: Database, sql: asyncpg.Connection) -> None:
    for joined in (
        "left join atproto.links l using (did, bucket, collection, rkey)",
        "join atproto.repos using (did, bucket)",
    ):
        wanted = f"select rkey from atproto.records {joined} where did = $1 and bucket = atproto.bucket_of($1)"
        assert tasks_of(await plan_of(sql, wanted, did(1))) == 1
        assert len(await sql.fetch(wanted, did(1))) == 3


async def test_a_prepared_query_reads_one_shard_however_often_it_runs(
    filled: Database, sql: asyncpg.Connection
) -> None:
    """From the sixth time on, Postgres may use a plan that does not know the values."""
    await sql.execute(
        "prepare by_did(text) as select rkey from atproto.records where did = $1 and bucket = atproto.bucket_of($1)"
    )
    for _ in range(8):
        assert len(await sql.fetch(f"execute by_did('{did(1)}')")) == 3
    assert tasks_of(await plan_of(sql, f"execute by_did('{did(1)}')")) == 1


async def test_a_reader_reads_each_view_and_calls_each_function_for_readers(reader: asyncpg.Connection) -> None:
    expected = {"repos": REPOS, "records": 3 * REPOS, "blobs": 2 * REPOS, "links": 2 * REPOS}
    for view in VIEWS:
        rows = await reader.fetch(f"select * from atproto.{view}")
        assert len(rows) == expected.get(view, len(rows)), view
    rows = await reader.fetch(f"select title, created_at, lexicon_problem from {REVIEWS} order by did")
    assert [tuple(row)[2] for row in rows] == [None] * REPOS
    assert {row["title"] for row in rows} == {"Grüße"}
    for name in ("register_reader", *READER_CALLS):
        await reader.fetch(READER_CALLS[name], did(1))


async def test_an_operator_calls_each_function_that_is_for_operators(
    reader: asyncpg.Connection, sql: asyncpg.Connection
) -> None:
    role = await reader.fetchval("select current_user")
    for call in OPERATOR_CALLS.values():
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await reader.fetch(call, did(1))
    await sql.execute(f"grant atproto_operator to {role}")
    for call in OPERATOR_CALLS.values():
        await reader.fetch(call, did(1))


async def test_a_reader_cannot_name_a_private_table(reader: asyncpg.Connection) -> None:
    for table in ("repo", "record", "identity", "record_link", "buffered_event", "change"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied for schema indexer"):
            await reader.fetch(f"select * from indexer.{table}")


async def test_records_of_hidden_repos_are_not_shown(filled: Database, reader: asyncpg.Connection) -> None:
    await filled.repos.set_takedown(did(1), on=True)
    await insert(filled, synchronized("gone", active=False), changes=(put("app.test/a", BLOB),))
    for view, shown in {"records": 3, "blobs": 2, "links": 2}.items():
        assert await reader.fetchval(f"select count(*) from atproto.{view}") == shown * (REPOS - 1)
        assert await reader.fetch(f"select * from atproto.{view} where did = any($1)", [did(1), did("gone")]) == []
    assert await reader.fetchval("select atproto.record_bytes($1, 'app.test', 'a')", did(1)) is None


async def test_functions_return_what_is_stored(
    filled: Database, reader: asyncpg.Connection, sql: asyncpg.Connection
) -> None:
    await sql.execute("update indexer.record set original = 'abc' where did = $1 and collection = 'app.test'", did(1))
    await sql.execute(
        "insert into indexer.identity (did, bucket, handle, fetched_at, stale, handle_attempts) "
        "values ($1, $2, 'a.test', now(), false, 0)",
        did(1),
        bucket_of(did(1)),
    )
    for _ in range(7):  # from the sixth run on, the statements of a function may have a generic plan
        assert await reader.fetchval("select atproto.record_bytes($1, 'app.test', 'a')", did(1)) == b"abc"
        assert await reader.fetchval("select atproto.did_of('@A.test')") == did(1)
        assert await reader.fetchval("select atproto.link_count($1, $2, $3)", post("one"), LIKE, PATH) == REPOS


CHANGES_WITH_VALUES = """
    with c as materialized (select * from atproto.changes_after($1, 1000)),
        r as materialized (
            select r.did, r.collection, r.rkey, r.value from c join atproto.records r using (did, collection, rkey)
        )
    select c.seq, c.did, c.collection, c.rkey, r.value from c left join r using (did, collection, rkey) order by seq
"""


async def test_changes_are_read_with_the_values_of_their_records(filled: Database, reader: asyncpg.Connection) -> None:
    """The recipe of docs/sql.md reads the records of the changes; a plain left join would fetch all records."""
    rows = await reader.fetch(CHANGES_WITH_VALUES, 0)
    values: dict[str, Any] = {f"{row['did']}/{row['collection']}": row["value"] for row in rows if row["collection"]}
    assert len(values) == 3 * REPOS
    assert all(values.values())


HIDE_SCHEMA = """
    do $$ begin
        perform set_config('citus.enable_ddl_propagation', 'off', true);
        revoke usage on schema indexer from atproto_reader;
    end $$
"""


async def test_readers_read_a_new_worker_after_it_was_granted_to_them(
    reader: asyncpg.Connection, sql: asyncpg.Connection
) -> None:
    """A worker that was just added has the schema of the coordinator, without its rights for readers."""
    hidden = await sql.fetch("select success from run_command_on_workers($1)", HIDE_SCHEMA)
    assert {success for (success,) in hidden} == {True}
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await reader.fetch("select * from atproto.records")
    await sql.execute("select indexer.grant_shards_to_readers()")
    assert len(await reader.fetch("select * from atproto.records")) == 3 * REPOS


async def test_readers_read_a_moved_shard(reader: asyncpg.Connection, sql: asyncpg.Connection) -> None:
    [(shard, source, target)] = await sql.fetch(
        "select s.shardid, s.nodeport, n.nodeport from citus_shards s join pg_dist_node n on n.nodeport <> s.nodeport "
        "where s.table_name = 'indexer.repo'::regclass and n.groupid <> 0 limit 1"
    )
    for start, end in ((source, target), (target, source)):
        await sql.execute("select citus_move_shard_placement($1, '127.0.0.1', $2, '127.0.0.1', $3)", shard, start, end)
        assert len(await reader.fetch("select * from atproto.records")) == 3 * REPOS
