"""Apply migrations with Alembic.

SQLAlchemy and Alembic take a third of the time in which a daemon or a command starts, so only a migration imports this.
"""

from pathlib import Path

import asyncpg
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

from indexer.crash_points import crash_point
from indexer.db import requirements

SCHEMA_FOLDER = Path(__file__).parent / "schema"


async def apply_versions(driver: asyncpg.Connection, database: str | None) -> None:
    """Apply the versions after `database`; if it is None, the files of the schema. The caller has a transaction.

    Raises:
        PostgresError: The error of the driver.
    """

    async def creator() -> asyncpg.Connection:
        return driver

    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=creator, poolclass=StaticPool, isolation_level="AUTOCOMMIT"
    )
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_run_alembic, database)
    except DBAPIError as error:
        cause = error.orig and error.orig.__cause__
        raise (cause or error) from None


def _run_alembic(connection: Connection, database: str | None) -> None:
    config = Config()
    config.set_main_option("script_location", str(requirements.migrations_folder()).replace("%", "%%"))
    config.attributes.update(  # everything that migrations/env.py needs
        connection=connection,
        schema_folder=SCHEMA_FOLDER,
        on_version_apply=[lambda **_: crash_point("migration.version")],
    )
    command.upgrade(config, "head" if database else requirements.FIRST_VERSION)
    command.stamp(config, "head")  # the files have the effects of all later versions
