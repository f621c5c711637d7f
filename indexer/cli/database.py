"""Open the database that the settings name, for one command."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from indexer.app.settings import Settings
from indexer.db import Database
from indexer.db.requirements import require_usable_schema
from indexer.embedded import database


def open_database(settings: Settings) -> AbstractAsyncContextManager[str]:
    """Return a context manager that yields the URL of the database.

    It starts the embedded Postgres for the duration of the block, unless that is running already.
    """
    url = settings.database_url
    return database(url.get_secret_value() if url else None, settings.data_dir)


@asynccontextmanager
async def connect_database(
    settings: Settings, *, connections: int = 1, readonly: bool = False
) -> AsyncIterator[Database]:
    """Open the database.

    Raises:
        SchemaVersionError: This release cannot use the version of the database schema.
        SettingsError: The operator has to correct the URL, the password or a privilege.
        DatabaseError: The database does not answer.
    """
    async with open_database(settings) as dsn:
        await require_usable_schema(dsn)
        db = await Database.open(dsn, connections=connections, readonly=readonly)
        try:
            yield db
        finally:
            await db.close()
