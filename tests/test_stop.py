"""The end of a daemon while its Postgres hangs: bounded by the first signal, immediate at the second one."""

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from time import monotonic

import pytest

from indexer import embedded
from indexer.db.migrate import migrate
from tests.daemon_process import daemon_environment, indexer_run, log_tail
from tests.database_checks import assert_change_log_consistent, wait_until_equal
from tests.faulty_network import FaultyAccount, FaultyNetwork
from tests.waiting import until

POST = "com.example.post"
STOP_TIMEOUT = 3.0
ENOUGH = 10.0
"""Seconds within which a process ends at once, on a busy machine."""


@asynccontextmanager
async def own_database(directory: Path) -> AsyncIterator[str]:
    """Run a Postgres server for one test, which may stop its processes."""
    async with embedded.database(None, directory, {"fsync": "off", "shared_buffers": "16MB"}) as dsn:
        await migrate(dsn)
        yield dsn


def server_processes(data_dir: Path) -> list[int]:
    """Return the process IDs of the server in the data directory, its main process first."""
    pid = int((data_dir / "postgres" / "data" / "postmaster.pid").read_text().splitlines()[0])
    return [pid, *(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@contextmanager
def hanging_server(data_dir: Path) -> Iterator[None]:
    """Stop all processes of the server during the block, so that it accepts connections and never answers."""
    processes = server_processes(data_dir)
    for pid in processes:
        send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            send(pid, signal.SIGCONT)


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # Postgres ends idle processes
        os.kill(pid, number)


async def ended_after(process: Process, number: signal.Signals, limit: float) -> float:
    """Send a signal; return the seconds until the process has ended, with exit code 1."""
    began = monotonic()
    process.send_signal(number)
    assert await asyncio.wait_for(process.wait(), limit) == 1
    return monotonic() - began


def create_posts(accounts: list[FaultyAccount]) -> None:
    for account in accounts:
        account.create(POST, {"$type": POST})


@pytest.mark.parametrize(
    ("arguments", "second_signal"),
    [
        pytest.param([], True, id="two signals", marks=pytest.mark.slow),
        pytest.param([], False, id="one signal", marks=pytest.mark.proof("daemon")),
        pytest.param(["--processes", "2"], True, id="two processes, two signals", marks=pytest.mark.proof("daemon")),
        pytest.param(["--processes", "2"], False, id="two processes, one signal", marks=pytest.mark.proof("daemon")),
    ],
)
async def test_a_stop_ends_in_time_while_postgres_hangs_and_nothing_is_lost(
    tmp_path: Path, arguments: list[str], second_signal: bool
) -> None:
    server, daemons = tmp_path / "server", int(arguments[-1]) if arguments else 1
    async with FaultyNetwork() as network, own_database(server) as dsn:
        accounts = [network.create_account(f"a{number}.test") for number in range(8)]
        environment = daemon_environment(network, dsn, tmp_path)
        stop_timeout = {"INDEXER_STOP_TIMEOUT": "600" if second_signal else f"{STOP_TIMEOUT}"}
        async with indexer_run(tmp_path, environment | stop_timeout, *arguments) as process:
            create_posts(accounts)
            await wait_until_equal(network, dsn, min_records=8)
            with hanging_server(server):
                create_posts(accounts)
                if second_signal:
                    process.send_signal(signal.SIGTERM)
                    # A process that has not handled the first signal yet would take both for one.
                    await until(lambda: (tmp_path / "daemon.log").read_text().count("daemon.draining") == daemons)
                    assert await ended_after(process, signal.SIGTERM, ENOUGH) < ENOUGH
                    event = "daemon.stopped-at-once"
                else:
                    assert await ended_after(process, signal.SIGTERM, STOP_TIMEOUT + ENOUGH) > STOP_TIMEOUT / 2
                    event = "daemon.stop-timeout"
                await until(lambda: event in log_tail(tmp_path), lambda: log_tail(tmp_path))
        create_posts(accounts)
        async with indexer_run(tmp_path, environment, *arguments) as process:
            await wait_until_equal(network, dsn, min_records=24)
            await assert_change_log_consistent(dsn)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
