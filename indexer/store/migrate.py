"""Bringing a database's schema to the head of `migrations/`, by Alembic."""

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
from indexer.store.errors import CONNECT_SECONDS, database_errors
from indexer.store.schema import metadata

LOCK = 0x6D6967726174  # one at a time: the bytes of "migrat"


async def migrate(dsn: str) -> None:
    """Brings the schema to head, in one transaction; waits for another who does the same.

    Raises `DatabaseError` without a database.
    """
    async with _connection(dsn) as connection:
        await connection.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        await connection.execute(text(f"create schema if not exists {metadata.schema}"))
        await connection.run_sync(_upgrade)


async def schema_is_current(dsn: str) -> bool:
    """Whether the schema is exactly this program's. Raises `DatabaseError` without a database."""
    async with _connection(dsn) as connection:
        return await connection.run_sync(_is_current)


@asynccontextmanager
async def _connection(dsn: str) -> AsyncIterator[AsyncConnection]:
    """A connection in a transaction that commits at the end of the block."""

    async def connect() -> asyncpg.Connection:
        return await asyncpg.connect(dsn, timeout=CONNECT_SECONDS)

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        with database_errors():
            async with engine.begin() as connection:
                yield connection
    finally:
        await engine.dispose()


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", next(iter(migrations.__path__)).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection) -> None:
    command.upgrade(_config(connection), "head")


def _is_current(connection: Connection) -> bool:
    context = MigrationContext.configure(connection, opts={"version_table_schema": metadata.schema})
    head = ScriptDirectory.from_config(_config(connection)).get_current_head()
    return context.get_current_revision() == head
