"""Run tap, Bluesky's sync utility, with a consumer that acknowledges every event, and read its tables.

`go install` installs its program, at a fixed version, into a folder that git ignores. Its tables: `repos` (did, state,
rev, prev_data) and `repo_records` (did, collection, rkey, cid), in Postgres or SQLite.
"""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import orjson

from benchmarks.harness import TIMEOUT_SECONDS, BenchmarkError, LoadProcess
from benchmarks.peer_results import RepoResult
from benchmarks.workload import Rows, digest_of
from indexer.atproto.cid import parse_cid

PACKAGE = "github.com/bluesky-social/indigo/cmd/tap"
VERSION = "v0.0.0-20260605210604-af2fec94f34c"
FOLDER = Path(__file__).parents[1] / "build" / "tap"
NEEDS_GO = "tap is not installed: install Go (https://go.dev/doc/install) and gcc, or name the program with --tap."
POLL_SECONDS = 0.05
STALL_SECONDS = 600.0
"""Maximum time to wait until the consumer has all events, and until the next repo is synchronized."""
_LISTENING = "0A"
_SQLITE = "sqlite://"


def install_tap() -> Path | None:
    """Return the program, which the Go client installs into `FOLDER` the first time; None if there is no Go.

    Raises:
        BenchmarkError: It cannot be installed.
    """
    program, go = FOLDER / VERSION / "tap", shutil.which("go")
    if program.exists():
        return program
    if go is None:
        return None
    environment = os.environ | {"GOBIN": str(program.parent)}
    command = [go, "install", f"{PACKAGE}@{VERSION}"]
    done = subprocess.run(command, env=environment, cwd="/", check=False)  # noqa: S603 - fixed words
    if done.returncode:
        raise BenchmarkError(f"go install {PACKAGE}@{VERSION} failed; its reason is above")
    return program


Fetch = Callable[[str], Awaitable[list[tuple[Any, ...]]]]
"""Returns the rows of a statement."""


@asynccontextmanager
async def open_database(url: str) -> AsyncIterator[Fetch]:
    """Open a database for reading: Postgres, or the file of a `sqlite://` URL."""
    if url.startswith(_SQLITE):
        with closing(sqlite3.connect(f"file:{url.removeprefix(_SQLITE)}?mode=ro", uri=True)) as file:

            async def fetch_from_file(statement: str) -> list[tuple[Any, ...]]:
                return file.execute(statement).fetchall()

            yield fetch_from_file
        return
    connection = await asyncpg.connect(url)

    async def fetch(statement: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await connection.fetch(statement)]

    try:
        yield fetch
    finally:
        await connection.close()


async def results_of_tables(fetch: Fetch) -> dict[str, RepoResult]:
    """Return rev, tree and records of every repo that is `active`."""
    rows = defaultdict[str, Rows](dict)
    for did, collection, rkey, cid in await fetch("select did, collection, rkey, cid from repo_records"):
        rows[did][f"{collection}/{rkey}"] = parse_cid(cid)
    repos = await fetch("select did, rev, prev_data from repos where state = 'active'")
    return {did: RepoResult(rev, parse_cid(data).hex(), *_summary(rows[did])) for did, rev, data in repos}


def results_of_events(lines: Iterable[bytes]) -> dict[str, RepoResult]:
    """Return rev and records of every repo according to the events, without the tree."""
    rows, revs = defaultdict[str, Rows](dict), defaultdict[str, str](str)
    for line in lines:
        event = orjson.loads(line)
        if event["type"] != "record":
            continue
        record = event["record"]
        did, path = record["did"], f"{record['collection']}/{record['rkey']}"
        revs[did] = max(revs[did], record["rev"])
        if record["action"] == "delete":
            rows[did].pop(path, None)
        else:
            rows[did][path] = parse_cid(record["cid"])
    return {did: RepoResult(revs[did], "", *_summary(rows[did])) for did in revs}


def _summary(rows: Rows) -> tuple[int, str]:
    return len(rows), digest_of(rows)


@dataclass(slots=True)
class TapProcess:
    """tap in a separate process, and its consumer in another.

    Attributes:
        process: The process.
        log: The file with its output.
        events: The file with the events that the consumer received.
        url: The URL of its HTTP server.
        consumer: The consumer.
    """

    process: Process
    log: Path
    events: Path
    url: str
    consumer: LoadProcess

    def raise_if_ended(self) -> None:
        """Raise `BenchmarkError` with the last lines of output if the process has ended."""
        _raise_if_ended(self.process, self.log)

    async def add_repos(self, dids: list[str]) -> None:
        """Let tap synchronize these repos."""
        async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS) as client:
            response = await client.post(f"{self.url}/repos/add", json={"dids": dids})
        if response.status_code != httpx.codes.OK:
            raise BenchmarkError(f"tap refused the repos: {response.status_code} {response.text[:200]}")

    async def wait_for_events(self, count: int) -> float:
        """Wait until the consumer has acknowledged this number of record events; return when (monotonic)."""
        await self.consumer.command(count)
        at: float = await self.consumer.read("received", STALL_SECONDS)
        return at

    async def stop(self) -> None:
        """Stop tap with SIGTERM.

        Raises:
            BenchmarkError: It did not end within `TIMEOUT_SECONDS`.
        """
        self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), TIMEOUT_SECONDS)
        except TimeoutError:
            raise BenchmarkError("tap did not stop") from None


@asynccontextmanager
async def run_tap(program: Path, directory: Path, database_url: str, **settings: str) -> AsyncIterator[TapProcess]:
    """Run tap with its defaults and these settings, with a consumer. Kill both at the end if they still run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TAP_", "RELAY_"))}
    defaults = {"database_url": database_url, "bind": "127.0.0.1:0", "log_level": "warn"}
    environment |= {f"TAP_{name.upper()}": value for name, value in (defaults | settings).items()}
    environment["GODEBUG"] = "netdns=go"
    log, events = directory / "tap.log", directory / "events"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            program, "run", env=environment, cwd=directory, stdout=output, stderr=output
        )
    try:
        port = await _wait_for_port(process, log)
        async with _consumer(port, events) as consumer:
            yield TapProcess(process, log, events, f"http://127.0.0.1:{port}", consumer)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def _consumer(port: int, events: Path) -> AsyncIterator[LoadProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.tap_consumer", str(port), str(events), stdin=PIPE, stdout=PIPE
    )
    consumer = LoadProcess(process)
    try:
        await consumer.read("connected")
        yield consumer
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _wait_for_port(process: Process, log: Path) -> int:
    """Return the port on which the process listens, as soon as it does."""
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while (port := listening_port(process.pid)) is None:
                _raise_if_ended(process, log)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise BenchmarkError("tap does not listen on any port") from None
    return port


def listening_port(pid: int) -> int | None:
    """Return the TCP port on which a process listens, from Linux's /proc; None if there is none."""
    try:
        targets = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:  # the process has ended, or has closed a file meanwhile
        return None
    for line in lines:
        _, address, _, state, *fields = line.split()
        if state == _LISTENING and f"socket:[{fields[5]}]" in targets:
            return int(address.partition(":")[2], 16)
    return None


def _raise_if_ended(process: Process, log: Path) -> None:
    if process.returncode is not None:
        last = log.read_text(errors="replace").splitlines()[-5:]
        raise BenchmarkError("\n".join([f"tap ended with code {process.returncode}", *last]))
