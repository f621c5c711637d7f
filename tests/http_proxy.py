"""A proxy before an HTTP server on loopback, which may serve websockets."""

import asyncio
from asyncio import StreamReader, StreamWriter

from tests.tcp_proxy import LOOPBACK, Messages, TcpProxy

PIECE_BYTES = 200
HEADS = (b"GET ", b"POST ", b"HTTP/1.1 ")


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
    """Heads, each with its body in pieces of a few bytes, or with the frames of the websocket that it opens.

    A head is never received together with the body before it: the client waits for the answer to each request.
    """

    def __init__(self) -> None:
        super().__init__()
        self._websocket = False

    def first(self) -> tuple[str, int]:
        if self._websocket:
            return "frame", _size_of_frame(self.buffer)
        if not self.buffer.startswith(HEADS):
            return "body", min(len(self.buffer), PIECE_BYTES)
        head, end, _ = self.buffer.partition(b"\r\n\r\n")
        self._websocket = bool(end) and b"upgrade: websocket" in head.lower()
        return "upgrade" if self._websocket else "head", len(head + end) if end else 0


def _size_of_frame(data: bytearray) -> int:
    """Return the size of the websocket frame that begins here; 0 if it is not complete (RFC 6455, section 5.2)."""
    if len(data) < 2:
        return 0
    length = data[1] & 0x7F
    extra = {126: 2, 127: 8}.get(length, 0)
    header = 2 + extra + (4 if data[1] & 0x80 else 0)
    size = header + (int.from_bytes(data[2 : 2 + extra]) if extra else length)
    return size if len(data) >= max(header, size) else 0
