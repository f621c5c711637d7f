"""A proxy before a database, which can stop to answer: connections break, or nothing is transmitted."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Literal

from sqlalchemy import make_url

BYTES = 1 << 16


class DatabaseProxy:
    """Forwards connections to a database until it is told not to.

    Attributes:
        dsn: The database, through the proxy.
        mode: `open`: forward; `hang`: keep connections and accept new ones, but transmit nothing; `refuse`: break
            connections and close new ones at once.
        disturbed: How many connections were broken or closed, and how often data or a connection had to wait.
    """

    def __init__(self, dsn: str) -> None:
        self._url = make_url(dsn)
        self.dsn = ""
        self.mode: Literal["open", "hang", "refuse"] = "open"
        self.disturbed = 0
        self._opened = asyncio.Event()
        self._opened.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def hang(self) -> None:
        self.mode = "hang"
        self._opened.clear()

    def refuse(self) -> None:
        self.mode = "refuse"
        self._opened.set()
        self.disturbed += len(self._tasks)
        for task in self._tasks:
            task.cancel()

    def open(self) -> None:
        self.mode = "open"
        self._opened.set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        url = self._url.set(host="127.0.0.1", port=port).difference_update_query(["host", "port"])
        self.dsn = url.render_as_string(hide_password=False)
        try:
            yield
        finally:
            server.close()
            self.refuse()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()

    async def _forward(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.mode == "refuse":
                self.disturbed += 1
            else:
                self.disturbed += self.mode == "hang"
                await self._opened.wait()
                await self._exchange(reader, writer)
        except (asyncio.CancelledError, OSError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            await _close(writer)

    async def _exchange(self, reader: StreamReader, writer: StreamWriter) -> None:
        upstream_reader, upstream_writer = await self._connect()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, upstream_writer))
                group.create_task(self._copy(upstream_reader, writer))
        except* OSError:
            pass
        finally:
            await _close(upstream_writer)

    async def _copy(self, reader: StreamReader, writer: StreamWriter) -> None:
        while data := await reader.read(BYTES):
            self.disturbed += self.mode == "hang"
            await self._opened.wait()
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        host = self._url.host or str(self._url.query["host"])
        port = self._url.port or int(str(self._url.query.get("port", 5432)))
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, port)


async def _close(writer: StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
