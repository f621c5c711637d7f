"""An HTTP host on loopback that sends just the bytes a test wants sent, at the pace it wants."""

import asyncio
import gzip
import ssl
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(
    body: bytes = b"", *, status: int = 200, headers: dict[str, str] | None = None, length: int | None = None
) -> bytes:
    """A whole answer; `length` is a false Content-Length."""
    fields = {"Content-Length": str(len(body) if length is None else length)} | (headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} Status\r\n{head}\r\n".encode() + body


def zipped(body: bytes) -> bytes:
    return answer(gzip.compress(body, mtime=0), headers={"Content-Encoding": "gzip"})


class Host:
    """Answers each path with what `pages` has for it: bytes, or a script that writes them. Then hangs up.

    `requests` are the heads received, in lower case; `connections` counts those accepted.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.pages: dict[str, bytes | Script] = {}
        self.requests: list[str] = []
        self.connections = 0
        self.port = 0
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.requests.append(head.lower())
                path = head.split(" ", 2)[1]
                page = self.pages[path]
                if not isinstance(page, bytes):
                    await page(writer)
                    return
                writer.write(page)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
            return  # the client went away, or the test is over
        finally:
            self._tasks.discard(task)
            writer.close()
