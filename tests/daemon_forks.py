"""Daemons as processes that start within a fraction of a second: forks of a process that has imported everything.

Such a process can be told to kill itself at a crash point (`indexer/crash_points.py`).
"""

import asyncio
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from indexer import crash_points
from indexer.app.processes import run
from indexer.app.settings import load_settings
from indexer.app.tuning import Tuning
from indexer.cli.command import ExitCode
from indexer.cli.main import exit_code, main
from indexer.telemetry.log import configure_logging
from tests.background import running
from tests.waiting import until

SUPERVISION_SECONDS = 0.1
STACKS = signal.SIGUSR2
"""At this signal, a process writes the stacks of its threads to its log."""
RUN = ("run", "--no-migrate")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["indexer.app.processes", "indexer.cli.run", __name__])


def start_fork_server() -> None:
    """Start the process to fork, which remains until the session ends. So it must not begin within a test."""
    process = _context.Process(target=os.getpid)
    process.start()
    process.join()
    assert process.exitcode == 0


class Death(NamedTuple):
    """A moment at which a process kills itself.

    Attributes:
        point: The name of the crash point.
        committed: Die after the COMMIT of the transaction in which the point was reached.
        passes: Die when the point is reached for the time of this number.
        other: Another point that counts as this one.
    """

    point: str
    committed: bool = False
    passes: int = 1
    other: str | None = None


def do_not_prepare() -> None:
    """Change nothing in the process."""


class DaemonFork:
    """A daemon that can be killed and started again. Whoever uses it supervises it, as systemd does.

    Attributes:
        log: The log of all its processes.
        ended: How often it ended by itself with an error, for example because the database was unavailable while it
            started.
        tuning: The intervals, timeouts and sizes of the next processes.
    """

    def __init__(
        self,
        environment: dict[str, str],
        directory: Path,
        tuning: Tuning | None = None,
        prepare: Callable[[], None] = do_not_prepare,
    ) -> None:
        """Create it, without a process. `prepare`, a function of a module, is called in each process at first."""
        self.log = directory / "daemon.log"
        self.ended = 0
        self._environment = environment
        self.tuning = tuning or Tuning()
        self._prepare = prepare
        self._process: BaseProcess | None = None
        self._death: Death | None = None

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """Start the daemon, and start it again if it ends because of the database. Kill it at the end of the block."""
        self.start()
        try:
            async with running(self._supervise()):
                yield
        finally:
            self.close()

    @property
    def pid(self) -> int:
        """The ID of the process that was started last."""
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def start(self, death: Death | None = None, command: Sequence[str] = RUN) -> None:
        """Start a process; with `death`, it kills itself at that moment, and is not started again."""
        self._death = death
        self._process = _context.Process(
            target=_run,
            args=(self._environment, str(self.log), self._prepare, death, tuple(command), self.tuning),
        )
        self._process.start()

    def kill(self) -> None:
        """Kill the process."""
        self._restart_ended()
        assert self._process is not None
        self._process.kill()
        self._join_killed()

    async def wait_for_death(self, death: Death) -> None:
        """Wait until the process has killed itself."""
        process = self._process
        assert process is not None
        try:
            await until(lambda: not process.is_alive())
        except AssertionError:
            os.kill(self.pid, STACKS)
            await until(lambda: "most recent call first" in self.log_tail(), self.log_tail)
            raise AssertionError(f"no {death}: {self.log_tail()}") from None
        self._join_killed()

    def has_died(self) -> bool:
        """Return True if the process has killed itself at the moment for which it was told to."""
        return self._process is not None and self._death is not None and self._process.exitcode == -signal.SIGKILL

    def terminate(self) -> None:
        """Send the signal to drain and end."""
        assert self._process is not None
        self._process.terminate()

    async def wait_for_end(self) -> None:
        """Wait until the process has ended with success."""
        process, self._process = self._process, None
        assert process is not None
        await asyncio.to_thread(process.join)
        assert process.exitcode == ExitCode.OK, self.log_tail()

    async def stop(self) -> None:
        """Let the process drain and end."""
        self.terminate()
        await self.wait_for_end()

    def close(self) -> None:
        """Kill the process if there is one. If it has ended by itself with an error, count that."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.ended += self._process.exitcode not in (-signal.SIGKILL, ExitCode.OK)
            self._process = None

    def log_tail(self) -> str:
        """Return the end of the log, which the first process creates."""
        return self.log.read_text()[-3_000:] if self.log.exists() else ""

    def health_url(self) -> str:
        """Return the URL of the health checks of the process that was started last."""
        started = [line for line in self.log.read_text().splitlines() if '"daemon.started"' in line]
        return str(json.loads(started[-1])["health"])

    def _join_killed(self) -> None:
        assert self._process is not None
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL, self.log_tail()
        self._process = None

    async def _supervise(self) -> None:
        while True:
            self._restart_ended()
            await asyncio.sleep(SUPERVISION_SECONDS)

    def _restart_ended(self) -> None:
        if self._process is not None and not self._process.is_alive() and not self.has_died():
            log = self.log.read_text()
            assert self._process.exitcode == ExitCode.FAILED, self.log_tail()
            assert "Traceback (most" not in log, log[log.index("Traceback (most") :]
            self.ended += 1
            self.start()


def run_tuned(tuning: Tuning) -> int:
    """Run a daemon with the settings of the environment, like `indexer run --no-migrate`; return its exit code."""

    def start() -> int:
        settings = load_settings()
        configure_logging(settings.log_format, settings.log_level)
        return asyncio.run(run(settings, migrate_first=False, tuning=tuning))

    return exit_code(start)


def _run(
    environment: dict[str, str],
    log: str,
    prepare: Callable[[], None],
    death: Death | None,
    command: Sequence[str],
    tuning: Tuning,
) -> None:
    """Run the command in this process, with this environment and no other settings."""
    with open(log, "ab") as file:  # noqa: PTH123 - it stays open
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in os.environ if name.startswith("INDEXER_")]:
        del os.environ[name]
    os.environ.update(environment)
    faulthandler.register(STACKS, file=2, all_threads=True)
    prepare()
    if death is not None:
        _arm(death)
    sys.exit(run_tuned(tuning) if command == RUN else main(command))


def _arm(death: Death) -> None:
    """Let this process kill itself at a moment. Steps of a transaction and its COMMIT are in one asyncio task."""
    passes = count(1)
    in_transaction = ContextVar("in_transaction", default=False)

    def reached(point: str) -> None:
        if point in (death.point, death.other) and next(passes) >= death.passes:
            if not death.committed:
                _die()
            in_transaction.set(True)
        elif point == crash_points.COMMITTED and in_transaction.get():
            _die()

    crash_points.hooks.append(reached)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
