"""Daemons as processes that start within a fraction of a second: forks of a process that has imported everything."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from indexer.cli.main import main

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["indexer.daemon_process", "indexer.cli.daemon_commands", __name__])


def start_fork_server() -> None:
    """Start the process to fork, which remains until the session ends. So it must not begin within a test."""
    process = _context.Process(target=os.getpid)
    process.start()
    process.join()
    assert process.exitcode == 0


class DaemonFork:
    """A daemon that can be killed and started again.

    Attributes:
        log: The log of all its processes.
        kills: How often it was killed while it ran.
    """

    def __init__(self, environment: dict[str, str], directory: Path) -> None:
        self.log = directory / "daemon.log"
        self.kills = 0
        self._environment = environment
        self._process: BaseProcess | None = None

    def start(self) -> None:
        self._process = _context.Process(target=_run, args=(self._environment, str(self.log)))
        self._process.start()

    def kill(self) -> None:
        """Kill the process, which must be running."""
        assert self._process is not None
        assert self._process.is_alive(), self.log_tail()
        self._process.kill()
        self._process.join()
        self._process = None
        self.kills += 1

    def stop(self) -> None:
        """Let the process drain and end."""
        assert self._process is not None
        self._process.terminate()
        self._process.join(60)
        assert self._process.exitcode == 0, self.log_tail()
        self._process = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def log_tail(self) -> str:
        return self.log.read_text()[-3_000:]

    @contextmanager
    def killed_at_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.join()


def _run(environment: dict[str, str], log: str) -> None:
    """Run the command in this process, with this environment and no other settings."""
    with open(log, "ab") as file:  # noqa: PTH123 - it stays open
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in os.environ if name.startswith("INDEXER_")]:
        del os.environ[name]
    os.environ.update(environment)
    sys.exit(main(("run", "--no-migrate")))
