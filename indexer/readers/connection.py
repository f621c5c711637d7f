"""Read and write the connection of a websocket below its protocol: with a limit, and many frames at once."""

import asyncio
from collections.abc import Hashable
from typing import cast

from indexer.concurrency.turns import Turns

WRITE_PIECE_BYTES = 256 << 10
"""Bytes that are written before the client must have read most of them."""
BUFFER_BYTES = 64 << 10
"""Bytes in the buffer of the connection from which writing waits. It is the default of asyncio."""
SEND_SECONDS = 30.0
"""Time in which a client must read a piece."""
_PONG = 0x8A
READ_PIECE_BYTES = 16 << 10
READ_BYTES_PER_SECOND = 1 << 20
"""Rate of all clients together: a filter of `/subscribe` with 10,000 DIDs has 350 kB, an acknowledgement 30 bytes."""
READ_PIECE_SECONDS = 0.004
"""Time that each piece takes in addition, however small it is."""


class FrameWriter:
    """Writes to the connection of a websocket.

    aiohttp makes a system call for each frame. Here, one call writes hundreds of frames. A piece may end within a
    frame, so aiohttp must write nothing while `within_frame`: answer pings here.

    Attributes:
        within_frame: True if the last piece did not end with its frame.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        # This protocol of aiohttp supports `drain`, like that of asyncio's own streams.
        self._writer = asyncio.StreamWriter(transport, transport.get_protocol(), None, asyncio.get_running_loop())
        self._draining: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self.within_frame = False

    async def write(self, data: bytes) -> None:
        """Write complete frames, and wait until most of them are on their way.

        Raises:
            TimeoutError: The client did not read a piece in `SEND_SECONDS`.
            ConnectionError: The connection is closed.
        """
        async with self._turn:
            for start in range(0, len(data), WRITE_PIECE_BYTES):
                if self._transport.is_closing():
                    raise ConnectionResetError("the connection is closed")
                self._writer.write(data[start : start + WRITE_PIECE_BYTES])
                self.within_frame = start + WRITE_PIECE_BYTES < len(data)
                if self._transport.get_write_buffer_size() > BUFFER_BYTES:
                    await self._drain()

    async def answer_ping(self, payload: bytes) -> None:
        """Send the pong for a ping, after the frames that are being written; raise the errors of `write`."""
        await self.write(bytes((_PONG, len(payload))) + payload)

    async def _drain(self) -> None:
        # In a task, because aiohttp may wait for the same future, which a cancellation would cancel for both.
        self._draining = asyncio.create_task(self._writer.drain())
        await asyncio.wait([self._draining], timeout=SEND_SECONDS)
        if not self._draining.done():
            raise TimeoutError(f"nothing was read for {SEND_SECONDS:.0f} seconds")
        draining, self._draining = self._draining, None
        if draining.cancelled() or draining.exception() is not None:
            raise ConnectionResetError("the connection is closed")

    async def close(self) -> None:
        """Close the connection. What the client has not read of it is dropped."""
        if self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._transport.close()
        if self._draining is not None:
            await asyncio.wait([self._draining])  # ends with the connection
            if not self._draining.cancelled():
                self._draining.exception()  # a lost connection is expected


def reading_seconds(size: int) -> float:
    """Return the time that a piece of this many bytes takes."""
    return READ_PIECE_SECONDS + size / READ_BYTES_PER_SECOND


class LimitedReading(asyncio.BufferedProtocol):
    """Reads a connection for its protocol, piece by piece: no piece is parsed before the client has a turn.

    The library parses what arrives at once, and it counts neither fragments nor frames of other types than messages. So
    bytes are counted here, before they are parsed. A client that sends more than its share waits, and so do the others
    of its key; other keys wait for one piece of each.
    """

    def __init__(self, transport: asyncio.Transport, turns: Turns, key: Hashable) -> None:
        """Read the connection from now on, instead of its present protocol. Each key gets the same share."""
        self._transport = transport
        self._protocol = cast(asyncio.Protocol, transport.get_protocol())
        self._turns = turns
        self._key = key
        self._buffer = bytearray(READ_PIECE_BYTES)
        self._passing: asyncio.Task[None] | None = None
        transport.set_protocol(self)

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 - the caller names it
        """Return the buffer for the next piece."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Read nothing more until this piece has had its turn."""
        self._transport.pause_reading()
        self._passing = asyncio.create_task(self._pass(bytes(self._buffer[:nbytes])))

    async def _pass(self, piece: bytes) -> None:
        await self._turns.spend(self._key, reading_seconds(len(piece)))
        # In this order, because the protocol may pause the reading itself.
        self._transport.resume_reading()
        self._protocol.data_received(piece)

    def eof_received(self) -> bool | None:
        """Tell the protocol that the client has ended its side of the connection."""
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the protocol that the connection has ended."""
        if self._passing is not None:
            self._passing.cancel()
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Tell the protocol that the buffer of the connection is full."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Tell the protocol that the buffer of the connection has room."""
        self._protocol.resume_writing()
