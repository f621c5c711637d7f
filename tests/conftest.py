"""Databases for the tests, and a check that no test leaves a task, a socket or a process behind.

One Postgres server runs per session, or one Citus cluster with `--database citus`. Each test gets a migrated database
of its own, copied from a template.
"""

import asyncio
import gc
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import asyncpg
import pytest

from indexer.db import Database
from tests.citus_server import CitusServer
from tests.database_server import DatabaseServer, memory_directory
from tests.profiles import register_profiles

FINISH_CYCLES = 20
"""Cycles of the event loop in which callbacks of closed connections may finish after a test."""


register_profiles()
# The imported modules and the collected tests live until the end: the garbage collector need not look at them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000)  # collecting more often takes a tenth of the time of all tests
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--database",
        choices=("postgres", "citus"),
        default="postgres",
        help="where the databases of the tests are: on one Postgres server, or distributed over a Citus cluster",
    )
    parser.addoption("--proof", metavar="PART", help="run the tests of this part of `make proof` instead of the others")
    parser.addoption("--minutes", type=float, default=0.1, help="how long the tests of overload send too much, each")
    parser.addoption("--deaths", type=int, default=0, help="random deaths of daemons in tests/crashes, at least 120")


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatabaseServer]:
    """Run the server that `--database` names."""
    if request.config.getoption("--database") == "citus":
        yield request.getfixturevalue("citus")
        return
    # Each test creates and drops a database of about 300 files, which is slow on a disk.
    with memory_directory() as directory:
        server = DatabaseServer(directory or tmp_path_factory.mktemp("postgres"))
        yield server
        server.close()


@pytest.fixture(scope="session")
def citus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CitusServer]:
    """Run a Citus cluster; skip the test if Citus is not installed."""
    with memory_directory() as directory:
        server = CitusServer(directory or tmp_path_factory.mktemp("citus"))
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
async def db(database: str) -> AsyncIterator[Database]:
    db = await Database.open(database, connections=5)
    yield db
    await db.close()


@pytest.fixture
async def sql(database: str) -> AsyncIterator[asyncpg.Connection]:
    """Open a connection beside those of the pool."""
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests were skipped, a line for each reason, and what the passed crash tests have counted."""
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
    counted = [pair for report in terminalreporter.stats.get("passed", ()) for pair in report.user_properties]
    deaths = sum(int(str(value)) for name, value in counted if name == "deaths")
    if deaths:
        terminalreporter.write_line(f"crash tests: processes were killed {deaths} times, and nothing was lost")
    for name, figures in [pair for pair in counted if pair[0] in ("overload", "writes that are seen")]:
        terminalreporter.write_line(f"{name}: {figures}")
    for points in [value for name, value in counted if name == "missed crash points" and value]:
        terminalreporter.write_line(
            f"crash points that a process passed, but that no process to kill reached: {points}"
        )
    for cuts in [value for name, value in counted if name == "cuts"]:
        terminalreporter.write_line(f"connections that were broken, by the next message: {cuts}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, selected, others = config.getoption("--proof"), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        proof = item.get_closest_marker("proof")
        (selected if (proof.args[0] if proof else None) == part else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = selected
    for item in items:
        one_server = item.get_closest_marker("one_server")
        if one_server is not None and config.getoption("--database") == "citus":
            item.add_marker(pytest.mark.skip(reason=f"not on a cluster: {one_server.args[0]}"))
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
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has none, as after most tests, and reading the files would take longer
        return set()
    children: set[str] = set()
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
        with suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:  # noqa: PTH123
            children.update(file.read().split())
    return children
