"""Several daemons on one machine, each with its part of the shard: `indexer run --processes N`.

Each is a process of its own with a port of its own, and reads the relay's stream for itself. One that ends is started
again; its part of the work goes on from its cursor. A signal is passed on.
"""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from math import ceil
from pathlib import Path

import structlog

from indexer.config import Settings, variable
from indexer.errors import SettingsError
from indexer.run import signals
from indexer.store.embedded import database
from indexer.store.migrate import migrate
from indexer.sync.shard import BUCKETS

PAUSE_FIRST, PAUSE_MOST = 1.0, 60.0  # seconds before a process is started again
BAD_SETTINGS = 2  # the exit code: no other start would do better

log = structlog.get_logger(__name__)


async def supervise(settings: Settings, processes: int, config: Path | None, *, migrate_first: bool = True) -> int:
    """Runs them until a signal comes; gives the exit code. Raises `SettingsError` if there are too few buckets."""
    if settings.shard.count * processes > BUCKETS:
        raise SettingsError(f"--processes: {processes} of shard {settings.shard} are more than {BUCKETS} shards")
    stop = asyncio.Event()
    url = settings.database_url.get_secret_value() if settings.database_url else None
    with signals(stop):
        async with database(url, settings.data_dir) as dsn:
            if migrate_first:
                await migrate(dsn)
            children = [Child(index, environment(settings, index, processes), config) for index in range(processes)]
            tasks = [asyncio.create_task(child.run(stop)) for child in children]
            codes = await asyncio.gather(*tasks)
    return max(codes)


def environment(settings: Settings, index: int, processes: int) -> dict[str, str]:
    """What is different for each: its buckets, its port, and its share of the rates that others see."""
    address = settings.http_bind
    own = {
        "shard": settings.shard.part(index, processes),
        "http_bind": address._replace(port=address.port + index if address.port else 0),
        "plc_rate": settings.plc_rate / processes,
        "host_rate": settings.host_rate / processes,
        "host_concurrency": ceil(settings.host_concurrency / processes),
        "handle_rate": settings.handle_rate / processes,
        "outbound_rate": settings.outbound_rate / processes,
        "outbound_concurrency": ceil(settings.outbound_concurrency / processes),
    }
    return {variable(name): str(value) for name, value in own.items()}


class Child:
    """One daemon's process, started again when it ends."""

    def __init__(self, index: int, environment: Mapping[str, str], config: Path | None) -> None:
        self._index = index
        self._environment = environment
        self._config = ("--config", str(config)) if config else ()
        self.process: Process | None = None

    async def run(self, stop: asyncio.Event) -> int:
        """Until `stop` is set, or the settings are refused, which sets it; gives the last exit code."""
        pause = PAUSE_FIRST
        stopped = asyncio.create_task(stop.wait())
        try:
            while True:
                code = await self._once(stopped)
                if code == BAD_SETTINGS:
                    stop.set()
                if stop.is_set():
                    return code
                log.error("process.ended", process=self._index, code=code, pause=pause)
                await asyncio.wait([stopped], timeout=pause)
                pause = min(2 * pause, PAUSE_MOST)
        finally:
            stopped.cancel()
            if self.process is not None and self.process.returncode is None:
                self.process.kill()
                await self.process.wait()

    async def _once(self, stopped: "asyncio.Task[bool]") -> int:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "indexer", *self._config, "run", "--no-migrate", env=os.environ | self._environment
        )
        log.info("process.started", process=self._index, pid=self.process.pid)
        ended = asyncio.create_task(self.process.wait())
        await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            self.process.terminate()
        return await ended
