"""A proxy before a TCP server, which can break connections between two protocol messages, be slow, or hang."""

import asyncio
from abc import ABC, abstractmethod
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Literal

LOOPBACK = "127.0.0.1"
BYTES = 1 << 16


class Messages(ABC):
    """Divides what one side of a connection sends into messages."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def split(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Take received bytes; yield the messages that are complete, each with its kind."""
        self.buffer += data
        kind, size = self.first()
        while size:
            message = bytes(self.buffer[:size])
            del self.buffer[:size]
            yield kind, message
            kind, size = self.first()

    @abstractmethod
    def first(self) -> tuple[str, int]:
        """Return the kind and the size of the first message in the buffer; the size is 0 if it is not complete."""


class TcpProxy(ABC):
    """Forwards connections to a server until it is told not to.

    Attributes:
        port: The port of the proxy, on loopback.
        mode: `open`: forward; `hang`: keep connections and accept new ones, but transmit nothing; `refuse`: break
            connections and close new ones at once.
        disturbed: How many connections `refuse` broke or closed, and how often data or a connection had to wait.
        cuts: The connections that `cut_before` broke: which side would have sent the next message, and the kind of it.
        rate: Bytes per second that each client may send; None: no limit.
    """

    def __init__(self) -> None:
        self.port = 0
        self.mode: Literal["open", "hang", "refuse"] = "open"
        self.disturbed = 0
        self.cuts: list[str] = []
        self.rate: float | None = None
        self._cut_in: int | None = None
        self._cut_kind: str | None = None
        self._opened = asyncio.Event()
        self._opened.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def connect(self) -> tuple[StreamReader, StreamWriter]:
        """Connect to the server."""

    @abstractmethod
    def messages(self) -> tuple[Messages, Messages]:
        """Return what divides a new connection into messages: those of the client, and those of the server."""

    def passes(self, kind: str, message: bytes) -> bool:  # noqa: ARG002 - of proxies that lose messages
        """Return False for a message that is not to be forwarded. `kind` is as in `cuts`."""
        return True

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

    def cut_before(self, number: int, kind: str | None = None) -> None:
        """Break one connection: the one that would transmit the message of this number from now on, counted from 1.

        With `kind`, as in `cuts`, only such messages count.
        """
        self._cut_in, self._cut_kind = number, kind

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._forward, LOOPBACK, 0)
        self.port = server.sockets[0].getsockname()[1]
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
        of_client, of_server = self.messages()
        upstream_reader, upstream_writer = await self.connect()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, upstream_writer, of_client, "client"))
                group.create_task(self._copy(upstream_reader, writer, of_server, "server"))
        except* OSError:
            writer.transport.abort()
        finally:
            await _close(upstream_writer)

    async def _copy(
        self, reader: StreamReader, writer: StreamWriter, messages: Messages, side: Literal["client", "server"]
    ) -> None:
        while data := await reader.read(BYTES):
            self.disturbed += self.mode == "hang"
            for kind, message in messages.split(data):
                await self._opened.wait()
                self._cut_if_due(f"{side} {kind}")
                if side == "client" and self.rate is not None:
                    await asyncio.sleep(len(message) / self.rate)
                if self.passes(f"{side} {kind}", message):
                    writer.write(message)
            await writer.drain()
        writer.close()

    def _cut_if_due(self, kind: str) -> None:
        """Count a message; raise an error instead if its connection is to be broken before it."""
        if self._cut_in is not None and self._cut_kind in (None, kind):
            self._cut_in -= 1
            if self._cut_in == 0:
                self._cut_in = None
                self.cuts.append(kind)
                raise ConnectionAbortedError("broken by the proxy")


async def _close(writer: StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
