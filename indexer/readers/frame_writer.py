"""Write complete websocket frames to a connection, many at once."""

import asyncio

PIECE_BYTES = 256 << 10
"""Bytes that are written before the client must have read most of them."""
BUFFER_BYTES = 64 << 10
"""Bytes in the buffer of the connection from which writing waits. It is the default of asyncio."""
SEND_SECONDS = 30.0
"""Time in which a client must read a piece."""
_PONG = 0x8A


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
            for start in range(0, len(data), PIECE_BYTES):
                if self._transport.is_closing():
                    raise ConnectionResetError("the connection is closed")
                self._writer.write(data[start : start + PIECE_BYTES])
                self.within_frame = start + PIECE_BYTES < len(data)
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
