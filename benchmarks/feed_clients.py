"""The subscribers of `benchmarks.feed`, a separate process.

Arguments: the port of the daemon and the number of subscribers. Standard output has one JSON object per line: the
number of `subscribers` when all are connected. Then standard input has the time of the last event, in microseconds,
and a `result` for each subscriber follows: its number of events, the monotonic time of its last event, and whether the
times of its events increased.

The frames are only counted, in as little code as possible, because the subscribers share the cores of the machine with
the daemon. Of each piece that is read from the socket, the time of the last event is checked.
"""

import asyncio
import base64
import os
import sys
from time import monotonic

import orjson

READ_BYTES = 1 << 20
TEXT_FRAME = 0x81
_SHORT_FRAME, _LONG_FRAME = 126, 127


async def subscribe(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to `/subscribe`, and return the connection after the headers of the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=READ_BYTES)
    key = base64.b64encode(os.urandom(16)).decode()
    lines = ("GET /subscribe HTTP/1.1", f"Host: 127.0.0.1:{port}", "Connection: Upgrade", "Upgrade: websocket")
    headers = (*lines, "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}", "", "")
    writer.write("\r\n".join(headers).encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 101 " not in head.splitlines()[0]:
        raise ConnectionError(head.decode())
    return reader, writer


class Subscriber:
    """Counts the events of one connection.

    Attributes:
        events: The number of events.
        time: The time of the last one, in microseconds.
        at: When it was received, in monotonic seconds.
        ordered: The times increased.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._received = asyncio.Event()
        self.events, self.time, self.at, self.ordered = 0, 0, 0.0, True

    async def receive(self) -> None:
        """Read events until the connection ends."""
        rest = b""
        while data := await self._reader.read(READ_BYTES):
            rest += data
            start, last = 0, None
            while (frame := _frame(rest, start)) is not None:
                if rest[start] == TEXT_FRAME:  # others are pings
                    self.events += 1
                    last = frame
                start = frame[1]
            if last is not None:
                self.at = monotonic()
                time: int = orjson.loads(rest[slice(*last)])["time_us"]
                self.ordered, self.time = self.ordered and time > self.time, time
                self._received.set()
            rest = rest[start:]

    async def wait_for(self, time: int) -> dict[str, object]:
        """Return the result when the event of this time has come."""
        while self.time < time:
            await self._received.wait()
            self._received.clear()
        return {"events": self.events, "at": self.at, "ordered": self.ordered}


def _frame(data: bytes, start: int) -> tuple[int, int] | None:
    """Return where the payload of the frame at `start` begins and ends; None if it is not complete."""
    if len(data) < start + 2:
        return None
    size, begin = data[start + 1], start + 2
    if size >= _SHORT_FRAME:
        begin += 8 if size == _LONG_FRAME else 2
        size = int.from_bytes(data[start + 2 : begin])
    return (begin, begin + size) if len(data) >= begin + size else None


async def run(port: int, count: int) -> None:
    """Connect all subscribers, and report what each of them received."""
    connections = [await subscribe(port) for _ in range(count)]
    subscribers = [Subscriber(reader) for reader, _ in connections]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(subscriber.receive()) for subscriber in subscribers]
        print(orjson.dumps({"subscribers": count}).decode(), flush=True)
        time = int(await asyncio.to_thread(sys.stdin.readline))
        for subscriber in subscribers:
            print(orjson.dumps({"result": await subscriber.wait_for(time)}).decode(), flush=True)
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(run(*map(int, sys.argv[1:])))
