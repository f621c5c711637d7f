"""A proxy before an HTTP server on loopback, which may serve websockets."""

import asyncio
from asyncio import StreamReader, StreamWriter

from tests.tcp_proxy import LOOPBACK, Messages, TcpProxy

PIECE_BYTES = 200


class HttpProxy(TcpProxy):
    """Forwards connections to the server at this port. It sees heads, pieces of bodies, and frames of websockets."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    async def connect(self) -> tuple[StreamReader, StreamWriter]:
        return await asyncio.open_connection(LOOPBACK, self._port)

    def messages(self) -> tuple[Messages, Messages]:
        return HttpMessages(), HttpMessages()


class HttpMessages(Messages):
    """A head, then the frames of the websocket that it opens, or else pieces of a few bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._websocket: bool | None = None

    def first_size(self) -> int:
        if self._websocket is None:
            head, end, _ = self.buffer.partition(b"\r\n\r\n")
            self._websocket = b"upgrade: websocket" in head.lower() if end else None
            return len(head + end) if end else 0
        return _size_of_frame(self.buffer) if self._websocket else min(len(self.buffer), PIECE_BYTES)


def _size_of_frame(data: bytearray) -> int:
    """Return the size of the websocket frame that begins here; 0 if it is not complete (RFC 6455, section 5.2)."""
    if len(data) < 2:
        return 0
    length = data[1] & 0x7F
    extra = {126: 2, 127: 8}.get(length, 0)
    header = 2 + extra + (4 if data[1] & 0x80 else 0)
    size = header + (int.from_bytes(data[2 : 2 + extra]) if extra else length)
    return size if len(data) >= max(header, size) else 0
