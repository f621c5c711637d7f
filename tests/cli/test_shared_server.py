"""Several commands on one data directory share its embedded Postgres server."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cli.command_line import environment_without_settings
from tests.waiting import until

pytestmark = pytest.mark.slow

ROUNDS = 3


async def start(data_dir: Path, *arguments: str) -> Process:
    settings = {
        "INDEXER_DATA_DIR": str(data_dir),
        "INDEXER_RELAYS": "ws://127.0.0.1:9",  # a port without a server
        "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
        "INDEXER_HTTP_BIND": "127.0.0.1:0",
    }
    data_dir.mkdir(exist_ok=True)
    with log_of(data_dir).open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "indexer", *arguments, env=environment_without_settings() | settings,
            stdout=PIPE, stderr=log if arguments == ("run",) else PIPE,
        )  # fmt: skip


def log_of(data_dir: Path) -> Path:
    """Return the log file of the daemon."""
    return data_dir / "daemon.log"


@asynccontextmanager
async def daemon(data_dir: Path) -> AsyncIterator[Process]:
    """Run a daemon during the block; then stop it and expect that it stops normally."""
    log = log_of(data_dir)
    process = await start(data_dir, "run")
    try:
        yield process
        await until(lambda: "daemon.started" in log.read_text() or process.returncode is not None, log.read_text)
        assert process.returncode is None, log.read_text()
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def server_pid(data_dir: Path) -> int | None:
    """Return the process ID of the server that runs in the data directory."""
    try:
        pid = int((data_dir / "postgres" / "data" / "postmaster.pid").read_text().splitlines()[0])
        os.kill(pid, 0)
    except (FileNotFoundError, IndexError, ProcessLookupError):
        return None
    return pid


@pytest.mark.timeout(300)
async def test_commands_started_at_once_on_a_fresh_directory_do_not_disturb_each_other(tmp_path: Path) -> None:
    for number in range(ROUNDS):
        data_dir = tmp_path / f"round {number}"
        async with daemon(data_dir):
            status = await start(data_dir, "status")
            migrate = await start(data_dir, "migrate")
            output, errors = await status.communicate()
            if status.returncode == 3 and not output:
                assert errors.decode().count("\n") == 1
                assert "indexer migrate" in errors.decode()
            else:
                assert status.returncode in {0, 3}, errors.decode()
            _, errors = await migrate.communicate()
            assert migrate.returncode == 0, errors.decode()
        await until(lambda path=data_dir: server_pid(path) is None)  # type: ignore[misc]


async def test_daemon_keeps_the_server_that_an_ended_command_started(tmp_path: Path) -> None:
    migrate = await start(tmp_path, "migrate")
    await migrate.communicate()
    assert migrate.returncode == 0
    watch = await start(tmp_path, "status", "--watch", "--json")
    assert watch.stdout is not None
    assert await watch.stdout.readline()
    pid = server_pid(tmp_path)
    async with daemon(tmp_path):
        await until(lambda: "daemon.started" in log_of(tmp_path).read_text())
        watch.terminate()  # a process that was started in the background by a shell ignores SIGINT
        await watch.communicate()
        assert watch.returncode == -signal.SIGTERM
        assert server_pid(tmp_path) == pid
    await until(lambda: server_pid(tmp_path) is None)
