"""Create the schema of a database, or upgrade it to the latest version in `migrations/`, with Alembic.

The files in `schema/` have every table, index, view and function as it is now. An empty database gets them as they
stand, and counts as upgraded to the latest version. A database with an older schema gets the versions after it.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from enum import Enum, auto
from itertools import count
from pathlib import Path
from typing import Any, cast

import asyncpg
import structlog
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from asyncpg import exceptions
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from indexer.crash_points import COMMITTED, crash_point
from indexer.db import schema_version
from indexer.db.database_errors import DatabaseError, connect, opening, unusable, without_password
from indexer.db.migration_locks import LOCK_TIMES, LockTimes, MigrationLocks
from indexer.db.requirements import missing_roles, missing_to_migrate
from indexer.db.schema_version import SchemaChange
from indexer.reasons import FetchFailure
from indexer.sync.backoff import backoff_seconds

MAX_ATTEMPTS = 50
"""Attempts to migrate a database while other databases of the same server are migrated."""
POLL_SECONDS = 0.02

SCHEMA_FOLDER = Path(__file__).parent / "schema"

OnVersion = Callable[[int, int], None]
"""Called with the number of versions that are applied, and of all versions to apply: first with 0, then after each."""


def _ignore(_applied: int, _total: int) -> None:
    """Report no progress."""


def on_one_server(_connection: asyncpg.Connection) -> AbstractAsyncContextManager[None]:
    """Change the schema of a plain database, which needs nothing besides."""
    return nullcontext()


_alembic_lock = threading.Lock()
_HAS_LEXICONS = "select to_regprocedure('indexer.recreate_lexicon_views()') is not null"
# `indexer distribute` creates on the other nodes what they need. Citus would copy everything there, which needs the
# rights of a superuser: for a function that reads pg_roles, Citus replaces this view of Postgres on the nodes. If the
# nodes know the schema, the tables are distributed, or an earlier release has copied functions, which must stay equal.
_ONLY_ON_THIS_SERVER = """
    do $$ begin
        if exists (select from pg_extension where extname = 'citus') then
            if not exists (
                select from pg_catalog.pg_dist_object
                where classid = 'pg_namespace'::regclass and objid = to_regnamespace('indexer')
            ) then
                set local citus.enable_ddl_propagation = off;
            end if;
        end if;
    end $$
"""
_RECREATE_VIEWS = "select indexer.recreate_lexicon_views()"
_CONFLICT = "tuple concurrently updated"  # asyncpg has no class for this error, only one for all internal errors

log = structlog.get_logger(__name__)

# A second process waits here until the first one commits, and then gets a unique violation.
_CREATE_LOCK = """
    do $$ begin
        begin
            if to_regnamespace('indexer') is null then
                create schema indexer;
            end if;
        exception when unique_violation or duplicate_schema then
            null;
        end;
        begin
            if to_regclass('indexer.migration_lock') is null then
                create table indexer.migration_lock ();
            end if;
        exception when unique_violation or duplicate_table then
            null;
        end;
    end $$
"""
# Not an advisory lock, because any role could take it.
_LOCK = "lock table indexer.migration_lock in exclusive mode"


async def migrate(
    dsn: str,
    on_version: OnVersion = _ignore,
    times: LockTimes = LOCK_TIMES,
    changing: SchemaChange = on_one_server,
) -> None:
    """Create or upgrade the schema in one transaction. Waits for another process that does the same.

    The transaction is repeated if a concurrent migration of another database of the server fails it, because roles
    belong to the whole server, and if another session holds a lock that it needs.

    Args:
        dsn: The database.
        on_version: Called when the migration begins, and after each version that is applied.
        times: How long it waits for locks.
        changing: Surrounds the changes of the schema, and does what the layout of the database needs besides.

    Raises:
        SchemaVersionError: This release can neither use nor upgrade the schema.
        SettingsError: The operator has to correct the URL, the password, a privilege, or the contents of the database.
        DatabaseError: The database is unavailable.
    """
    if not await schema_version.needs_upgrade(dsn):
        return
    conflicts, locks = 0, MigrationLocks(dsn, times)
    while conflicts < MAX_ATTEMPTS:
        with opening(dsn):
            async with _only_migration_of_this_process():
                obstacle = await _upgrade(dsn, on_version, locks, changing)
            if obstacle is None:
                return
            if obstacle is _Obstacle.LOCK:
                await locks.make_way()
                continue
        conflicts += 1
        await asyncio.sleep(backoff_seconds(conflicts, dsn, first=0.1, maximum=2.0))
    obstacles = "concurrent changes of roles or deadlocks"
    text = f"{MAX_ATTEMPTS} attempts to migrate the database {without_password(dsn)} met {obstacles}"
    raise DatabaseError(FetchFailure.UNREACHABLE, text)


class _Obstacle(Enum):
    """The reason why the transaction of a migration has to be repeated."""

    LOCK = auto()
    OTHER_MIGRATION = auto()


@asynccontextmanager
async def _only_migration_of_this_process() -> AsyncIterator[None]:
    """Run the block alone: Alembic keeps the connection of the running migration in global variables."""
    while not _alembic_lock.acquire(blocking=False):  # noqa: ASYNC110 - several threads with event loops may need it
        await asyncio.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        _alembic_lock.release()


async def _upgrade(dsn: str, on_version: OnVersion, locks: MigrationLocks, changing: SchemaChange) -> _Obstacle | None:
    """Upgrade the schema; return why the transaction has to be repeated, or None."""
    try:
        async with _transaction(dsn) as (connection, driver):
            if missing := await missing_to_migrate(driver):
                raise unusable(dsn, missing)
            await connection.execute(text(_ONLY_ON_THIS_SERVER))
            await connection.execute(text(_CREATE_LOCK))
            await connection.execute(text(_LOCK))
            if not await schema_version.is_old(driver):  # another process has migrated it
                return None
            database = await schema_version.database_version(driver)
            async with changing(driver), locks.limited(driver, database):
                await connection.run_sync(_apply_versions, database, on_version)
                if await driver.fetchval(_HAS_LEXICONS):
                    await driver.execute(_RECREATE_VIEWS)
            if roles := await missing_roles(driver):
                log.warning("database.roles-missing", roles=roles)
            crash_point("migration.done")
        crash_point(COMMITTED)
    except (DBAPIError, exceptions.PostgresError) as error:
        cause = _driver_error(error)
        if isinstance(cause, exceptions.DependentObjectsStillExistError):
            raise unusable(dsn, _in_use(cause)) from error
        if (obstacle := _obstacle(cause)) is None:
            raise cause from None
        return obstacle
    return None


def _driver_error(error: BaseException) -> BaseException:
    """Return the driver's own error if SQLAlchemy has wrapped it, otherwise the same error."""
    cause = error.orig.__cause__ if isinstance(error, DBAPIError) and error.orig is not None else None
    return cause or error


def _apply_versions(connection: Connection, database: str | None, on_version: OnVersion) -> None:
    """Apply the versions after `database`; if it is None, the files of the schema."""
    config = _config(connection)
    target = "head" if database else schema_version.FIRST_VERSION
    versions = ScriptDirectory.from_config(config).iterate_revisions(target, database or "base")
    waiting, applied = len(list(versions)), count(1)
    on_version(0, waiting)

    def on_version_apply(**_: Any) -> None:
        on_version(next(applied), waiting)
        crash_point("migration.version")

    config.attributes["on_version_apply"] = [on_version_apply]
    command.upgrade(config, target)
    config.attributes["on_version_apply"] = []
    command.stamp(config, "head")  # the files have the effects of all later versions


def _in_use(error: exceptions.DependentObjectsStillExistError) -> str:
    """Return what depends on a view that the migration replaces. The hint of Postgres is to drop that, too."""
    return (
        f"{error.detail or error.args[0]}; nothing was changed: this release replaces the view; drop what depends on "
        "it, run the command again, and create it again"
    )


def _obstacle(cause: BaseException) -> _Obstacle | None:
    """Return what the error says about other sessions; None if they did not cause it."""
    if isinstance(cause, exceptions.LockNotAvailableError):
        return _Obstacle.LOCK
    is_conflict = (
        (isinstance(cause, exceptions.UniqueViolationError) and cause.schema_name == "pg_catalog")
        or (isinstance(cause, exceptions.InternalServerError) and _CONFLICT in str(cause))
        or isinstance(cause, exceptions.DeadlockDetectedError)
    )
    return _Obstacle.OTHER_MIGRATION if is_conflict else None


@asynccontextmanager
async def _transaction(dsn: str) -> AsyncIterator[tuple[AsyncConnection, asyncpg.Connection]]:
    """Open a connection and a transaction that is committed at the end of the block; yield it and its driver's one.

    The transaction begins with the first statement of SQLAlchemy's connection.
    """

    async def creator() -> asyncpg.Connection:
        return await connect(dsn)

    engine = create_async_engine("postgresql+asyncpg://", async_creator=creator, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            driver = cast("asyncpg.Connection", (await connection.get_raw_connection()).driver_connection)
            try:
                yield connection, driver
            except asyncio.CancelledError:
                await connection.invalidate()  # else the rollback waits for the driver's cancelled statement
                raise
    finally:
        await engine.dispose()


def _config(connection: Connection) -> Config:
    """Return the configuration, with everything in `attributes` that migrations/env.py needs."""
    config = Config()
    config.set_main_option("script_location", str(schema_version.migrations_folder()).replace("%", "%%"))
    config.attributes.update(connection=connection, schema_folder=SCHEMA_FOLDER)
    return config
