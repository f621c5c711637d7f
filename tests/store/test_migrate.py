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

from indexer.errors import SchemaVersionError, SettingsError
from indexer.store.embedded import database as embedded_database
from indexer.store.migrate import migrate
from indexer.store.requirements import OLDEST_POSTGRES, unsupported_version
from indexer.store.schema_version import require_current_schema, require_privileges, schema_is_current, schema_state
from tests.cli.command_line import PROJECT, environment_without_settings
from tests.database_server import SERVER_SETTINGS, DatabaseServer
from tests.store.change_log_helpers import connected

pytestmark = pytest.mark.slow

ROUNDS, DATABASES = 2, 4
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


@pytest.mark.timeout(400)
async def test_concurrent_migrations_of_several_databases_of_one_server_succeed(tmp_path: Path) -> None:
    """In each round, neither the databases nor the roles of the public schema exist."""
    names = [f"many_{number}" for number in range(DATABASES)]
    async with embedded_database(None, tmp_path, SERVER_SETTINGS) as dsn, connected(dsn) as sql:
        for _ in range(ROUNDS):
            for name in names:
                await sql.execute(f"create database {name}")
            results = await asyncio.gather(*(migrate_in_process(with_database(dsn, name)) for name in names))
            assert [code for code, _ in results] == [0] * DATABASES, results
            for name in names:
                assert await schema_is_current(with_database(dsn, name))
                await sql.execute(f"drop database {name} with (force)")
            await sql.execute("drop role atproto_reader, atproto_operator")


async def migrate_in_process(dsn: str) -> tuple[int | None, bytes]:
    """Run `indexer migrate`; return its exit code, and its error messages and progress."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "indexer", "migrate",
        env=environment_without_settings() | {"INDEXER_DATABASE_URL": dsn}, cwd=PROJECT,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, errors = await process.communicate()
    return process.returncode, errors


async def test_concurrent_migrations_in_one_process_succeed(postgres: DatabaseServer) -> None:
    databases = [postgres.create(migrated=False) for _ in range(3)]
    try:
        await asyncio.gather(*map(migrate, databases))
        for dsn in databases:
            assert await schema_is_current(dsn)
    finally:
        for dsn in databases:
            postgres.drop(dsn)


async def test_role_that_may_not_create_a_schema_is_named_before_the_migration(empty_database: str) -> None:
    async with role(empty_database) as name:
        with pytest.raises(SettingsError, match=f"the role {name} needs the privilege CREATE on the database") as error:
            await migrate(with_user(empty_database, name))
        assert str(error.value).startswith("INDEXER_DATABASE_URL: cannot use the database postgresql://")
        assert urlsplit(empty_database).path in str(error.value)
        assert not await schema_is_current(empty_database)


async def test_role_that_does_not_own_the_schema_is_named_before_the_upgrade(empty_database: str) -> None:
    await migrate(empty_database, "0014")
    async with role(empty_database) as name, connected(empty_database) as sql:
        await sql.execute(GRANTS.format(role=name))
        with pytest.raises(
            SettingsError, match=f"the role {name} must own the schema (indexer|atproto), which belongs"
        ):
            await migrate(with_user(empty_database, name))


async def test_owner_that_may_not_create_the_schema_of_typed_views_is_named_before_the_upgrade(
    empty_database: str,
) -> None:
    """Before typed views, the owner of the schemas needed nothing else to upgrade them."""
    async with role(empty_database) as name, connected(empty_database) as sql:
        database = urlsplit(empty_database).path[1:]
        await sql.execute(f"grant create on database {database} to {name}")
        await migrate(with_user(empty_database, name), "0023")
        await sql.execute(f"revoke create on database {database} from {name}")
        missing = f"to create the schema lexicon, the role {name} needs the privilege CREATE on the database"
        assert (await schema_state(with_user(empty_database, name))).missing == missing, "indexer doctor shows it"
        with pytest.raises(SettingsError, match=missing):
            await migrate(with_user(empty_database, name))


async def test_role_with_create_on_the_database_migrates_and_runs(empty_database: str) -> None:
    """It may not create roles, as on some managed services."""
    async with role(empty_database) as name, connected(empty_database) as sql:
        await sql.execute(f"grant create on database {urlsplit(empty_database).path[1:]} to {name}")
        await migrate(with_user(empty_database, name))
        await require_privileges(with_user(empty_database, name))
        assert await schema_is_current(empty_database)


async def test_missing_roles_of_the_public_schema_are_reported(tmp_path: Path) -> None:
    async with embedded_database(None, tmp_path) as dsn, role(dsn) as name, connected(dsn) as sql:
        await sql.execute(f"grant create on database {urlsplit(dsn).path[1:]} to {name}")
        with capture_logs() as lines:
            await migrate(with_user(dsn, name))
        assert [line["roles"] for line in lines if line["event"] == "database.roles-missing"] == [
            ["atproto_operator", "atproto_reader"]
        ]


async def test_role_without_ownership_migrates_a_current_schema_and_lacks_no_privilege_after_the_grants(
    database: str, sql: asyncpg.Connection
) -> None:
    async with role(database) as name:
        dsn = with_user(database, name)
        with pytest.raises(SettingsError, match="permission denied for schema indexer"):
            await require_current_schema(dsn)
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


async def test_release_uses_a_newer_schema_that_removed_nothing(database: str, sql: asyncpg.Connection) -> None:
    """While a rollout lasts, a daemon of the previous release may start again."""
    await sql.execute("update indexer.alembic_version set version_num = '9999'")
    await sql.execute("alter table indexer.repo add column of_the_future text")
    for check in (migrate, require_current_schema):
        with capture_logs() as lines:
            await check(database)
        assert [line["event"] for line in lines] == ["database.newer-schema"]
    assert (await schema_state(database)).compatible
    assert await sql.fetchval("select version_num from indexer.alembic_version") == "9999"


async def test_release_refuses_a_newer_schema_that_removed_something(database: str, sql: asyncpg.Connection) -> None:
    await sql.execute("update indexer.alembic_version set version_num = '9999'")
    await sql.execute("insert into indexer.stored_setting values ('oldest_compatible_schema', '9998')")
    assert not (await schema_state(database)).compatible
    for check in (migrate, require_current_schema):
        with pytest.raises(SchemaVersionError, match=r"schema is version 9999; .* Use the release that upgraded it"):
            await check(database)


def test_older_postgres_than_the_oldest_supported_is_reported() -> None:
    assert unsupported_version(OLDEST_POSTGRES * 10_000) is None
    assert unsupported_version(190_002) is None
    expected = f"the server is Postgres 14; this program needs Postgres {OLDEST_POSTGRES} or newer"
    assert unsupported_version(140_012) == expected
    assert (
        unsupported_version(90_624)
        == f"the server is Postgres 9; this program needs Postgres {OLDEST_POSTGRES} or newer"
    )


async def test_too_old_server_is_refused_by_every_use_of_the_database(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.store.requirements.OLDEST_POSTGRES", 999)
    for use in (migrate, require_current_schema, require_privileges):
        with pytest.raises(SettingsError, match="this program needs Postgres 999 or newer"):
            await use(database)
