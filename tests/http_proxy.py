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

    Attributes:
        is_websocket: True after a head that opened a websocket.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_websocket = False

    def first(self) -> tuple[str, int]:
        if self.is_websocket:
            return "frame", frame_sizes(self.buffer)[1]
        if not self.buffer.startswith(HEADS):
            return "body", min(len(self.buffer), PIECE_BYTES)
        head, end, _ = self.buffer.partition(b"\r\n\r\n")
        self.is_websocket = bool(end) and b"upgrade: websocket" in head.lower()
        return "upgrade" if self.is_websocket else "head", len(head + end) if end else 0


def frame_sizes(data: bytes | bytearray, start: int = 0) -> tuple[int, int]:
    """Return the size of the header of the websocket frame at `start`, and of the whole frame.

    Both are 0 if the frame is not complete (RFC 6455, section 5.2).
    """
    if len(data) < start + 2:
        return 0, 0
    length, extended = data[start + 1] & 0x7F, start + 2
    extra = {126: 2, 127: 8}.get(length, 0)
    header = 2 + extra + (4 if data[start + 1] & 0x80 else 0)
    size = header + (int.from_bytes(data[extended : extended + extra]) if extra else length)
    return (header, size) if len(data) >= start + max(header, size) else (0, 0)
