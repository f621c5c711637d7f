"""The servers of a test session: a database for each test, on one Postgres or on a Citus cluster."""

import asyncio
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from indexer import embedded

T = TypeVar("T")

SERVER_SETTINGS = {
    "fsync": "off",
    "shared_buffers": "64MB",
    "synchronous_commit": "off",
    "max_connections": "200",
    "max_prepared_transactions": "10",
}
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - each session creates a private directory in it
MIN_FREE_MEMORY = 4 << 30
DIRECTORY_PREFIX = "indexer-tests-"

CHECK_TRANSITIONS = """
    create function indexer.check_transition() returns trigger language plpgsql as $$ begin
        if (old.sync_status, new.sync_status) not in (ALLOWED) then
            raise exception '%: a % repo never becomes %', new.did, old.sync_status, new.sync_status;
        end if;
        return null;
    end $$;
    create trigger check_transition after update of sync_status on indexer.repo
        for each row execute function indexer.check_transition()
"""


class DatabaseServer:
    """A Postgres server, and a thread with an event loop, so that synchronous fixtures can use it.

    While a test runs, the database of the next test is created and that of the previous one is dropped.
    """

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postgres fixtures", daemon=True)
        self._thread.start()
        self._context = self._run_nodes(directory)
        self._dsns = self.run(self._context.__aenter__())
        self._connections = [self.run(asyncpg.connect(dsn)) for dsn in self._dsns]
        self._one_at_a_time = self.run(_lock())
        self._name = f"test_{secrets.token_hex(4)}"  # several sessions may share one server
        self._numbers = count()
        self._template: str | None = None
        self._next: Future[str] | None = None
        self._drops: list[Future[None]] = []

    @property
    def dsn(self) -> str:
        """A database of the server that belongs to no test."""
        return self._dsns[0]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and return its result."""
        return self._start(coroutine).result(timeout=120)

    def close(self) -> None:
        """Drop all databases and stop the server."""
        if self._next is not None:
            self.drop(self._next.result(timeout=120))
        if self._template is not None:
            self.drop(dsn_of(self.dsn, self._template))
        for drop in self._drops:
            drop.result(timeout=120)
        for connection in self._connections:
            self.run(connection.close())
        self.run(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def create(self, *, migrated: bool) -> str:
        """Return the DSN of a new database, with the latest schema or without any."""
        if not migrated:
            return self.run(self._create_empty(self._new_name()))
        created = self._next or self._start(self._copy(self.template()))
        dsn = created.result(timeout=120)
        self._next = self._start(self._copy(self.template()))
        return dsn

    def copy(self, dsn: str) -> str:
        """Return the DSN of a copy of a database that no test is connected to."""
        return self.run(self._copy(urlsplit(dsn).path[1:]))

    def drop(self, dsn: str) -> None:
        """Drop a database in the background."""
        self._drops.append(self._start(self._drop(urlsplit(dsn).path[1:])))

    def template(self) -> str:
        """Return the name of a migrated database to copy; it is created when it is first needed."""
        if self._template is None:
            name = f"{self._name}_template"
            self.run(self._migrate(self.run(self._create_empty(name))))
            self._template = name
        return self._template

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _new_name(self) -> str:
        return f"{self._name}_{next(self._numbers)}"

    def _run_nodes(self, directory: Path) -> AbstractAsyncContextManager[Sequence[str]]:
        """Run the server, or the nodes of a cluster, with the coordinator first; yield a DSN for each."""
        return _run_server(directory)

    async def _create_empty(self, name: str) -> str:
        await self._execute(f"create database {name} template template0")
        return dsn_of(self.dsn, name)

    async def _migrate(self, dsn: str) -> None:
        from indexer.db.migrate import migrate  # noqa: PLC0415 - only tests with a database import migrations

        await migrate(dsn)
        await self._check_transitions(dsn)

    async def _check_transitions(self, dsn: str) -> None:
        """Let the database refuse each change of a sync status that is not in the table of transitions."""
        from indexer.sync.repo import TRANSITIONS  # noqa: PLC0415 - as above

        changes = {(before, after) for before, row in TRANSITIONS.items() for _, after in row.values()}
        allowed = ", ".join(f"('{before}', '{after}')" for before, after in sorted(changes))
        connection = await asyncpg.connect(dsn)
        await connection.execute(CHECK_TRANSITIONS.replace("ALLOWED", allowed))
        await connection.close()

    async def _copy(self, template: str) -> str:
        name = self._new_name()
        # Without fsync, copying files takes a third of the time of writing pages to the WAL.
        await self._execute(f"create database {name} template {template} strategy file_copy")
        return dsn_of(self.dsn, name)

    async def _drop(self, name: str) -> None:
        await self._execute(f"drop database {name} with (force)")

    async def _execute(self, statement: str) -> None:
        """Execute a statement on each node."""
        async with self._one_at_a_time:
            await asyncio.gather(*(self._execute_on(connection, statement) for connection in self._connections))

    async def _execute_on(self, connection: asyncpg.Connection, statement: str) -> None:
        await connection.execute(statement)


def dsn_of(dsn: str, name: str) -> str:
    """Return the DSN of another database of the same server."""
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))


@asynccontextmanager
async def _run_server(directory: Path) -> AsyncIterator[Sequence[str]]:
    url = os.environ.get("INDEXER_TEST_DATABASE_URL")
    async with embedded.database(url, directory, SERVER_SETTINGS) as dsn:
        yield [dsn]


async def _lock() -> asyncio.Lock:
    return asyncio.Lock()


@contextmanager
def memory_directory() -> Iterator[Path | None]:
    """Create a directory in memory, and remove those of killed sessions. Yield None if there is too little memory."""
    if not SHARED_MEMORY.is_dir():
        yield None
        return
    for old in SHARED_MEMORY.glob(f"{DIRECTORY_PREFIX}*"):
        pid = old.name.removeprefix(DIRECTORY_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            shutil.rmtree(old, ignore_errors=True)
    if shutil.disk_usage(SHARED_MEMORY).free < MIN_FREE_MEMORY:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix=f"{DIRECTORY_PREFIX}{os.getpid()}-", dir=SHARED_MEMORY) as directory:
        yield Path(directory)
