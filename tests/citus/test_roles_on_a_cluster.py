# ruff: noqa: S608 - a function cannot be a parameter
"""Roles on a cluster: an owner that is no superuser, and readers that try to send commands to the nodes."""

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from indexer.cluster.distribute import distribute
from indexer.db.migrate import migrate
from indexer.db.requirements import require_privileges
from indexer.demo.scenario import Scenario
from indexer.errors import SettingsError
from tests.citus_cluster import WORKERS
from tests.citus_server import SHARDS, CitusServer
from tests.cli.command_line import error_line, run_indexer
from tests.daemon_process import daemon_process
from tests.database_checks import assert_change_log_consistent, wait_until_equal
from tests.db.change_log_helpers import connected
from tests.db.test_migrate import GRANTS, role, with_user
from tests.faulty_network import FaultyNetwork

pytestmark = pytest.mark.proof("cluster")

STEPS = 40
COMMANDS = (
    "run_command_on_workers($1)",
    "run_command_on_all_nodes($1)",
    "run_command_on_coordinator($1)",
    "run_command_on_shards({table}, $1)",
    "run_command_on_placements({table}, $1)",
    "run_command_on_colocated_placements({table}, {table}, $1)",
    "master_run_on_worker(array['127.0.0.1'], array[{port}], array[$1], false)",
)
"""The functions of Citus that run a command on other nodes."""
OTHER_FUNCTIONS = """
    select oid::regprocedure from pg_proc
    where proname ~ '^(master_)?run_(command_)?on_' and proname <> all($1::text[])
"""


@pytest.fixture
async def owner(empty_database: str) -> str:
    """Return the name of a role without privileges that owns the database.

    It stays when the test ends, because it owns the database then.
    """
    database = urlsplit(empty_database).path[1:]
    async with connected(empty_database) as sql:
        await sql.execute(f"create role owner_of_{database} login")
        await sql.execute(f"alter database {database} owner to owner_of_{database}")
    return f"owner_of_{database}"


@pytest.fixture
async def reader(database: str, sql: asyncpg.Connection) -> AsyncIterator[asyncpg.Connection]:
    """Log in as a role that is a member of atproto_reader, as docs/sql.md creates it."""
    name = f"reader_of_{urlsplit(database).path[1:]}"
    await sql.execute(f"create role {name} login in role atproto_reader")
    connection = await asyncpg.connect(with_user(database, name))
    yield connection
    await connection.close()
    await sql.execute(f"drop role {name}")


async def test_an_owner_that_is_no_superuser_migrates_distributes_and_runs_a_daemon(
    empty_database: str, owner: str, tmp_path: Path
) -> None:
    dsn = with_user(empty_database, owner)
    await migrate(dsn)
    result = await distribute(dsn, SHARDS, lambda *_: None)
    assert any(owner in notice and "from public" in notice for notice in result.notices)
    async with FaultyNetwork() as network:
        scenario = Scenario(network, seed=5)
        async with daemon_process(network, dsn, tmp_path):
            for step in range(STEPS):
                scenario.perform(step, STEPS)
            await wait_until_equal(network, dsn, min_records=10)
    await assert_change_log_consistent(dsn)


async def test_a_role_that_does_not_own_the_database_is_refused_before_anything_is_changed(
    empty_database: str,
) -> None:
    await migrate(empty_database)
    async with role(empty_database) as name, connected(empty_database) as sql:
        await sql.execute(GRANTS.format(role=name))
        refused = run_indexer("distribute", INDEXER_DATABASE_URL=with_user(empty_database, name))
        assert refused.returncode == 2
        assert "the role must own the database on 127.0.0.1:" in error_line(refused)
        assert await sql.fetch("select from pg_dist_partition") == []


async def test_a_reader_cannot_run_a_command_on_the_nodes(
    citus: CitusServer, reader: asyncpg.Connection, sql: asyncpg.Connection
) -> None:
    """On a worker, it may read the shards, with the records of hidden repos."""
    table = await sql.fetchval("select 'indexer.record'::regclass::oid")
    port = citus.cluster.ports[WORKERS[0]]
    for command in COMMANDS:
        query = f"select * from {command.format(table=table, port=port)}"
        await sql.fetch(query, "select 1")  # the owner of the server may run it
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied for function"):
            await reader.fetch(query, "select 1")
    assert await sql.fetch(OTHER_FUNCTIONS, [command.partition("(")[0] for command in COMMANDS]) == []


async def test_a_role_that_may_use_the_private_schema_reads_the_sizes_of_tables(
    database: str, sql: asyncpg.Connection
) -> None:
    """A daemon whose role does not own the schema may send commands to the nodes after the next `distribute`."""
    parts = "select count(*) from indexer.parts_of('indexer.repo')"
    async with role(database) as name, connected(with_user(database, name)) as daemon:
        await sql.execute(GRANTS.format(role=name))
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await daemon.fetchval(parts)
        with pytest.raises(SettingsError, match="needs the privilege EXECUTE on the function run_command_on_all_nodes"):
            await require_privileges(with_user(database, name))
        assert (await distribute(database, None, lambda *_: None)).was_complete
        await require_privileges(with_user(database, name))
        assert await daemon.fetchval(parts) == SHARDS
