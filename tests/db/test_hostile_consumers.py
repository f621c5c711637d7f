"""A role that may only read the public schema cannot stop the upkeep of the change log, or use up its space."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import pytest

from indexer.db import Database
from indexer.db.change_log_segments import RetentionPolicy, TrimPlan, trim
from tests.db.change_log_helpers import NEXT, change, connected, fill_segments, log, rkeys

pytestmark = pytest.mark.slow

TRIM_EVERYTHING = RetentionPolicy(0.001, 2**40, 1)
LATER = 2e9
OPEN_TRANSACTIONS = (
    "select atproto.register_reader('new')",
    "select atproto.register_reader('again')",
    "select * from atproto.next_changes('reading', 1)",
    "select atproto.unregister_reader('removed')",
    "select * from atproto.changes_after(0, 100)",
    "select atproto.latest_seq()",
    "table atproto.readers",
)


@asynccontextmanager
async def as_role(dsn: str, role: str = "atproto_reader") -> AsyncIterator[asyncpg.Connection]:
    async with connected(dsn) as connection:
        await connection.execute(f"set session authorization {role}")
        yield connection


async def test_open_transactions_of_consumers_do_not_stop_trimming(
    db: Database, database: str, sql: asyncpg.Connection
) -> None:
    """They disconnect no bystander, and one who reads in time still gets every change."""
    async with as_role(database) as reader:
        for name in ("again", "reading", "removed", "bystander"):
            await reader.execute("select atproto.register_reader($1, 0)", name)
    await fill_segments(sql, 4)
    async with as_role(database) as bystander:
        assert rkeys(await bystander.fetch(NEXT, "bystander", 10)) == ["0", "1", "2", "3"]
    async with AsyncExitStack() as stack:
        for statement in OPEN_TRANSACTIONS:
            reader = await stack.enter_async_context(as_role(database))
            await reader.execute("begin")
            await reader.execute(statement)
        _, done = await db.segments.trim(TRIM_EVERYTHING, LATER)
        assert (done.truncate, sorted(done.disconnect)) == ((0, 1, 2), ["again", "reading", "removed"])
        await trim(sql, TrimPlan((), (), 4))
        await log(sql, change(4, 4))
    async with as_role(database) as bystander:
        assert rkeys(await bystander.fetch(NEXT, "bystander", 10)) == ["4"]
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="'reading' was disconnected"):
            await bystander.fetch(NEXT, "reading", 10)


async def test_a_registration_that_commits_after_trimming_reports_the_loss(
    db: Database, database: str, sql: asyncpg.Connection
) -> None:
    await fill_segments(sql, 3)
    async with as_role(database) as reader:
        await reader.execute("begin; select atproto.register_reader('late', 0)")
        _, done = await db.segments.trim(TRIM_EVERYTHING, LATER)
        assert done.truncate == (0, 1)
        await reader.execute("commit")
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="up to 2 have been trimmed"):
            await reader.fetch(NEXT, "late", 10)


async def test_a_role_registers_a_limited_number_of_consumers(database: str, sql: asyncpg.Connection) -> None:
    async with as_role(database) as hostile, as_role(database, "atproto_operator") as bystander:
        many = "select atproto.register_reader('name' || n) from generate_series(1, $1::integer) n"
        with pytest.raises(asyncpg.ConfigurationLimitExceededError, match="role atproto_reader has 16 consumers"):
            await hostile.execute(many, 20_000)
        assert await sql.fetchval("select count(*) from atproto.readers") == 0
        await hostile.execute(many, 16)
        await hostile.execute("select atproto.register_reader('name1')")
        with pytest.raises(asyncpg.ConfigurationLimitExceededError):
            await hostile.execute("select atproto.register_reader('one more')")
        assert await bystander.fetchval("select atproto.register_reader('bystander')") == 0
        assert await hostile.fetchval("select atproto.unregister_reader('name7')")
        await hostile.execute("select atproto.register_reader('one more')")
        assert await sql.fetchval("select count(*) from atproto.readers") == 17


async def test_concurrent_registrations_of_a_role_share_its_limit(database: str) -> None:
    async with as_role(database) as first, as_role(database) as second, connected(database) as third:
        await first.execute("select atproto.register_reader('name' || n) from generate_series(1, 15) n")
        await first.execute("begin; select atproto.register_reader('sixteenth')")
        await second.execute("set lock_timeout = '50ms'")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await second.execute("select atproto.register_reader('another')")
        await first.execute("commit")
        with pytest.raises(asyncpg.ConfigurationLimitExceededError):
            await second.execute("select atproto.register_reader('another')")
        assert await third.fetchval("select count(*) from atproto.readers") == 16


async def test_names_of_consumers_are_limited(database: str) -> None:
    async with as_role(database) as reader:
        await reader.execute("select atproto.register_reader($1)", "n" * 100)
        for name in ("n" * 101, "a\nb", "a\x1b[2Jb", "", None):
            with pytest.raises(asyncpg.InvalidParameterValueError, match="name of a consumer"):
                await reader.execute("select atproto.register_reader($1)", name)


async def test_only_its_role_advances_or_removes_a_consumer(database: str, sql: asyncpg.Connection) -> None:
    await sql.execute("create role other_consumer in role atproto_reader")
    try:
        async with as_role(database) as reader, as_role(database, "other_consumer") as other:
            await reader.execute("select atproto.register_reader('one', 0)")
            await log(sql, change(1, 1), change(1, 2), change(1, 3))
            for call in ("register_reader('one')", "next_changes('one', 1)", "unregister_reader('one')"):
                with pytest.raises(asyncpg.InsufficientPrivilegeError, match="'one' belongs to role atproto_reader"):
                    await other.execute(f"select atproto.{call}")
            await sql.execute("set role other_consumer")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await sql.execute("select atproto.unregister_reader('one')")
            await sql.execute("set role atproto_reader")
            assert rkeys(await sql.fetch(NEXT, "one", 1)) == ["1"]
            await sql.execute("reset role")
            assert rkeys(await reader.fetch(NEXT, "one", 10)) == ["2", "3"]
            assert await sql.fetchval("select owner from atproto.readers") == "atproto_reader"
            assert await sql.fetchval("select atproto.unregister_reader('one')"), "the owner of the schema may"
    finally:
        await sql.execute("drop role other_consumer")
