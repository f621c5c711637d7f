"""Run several daemon processes on one machine, each with a part of the shard: `indexer run --processes N`.

Each process has its own port and consumes the whole stream. A process that ends is restarted and continues from its
cursor. Signals are passed on to the processes: they are not in the process group that a terminal sends Ctrl-C to. If
this process ends at once, at a second signal or because it was killed, the kernel sends a signal to the processes, and
they drain and end.
"""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from math import ceil
from pathlib import Path

import structlog

from indexer.app.process_setup import PARENT_ENDED, StopRequest, available_cores, stop_on_signals
from indexer.app.settings import Settings, variable
from indexer.cli.command import ExitCode
from indexer.cli.database import open_database
from indexer.db.prepare_database import prepare_database
from indexer.embedded.server_parent import end_with_parent
from indexer.errors import SettingsError
from indexer.net.server.address import Address
from indexer.serve.health import Listener
from indexer.sync.shard import BUCKETS

MIN_RESTART_SECONDS, MAX_RESTART_SECONDS = 1.0, 60.0
"""Pause before a process is restarted. It doubles each time."""
MAX_PORT = 65_535
STOP_TIMEOUT_SHARE = 0.9
"""The part of `INDEXER_STOP_TIMEOUT` that the processes have, so that this one can end after them."""

log = structlog.get_logger(__name__)


async def supervise(settings: Settings, processes: int, config: Path | None, *, migrate_first: bool = True) -> int:
    """Run the processes until a signal arrives, and return the highest exit code.

    Raises:
        SettingsError: There are more processes than buckets, a port is in use, or the operator has to correct
            something about the database.
    """
    shards = settings.shard.count * processes
    if shards > BUCKETS:
        needed = f"{processes} processes for shard {settings.shard} need {shards} shards"
        raise SettingsError(f"--processes: {needed}; the maximum is {BUCKETS}")
    await _require_free_ports(settings.http_bind, processes)
    stop = StopRequest()
    with stop_on_signals(stop, settings.stop_timeout):
        async with open_database(settings) as dsn:
            if not await prepare_database(dsn, stop, migrate_first=migrate_first):
                return ExitCode.OK
            children = [
                ChildProcess(index, process_environment(settings, index, processes), config)
                for index in range(processes)
            ]
            tasks = [asyncio.create_task(child.run(stop)) for child in children]
            stop.step = "wait for the daemon processes"
            codes = await asyncio.gather(*tasks)
            stop.step = "end the use of the database"
    return max(ExitCode.FAILED if code < 0 else code for code in codes)


async def _require_free_ports(bind: Address, processes: int) -> None:
    """Raise `SettingsError` if a process could not serve at its port: before the schema is upgraded."""
    if bind.port + processes - 1 > MAX_PORT:
        raise SettingsError(f"--processes: {processes} processes from port {bind.port} need ports above {MAX_PORT}")
    for index in range(processes if bind.port else 0):
        with closing(Listener(bind._replace(port=bind.port + index))) as listener:
            await listener.bind()


def process_environment(settings: Settings, index: int, processes: int) -> dict[str, str]:
    """Return the variables that differ between the processes: shard, port, and their share of threads and rates."""
    address = settings.http_bind
    own = {
        "shard": settings.shard.subshard(index, processes),
        "http_bind": address._replace(port=address.port + index if address.port else 0),
        "verify_threads": ceil((settings.verify_threads or available_cores()) / processes),
        "plc_rate": settings.plc_rate / processes,
        "host_rate": settings.host_rate / processes,
        "host_concurrency": ceil(settings.host_concurrency / processes),
        "handle_rate": settings.handle_rate / processes,
        "outbound_rate": settings.outbound_rate / processes,
        "stop_timeout": settings.stop_timeout * STOP_TIMEOUT_SHARE,
    }
    return {variable(name): str(value) for name, value in own.items()}


class ChildProcess:
    """One daemon process, restarted when it ends.

    Attributes:
        process: The process that was started last.
    """

    def __init__(self, index: int, environment: Mapping[str, str], config: Path | None) -> None:
        self._index = index
        self._environment = environment
        self._config = ("--config", str(config)) if config else ()
        self.process: Process | None = None

    async def run(self, stop: asyncio.Event) -> int:
        """Run the process until `stop` is set, and return the last exit code.

        If the process rejects its settings, set `stop`: a restart would end the same way.
        """
        pause = MIN_RESTART_SECONDS
        stopped = asyncio.create_task(stop.wait())
        try:
            while True:
                code = await self._run_once(stopped)
                if code == ExitCode.BAD_ARGUMENT:
                    stop.set()
                if stop.is_set():
                    return code
                log.error("process.ended", process=self._index, code=code, pause=pause)
                await asyncio.wait([stopped], timeout=pause)
                if stop.is_set():
                    return code
                pause = min(2 * pause, MAX_RESTART_SECONDS)
        finally:
            stopped.cancel()
            if self.process is not None and self.process.returncode is None:
                self.process.kill()
                await self.process.wait()

    async def _run_once(self, stopped: "asyncio.Task[bool]") -> int:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "indexer", *self._config, "run", "--no-migrate"),
            env=os.environ | self._environment,
            process_group=0,
            preexec_fn=partial(end_with_parent, PARENT_ENDED),
        )
        log.info("process.started", process=self._index, pid=self.process.pid)
        ended = asyncio.create_task(self.process.wait())
        await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            self.process.terminate()
        return await ended
