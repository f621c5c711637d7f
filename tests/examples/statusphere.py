"""Run an example AppView as its README says, and compare what it shows with the network."""

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from indexer.demo.local_pds import GET_REPO
from tests.cli.command_line import environment_without_settings
from tests.demo.independent_decoder import decode_all, decode_car, decode_records
from tests.free_ports import free_ports
from tests.waiting import until

ROOT = Path(__file__).parents[2]
COLLECTION = "xyz.statusphere.status"
PORTS = 6
START_SECONDS = 180.0
STOP_SECONDS = 60.0
ACTIVITY_SECONDS = 15
MAX_STATUS_BYTES = 32
STARTED = "Ctrl-C stops everything."

Page = dict[str, Any]
Shown = Callable[[], Awaitable[Page | None]]
"""Return what the AppView shows; None if it is not running."""


def command_of(example: str) -> str:
    """Return the command of the README: the first code block of it."""
    readme = (ROOT / "examples" / example / "README.md").read_text()
    command = re.search(r"^    (\S.*)$", readme, re.MULTILINE)
    assert command is not None, readme
    return command[1]


class RunningExample:
    """An example that was started with the command of its README.

    Attributes:
        lines: Everything that it printed.
        first_port: The first of its ports: relay, PLC directory, two PDSes, indexer, AppView.
    """

    def __init__(self, process: Process, first_port: int) -> None:
        self.lines: list[str] = []
        self.first_port = first_port
        self._process = process
        self._reading = asyncio.create_task(self._read())
        self._http = httpx.AsyncClient(timeout=30)
        self._writes = 0

    @property
    def appview_url(self) -> str:
        return f"http://127.0.0.1:{self.first_port + 5}"

    @property
    def database(self) -> str:
        """The database as the role of the AppView."""
        return next(line for line in self.lines if line.startswith("database: ")).partition(": ")[2]

    def process_of(self, name: str) -> int:
        """Return the process ID of the running indexer or AppView."""
        return [int(line.split()[-1]) for line in self.lines if line.startswith(f"{name}: process ")
                and " ended " not in line][-1]  # fmt: skip

    async def wait_for(self, text: str) -> None:
        async with asyncio.timeout(START_SECONDS):
            while not any(text in line for line in self.lines):
                assert not self._reading.done(), self.lines
                await asyncio.sleep(0.05)

    async def get_page(self) -> Page | None:
        """Return what an AppView with an HTTP server shows."""
        try:
            response = await self._http.get(f"{self.appview_url}/statuses.json")
        except httpx.TransportError:
            return None
        return response.json() if response.status_code == 200 else None

    async def kill(self, name: str) -> None:
        """Kill the indexer or the AppView (SIGKILL), and write statuses before it is started again."""
        killed = self.process_of(name)
        self._process.send_signal(signal.SIGSTOP)  # it starts nothing until it continues
        os.kill(killed, signal.SIGKILL)
        await until(lambda: has_ended(killed))
        await self.write()
        self._process.send_signal(signal.SIGCONT)
        await self.wait_for(f"{name}: process {killed} ended with code -9")
        await until(lambda: self.process_of(name) != killed, lambda: self.lines[-5:])

    async def write(self) -> None:
        """Delete, create and replace statuses of all active accounts that have some."""
        for did, records in (await self._repos()).items():
            if not records:
                continue
            self._writes += 1
            newest = max(records, key=lambda record: str(record["value"].get("createdAt")))
            await self._post(did, "deleteRecord", rkey=newest["uri"].rpartition("/")[2])
            text = "🎉" if self._writes % 2 else "🌧️"
            await self._post(did, "createRecord", record=status(text))
            await self._post(did, "putRecord", rkey="self", record=status("🧪"))
            await self._post(did, "putRecord", rkey="unusual", record=status("🧪") | {"createdAt": "tomorrow"})

    async def until_equal(self, shown: Shown) -> Page:
        """Wait until the AppView shows the truth of the network; return it."""
        page: Page | None = None
        expected: Page = {}

        async def equal() -> bool:
            nonlocal page, expected
            expected = await self.truth()
            page = await shown()
            return page is not None and normalized(page) == normalized(expected)

        await until(equal, lambda: {"shown": page, "expected": expected, "lines": self.lines[-10:]})
        return expected

    async def truth(self) -> Page:
        """Return the page, computed from what the servers of the network say."""
        statuses, counts = [], Counter[str]()
        for did, records in (await self._repos()).items():
            valid = [record for record in records if is_valid(record["value"])]
            counts.update(record["value"]["status"] for record in valid)
            if valid:
                latest = max(valid, key=lambda record: (moment_of(record["value"]), record["uri"]))
                value = latest["value"]
                statuses.append({
                    "did": did,
                    "handle": await self._handle(did),
                    "status": value["status"],
                    "createdAt": value["createdAt"],
                    "uri": latest["uri"],
                })  # fmt: skip
        statuses.sort(key=lambda row: str(row["did"]))
        statuses.sort(key=lambda row: str(row["createdAt"]), reverse=True)
        return {"statuses": statuses, "counts": [{"status": text, "count": n} for text, n in counts.items()]}

    async def stop(self) -> None:
        """Stop it as Ctrl-C does; nothing may remain."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        finally:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            await self._reading
            await self._http.aclose()
        assert self._process.returncode == 0, self.lines

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(line.decode().rstrip())

    async def _repos(self) -> dict[str, list[dict[str, Any]]]:
        """Return the statuses of all active accounts, valid or not."""
        repos: dict[str, list[dict[str, Any]]] = {}
        for port in (self.first_port + 2, self.first_port + 3):
            listed = await self._get(port, "com.atproto.sync.listRepos")
            for did in [repo["did"] for repo in listed["repos"] if repo["active"]]:
                repos[did] = await self._records(port, did)
        return repos

    async def _records(self, port: int, did: str) -> list[dict[str, Any]]:
        """Return the statuses of a repo; none if it is deactivated, deleted or moved since it was listed."""
        response = await self._http.get(f"http://127.0.0.1:{port}{GET_REPO}", params={"did": did})
        if response.status_code == 400 and response.json()["error"] in {"RepoDeactivated", "RepoNotFound"}:
            return []
        assert response.status_code == 200, response.text
        root, blocks = decode_car(response.content)
        paths = decode_records(blocks, decode_all(blocks[root])[0]["data"])
        return [
            {"uri": f"at://{did}/{path}", "value": decode_all(blocks[cid])[0]}
            for path, cid in paths.items()
            if path.startswith(f"{COLLECTION}/")
        ]

    async def _handle(self, did: str) -> str:
        document = (await self._http.get(f"http://127.0.0.1:{self.first_port + 1}/{did}")).json()
        handle: str = document["alsoKnownAs"][0].removeprefix("at://")
        return handle

    async def _get(self, port: int, method: str, **parameters: str) -> dict[str, Any]:
        response = await self._http.get(f"http://127.0.0.1:{port}/xrpc/{method}", params=parameters)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    async def _post(self, did: str, method: str, **fields: Any) -> None:
        document = (await self._http.get(f"http://127.0.0.1:{self.first_port + 1}/{did}")).json()
        url = f"{document['service'][0]['serviceEndpoint']}/xrpc/com.atproto.repo.{method}"
        response = await self._http.post(url, json={"repo": did, "collection": COLLECTION, **fields})
        assert response.status_code == 200, response.text


@asynccontextmanager
async def running_example(example: str, *options: str) -> AsyncIterator[RunningExample]:
    """Run an example with the command of its README, on free ports, until the block ends."""
    port = free_ports(PORTS)
    process = await asyncio.create_subprocess_exec(
        *command_of(example).split(), "--first-port", str(port), "--seconds", str(ACTIVITY_SECONDS), *options,
        cwd=ROOT,
        env=environment_without_settings() | {"PYTHON": sys.executable},
        stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
    )  # fmt: skip
    running = RunningExample(process, port)
    try:
        await running.wait_for(STARTED)
        yield running
    finally:
        await running.stop()


def has_ended(process: int) -> bool:
    """Return True if a process has ended. Its parent may have noticed it, before SIGSTOP took effect there."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def status(text: str) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"$type": COLLECTION, "status": text, "createdAt": now}


def is_valid(value: Any) -> bool:
    match value:
        case {"status": str(text), "createdAt": str()}:
            return 0 < len(text.encode()) <= MAX_STATUS_BYTES and moment_of(value) is not None
        case _:
            return False


def moment_of(value: dict[str, Any]) -> datetime | None:
    try:
        return datetime.fromisoformat(value["createdAt"])
    except ValueError:
        return None


def normalized(page: Page) -> tuple[Any, ...]:
    """Return a page in a form to compare: the statuses in order, with equal names, and the counts in any order."""
    return page["statuses"], {row["status"]: row["count"] for row in page["counts"]}
