"""An HTTP host on loopback that sends exactly the bytes that a test wants, at the speed that it wants."""

import asyncio
import gzip
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

TLS_SHUTDOWN_TIMEOUT = 0.2
Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


def http_response(
    body: bytes = b"", *, status: int = 200, headers: dict[str, str] | None = None, length: int | None = None
) -> bytes:
    """Return a whole response; `length` replaces the true Content-Length."""
    fields = {"Content-Length": str(len(body) if length is None else length)} | (headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} Status\r\n{head}\r\n".encode() + body


def gzip_response(body: bytes) -> bytes:
    return http_response(gzip.compress(body, mtime=0), headers={"Content-Encoding": "gzip"})


async def hang(_writer: asyncio.StreamWriter) -> None:
    """Never respond; a script for `ScriptedHost`."""
    await asyncio.get_running_loop().create_future()


class ScriptedHost:
    """Responds to each request with the page of its path.

    Attributes:
        pages: By path: the bytes to send, or a script that sends them. After a script, the connection is closed.
        requests: The heads of the requests, in lower case.
        connections: Number of accepted connections.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, bind: str = "127.0.0.1") -> None:
        self.pages: dict[str, bytes | Script] = {}
        self.requests: list[str] = []
        self.connections = 0
        self.port = 0
        self._tls = tls
        self._bind = bind
        self._handlers: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        shutdown_timeout = None if self._tls is None else TLS_SHUTDOWN_TIMEOUT
        self._server = await asyncio.start_server(
            self._accept, self._bind, 0, ssl=self._tls, ssl_shutdown_timeout=shutdown_timeout
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        results = await asyncio.gather(*self._handlers, return_exceptions=True)
        for writer in self._writers:
            if self._tls is None:
                writer.transport.abort()
            with suppress(ConnectionError, TimeoutError, ssl.SSLError):
                await writer.wait_closed()
        await self._server.wait_closed()
        for failure in results:
            if isinstance(failure, Exception):
                raise failure  # of a script

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        self._handlers.append(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._respond(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass  # the client closed the connection
        finally:
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head.lower())
            page = self.pages[head.split(" ", 2)[1]]
            if not isinstance(page, bytes):
                await page(writer)
                return
            writer.write(page)
            await writer.drain()
