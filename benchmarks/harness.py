"""Run the parts of a benchmark: a real Postgres, and the load and the daemons in separate processes."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import cpu_usage
from benchmarks.workload import Workload
from indexer import embedded
from indexer.db.migrate import migrate
from indexer.serve.health import DEFAULT_HTTP_LIMITS

T = TypeVar("T")

DAEMON_VARIABLES = frozenset({"INDEXER_BATCH_WINDOW", "INDEXER_CORE", "INDEXER_VERIFY_THREADS"})
"""Settings that daemons get from the environment of the benchmark."""
TIMEOUT_SECONDS = 60.0
"""Maximum time to wait for a process that makes no progress."""


class BenchmarkError(Exception):
    """A part of the benchmark ended or made no progress."""


@dataclass(frozen=True, slots=True)
class DatabaseServer:
    """A running Postgres, or a cluster of several.

    Attributes:
        dsn: The DSN of the database.
        pids: The main process of each server.
        nodes: The DSN of the database on each server, also on those that only the first one connects to.
    """

    dsn: str
    pids: tuple[int, ...]
    nodes: tuple[str, ...]

    @property
    def servers(self) -> Mapping[str, Sequence[int]]:
        """The main processes by part: of all servers and, in a cluster, of all but the first one."""
        workers = self.pids[1:]
        return {"Postgres": self.pids} | ({"Postgres on workers": workers} if workers else {})


@asynccontextmanager
async def database(directory: Path) -> AsyncIterator[DatabaseServer]:
    """Run the embedded Postgres as the daemon does, with an empty migrated database."""
    async with empty_database(directory) as database:
        await migrate(database.dsn)
        yield database


@asynccontextmanager
async def empty_database(directory: Path, settings: Mapping[str, str] | None = None) -> AsyncIterator[DatabaseServer]:
    """Run the embedded Postgres as the daemon does, with a database without tables.

    Args:
        directory: The data directory.
        settings: Settings of Postgres, which override those of the embedded one.
    """
    async with embedded.database(None, directory, settings) as dsn:
        connection = await asyncpg.connect(dsn)
        server = cpu_usage.parent_pid(await connection.fetchval("select pg_backend_pid()"))
        await connection.close()
        yield DatabaseServer(dsn, (server,), (dsn,))


@dataclass(slots=True)
class LoadProcess:
    """A process that talks by lines of JSON, such as `benchmarks.load_relay` or `benchmarks.export_host`.

    Attributes:
        process: The process.
        url: Its URL, if it has one.
    """

    process: Process
    url: str = ""

    async def read(self, name: str, timeout: float = TIMEOUT_SECONDS) -> Any:  # noqa: ASYNC109
        """Wait for the next line of output that contains `name`, and return the value.

        Raises:
            BenchmarkError: No such line came within `timeout` seconds, or the process ended.
        """
        try:
            async with asyncio.timeout(timeout):
                while name not in (fields := orjson.loads(await _pipe(self.process.stdout).readuntil())):
                    pass
        except (TimeoutError, asyncio.IncompleteReadError):
            raise BenchmarkError(f"the load process did not report {name!r}") from None
        return fields[name]

    async def wait_for_subscribers(self, count: int) -> None:
        """Wait until the number of subscribers becomes `count`."""
        while await self.read("subscribers") != count:
            pass

    async def command(self, *words: int | str) -> None:
        """Send a command (see `benchmarks.load_relay`)."""
        pipe = _pipe(self.process.stdin)
        pipe.write(" ".join(map(str, words)).encode() + b"\n")
        await pipe.drain()


def _pipe(pipe: T | None) -> T:
    if pipe is None:
        raise TypeError("not a pipe")
    return pipe


@asynccontextmanager
async def load_process(module: str, workload: Workload) -> AsyncIterator[LoadProcess]:
    """Run `benchmarks.<module>` on a workload until the end of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"benchmarks.{module}", str(workload.directory), stdin=PIPE, stdout=PIPE
    )
    load = LoadProcess(process)
    try:
        load.url = await load.read("url")
        yield load
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@dataclass(slots=True)
class DaemonProcess:
    """`indexer run` in a separate process.

    Attributes:
        process: The process.
        log: The file with its log lines.
        url: The URL of its HTTP server.
    """

    process: Process
    log: Path
    url: str = ""

    async def wait_until_started(self) -> None:
        """Wait until the daemon serves HTTP."""
        while not self.url:
            self.raise_if_ended()
            for line in self.log.read_bytes().splitlines():
                fields = orjson.loads(line)
                if fields.get("event") == "daemon.started":
                    self.url = fields["health"]
            await asyncio.sleep(0.05)

    def raise_if_ended(self) -> None:
        """Raise `BenchmarkError` with the last log lines if the daemon has ended."""
        if self.process.returncode is not None:
            last = self.log.read_text(errors="replace").splitlines()[-5:]
            raise BenchmarkError("\n".join([f"the daemon ended with code {self.process.returncode}", *last]))

    async def metrics(self) -> dict[str, float]:
        """Return the samples by name and label values, such as `indexer_batch_seconds_sum apply`."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.url}/metrics")).text
        return {
            " ".join([sample.name, *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def wait_until_counted(self) -> None:
        """Wait until the daemon has counted the repos, because the first count reads all rows."""
        while not any(value for name, value in (await self.metrics()).items() if name.startswith("indexer_repos ")):
            self.raise_if_ended()
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """Stop the daemon with SIGTERM.

        Raises:
            BenchmarkError: The daemon did not end within `TIMEOUT_SECONDS`, or its exit code is not 0.
        """
        self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), TIMEOUT_SECONDS)
        except TimeoutError:
            raise BenchmarkError("the daemon did not stop") from None
        if self.process.returncode:
            self.raise_if_ended()


@asynccontextmanager
async def daemon(dsn: str, directory: Path, **settings: object) -> AsyncIterator[DaemonProcess]:
    """Run the daemon with these settings and those of the core. Kill it at the end of the block if it still runs."""
    directory.mkdir()  # noqa: ASYNC240 - no other task is running
    environment = {
        name: value for name, value in os.environ.items() if name in DAEMON_VARIABLES or not name.startswith("INDEXER_")
    }
    defaults = {"database_url": dsn, "data_dir": directory, "allow_private_hosts": "true", "http_bind": "127.0.0.1:0"}
    defaults["track"] = "all"
    environment |= {f"INDEXER_{name.upper()}": str(value) for name, value in (defaults | settings).items()}
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "indexer", "run", env=environment, stderr=log
        )
    running = DaemonProcess(process, directory / "log")
    try:
        await running.wait_until_started()
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def sum_metrics(daemons: Iterable[DaemonProcess]) -> Counter[str]:
    """Return the sums of the samples of all daemons (see `DaemonProcess.metrics`), as they are now."""
    await asyncio.sleep(1.1 * DEFAULT_HTTP_LIMITS.scrape_interval)  # a daemon computes its metrics once per interval
    total = Counter[str]()
    for daemon in daemons:
        total.update(await daemon.metrics())
    return total
