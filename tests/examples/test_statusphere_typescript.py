"""The example AppView in TypeScript shows the truth of the network, also after it and the indexer were killed."""

import asyncio
import json
import os
import subprocess
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from aiohttp import WSMsgType, web

from tests.examples.statusphere import COLLECTION, ROOT, Page, RunningExample, command_of, running_example
from tests.free_ports import free_ports
from tests.realnet.real_network import NODE
from tests.waiting import until

EXAMPLE = ROOT / "examples" / "statusphere-typescript"
INSTALLED = EXAMPLE / "node_modules" / ".installed"
ADA, BOB = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa", "did:plc:bbbbbbbbbbbbbbbbbbbbbbbb"

needs_packages = pytest.mark.skipif(
    not INSTALLED.exists() or not NODE.exists(),
    reason="the packages of the example are not installed: run tests/feed_clients/setup.sh",
)


@pytest.fixture(autouse=True)
def node_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{NODE.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.slow
@needs_packages
@pytest.mark.timeout(600)
async def test_typescript_appview_loses_nothing_when_it_or_the_indexer_is_killed() -> None:
    async with running_example("statusphere-typescript") as example:
        page = await example.until_equal(example.get_page)
        for name in ("appview", "indexer", "appview", "indexer"):
            await example.kill(name)
            page = await example.until_equal(example.get_page)
        assert len(page["statuses"]) >= 4
        assert {"🎉", "🧪"} <= {row["status"] for row in page["counts"]}
        await assert_html(example, page)
        problems = [line for line in example.lines if line.startswith("feed: ")]
        assert [line for line in problems if not line.startswith("feed: no connection (")] == []
        processes = [example.process_of(name) for name in ("appview", "indexer")]
    assert [process for process in processes if Path(f"/proc/{process}").exists()] == []


async def shown_at(url: str) -> Page:
    """Return what the AppView shows."""
    async with httpx.AsyncClient(timeout=30) as http:
        response = await http.get(f"{url}/statuses.json")
    assert response.status_code == 200, response.text
    page: Page = response.json()
    return page


async def assert_html(example: RunningExample, page: Page) -> None:
    async with httpx.AsyncClient() as http:
        html = (await http.get(example.appview_url)).text
        assert all(row["handle"] in html and row["status"] in html for row in page["statuses"])
        assert (await http.get(f"{example.appview_url}/nothing")).status_code == 404
        assert (await http.post(example.appview_url)).status_code == 405


class Feed:
    """A feed that sends the same events over each connection, and breaks the first ones, or refuses all.

    Attributes:
        acknowledged: The numbers of the events that were acknowledged, over each connection.
    """

    def __init__(self, events: Iterable[dict[str, Any]], broken: int = 0, *, refuses: bool = False) -> None:
        self.acknowledged: list[list[int]] = []
        self._messages = [json.dumps(event, ensure_ascii=False) for event in events]
        self._broken = broken
        self._refuses = refuses

    async def __aenter__(self) -> Self:
        application = web.Application()
        application.router.add_get("/channel", self._channel)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _channel(self, request: web.Request) -> web.StreamResponse:
        if self._refuses:
            return web.Response(status=401)
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        acknowledged: list[int] = []
        self.acknowledged.append(acknowledged)
        for message in self._messages:
            await websocket.send_str(message)
        async for received in websocket:
            assert received.type is WSMsgType.TEXT
            acknowledged.append(json.loads(received.data)["id"])
            if len(self.acknowledged) <= self._broken:
                break
        assert request.transport is not None
        request.transport.abort()
        return websocket


@asynccontextmanager
async def running_appview(feed_url: str, directory: Path) -> AsyncIterator[tuple[Process, str]]:
    """Run the AppView during the block; yield its process and its URL."""
    port = free_ports(1)
    settings = {"INDEXER_URL": feed_url, "PORT": str(port), "DATA_DIR": str(directory)}
    process = await asyncio.create_subprocess_exec(
        NODE, "--disable-warning=ExperimentalWarning", EXAMPLE / "src" / "main.ts",
        env=os.environ | settings, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
    )  # fmt: skip
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def record(number: int, action: str, did: str, rkey: str, **value: Any) -> dict[str, Any]:
    event = {"live": True, "did": did, "rev": "3laaaaaaaaa22", "collection": COLLECTION, "rkey": rkey, "action": action}
    content = {"record": {"$type": COLLECTION, **value}, "cid": CID} if value else {}
    return {"id": number, "type": "record", "record": event | content}


def identity(number: int, did: str, handle: str, status: str = "active") -> dict[str, Any]:
    state = {"did": did, "handle": handle, "is_active": status == "active", "status": status}
    return {"id": number, "type": "identity", "identity": state}


CID = "bafyreihdwdcefgh4dqkjv67uzcmw7ojee6xedzdetojuzjevtenxquvyku"


@pytest.mark.slow
@needs_packages
async def test_appview_shows_the_same_if_every_event_comes_again_and_records_do_not_fit(tmp_path: Path) -> None:
    events = [
        record(1, "create", ADA, "a", status="🦋", createdAt="2026-01-01T00:00:00.1234567+01:00"),
        record(2, "create", ADA, "b", status="🚀", createdAt="2025-12-31T23:00:00.1234Z"),
        record(3, "create", ADA, "c", status="not one grapheme", createdAt="2026-01-02T00:00:00Z"),
        record(4, "create", ADA, "d", status="🙃", createdAt="yesterday"),
        record(5, "create", ADA, "e", status="🙃", createdAt="2026-01-03T00:00:00Z"),
        record(6, "update", ADA, "e", status=7, createdAt="2026-01-03T00:00:00Z"),
        record(7, "create", ADA, "f", status="🙃", createdAt="2026-01-04T00:00:00Z"),
        record(8, "delete", ADA, "f"),
        record(9, "create", ADA, "g"),  # a value that the feed leaves out
        identity(10, ADA, "ada.test"),
        record(11, "create", BOB, "a", status="👍", createdAt="2026-01-05T00:00:00Z"),
        identity(12, BOB, "bob.test"),
        identity(13, BOB, "bob.test", "deactivated"),
    ]  # fmt: skip
    async with Feed(events, broken=1) as feed, running_appview(feed.url, tmp_path) as (process, url):
        await until(lambda: len(feed.acknowledged) == 2 and set(feed.acknowledged[1]) == set(range(1, 14)))
        page = await shown_at(url)
        process.terminate()
        assert await process.wait() == 0
    assert page == {
        "statuses": [
            {
                "did": ADA,
                "handle": "ada.test",
                "status": "🦋",
                "createdAt": "2025-12-31T23:00:00.123Z",
                "uri": f"at://{ADA}/{COLLECTION}/a",
            }
        ],
        "counts": [{"status": "🚀", "count": 1}, {"status": "🦋", "count": 1}],
    }
    again = Feed([identity(14, BOB, "handle.invalid")])
    async with again, running_appview(again.url, tmp_path) as (_, url):
        await until(lambda: again.acknowledged == [[14]])
        page = await shown_at(url)
    assert [row["handle"] for row in page["statuses"]] == [None, "ada.test"]


@pytest.mark.slow
@needs_packages
async def test_appview_continues_if_the_connection_ends_while_it_stores_an_event(tmp_path: Path) -> None:
    count = 500
    events = [
        record(number, "create", ADA, f"r{number}", status="🦋", createdAt="2026-01-01T00:00:00Z")
        for number in range(1, count + 1)
    ]
    async with Feed(events, broken=3) as feed, running_appview(feed.url, tmp_path) as (_, url):
        await until(lambda: len(feed.acknowledged) == 4 and set(feed.acknowledged[3]) == set(range(1, count + 1)))
        page = await shown_at(url)
    assert page["counts"] == [{"status": "🦋", "count": count}]


@pytest.mark.slow
@needs_packages
async def test_appview_ends_with_one_message_if_the_indexer_refuses_it(tmp_path: Path) -> None:
    async with Feed([], refuses=True) as feed, running_appview(feed.url, tmp_path) as (process, _):
        output, _ = await process.communicate()
    assert process.returncode == 1
    assert output.decode() == "feed: Error: Unexpected server response: 401\n"


@pytest.mark.slow
@needs_packages
def test_typescript_example_compiles_strictly() -> None:
    compiler = EXAMPLE / "node_modules" / "typescript" / "bin" / "tsc"
    result = subprocess.run([NODE, compiler, "--project", EXAMPLE], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_example_says_which_node_it_needs(tmp_path: Path) -> None:
    """An old Node.js cannot run TypeScript."""
    old = tmp_path / "node"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run([EXAMPLE / "setup.sh"], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.partition(".")[0]) == (1, "Node")


def test_readme_starts_the_typescript_example_with_one_command() -> None:
    """The first test runs this command."""
    assert command_of("statusphere-typescript") == "examples/statusphere-typescript/run"
    assert os.access(EXAMPLE / "run", os.X_OK)
