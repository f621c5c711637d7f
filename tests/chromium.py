"""Drive a headless Chromium through the Chrome DevTools protocol, for tests of the status page and for screenshots."""

import asyncio
import base64
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import orjson
from websockets.asyncio.client import ClientConnection, connect

from tests.waiting import until

EXECUTABLE = shutil.which("chromium")
INSTALL_COMMAND = "tests/serve/install_chromium.sh"
END_SECONDS = 60.0
CALL_SECONDS = 60.0

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-port=0",
)
Scheme = Literal["light", "dark"]


class PageError(Exception):
    """An expression that was evaluated in the page raised an exception."""


class Page:
    """A tab of the browser.

    Attributes:
        problems: Errors and warnings of the console, uncaught exceptions, violations of the Content-Security-Policy,
            failed requests and opened dialogs, as text.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.session: str | None = None
        self.problems: list[str] = []

    async def read(self) -> None:
        """Read the messages of the browser until it closes the connection."""
        async for message in self._connection:
            body = orjson.loads(message)
            if (answer := self._answers.pop(body.get("id", 0), None)) is not None:
                if not answer.done():
                    answer.set_result(body)
            elif "method" in body and (problem := _problem(body["method"], body["params"])) is not None:
                self.problems.append(problem)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        id_ = next(self._ids)
        answer = self._answers[id_] = asyncio.get_running_loop().create_future()
        message = {"id": id_, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        await self._connection.send(orjson.dumps(message).decode())
        body = await asyncio.wait_for(answer, CALL_SECONDS)
        if "error" in body:
            raise PageError(f"{method}: {body['error']}")
        result: dict[str, Any] = body["result"]
        return result

    async def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: Scheme = "light") -> None:
        """Load a page in a window of this width, with a preferred color scheme."""
        await self.set_view(width=width, height=height, scheme=scheme)
        await self.call("Page.navigate", url=url)

    async def set_view(self, *, width: int, height: int, scheme: Scheme, scale: float = 1.0) -> None:
        """Change the size of the window and the preferred color scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page, as JSON represents it."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in result:
            raise PageError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    async def wait_for(self, expression: str) -> None:
        """Wait until an expression in the page is true. It may fail while a page is being loaded."""

        async def is_true() -> bool:
            with suppress(PageError):
                return bool(await self.evaluate(expression))
            return False

        await until(is_true, lambda: f"{expression}: {self.problems}")

    async def screenshot(self, form: Literal["png", "webp"] = "png", quality: int = 85) -> bytes:
        """Return a picture of the window. `quality` applies only to WebP."""
        options = {"quality": quality} if form == "webp" else {}
        result = await self.call("Page.captureScreenshot", format=form, **options)
        return base64.b64decode(result["data"])


@asynccontextmanager
async def open_browser() -> AsyncIterator[Page]:
    """Start a browser with an empty profile, and yield its only tab."""
    assert EXECUTABLE is not None, f"Chromium is not installed: run {INSTALL_COMMAND}"
    with tempfile.TemporaryDirectory(prefix="indexer-chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            EXECUTABLE,
            *_FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            url = await _debugger_url(Path(profile, "DevToolsActivePort"))
            async with connect(url, max_size=None, proxy=None) as connection:
                page = Page(connection)
                reading = asyncio.create_task(page.read())
                try:
                    await _attach(page)
                    yield page
                    page.session = None
                    with suppress(PageError):
                        await page.call("Browser.close")
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
            await asyncio.wait_for(process.wait(), END_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _debugger_url(file: Path) -> str:
    """Wait for the file in which the browser names its port, and return the URL of its websocket."""
    await until(lambda: file.exists() and len(file.read_text().splitlines()) > 1)
    port, path = file.read_text().splitlines()
    return f"ws://127.0.0.1:{port}{path}"


async def _attach(page: Page) -> None:
    """Attach to a new tab, and report what its page does wrong."""
    target = await page.call("Target.createTarget", url="about:blank")
    attached = await page.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
    page.session = attached["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
        await page.call(f"{domain}.enable")


def _problem(method: str, event: dict[str, Any]) -> str | None:
    """Return what an event of the protocol says is wrong; None if it says nothing."""
    describe = _PROBLEMS.get(method)
    return None if describe is None else describe(event)


def _console_problem(event: dict[str, Any]) -> str | None:
    texts = [str(argument.get("value", argument.get("description"))) for argument in event["args"]]
    return f"console: {' '.join(texts)}" if event["type"] in {"error", "warning", "assert"} else None


def _log_problem(event: dict[str, Any]) -> str | None:
    entry = event["entry"]
    return f"log: {entry['text']} {entry.get('url', '')}" if entry["level"] in {"error", "warning"} else None


def _issue_problem(event: dict[str, Any]) -> str | None:
    issue = event["issue"]
    return f"issue: {issue}" if issue["code"] == "ContentSecurityPolicyIssue" else None


_PROBLEMS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "Runtime.exceptionThrown": lambda event: f"exception: {event['exceptionDetails']}",
    "Runtime.consoleAPICalled": _console_problem,
    "Log.entryAdded": _log_problem,
    "Audits.issueAdded": _issue_problem,
    "Network.loadingFailed": lambda event: None if event.get("canceled") else f"request failed: {event['errorText']}",
    "Page.javascriptDialogOpening": lambda event: f"dialog: {event['message']}",
}
