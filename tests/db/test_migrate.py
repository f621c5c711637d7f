"""Migrations of several databases at once, with few privileges, or after a newer release."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from structlog.testing import capture_logs

from indexer.db import DatabaseError
from indexer.db.migrate import migrate
from indexer.db.requirements import (
    OLDEST_POSTGRES,
    load_database_facts,
    require_privileges,
    require_usable_schema,
    unsupported_version,
)
from indexer.embedded import database as embedded_database
from indexer.errors import SchemaVersionError, SettingsError
from tests.cli.command_line import PROJECT, environment_without_settings
from tests.database_checks import schema_is_current
from tests.database_server import SERVER_SETTINGS
from tests.db.change_log_helpers import connected
from tests.db.later_release import use_later_release

pytestmark = pytest.mark.slow

DATABASES = 2
GRANTS = """
    grant usage on schema indexer, atproto to {role};
    grant all on all tables in schema indexer, atproto to {role};
    grant all on all sequences in schema indexer to {role};
    grant execute on all functions in schema indexer, atproto to {role};
"""


def with_user(dsn: str, user: str) -> str:
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}"))


def with_database(dsn: str, name: str) -> str:
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))


@asynccontextmanager
async def role(dsn: str, attributes: str = "", kind: str = "role") -> AsyncIterator[str]:
    """Create a role of this kind for the database; yield its name, which is unique on the server."""
    name = f"{kind}_{urlsplit(dsn).path[1:]}"
    async with connected(dsn) as sql:
        await sql.execute(f"create role {name} login {attributes}")
        try:
            yield name
        finally:
            await sql.execute(f"drop owned by {name} cascade; drop role {name}")


@pytest.mark.proof("daemon")
async def test_concurrent_migrations_of_several_databases_of_one_server_succeed(tmp_path: Path) -> None:
    """Neither the databases nor the roles of the public schema exist; the first role may not create these."""
    names = [f"many_{number}" for number in range(DATABASES)]
    async with embedded_database(None, tmp_path, SERVER_SETTINGS) as dsn, connected(dsn) as sql:
        async with role(dsn) as name:
            await sql.execute(f"grant create on database {urlsplit(dsn).path[1:]} to {name}")
            with capture_logs() as lines:
                await migrate(with_user(dsn, name))
            await sql.execute("create role atproto_operator; create role atproto_reader")
            await migrate(with_user(dsn, name))
            assert await sql.fetchval("select has_table_privilege('atproto_reader', 'atproto.records', 'select')")
            roles = "atproto_operator, atproto_reader"
            await sql.execute(f"drop owned by {roles}; drop role {roles}")
        missing = [line["roles"] for line in lines if line["event"] == "database.roles-missing"]
        assert missing == [["atproto_operator", "atproto_reader"]]
        for name in names:
            await sql.execute(f"create database {name}")
        results = await asyncio.gather(*(migrate_in_process(with_database(dsn, name)) for name in names))
        assert [code for code, _ in results] == [0] * DATABASES, results
        for name in names:
            assert await schema_is_current(with_database(dsn, name))


async def migrate_in_process(dsn: str) -> tuple[int | None, bytes]:
    """Run `indexer migrate`; return its exit code, and its error messages and progress."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "indexer", "migrate",
        env=environment_without_settings() | {"INDEXER_DATABASE_URL": dsn}, cwd=PROJECT,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, errors = await process.communicate()
    return process.returncode, errors


async def test_missing_privilege_is_named_and_nothing_is_migrated(
    empty_database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CREATE on the database, and the ownership of the schemas.

    The role may not create roles, as on some managed services.
    """
    database = urlsplit(empty_database).path[1:]
    async with role(empty_database) as name, connected(empty_database) as sql:
        dsn = with_user(empty_database, name)
        with pytest.raises(SettingsError, match=f"permission denied for database {database}") as error:
            await migrate(dsn)
        assert str(error.value).startswith("INDEXER_DATABASE_URL: cannot use the database postgresql://")
        await sql.execute(f"grant create on database {database} to {name}")
        await migrate(dsn)
        use_later_release(monkeypatch, tmp_path, ["alter table indexer.repo add column later integer"])
        async with role(empty_database, kind="other") as other:
            await sql.execute(GRANTS.format(role=other))
            with pytest.raises(SettingsError, match="must be owner of table repo"):
                await migrate(with_user(empty_database, other))
        await migrate(dsn)
        await require_privileges(dsn)
        assert await schema_is_current(empty_database)


async def test_role_without_ownership_migrates_a_current_schema_and_lacks_no_privilege_after_the_grants(
    database: str, sql: asyncpg.Connection
) -> None:
    async with role(database) as name:
        dsn = with_user(database, name)
        with pytest.raises(SettingsError, match="permission denied for schema indexer"):
            await require_usable_schema(dsn)
        await sql.execute(GRANTS.format(role=name))
        await migrate(dsn)
        await require_privileges(dsn)
        await sql.execute(f"revoke truncate on indexer.change_3 from {name}")
        with pytest.raises(
            SettingsError, match=f"the role {name} needs the privilege TRUNCATE on the table .*change_3"
        ):
            await require_privileges(dsn)


async def test_foreign_schema_with_the_same_name_is_reported_in_one_line(empty_database: str) -> None:
    async with connected(empty_database) as sql:
        await sql.execute("create schema atproto")
    with pytest.raises(SettingsError, match=r'INDEXER_DATABASE_URL: .*: schema "atproto" already exists$') as error:
        await migrate(empty_database)
    assert "\n" not in str(error.value)


async def test_release_uses_a_newer_schema_unless_that_removed_something(
    database: str, sql: asyncpg.Connection
) -> None:
    """While a rollout lasts, a daemon of the previous release may start again."""
    await sql.execute("update indexer.alembic_version set version_num = '9999'")
    await sql.execute("alter table indexer.repo add column of_the_future text")
    for check in (migrate, require_usable_schema):
        with capture_logs() as lines:
            await check(database)
        assert [line["event"] for line in lines] == ["database.newer-schema"]
    assert (await load_database_facts(database)).schema.is_usable
    assert not await schema_is_current(database)
    assert await sql.fetchval("select version_num from indexer.alembic_version") == "9999"
    await sql.execute("insert into indexer.stored_setting values ('oldest_compatible_schema', '9998')")
    assert not (await load_database_facts(database)).schema.is_usable
    for check in (migrate, require_usable_schema):
        with pytest.raises(SchemaVersionError, match=r"schema is version 9999; .* Use the release that upgraded it"):
            await check(database)


async def test_older_server_than_the_oldest_supported_is_refused_by_every_use_of_the_database(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unsupported_version(OLDEST_POSTGRES * 10_000) is None
    expected = f"the server is Postgres 9; this program needs Postgres {OLDEST_POSTGRES} or newer"
    assert unsupported_version(90_624) == expected
    monkeypatch.setattr("indexer.db.requirements.OLDEST_POSTGRES", 999)
    for use in (migrate, require_usable_schema, require_privileges):
        with pytest.raises(SettingsError, match="this program needs Postgres 999 or newer"):
            await use(database)


async def test_a_missing_database_is_a_database_error(tmp_path: Path) -> None:
    dsn = f"postgresql://postgres@/none?host={tmp_path}"
    for use in (migrate, schema_is_current):
        with pytest.raises(DatabaseError):
            await use(dsn)
