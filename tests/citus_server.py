"""Databases on a Citus cluster for the tests, distributed over its nodes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
from asyncpg import exceptions

from indexer.cluster.distribute import distribute
from tests.citus_cluster import Cluster, running_cluster
from tests.database_server import DatabaseServer

SHARDS = 4
"""Shards of each table. More shards make each database, and each statement on all buckets, more expensive."""
ATTEMPTS = 100
"""Attempts to copy or drop a database while processes of Citus leave it."""
PAUSE = 0.1

_SETTINGS = """
    select setting from pg_db_role_setting, unnest(setconfig) setting
    where setdatabase = (select oid from pg_database where datname = $1) and setrole = 0
"""
_END_SESSIONS = "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1"


class CitusServer(DatabaseServer):
    """A coordinator and two workers.

    The database of a test has the same name on each node. It is a copy of the template on each node: it contains the
    shards and the metadata of Citus. So it takes less than a second, a fifth of the time to distribute new tables.

    Attributes:
        cluster: The nodes, which a test may kill and start if no other test runs on them.
    """

    cluster: Cluster

    def _run_nodes(self, directory: Path) -> AbstractAsyncContextManager[Sequence[str]]:
        return self._run_cluster(directory)

    @asynccontextmanager
    async def _run_cluster(self, directory: Path) -> AsyncIterator[Sequence[str]]:
        context = running_cluster(directory)
        self.cluster = await asyncio.to_thread(context.__enter__)
        try:
            yield [self.cluster.url_of(name) for name in self.cluster.names]
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)

    async def _create_empty(self, name: str) -> str:
        """Create a database that knows the nodes, without a schema."""
        dsn = await super()._create_empty(name)
        await self.cluster.introduce(name)
        return dsn

    async def _migrate(self, dsn: str) -> None:
        await super()._migrate(dsn)
        await distribute(dsn, SHARDS, lambda *_: None)

    async def _check_transitions(self, dsn: str) -> None:
        """Check nothing: a table with triggers cannot be distributed."""

    async def _copy(self, template: str) -> str:
        """Copy the template on each node, and its settings, which are not in its files."""
        [settings] = await self._fetch(self._connections[:1], _SETTINGS, template)
        await self._disconnect(template)
        dsn = await super()._copy(template)
        await self._execute(f"alter database {template} allow_connections true")
        for (setting,) in settings:
            name, _, value = setting.partition("=")
            await self._fetch(self._connections[:1], f"alter database {urlsplit(dsn).path[1:]} set {name} = '{value}'")
        return dsn

    async def _drop(self, name: str) -> None:
        await self._disconnect(name)
        await super()._drop(name)

    async def _disconnect(self, name: str) -> None:
        """End the sessions of the database, and prevent that Citus opens new ones."""
        await self._execute(f"alter database {name} allow_connections false")
        await self._fetch(self._connections, _END_SESSIONS, name)

    async def _fetch(
        self, connections: Sequence[asyncpg.Connection], statement: str, *values: str
    ) -> list[list[asyncpg.Record]]:
        async with self._one_at_a_time:
            return await asyncio.gather(*(connection.fetch(statement, *values) for connection in connections))

    async def _execute_on(self, connection: asyncpg.Connection, statement: str) -> None:
        """Execute a statement again while a process of Citus uses the database."""
        for _ in range(ATTEMPTS):
            with suppress(exceptions.ObjectInUseError):
                return await super()._execute_on(connection, statement)
            await asyncio.sleep(PAUSE)
        return await super()._execute_on(connection, statement)
