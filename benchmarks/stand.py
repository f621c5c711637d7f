"""What a benchmark runs on: a real Postgres, the load and the daemon, each in processes of its own."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import usage
from benchmarks.world import World
from indexer.store import embedded
from indexer.store.migrate import migrate

T = TypeVar("T")

PATIENCE = 60.0  # seconds without a sign of life


class BenchmarkError(Exception):
    """A part of the benchmark ended or stood still; the message says which, and what it said last."""


@dataclass(frozen=True, slots=True)
class Database:
    dsn: str
    pid: int


@asynccontextmanager
async def database(directory: Path) -> AsyncIterator[Database]:
    """The embedded Postgres as the daemon would run it, migrated and empty."""
    async with embedded.database(None, directory) as dsn:
        await migrate(dsn)
        connection = await asyncpg.connect(dsn)
        server = usage.parent(await connection.fetchval("select pg_backend_pid()"))
        await connection.close()
        yield Database(dsn, server)


@dataclass(slots=True)
class Load:
    """A load process, `benchmarks.<module>`, on a world; `url` is where it serves."""

    process: Process
    url: str = ""

    async def told(self, name: str) -> Any:
        """Waits for the next line that says `name`, and gives its value."""
        try:
            async with asyncio.timeout(PATIENCE):
                while name not in (said := orjson.loads(await _pipe(self.process.stdout).readuntil())):
                    pass
        except (TimeoutError, asyncio.IncompleteReadError):
            raise BenchmarkError(f"the load didn't say {name!r}") from None
        return said[name]

    async def subscribed(self, count: int) -> None:
        """Waits until so many subscribers are connected."""
        while await self.told("subscribers") != count:
            pass

    async def tell(self, *words: int) -> None:
        pipe = _pipe(self.process.stdin)
        pipe.write(" ".join(map(str, words)).encode() + b"\n")
        await pipe.drain()


def _pipe(pipe: T | None) -> T:
    if pipe is None:
        raise TypeError("not a pipe")
    return pipe


@asynccontextmanager
async def load(module: str, world: World) -> AsyncIterator[Load]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"benchmarks.{module}", str(world.directory), stdin=PIPE, stdout=PIPE
    )
    running = Load(process)
    try:
        running.url = await running.told("url")
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@dataclass(slots=True)
class Daemon:
    """`indexer run` in a process of its own, whose log goes to the file `log`."""

    process: Process
    log: Path
    health: str = ""

    async def started(self) -> None:
        while not self.health:
            self.check()
            for line in self.log.read_bytes().splitlines():
                said = orjson.loads(line)
                if said.get("event") == "daemon.started":
                    self.health = said["health"]
            await asyncio.sleep(0.05)

    def check(self) -> None:
        """Raises `BenchmarkError` if the daemon has ended."""
        if self.process.returncode is not None:
            last = self.log.read_text(errors="replace").splitlines()[-5:]
            raise BenchmarkError("\n".join([f"the daemon ended with code {self.process.returncode}", *last]))

    async def metrics(self) -> dict[str, float]:
        """Samples by their name, and the values of their labels behind it: `indexer_batch_seconds_sum apply`."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.health}/metrics")).text
        return {
            " ".join([sample.name, *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def counted(self) -> None:
        """Waits until it has counted the repos, which reads them all: at the start, then a hundredth of the time."""
        while not any(value for name, value in (await self.metrics()).items() if name.startswith("indexer_repos ")):
            self.check()
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """Asks it to drain and end; raises `BenchmarkError` if it doesn't do so in good order."""
        self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), PATIENCE)
        except TimeoutError:
            raise BenchmarkError("the daemon didn't stop") from None
        if self.process.returncode:
            self.check()


@asynccontextmanager
async def daemon(dsn: str, directory: Path, **settings: object) -> AsyncIterator[Daemon]:
    """The daemon under `settings` alone, serving; killed at the end of the block if nobody has stopped it."""
    directory.mkdir()  # noqa: ASYNC240 - nobody else is waiting
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INDEXER_")}
    ours = {"database_url": dsn, "data_dir": directory, "allow_private_hosts": "true", "http_bind": "127.0.0.1:0"}
    environment |= {f"INDEXER_{name.upper()}": str(value) for name, value in (ours | settings).items()}
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "indexer", "run", env=environment, stderr=log
        )
    running = Daemon(process, directory / "log")
    try:
        await running.started()
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def sum_metrics(daemons: Iterable[Daemon]) -> Counter[str]:
    """Of all of them; see `Daemon.metrics`."""
    total = Counter[str]()
    for daemon in daemons:
        total.update(await daemon.metrics())
    return total
