"""Databases for the tests, and a check that no test leaves a task, a socket or a process behind.

One Postgres server runs per session. Each test gets a migrated database of its own, copied from a template.
"""

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from indexer.store import Store, embedded
from tests.profiles import register_profiles

T = TypeVar("T")

SERVER_SETTINGS = {"fsync": "off", "shared_buffers": "64MB", "synchronous_commit": "off", "max_connections": "200"}
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - each session creates a private directory in it
MIN_FREE_MEMORY = 4 << 30
DIRECTORY_PREFIX = "indexer-tests-"
FINISH_CYCLES = 20
"""Cycles of the event loop in which callbacks of closed connections may finish after a test."""


register_profiles()


class DatabaseServer:
    """A Postgres server, and a thread with an event loop, so that synchronous fixtures can use it.

    While a test runs, the database of the next test is created and that of the previous one is dropped.
    """

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postgres fixtures", daemon=True)
        self._thread.start()
        self._context = embedded.database(os.environ.get("INDEXER_TEST_DATABASE_URL"), directory, SERVER_SETTINGS)
        self.dsn = self.run(self._context.__aenter__())
        self._connection: asyncpg.Connection = self.run(asyncpg.connect(self.dsn))
        self._one_at_a_time = self.run(_lock())
        self._name = f"test_{secrets.token_hex(4)}"  # several sessions may share one server
        self._numbers = count()
        self._template: str | None = None
        self._next: Future[str] | None = None
        self._drops: list[Future[None]] = []

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and return its result."""
        return self._start(coroutine).result(timeout=120)

    def close(self) -> None:
        """Drop all databases and stop the server."""
        if self._next is not None:
            self.drop(self._next.result(timeout=120))
        if self._template is not None:
            self.drop(self._dsn_of(self._template))
        for drop in self._drops:
            drop.result(timeout=120)
        self.run(self._connection.close())
        self.run(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def create(self, *, migrated: bool) -> str:
        """Return the DSN of a new database, with the latest schema or without any."""
        if not migrated:
            return self.run(self._create("template0"))
        created = self._next or self._start(self._create(self.template()))
        dsn = created.result(timeout=120)
        self._next = self._start(self._create(self.template()))
        return dsn

    def copy(self, dsn: str) -> str:
        """Return the DSN of a copy of a database that nothing is connected to."""
        return self.run(self._create(urlsplit(dsn).path[1:]))

    def drop(self, dsn: str) -> None:
        """Drop a database in the background."""
        self._drops.append(self._start(self._execute(f"drop database {urlsplit(dsn).path[1:]} with (force)")))

    def template(self) -> str:
        """Return the name of a migrated database to copy; it is created when it is first needed."""
        if self._template is None:
            from indexer.store.migrate import migrate  # noqa: PLC0415 - only tests with a database import migrations

            name = f"{self._name}_template"
            self.run(self._execute(f"create database {name} template template0"))
            self.run(migrate(self._dsn_of(name)))
            self._template = name
        return self._template

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _create(self, template: str) -> str:
        name = f"{self._name}_{next(self._numbers)}"
        # Without fsync, copying files takes a third of the time of writing pages to the WAL.
        await self._execute(f"create database {name} template {template} strategy file_copy")
        return self._dsn_of(name)

    def _dsn_of(self, name: str) -> str:
        return urlunsplit(urlsplit(self.dsn)._replace(path=f"/{name}"))

    async def _execute(self, statement: str) -> None:
        async with self._one_at_a_time:
            await self._connection.execute(statement)


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


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatabaseServer]:
    # Each test creates and drops a database of about 300 files, which is slow on a disk.
    with memory_directory() as directory:
        server = DatabaseServer(directory or tmp_path_factory.mktemp("postgres"))
        yield server
        server.close()


@pytest.fixture
def database(postgres: DatabaseServer) -> Iterator[str]:
    """Return the DSN of an empty database with the latest schema."""
    dsn = postgres.create(migrated=True)
    yield dsn
    postgres.drop(dsn)


@pytest.fixture
def empty_database(postgres: DatabaseServer) -> Iterator[str]:
    """Return the DSN of a database without a schema."""
    dsn = postgres.create(migrated=False)
    yield dsn
    postgres.drop(dsn)


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    store = await Store.open(database, connections=5)
    yield store
    await store.close()


@pytest.fixture
async def sql(database: str) -> AsyncIterator[asyncpg.Connection]:
    """Open a connection beside those of the store."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest.fixture(autouse=True)
def no_socket_or_process_left() -> Iterator[None]:
    """Fail a test that leaves a socket open or a child process running."""
    sockets, children = open_sockets(), child_processes()
    yield
    left = {f"process {child}" for child in child_processes() - children}
    left |= {f"socket {socket}" for socket in open_sockets() - sockets}
    assert not left, f"left behind: {', '.join(sorted(left))}"


@pytest.fixture(autouse=True)
def no_log_handler_left() -> Iterator[None]:
    """Fail a test that configures the logging of the test process: later tests would write to its closed stderr."""
    before = stream_handlers()
    yield
    assert stream_handlers() == before, "left behind: log handlers"


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fail an asynchronous test that leaves a task running; it is added to every such test below."""
    yield
    for _ in range(FINISH_CYCLES):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0)
    pytest.fail(f"left behind: {', '.join(sorted(str(task) for task in left))}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Store how the run ended: `.ci/repeat-failures` repeats the failures of complete runs only."""
    if not hasattr(session.config, "workerinput") and session.config.cache is not None:
        session.config.cache.set("indexer/exit-status", int(exitstatus))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and asyncio.iscoroutinefunction(item.obj):
            item.add_marker(pytest.mark.usefixtures("no_task_left"), append=False)
            item.fixturenames.insert(0, "no_task_left")


def stream_handlers() -> list[logging.Handler]:
    """Return the handlers of the root logger, without those of pytest, which change with each phase of a test."""
    return [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]


def open_sockets() -> set[str]:
    """Return the open sockets of this process."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib is slow, and this runs twice for each test
        with suppress(OSError):  # closed meanwhile
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
    return {target for target in found if target.startswith("socket:")}


def child_processes() -> set[str]:
    """Return the process IDs of this process's children."""
    children: set[str] = set()
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
        with suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:  # noqa: PTH123
            children.update(file.read().split())
    return children
