"""Create the schema of a database, or upgrade it to the latest version in `migrations/`.

The files in `schema/` have every table, index, view and function as it is now. An empty database gets them as they
stand, and counts as upgraded to the latest version. A database with an older schema gets the versions after it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from itertools import count
from pathlib import Path
from time import monotonic

import asyncpg
import structlog
from asyncpg import exceptions

from indexer.crash_points import COMMITTED, crash_point
from indexer.db.blocking_sessions import BlockingSession, end_blocking
from indexer.db.database_errors import DatabaseError, connect, database_errors, unusable, without_password
from indexer.db.requirements import opened, require_privileges, require_scope, require_usable_schema, schema_state
from indexer.sync.backoff import backoff_seconds

LOCK_SECONDS, MAX_LOCK_SECONDS = 2.0, 64.0
"""How long an attempt waits for a lock. Queries of the same table or view wait behind it.

The time doubles as long as no session with an old transaction stays. It gets longer than `CONSUMER_SECONDS`, so that no
number of consumers whose queries overlap can keep a migration waiting."""
CONSUMER_SECONDS = 60.0
"""Age of the transaction of a consumer at which its session is ended for a migration: the limit of its role."""
MAX_CONFLICTS = 50
"""Attempts while other databases of the same server are migrated."""
MAX_PAUSE_SECONDS = 10.0
"""Longest pause before a migration is tried again."""
FIRST_START_SECONDS, MAX_START_SECONDS = 0.4, 12.0
"""Pauses between attempts to start, before the jitter of 25 %: the longest pause is 15 seconds."""

SchemaChange = Callable[[asyncpg.Connection], AbstractAsyncContextManager[object]]
"""Surrounds the changes of the schema in the transaction of a migration. `nullcontext` suits a plain database."""

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
# One migration at a time. The first one creates the schema, and another one waits at this statement. Later ones have a
# table to lock. Any role could take an advisory lock.
_CREATE_SCHEMA = "create schema if not exists indexer"
_LOCK = "lock table indexer.alembic_version in exclusive mode"
# Postgres ends the transaction a minute after this process was stopped, for example with SIGSTOP.
_LIMITS = "set local lock_timeout = {}; set local idle_in_transaction_session_timeout = '60s'"
_MISSING_ROLES = """
    select array_agg(name) from unnest(array['atproto_operator', 'atproto_reader']) name where to_regrole(name) is null
"""
_ROLES_WITHOUT_PRIVILEGES = """
    select exists (
        select from pg_roles r, pg_namespace n
        where rolname in ('atproto_operator', 'atproto_reader') and nspname = 'atproto'
            and pg_has_role(nspowner, 'usage') and not has_schema_privilege(r.oid, n.oid, 'usage')
    )
"""
_PRIVILEGES = Path(__file__).parent / "schema" / "13_privileges.sql"

log = structlog.get_logger(__name__)


async def prepare_database(
    dsn: str, stop: asyncio.Event, *, migrate_first: bool, changing: SchemaChange, scope_chosen: bool = True
) -> bool:
    """Wait until the database answers, and migrate it or check its version; return False if `stop` ended this.

    Args:
        dsn: The database.
        stop: Set it to end the wait. A migration that has begun is rolled back.
        migrate_first: Upgrade the schema. Otherwise this release must be able to use it as it is.
        changing: See `migrate`.
        scope_chosen: A scope will be stored. Otherwise the database must have one.

    Raises:
        NoScopeError: The database must have a scope, and has none. Nothing was changed.
        SchemaVersionError: The schema is too old and `migrate_first` is False, or it is too new for this release.
        SettingsError: The operator has to correct the URL, the password, a privilege, or the contents of the database.
    """
    prepared = asyncio.create_task(
        _prepare(dsn, changing if migrate_first else None, scope_chosen=scope_chosen), name="prepare database"
    )
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([prepared, stopped], return_when=asyncio.FIRST_COMPLETED)
        if prepared.done():
            prepared.result()
        return not stop.is_set()
    finally:
        prepared.cancel()
        stopped.cancel()
        await asyncio.gather(prepared, stopped, return_exceptions=True)


async def _prepare(dsn: str, changing: SchemaChange | None, *, scope_chosen: bool) -> None:
    for attempt in count(1):
        try:
            if not scope_chosen:
                await require_scope(dsn)
            await (require_usable_schema(dsn) if changing is None else migrate(dsn, changing))
            await require_privileges(dsn)
        except DatabaseError as error:
            if attempt == 1:
                log.warning("database.waiting", error=error.detail)
        else:
            if attempt > 1:
                log.info("database.answered", database=without_password(dsn), attempts=attempt)
            return
        await asyncio.sleep(start_pause(attempt, dsn))


def start_pause(attempt: int, dsn: str) -> float:
    """Return the pause in seconds after this number of attempts to start with the database."""
    return backoff_seconds(attempt, without_password(dsn), first=FIRST_START_SECONDS, maximum=MAX_START_SECONDS)


async def migrate(dsn: str, changing: SchemaChange = nullcontext) -> None:
    """Create or upgrade the schema in one transaction. Waits for another process that does the same.

    With a current schema, only the roles of the public schema get their privileges, if they were created later.

    The transaction is repeated if a concurrent migration of another database of the server fails it, because roles
    belong to the whole server, and if another session holds a lock that it needs.

    Args:
        dsn: The database.
        changing: Surrounds the changes of the schema, and does what the layout of the database needs besides.

    Raises:
        SchemaVersionError: This release can neither use nor upgrade the schema.
        SettingsError: The operator has to correct the URL, the password, a privilege, or the contents of the database.
        DatabaseError: The database is unavailable.
    """
    async with opened(dsn) as connection:
        state = await schema_state(connection)
        if not state.is_old:
            state.require_usable()
            if await connection.fetchval(_ROLES_WITHOUT_PRIVILEGES):  # created after the schema
                await connection.execute(_PRIVILEGES.read_text(encoding="utf-8"))
            return
    log.info("database.migrating", database=state.database, release=state.release)
    began, lock_seconds, conflicts = monotonic(), LOCK_SECONDS, 0
    for attempt in count(1):
        blocking: list[BlockingSession] = []
        with database_errors(dsn):
            try:
                await _upgrade(dsn, lock_seconds, changing, blocking)
                break
            except exceptions.LockNotAvailableError:
                for fields in [session.fields for session in blocking] or [dict.fromkeys(("role", "pid", "seconds"))]:
                    log.warning("database.migration-waiting", **fields)
                stays = any(session.is_old(CONSUMER_SECONDS) for session in blocking)
                lock_seconds = LOCK_SECONDS if stays else min(2 * lock_seconds, MAX_LOCK_SECONDS)
            except asyncpg.PostgresError as error:
                conflicts += 1
                if conflicts == MAX_CONFLICTS or not _is_conflict(error):
                    raise
        await asyncio.sleep(backoff_seconds(attempt, dsn, first=0.2, maximum=MAX_PAUSE_SECONDS))
    log.info("database.migrated", release=state.release, seconds=round(monotonic() - began))


async def _upgrade(dsn: str, lock_seconds: float, changing: SchemaChange, blocking: list[BlockingSession]) -> None:
    """Upgrade the schema in one transaction. If it fails, Postgres rolls back when the connection is closed.

    `blocking` gets the sessions for which it has waited last.
    """
    from indexer.db.apply_versions import apply_versions  # noqa: PLC0415 - loads SQLAlchemy and Alembic

    async with connect(dsn) as connection, _watched(dsn, connection.get_server_pid(), lock_seconds, blocking):
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(_ONLY_ON_THIS_SERVER)
        has_schema = (await schema_state(connection)).database is not None
        await connection.execute(_LOCK if has_schema else _CREATE_SCHEMA)
        state = await schema_state(connection)
        if not state.is_old:  # another process has migrated it
            return
        async with changing(connection):
            await connection.execute(_LIMITS.format(round(1000 * lock_seconds)))  # on all nodes of a cluster
            try:
                await apply_versions(connection, state.database)
                await connection.execute("select indexer.recreate_lexicon_views()")
            except exceptions.DependentObjectsStillExistError as error:  # the hint of Postgres is to drop that, too
                detail = f"{error.detail or error.args[0]}; nothing was changed: this release replaces the view"
                reason = f"{detail}; drop what depends on it, run the command again, and create it again"
                raise unusable(dsn, reason) from error
        if roles := await connection.fetchval(_MISSING_ROLES):
            log.warning("database.roles-missing", roles=roles)
        crash_point("migration.done")
        await transaction.commit()
    crash_point(COMMITTED)


@asynccontextmanager
async def _watched(dsn: str, pid: int, lock_seconds: float, blocking: list[BlockingSession]) -> AsyncIterator[None]:
    """Keep in `blocking` for which sessions the session `pid` has last waited during the block.

    End those of consumers that are too old.
    """

    async def watch() -> None:
        async with connect(dsn) as connection:
            while True:
                await asyncio.sleep(min(1.0, lock_seconds / 4))
                if sessions := await end_blocking(connection, pid, CONSUMER_SECONDS):
                    blocking[:] = [session for session in sessions if not session.ended]
                for session in sessions:
                    if session.ended:
                        log.error("consumer.session-ended", **session.fields)

    watching = asyncio.create_task(watch(), name="sessions that block the migration")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _is_conflict(error: BaseException) -> bool:
    """Return True if another migration of this server caused the error, or a deadlock.

    asyncpg has no class for "tuple concurrently updated", only one for all internal errors.
    """
    return (
        (isinstance(error, exceptions.UniqueViolationError) and error.schema_name == "pg_catalog")
        or (isinstance(error, exceptions.InternalServerError) and "tuple concurrently updated" in str(error))
        or isinstance(error, exceptions.DeadlockDetectedError)
    )
