"""The consumer of tap in `benchmarks.peers`: a separate process that acknowledges every event at once.

Arguments: the port of tap, and the file to which the events are written, one JSON object per line. Standard output has
one JSON object per line: `connected`, and, for each number on standard input, `received` with the monotonic time at
which that many record events had been acknowledged. The process ends when standard input ends.

The events are not parsed here, because the consumer shares the cores of the machine with tap.
"""

import base64
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Condition, Thread
from time import monotonic
from typing import BinaryIO

import orjson

READ_BYTES = 1 << 20
_TEXT, _CLOSE, _PING, _PONG = 0x81, 0x88, 0x89, 0x8A
_SHORT_FRAME, _LONG_FRAME, _MASKED = 126, 127, 0x80
_NO_MASK = bytes(4)  # a client must mask its frames; with this key, the payload stays as it is
_ID, _RECORD = b'{"id":', b'"type":"record"'


def connect(port: int) -> socket.socket:
    """Connect to `/channel`, and return the connection after the headers of the response.

    Raises:
        ConnectionError: tap refused the connection.
    """
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lines = ("GET /channel HTTP/1.1", f"Host: 127.0.0.1:{port}", "Connection: Upgrade", "Upgrade: websocket")
    key = base64.b64encode(os.urandom(16)).decode()
    headers = (*lines, "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}", "", "")
    connection.sendall("\r\n".join(headers).encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)  # the first frame may follow the headers at once
        if not byte:
            raise ConnectionError(head.decode())
        head += byte
    if b" 101 " not in head.splitlines()[0]:
        raise ConnectionError(head.decode())
    return connection


class Consumer:
    """Acknowledges the events of one connection and writes them to a file.

    Attributes:
        ids: The ids of all record events.
        at: When the last of them was acknowledged, in monotonic seconds.
        ended: The connection has ended.
        changed: Notified when one of these changes.
    """

    def __init__(self, connection: socket.socket, file: BinaryIO) -> None:
        self._connection, self._file = connection, file
        self.ids, self.at, self.ended, self.changed = set[int](), 0.0, False, Condition()

    def receive(self) -> None:
        """Acknowledge events until the connection ends."""
        rest = b""
        try:
            while data := self._connection.recv(READ_BYTES):
                rest += data
                end = self._acknowledge(rest)
                rest = rest[end:]
        finally:
            with self.changed:
                self.ended = True
                self.changed.notify_all()

    def _acknowledge(self, data: bytes) -> int:
        """Acknowledge all complete events in `data`, and return their end."""
        events, answers, end = [], [], 0
        ids = list[int]()
        for opcode, start, stop in frames(data):
            end, payload = stop, data[start:stop]
            if opcode == _TEXT:
                number = event_id(payload)
                events.append(payload)
                answers.append(masked(_TEXT, b'{"type":"ack","id":%d}' % number))
                if _RECORD in payload:
                    ids.append(number)
            elif opcode == _PING:
                answers.append(masked(_PONG, payload))
            elif opcode != _CLOSE:
                raise ValueError(f"unexpected frame {opcode:#x}")
        self._connection.sendall(b"".join(answers))
        if events:
            self._file.write(b"\n".join(events) + b"\n")
        with self.changed:
            self.ids.update(ids)
            self.at = monotonic() if ids else self.at
            self.changed.notify_all()
        return end

    def wait_for(self, count: int) -> float:
        """Return when the last event was acknowledged, as soon as there are `count` record events, all in the file.

        Raises:
            ConnectionError: The connection ended before.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.ended or len(self.ids) >= count)
            if len(self.ids) < count:
                raise ConnectionError(f"tap ended the connection after {len(self.ids)} of {count} record events")
            self._file.flush()
            return self.at


def frames(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the first byte, and the start and end of the payload, of each complete frame (RFC 6455, section 5.2)."""
    end = 0
    while len(data) >= end + 2:
        opcode, size, start = data[end], data[end + 1], end + 2
        if size >= _SHORT_FRAME:
            start += 8 if size == _LONG_FRAME else 2
            size = int.from_bytes(data[end + 2 : start])
        if len(data) < start + size:
            return
        end = start + size
        yield opcode, start, end


def masked(opcode: int, payload: bytes) -> bytes:
    """Return a frame of a client. `payload` has less than 126 bytes."""
    return bytes([opcode, _MASKED | len(payload)]) + _NO_MASK + payload


def event_id(payload: bytes) -> int:
    """Return the id of an event, which is its first field."""
    if not payload.startswith(_ID):
        raise ValueError(f"no id at the start of {payload[:80]!r}")
    return int(payload[len(_ID) : payload.index(b",")])


def run(port: int, path: Path) -> None:
    """Consume events until standard input ends."""
    with connect(port) as connection, path.open("wb") as file:
        consumer = Consumer(connection, file)
        Thread(target=consumer.receive, daemon=True).start()
        _report(connected=1)
        for line in sys.stdin:
            _report(received=consumer.wait_for(int(line)))
        connection.shutdown(socket.SHUT_RDWR)


def _report(**fields: object) -> None:
    print(orjson.dumps(fields).decode(), flush=True)


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
