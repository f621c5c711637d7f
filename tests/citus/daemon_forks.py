"""Daemons as processes that start within a fraction of a second: forks of a process that has imported everything."""

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from indexer.cli.command import ExitCode
from indexer.cli.main import main

SUPERVISION_SECONDS = 0.1

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["indexer.daemon_process", "indexer.cli.daemon_commands", __name__])


def start_fork_server() -> None:
    """Start the process to fork, which remains until the session ends. So it must not begin within a test."""
    process = _context.Process(target=os.getpid)
    process.start()
    process.join()
    assert process.exitcode == 0


class DaemonFork:
    """A daemon that can be killed and started again. Whoever uses it supervises it, as systemd does.

    Attributes:
        log: The log of all its processes.
        ended: How often it ended by itself, because the database was unavailable while it started.
    """

    def __init__(self, environment: dict[str, str], directory: Path) -> None:
        self.log = directory / "daemon.log"
        self.ended = 0
        self._environment = environment
        self._process: BaseProcess | None = None

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """Start the daemon, and start it again if it ends because of the database. Kill it at the end of the block."""
        self.start()
        supervisor = asyncio.create_task(self._supervise())
        try:
            yield
        finally:
            supervisor.cancel()
            await asyncio.wait([supervisor])
            if self._process is not None:
                self._process.kill()
                self._process.join()
        if not supervisor.cancelled():
            supervisor.result()

    def start(self) -> None:
        self._process = _context.Process(target=_run, args=(self._environment, str(self.log)))
        self._process.start()

    def kill(self) -> None:
        """Kill the process."""
        self._restart_ended()
        assert self._process is not None
        self._process.kill()
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL, self.log_tail()
        self._process = None

    async def stop(self) -> None:
        """Let the process drain and end."""
        process, self._process = self._process, None
        assert process is not None
        process.terminate()
        await asyncio.to_thread(process.join)
        assert process.exitcode == ExitCode.OK, self.log_tail()

    def log_tail(self) -> str:
        """Return the end of the log, which the first process creates."""
        return self.log.read_text()[-3_000:] if self.log.exists() else ""

    async def _supervise(self) -> None:
        while True:
            self._restart_ended()
            await asyncio.sleep(SUPERVISION_SECONDS)

    def _restart_ended(self) -> None:
        if self._process is not None and not self._process.is_alive():
            log = self.log.read_text()
            assert self._process.exitcode == ExitCode.FAILED, self.log_tail()
            assert "Traceback (most" not in log, log[log.index("Traceback (most") :]
            self.ended += 1
            self.start()


def _run(environment: dict[str, str], log: str) -> None:
    """Run the command in this process, with this environment and no other settings."""
    with open(log, "ab") as file:  # noqa: PTH123 - it stays open
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in os.environ if name.startswith("INDEXER_")]:
        del os.environ[name]
    os.environ.update(environment)
    sys.exit(main(("run", "--no-migrate")))
