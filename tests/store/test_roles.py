"""The permissions of the roles of the public schema."""

import re
from collections.abc import AsyncIterator

import asyncpg
import pytest

from indexer.store import Store
from indexer.sync.plans import Batch, RepoWrite
from tests.store.change_log_helpers import connected
from tests.store.repo_rows import did, insert, put, synchronized

pytestmark = pytest.mark.slow

READS = (
    *(
        f"table atproto.{view}"
        for view in ("repos", "records", "blobs", "links", "link_progress", "changes", "cursors", "rejected", "readers")
    ),
    "select atproto.did_of('alice.test')",
    "select atproto.link_count('did:plc:a', 'app.test', '.a')",
    "select atproto.record_bytes('did:plc:a', 'app.test', 'a')",
    "select atproto.latest_seq()",
    "select * from atproto.changes_after(0, 1)",
    "select atproto.register_reader('one')",
    "select * from atproto.next_changes('one', 1)",
    "select atproto.unregister_reader('one')",
    "listen atproto_changes",
)
REQUESTS = ("select atproto.request_resync('did:plc:a')", "select atproto.request_takedown('did:plc:a', true)")
FORBIDDEN = (
    *(
        f"table indexer.{table}"
        for table in ("repo", "record", "change", "change_0", "change_batch", "consumer", "change_log")
    ),
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


@pytest.fixture
async def operator(database: str) -> AsyncIterator[asyncpg.Connection]:
    async with connected(database) as connection:
        await connection.execute("set session authorization atproto_operator")
        yield connection


async def assert_refused(connection: asyncpg.Connection, *statements: str) -> None:
    for statement in statements:
        with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.ObjectNotInPrerequisiteStateError)) as refused:
            async with connection.transaction():
                await connection.execute(statement)
        assert re.match("permission denied|must be owner|cannot (insert|update|delete)", str(refused.value)), statement


async def test_role_atproto_reader_reads_and_consumes_only(reader: asyncpg.Connection) -> None:
    for statement in READS:
        await reader.execute(statement)
    await assert_refused(reader, *FORBIDDEN, *REQUESTS)


async def test_role_atproto_operator_reads_consumes_and_requests_only(operator: asyncpg.Connection) -> None:
    for statement in (*READS, *REQUESTS):
        await operator.execute(statement)
    await assert_refused(operator, *FORBIDDEN)


async def test_another_role_has_no_permission(database: str, sql: asyncpg.Connection) -> None:
    await sql.execute("create role other_role")
    try:
        async with connected(database) as connection:
            await connection.execute("set session authorization other_role")
            await assert_refused(connection, *READS[:-1], *REQUESTS, *FORBIDDEN)
    finally:
        await sql.execute("drop role other_role")


async def test_a_takedown_by_an_operator_is_logged(
    store: Store, operator: asyncpg.Connection, reader: asyncpg.Connection
) -> None:
    await insert(store, synchronized(1), changes=(put("app.test/a"),))
    position = await reader.fetchval("select atproto.latest_seq()")
    assert await operator.fetchval("select atproto.request_takedown($1, true)", did(1))
    rows = await reader.fetch("select did, action from atproto.changes_after($1, 10)", position)
    assert [tuple(row) for row in rows] == [(did(1), "hidden")]
    assert await operator.fetchval("select atproto.request_resync($1)", did(1))
    assert await reader.fetchval("select sync_reason from atproto.repos") == "requested"


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


async def test_a_reader_cannot_block_the_writer(
    store: Store, reader: asyncpg.Connection, sql: asyncpg.Connection
) -> None:
    """It leaves a transaction open in which it did everything that it may do."""
    await insert(store, synchronized(1), changes=(put("app.test/a"),))
    await reader.execute("select atproto.register_reader('one', 0)")
    await reader.execute("begin")
    for statement in READS:
        await reader.execute(statement)
    await reader.execute("select atproto.register_reader('one')")
    for lock in (0, 1, 0x6368616E6765):
        await reader.execute(f"select pg_advisory_lock({lock})")
    version = 2
    for version in range(2, 5):
        write = RepoWrite(version - 1, synchronized(1, version=version), (put("app.test/a", f'"{version}"', "update"),))
        assert not (await store.write(Batch((write,)))).skipped
    assert await store.set_takedown(did(1), on=True)
    blocked = await sql.fetchval("select count(*) from pg_stat_activity where cardinality(pg_blocking_pids(pid)) > 0")
    assert blocked == 0
    assert (await store.repos([did(1)]))[did(1)].version == version + 1
