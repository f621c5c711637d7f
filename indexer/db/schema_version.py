"""Compare the version of a database's schema with the one that this release needs, and check privileges.

`indexer.db.migrate` upgrades the schema. It loads SQLAlchemy and Alembic, which take a third of the time in which a
daemon or a command starts, so only what finds an older schema imports it.
"""

from asyncio import CancelledError
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import structlog

from indexer.db.columns import Connection
from indexer.db.database_errors import CONNECT_TIMEOUT, connect, opening, unusable
from indexer.db.requirements import missing_to_migrate, missing_to_run, server_version, unsupported_version
from indexer.errors import SchemaVersionError

FIRST_VERSION = "0101"
"""The version that `migrations/versions/0101_schema.py` creates. Earlier ones are of unreleased commits.

A release can use newer schemas, unless a migration says otherwise. A migration that removes or renames something that
the previous release uses stores its own version as the setting `oldest_compatible_schema`
(docs/decisions/0011-expand-then-contract.md).
"""

SchemaChange = Callable[[asyncpg.Connection], AbstractAsyncContextManager[None]]
"""Surrounds the changes of the schema in the transaction of a migration."""

_PACKAGE = Path(__file__).parents[1]
# Not `to_regclass`, which is an error without the right to use the schema.
_HAS_VERSION = """
    select exists (
        select from pg_class where relnamespace = to_regnamespace('indexer') and relname = 'alembic_version'
    )
"""
_VERSION = "select version_num from indexer.alembic_version"
_OLDEST_COMPATIBLE = "select value from indexer.stored_setting where name = 'oldest_compatible_schema'"

log = structlog.get_logger(__name__)


def migrations_folder() -> Path:
    """Return the folder of the migrations (docs/architecture.md#schema-and-migrations).

    A wheel has it in the package. In the repository, and in an editable installation, it is beside the package.
    """
    installed = _PACKAGE / "migrations"
    return installed if installed.is_dir() else _PACKAGE.parent / "migrations"


async def schema_is_current(dsn: str) -> bool:
    """Return True if the schema has exactly the version that this release needs.

    Raises:
        SettingsError: The operator has to correct the URL, the password or a privilege.
        DatabaseError: The database is unavailable.
    """
    async with _opened(dsn) as connection:
        database, release = await _versions(connection)
    return database == release


async def require_current_schema(dsn: str) -> None:
    """Raise an error unless this release can use the schema: it has the version needed, or a newer, compatible one.

    Raises:
        SchemaVersionError: This release cannot use the schema; the message names both versions.
        SettingsError: The operator has to correct the URL, the password or a privilege.
        DatabaseError: The database is unavailable.
    """
    async with _opened(dsn) as connection:
        database, release = await _versions(connection)
        if database != release:
            await _require_compatible(connection, database, release)


@dataclass(frozen=True, slots=True)
class SchemaState:
    """The schema of a database, compared with the one that this release needs.

    Attributes:
        database: The version of the database schema; None if there is no schema.
        release: The version that this release needs.
        missing: A privilege that the role lacks, to upgrade the schema or to run the daemon; None if it has all.
        compatible: True if the schema is newer, and this release can use it.
    """

    database: str | None
    release: str
    missing: str | None
    compatible: bool = False

    @property
    def is_current(self) -> bool:
        """True if the schema has exactly the version that this release needs."""
        return self.database == self.release


async def schema_state(dsn: str) -> SchemaState:
    """Return the version of the schema and a missing privilege.

    Raises:
        SettingsError: The operator has to correct the URL or the password, or the server is too old.
        DatabaseError: The database is unavailable.
    """
    async with _opened(dsn) as connection:
        database, release = await _versions(connection)
        compatible = await _is_compatible(connection, database, release)
        can_run = compatible or database == release
        missing = await (missing_to_run if can_run else missing_to_migrate)(connection)
    return SchemaState(database, release, missing, compatible)


async def needs_upgrade(dsn: str) -> bool:
    """Return True if there is no schema, or an older one than this release needs.

    Raises:
        SchemaVersionError: This release can neither use nor upgrade the schema.
        SettingsError: The operator has to correct the URL, the password or a privilege.
        DatabaseError: The database is unavailable.
    """
    async with _opened(dsn) as connection:
        return await is_old(connection)


async def is_old(connection: Connection) -> bool:
    """Return the same as `needs_upgrade`, read over an open connection. Use it in a block of `opening`."""
    database, release = await _versions(connection)
    if database is None or FIRST_VERSION <= database < release:
        return True
    if database != release:
        await _require_compatible(connection, database, release)
    return False


async def database_version(connection: Connection) -> str | None:
    """Return the version of the database schema; None if there is no schema. Use it in a block of `opening`."""
    has_version = await connection.fetchval(_HAS_VERSION)
    version: str | None = await connection.fetchval(_VERSION) if has_version else None
    return version


async def require_privileges(dsn: str) -> None:
    """Raise an error if the role lacks a privilege that the daemon needs on a migrated database.

    Raises:
        SettingsError: It lacks one.
        DatabaseError: The database is unavailable.
    """
    async with _opened(dsn) as connection:
        if missing := await missing_to_run(connection):
            raise unusable(dsn, missing)


async def require_ownership(dsn: str) -> None:
    """Raise an error if the role may not change the schema.

    Raises:
        SettingsError: It does not own something.
        DatabaseError: The database is unavailable.
    """
    async with _opened(dsn) as connection:
        if missing := await missing_to_migrate(connection):
            raise unusable(dsn, missing)


async def _require_compatible(connection: Connection, database: str | None, release: str) -> None:
    """Raise `SchemaVersionError` unless the schema is newer and this release can use it."""
    if not await _is_compatible(connection, database, release):
        raise SchemaVersionError(database, release, FIRST_VERSION)
    log.warning("database.newer-schema", database=database, release=release)


async def _is_compatible(connection: Connection, database: str | None, release: str) -> bool:
    """Return True if the schema is newer, and no migration after `release` removed what that release needs."""
    if database is None or database <= release:
        return False
    oldest = await connection.fetchval(_OLDEST_COMPATIBLE)
    return (oldest or FIRST_VERSION) <= release


async def _versions(connection: Connection) -> tuple[str | None, str]:
    """Return the version of the database schema (None: no schema), and the version that this release needs."""
    files = (migrations_folder() / "versions").glob("[0-9]*.py")
    return await database_version(connection), max(path.name.partition("_")[0] for path in files)


@asynccontextmanager
async def _opened(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Open a connection. Its errors, and those of the block, are raised as `opening` says.

    Raises:
        SettingsError: The server is too old.
    """
    with opening(dsn):
        connection = await connect(dsn)
        try:
            if problem := unsupported_version(await server_version(connection)):
                raise unusable(dsn, problem)
            yield connection
        except CancelledError:
            connection.terminate()  # without a wait for the end of the statement, which a server that hangs never sends
            raise
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT)
