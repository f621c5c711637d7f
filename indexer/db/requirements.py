"""Check that the server is new enough, and that the database role has the privileges that it needs.

docs/operations.md#postgres-version-and-privileges lists both for operators.
"""

from indexer.db.columns import Connection

OLDEST_POSTGRES = 15
"""The oldest major version with which the tests were run. The SQL needs version 14 (functions with BEGIN ATOMIC)."""

PUBLIC_ROLES = frozenset({"atproto_reader", "atproto_operator"})
"""The roles to which the migrations grant access to the public schema."""

_VERSION_FACTOR = 10_000
"""`server_version_num` is the major version times this, plus the minor version."""

# Only the owner of an object may alter it, and all members of the owner's role count as owners.
_MISSING_TO_MIGRATE = """
    with thing (kind, name, owner) as (
        select 'schema', nspname::text, nspowner from pg_namespace
        where nspname in ('indexer', 'atproto', 'lexicon')
        union all
        select 'relation', oid::regclass::text, relowner from pg_class
        where relnamespace in (to_regnamespace('indexer'), to_regnamespace('atproto'), to_regnamespace('lexicon'))
            and relkind in ('r', 'p', 'v', 'S')
        union all
        select 'function', oid::regprocedure::text, proowner from pg_proc
        where pronamespace in (to_regnamespace('indexer'), to_regnamespace('atproto'), to_regnamespace('lexicon'))
    )
    select format('to change the schema, the role %I must own the %s %s, which belongs to %I',
        current_user, kind, name, pg_get_userbyid(owner))
    from thing where not pg_has_role(owner, 'usage')
    union all
    select format('to create the schema %s, the role %I needs the privilege CREATE on the database', name, current_user)
    from unnest(array['indexer', 'lexicon']) name
    where to_regnamespace(name) is null and not has_database_privilege(current_database(), 'create')
    limit 1
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


def unsupported_version(version_number: int) -> str | None:
    """Return what is wrong with a server of this `server_version_num`; None if it is supported."""
    major = version_number // _VERSION_FACTOR
    if major >= OLDEST_POSTGRES:
        return None
    return f"the server is Postgres {major}; this program needs Postgres {OLDEST_POSTGRES} or newer"


async def server_version(connection: Connection) -> int:
    """Return the `server_version_num` of the server."""
    return int(await connection.fetchval("select current_setting('server_version_num')"))


async def missing_to_migrate(connection: Connection) -> str | None:
    """Return a privilege that the role lacks to create or upgrade the schema; None if it has all of them."""
    missing: str | None = await connection.fetchval(_MISSING_TO_MIGRATE)
    return missing


async def missing_to_run(connection: Connection) -> str | None:
    """Return a privilege that the role lacks to run the daemon; None if it has all of them."""
    missing: str | None = await connection.fetchval(_MISSING_TO_RUN)
    return missing


async def missing_roles(connection: Connection) -> list[str]:
    """Return the roles of the public schema that do not exist, because this role may not create roles."""
    found = await connection.fetch("select rolname from pg_roles")
    return sorted(PUBLIC_ROLES - {row["rolname"] for row in found})
