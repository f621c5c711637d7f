"""The permissions of the roles of the public schema."""

import re
from collections.abc import AsyncIterator

import asyncpg
import pytest

from indexer.db import Database
from indexer.sync.changes import Batch, RepoWrite
from tests.db.change_log_helpers import connected
from tests.db.repo_rows import did, insert, put, synchronized

pytestmark = pytest.mark.slow

VIEWS = ("repos", "records", "blobs", "hosts", "links", "link_progress", "changes", "cursors", "rejected", "readers")
READS = (
    *(f"table atproto.{view}" for view in VIEWS),
    "select atproto.did_of('alice.test')",
    "select atproto.link_count('did:plc:a', 'app.test', '.a')",
    "select atproto.record_bytes('did:plc:a', 'app.test', 'a')",
    "select atproto.latest_seq()",
    "select * from atproto.changes_after(0, 1)",
    "select * from atproto.wait_for('did:plc:a', '', '0')",  # not after a write
    "select atproto.register_reader('one')",
    "select * from atproto.next_changes('one', 1)",
    "select atproto.unregister_reader('one')",
    "listen atproto_changes",
)
REQUESTS = (
    "select atproto.request_resync('did:plc:a')",
    "select atproto.request_takedown('did:plc:a', true)",
    "select atproto.request_record('at://did:plc:a/com.example.note/a') where false",
)
TABLES = ("repo", "record", "host", "change", "change_0", "change_batch", "consumer", "change_log")
FORBIDDEN = (
    *(f"table indexer.{table}" for table in TABLES),
    "select indexer.bucket_of('did:plc:a')",
    "select indexer.log_repo_change('did:plc:a', 'hidden', null)",
    "select nextval('indexer.change_seq')",
    "select setval('indexer.trimmed_seq', 1)",
    "insert into atproto.changes (seq) values (1)",
    "update atproto.readers set seq = 0",
    "delete from atproto.records",
    "lock table atproto.records in access exclusive mode",
    "lock table indexer.numbering_lock in share update exclusive mode",
    "select * from atproto.records for share",
    "create table atproto.own (a int)",
    "create function atproto.own() returns int language sql return 1",
    "drop view atproto.records",
    "alter role atproto_reader login",
)


@pytest.fixture
async def reader(database: str) -> AsyncIterator[asyncpg.Connection]:
    async with connected(database) as connection:
        await connection.execute("set session authorization atproto_reader")
        yield connection


async def assert_refused(connection: asyncpg.Connection, *statements: str) -> None:
    for statement in statements:
        with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.ObjectNotInPrerequisiteStateError)) as refused:
            async with connection.transaction():
                await connection.execute(statement)
        assert re.match("permission denied|must be owner|cannot (insert|update|delete)", str(refused.value)), statement


async def test_a_role_may_do_what_is_granted_to_it_only(database: str, sql: asyncpg.Connection) -> None:
    await sql.execute("create role other_role")
    try:
        for role, allowed, refused in (
            ("atproto_reader", READS, (*FORBIDDEN, *REQUESTS)),
            ("atproto_operator", (*READS, *REQUESTS), FORBIDDEN),
            ("other_role", (), (*READS[:-1], *REQUESTS, *FORBIDDEN)),
        ):
            async with connected(database) as connection:
                await connection.execute(f"set session authorization {role}")
                for statement in allowed:
                    await connection.execute(statement)
                await assert_refused(connection, *refused)
    finally:
        await sql.execute("drop role other_role")


async def test_both_roles_have_timeouts_and_no_password(sql: asyncpg.Connection) -> None:
    rows = await sql.fetch(
        "select a.rolname, a.rolcanlogin, a.rolpassword, r.rolconfig from pg_authid a join pg_roles r using (oid) "
        "where a.rolname like 'atproto\\_%'"
    )
    assert {row["rolname"] for row in rows} == {"atproto_reader", "atproto_operator"}
    for row in rows:
        assert (row["rolcanlogin"], row["rolpassword"]) == (False, None)
        settings = dict(setting.split("=") for setting in row["rolconfig"])
        assert settings.keys() == {"statement_timeout", "idle_in_transaction_session_timeout", "lock_timeout"}
        assert settings["idle_in_transaction_session_timeout"] == settings["statement_timeout"] == "60s"


async def test_security_definer_functions_have_a_fixed_search_path(sql: asyncpg.Connection) -> None:
    rows = await sql.fetch(
        "select oid::regprocedure::text, proconfig from pg_proc where prosecdef "
        "and pronamespace::regnamespace::text in ('atproto', 'indexer')"
    )
    assert len(rows) >= 9
    for function, config in rows:
        assert "search_path=pg_catalog, pg_temp" in (config or ()), function


async def test_functions_of_consumers_are_not_compiled(sql: asyncpg.Connection) -> None:
    """JIT compilation takes longer than they do."""
    names = {"register_reader", "unregister_reader", "next_changes", "changes_after", "latest_seq", "consumer_states"}
    rows = await sql.fetch("select proname from pg_proc where proname = any($1) and 'jit=off' = any(proconfig)", names)
    assert {name for (name,) in rows} == names


async def test_a_reader_cannot_block_the_writer(
    db: Database, reader: asyncpg.Connection, sql: asyncpg.Connection
) -> None:
    """It leaves a transaction open in which it did everything that it may do."""
    await insert(db, synchronized(1), changes=(put("app.test/a"),))
    await reader.execute("select atproto.register_reader('one', 0)")
    await reader.execute("begin")
    for statement in READS:
        await reader.execute(statement)
    await reader.execute("select atproto.register_reader('one')")
    for lock in (0, 1, 0x6368616E6765):
        await reader.execute(f"select pg_advisory_lock({lock})")
    version = 2
    for version in range(2, 5):
        changes = (put("app.test/a", f'"{version}"', "update"),)
        write = RepoWrite(synchronized(1, version=version - 1), synchronized(1, version=version), changes)
        assert not (await db.write(Batch((write,)))).skipped
    assert await db.repos.set_takedown(did(1), on=True)
    blocked = await sql.fetchval("select count(*) from pg_stat_activity where cardinality(pg_blocking_pids(pid)) > 0")
    assert blocked == 0
    assert (await db.repos.load([did(1)]))[did(1)].version == version + 1
