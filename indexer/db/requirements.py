"""Check that this release can use a database: the versions of Postgres and of the schema, and privileges.

docs/operations.md#postgres-version-and-privileges lists them for operators. `indexer.db.migrate` upgrades the schema.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import time

import asyncpg
import structlog

from indexer.db.columns import Connection
from indexer.db.database_errors import connect, database_errors, unusable, without_password
from indexer.db.gaps import load_cursors
from indexer.errors import NoScopeError, SchemaVersionError
from indexer.sync.stream import Cursor

OLDEST_POSTGRES = 15
"""The oldest major version with which the tests were run. The SQL needs version 14 (functions with BEGIN ATOMIC)."""
FIRST_VERSION = "0101"
"""The version that `migrations/versions/0101_schema.py` creates. Earlier ones are of unreleased commits.

A release can use newer schemas, unless a migration says otherwise. A migration that removes or renames something that
the previous release uses stores its own version as the setting `oldest_compatible_schema`
(docs/decisions/0011-expand-then-contract.md).
"""
SETTINGS = (
    "server_version", "fsync", "full_page_writes", "autovacuum", "synchronous_commit", "max_connections",
    "superuser_reserved_connections",
)  # fmt: skip

_PACKAGE = Path(__file__).parents[1]
# Not `to_regclass`, which is an error without the right to use the schema.
_HAS_VERSION = """
    select exists (
        select from pg_class where relnamespace = to_regnamespace('indexer') and relname = 'alembic_version'
    )
"""
_HAS_SCOPE = "select exists (select from indexer.scope)"
_VERSION = "select version_num from indexer.alembic_version"
_OLDEST_COMPATIBLE = "select value from indexer.stored_setting where name = 'oldest_compatible_schema'"
_FACTS = """
    select (select jsonb_object_agg(name, current_setting(name)) from unnest($1::text[]) name)::text,
        date_part('epoch', clock_timestamp())
"""

# The function of Citus: `indexer distribute` lets only the roles of the daemons use it.
_MISSING_TO_RUN = """
    with missing (privilege, kind, name) as (
        select 'USAGE', 'schema', nspname::text from pg_namespace
        where nspname in ('indexer', 'atproto') and not has_schema_privilege(oid, 'usage')
        union all
        select privilege, 'table', oid::regclass::text
        from pg_class, unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) privilege
        where relnamespace = to_regnamespace('indexer') and relkind in ('r', 'p')
            and not has_table_privilege(oid, privilege)
        union all
        select 'SELECT', 'view', oid::regclass::text from pg_class
        where relnamespace = to_regnamespace('atproto') and relkind = 'v' and not has_table_privilege(oid, 'select')
        union all
        select privilege, 'sequence', oid::regclass::text
        from pg_class, unnest(array['SELECT', 'UPDATE']) privilege
        where relnamespace = to_regnamespace('indexer') and relkind = 'S' and not has_sequence_privilege(oid, privilege)
        union all
        select 'EXECUTE', 'function', oid::regprocedure::text from pg_proc
        where (
            pronamespace in (to_regnamespace('indexer'), to_regnamespace('atproto'))
            or pronamespace = 'pg_catalog'::regnamespace and proname = 'run_command_on_all_nodes'
        ) and not has_function_privilege(oid, 'execute')
    )
    select format('the role %I needs the privilege %s on the %s %s', current_user, privilege, kind, name)
    from missing limit 1
"""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SchemaState:
    """The schema of a database, compared with the one that this release needs.

    Attributes:
        database: The version of the database schema; None if there is no schema.
        release: The version that this release needs.
        is_usable: This release can use the schema: it has the version needed, or a newer one that keeps what this
            release needs.
    """

    database: str | None
    release: str
    is_usable: bool

    @property
    def is_old(self) -> bool:
        """True if this release can create or upgrade the schema."""
        return self.database is None or FIRST_VERSION <= self.database < self.release

    def require_usable(self) -> None:
        """Raise `SchemaVersionError` unless this release can use the schema; log that it is newer."""
        if not self.is_usable:
            raise SchemaVersionError(self.database, self.release, FIRST_VERSION)
        if self.database != self.release:
            log.warning("database.newer-schema", database=self.database, release=self.release)


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """The database as a new session sees it: the data of `indexer doctor`.

    Attributes:
        address: The connection string without passwords.
        settings: The values of `SETTINGS`.
        clock_ahead: Seconds by which the clock of the server is ahead of the one of this machine.
        schema: The version of the schema.
        missing: A privilege that the role lacks to run the daemon; None if it has all, or the schema cannot be used.
        cursors: The stored cursors; none if they cannot be read.
    """

    address: str
    settings: Mapping[str, str]
    clock_ahead: float
    schema: SchemaState
    missing: str | None
    cursors: Sequence[Cursor] = ()


def unsupported_version(version_number: int) -> str | None:
    """Return what is wrong with a server of this `server_version_num`; None if it is supported."""
    major = version_number // 10_000
    if major >= OLDEST_POSTGRES:
        return None
    return f"the server is Postgres {major}; this program needs Postgres {OLDEST_POSTGRES} or newer"


def migrations_folder() -> Path:
    """Return the folder of the migrations (docs/architecture.md#schema-and-migrations).

    A wheel has it in the package. In the repository, and in an editable installation, it is beside the package.
    """
    installed = _PACKAGE / "migrations"
    return installed if installed.is_dir() else _PACKAGE.parent / "migrations"


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """Open a connection. Its errors, and those of the block, are raised as `database_errors` says.

    Raises:
        SettingsError: The operator has to correct the URL, the password or a privilege, or the server is too old.
        DatabaseError: The database is unavailable.
    """
    with database_errors(dsn):
        async with connect(dsn) as connection:
            version = await connection.fetchval("select current_setting('server_version_num')::int")
            if problem := unsupported_version(version):
                raise unusable(dsn, problem)
            yield connection


async def schema_state(connection: Connection) -> SchemaState:
    """Return the version of the schema."""
    database = await connection.fetchval(_VERSION) if await connection.fetchval(_HAS_VERSION) else None
    files = (migrations_folder() / "versions").glob("[0-9]*.py")
    release = max(path.name.partition("_")[0] for path in files)
    is_usable = database == release
    if database is not None and database > release:
        is_usable = (await connection.fetchval(_OLDEST_COMPATIBLE) or FIRST_VERSION) <= release
    return SchemaState(database, release, is_usable)


async def require_usable_schema(dsn: str) -> None:
    """Raise `SchemaVersionError` unless this release can use the schema; other errors as `opened`."""
    async with opened(dsn) as connection:
        (await schema_state(connection)).require_usable()


async def require_scope(dsn: str) -> None:
    """Raise `NoScopeError` unless a scope is stored; other errors as `opened`. An unknown schema is not read."""
    async with opened(dsn) as connection:
        state = await schema_state(connection)
        is_known = state.is_usable or state.is_old
        if state.database is None or (is_known and not await connection.fetchval(_HAS_SCOPE)):
            raise NoScopeError


async def require_privileges(dsn: str) -> None:
    """Raise `SettingsError` if the role lacks a privilege to run the daemon; other errors as `opened`."""
    async with opened(dsn) as connection:
        if missing := await connection.fetchval(_MISSING_TO_RUN):
            raise unusable(dsn, missing)


async def load_database_facts(dsn: str) -> DatabaseFacts:
    """Read the facts. Nothing is written. Errors are those of `opened`."""
    async with opened(dsn) as connection:
        schema = await schema_state(connection)
        missing = await connection.fetchval(_MISSING_TO_RUN) if schema.is_usable else None
        asked_at = time()
        [(settings, server_time)] = await connection.fetch(_FACTS, SETTINGS)
        clock_ahead = server_time - (asked_at + time()) / 2
        cursors = await load_cursors(connection) if schema.is_usable and missing is None else []
    return DatabaseFacts(without_password(dsn), json.loads(settings), clock_ahead, schema, missing, cursors)
