"""Upgrade a database's schema to the latest version in `migrations/`, with Alembic."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

import migrations
from indexer.errors import SchemaVersionError
from indexer.store.database_errors import CONNECT_TIMEOUT, database_errors
from indexer.store.schema import metadata

LOCK_KEY = 0x6D6967726174
"""The advisory lock that serializes migrations: the bytes of "migrat"."""


async def migrate(dsn: str, revision: str = "head") -> None:
    """Upgrade the schema in one transaction. Waits for another process that does the same.

    Args:
        dsn: The database.
        revision: The version to upgrade to; `head` is the latest one.

    Raises:
        DatabaseError: The database is unavailable.
    """

    def upgrade(connection: Connection) -> None:
        command.upgrade(_config(connection), revision)

    async with _connection(dsn) as connection:
        await connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
        await connection.execute(text(f"create schema if not exists {metadata.schema}"))
        await connection.run_sync(upgrade)


async def schema_is_current(dsn: str) -> bool:
    """Return True if the schema has exactly the version that this release needs.

    Raises:
        DatabaseError: The database is unavailable.
    """
    async with _connection(dsn) as connection:
        database, release = await connection.run_sync(_versions)
    return database == release


async def require_current_schema(dsn: str) -> None:
    """Raise an error unless the schema has exactly the version that this release needs.

    Raises:
        SchemaVersionError: It has another version; the message names both versions.
        DatabaseError: The database is unavailable.
    """
    async with _connection(dsn) as connection:
        database, release = await connection.run_sync(_versions)
    if database != release:
        raise SchemaVersionError(database, release)


@asynccontextmanager
async def _connection(dsn: str) -> AsyncIterator[AsyncConnection]:
    """Open a connection and a transaction that is committed at the end of the block."""

    async def connect() -> asyncpg.Connection:
        return await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT)

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        with database_errors():
            async with engine.begin() as connection:
                yield connection
    finally:
        await engine.dispose()


def _config(connection: Connection) -> Config:
    """Return the configuration, with everything in `attributes` that migrations/env.py needs."""
    config = Config()
    config.set_main_option("script_location", next(iter(migrations.__path__)).replace("%", "%%"))
    config.attributes.update(connection=connection, target_metadata=metadata, version_table_schema=metadata.schema)
    return config


def _versions(connection: Connection) -> tuple[str | None, str]:
    """Return the version of the database schema (None: no schema), and the version that this release needs."""
    context = MigrationContext.configure(connection, opts={"version_table_schema": metadata.schema})
    release = ScriptDirectory.from_config(_config(connection)).get_current_head()
    return context.get_current_revision(), release or ""
