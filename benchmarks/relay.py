"""The load of `benchmarks.live`, a process of its own: a relay that sends a world's messages when it is told to.

Each line on its standard input, `first last rate`, sends those messages to every subscriber: at `rate` a second by the
clock, or, for rate 0, as fast as they are taken. A number alone has it greet so many idle repos. It says on its
standard output, in lines of JSON: its `url`, the number of `subscribers` at each change, and when sending `began`
(monotonic seconds).
"""

import asyncio
import sys
from pathlib import Path
from time import monotonic

import orjson
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.tables import idle_did
from benchmarks.world import World, greeting

PIECE = 32  # messages handed to the socket at once, without a rate
TICK = 0.002  # seconds between looks at the clock, with one


class Relay:
    def __init__(self, world: World) -> None:
        self._world = world
        self._subscribers: set[ServerConnection] = set()

    async def run(self) -> None:
        async with serve(self._subscribe, "127.0.0.1", 0, compression=None, ping_interval=None) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            _say(url=f"ws://127.0.0.1:{port}")
            reader = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            while line := await reader.readline():
                words = list(map(int, line.split()))
                _say(began=monotonic())
                sending = self._greet if len(words) == 1 else self._send
                await asyncio.gather(*(sending(socket, *words) for socket in self._subscribers))

    async def _subscribe(self, socket: ServerConnection) -> None:
        self._subscribers.add(socket)
        _say(subscribers=len(self._subscribers))
        try:
            await socket.wait_closed()
        finally:
            self._subscribers.remove(socket)
            _say(subscribers=len(self._subscribers))

    async def _greet(self, socket: ServerConnection, count: int) -> None:
        for number in range(1, count + 1):
            socket.transport.write(greeting(idle_did(number), number))
            if number % PIECE == 0:
                await socket.drain()

    async def _send(self, socket: ServerConnection, first: int, last: int, rate: int) -> None:
        """Straight to the transport: the messages have been framed before, so that sending costs next to nothing."""
        offsets, stream = self._world.offsets, self._world.stream
        began, done = monotonic(), first - 1
        while done < last:
            due = first - 1 + int((monotonic() - began) * rate) if rate else done + PIECE
            upto = min(due, last)
            if upto > done:
                socket.transport.write(stream[offsets[done] : offsets[upto]])
                await socket.drain()
                done = upto
            else:
                await asyncio.sleep(TICK)


def _say(**what: object) -> None:
    sys.stdout.buffer.write(orjson.dumps(what) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(Relay(World(Path(sys.argv[1]))).run())
