"""The relay of `benchmarks.live`, a separate process that sends messages of a workload on command.

Standard input has one command per line. `FIRST LAST RATE` sends these messages to every subscriber, at RATE messages
per second or, if RATE is 0, at the maximum rate. With a fourth word, only the subscribers that use this host name get
them. `COUNT` sends an old commit of each of COUNT idle repos.

Standard output has one JSON object per line: the `url`, the number of `subscribers` after each change, and the time
when sending `began` (monotonic seconds).
"""

import asyncio
import sys
from pathlib import Path
from time import monotonic

import orjson
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.idle_rows import idle_did
from benchmarks.workload import Workload, old_commit_message

MESSAGES_PER_WRITE = 32
POLL_SECONDS = 0.002


class LoadRelay:
    """A websocket server that sends the messages of a workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._subscribers: set[ServerConnection] = set()

    async def run(self) -> None:
        """Serve until standard input ends."""
        async with serve(self._subscribe, "127.0.0.1", 0, compression=None, ping_interval=None) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            _report(url=f"ws://127.0.0.1:{port}")
            reader = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            while line := await reader.readline():
                words = line.decode().split()
                numbers, hosts = list(map(int, words[:3])), words[3:]
                _report(began=monotonic())
                send = self._send_old_commits if len(numbers) == 1 else self._send
                chosen = [socket for socket in self._subscribers if not hosts or _host(socket) in hosts]
                await asyncio.gather(*(send(socket, *numbers) for socket in chosen))

    async def _subscribe(self, socket: ServerConnection) -> None:
        self._subscribers.add(socket)
        _report(subscribers=len(self._subscribers))
        try:
            await socket.wait_closed()
        finally:
            self._subscribers.remove(socket)
            _report(subscribers=len(self._subscribers))

    async def _send_old_commits(self, socket: ServerConnection, count: int) -> None:
        for number in range(1, count + 1):
            socket.transport.write(old_commit_message(idle_did(number), number))
            if number % MESSAGES_PER_WRITE == 0:
                await socket.drain()

    async def _send(self, socket: ServerConnection, first: int, last: int, rate: int) -> None:
        """Write framed messages directly to the transport, so that sending costs as little CPU as possible."""
        offsets, stream = self._workload.offsets, self._workload.stream
        began, sent = monotonic(), first - 1
        while sent < last:
            due = first - 1 + int((monotonic() - began) * rate) if rate else sent + MESSAGES_PER_WRITE
            end = min(due, last)
            if end > sent:
                socket.transport.write(stream[offsets[sent] : offsets[end]])
                await socket.drain()
                sent = end
            else:
                await asyncio.sleep(POLL_SECONDS)


def _host(socket: ServerConnection) -> str:
    """Return the host name that the subscriber used, without the port."""
    return socket.request.headers["Host"].partition(":")[0] if socket.request else ""


def _report(**fields: object) -> None:
    sys.stdout.buffer.write(orjson.dumps(fields) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(LoadRelay(Workload(Path(sys.argv[1]))).run())
