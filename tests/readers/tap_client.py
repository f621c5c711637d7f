"""A daemon that serves the clients of tap, and clients that acknowledge what a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from tests.daemon.running_daemon import RunningDaemon, running_daemon
from tests.waiting import until

Event = dict[str, Any]


@asynccontextmanager
async def tap_daemon(database: str, directory: Path, **settings: Any) -> AsyncIterator[RunningDaemon]:
    settings = {"roles": "live,resync,feed", "http_bind": "127.0.0.1:0"} | settings
    async with running_daemon(database, directory, **settings) as daemon:
        yield daemon


@asynccontextmanager
async def feed_client(daemon: RunningDaemon) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session with the HTTP server of a daemon."""
    async with daemon.stages.serve_http() as address, aiohttp.ClientSession(f"http://{address}") as session:
        yield session


class TapClient:
    """A client of the channel."""

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self.websocket = websocket
        self.received: list[Event] = []

    async def receive(self) -> Event:
        event: Event = json.loads(await self.websocket.receive_str(timeout=60))
        self.received.append(event)
        return event

    async def acknowledge(self, event: Event, *, binary: bool = False) -> None:
        """Send an acknowledgement; `binary` as some clients do, because tap reads both kinds of messages."""
        text = json.dumps({"type": "ack", "id": event["id"]})
        await (self.websocket.send_bytes(text.encode()) if binary else self.websocket.send_str(text))

    async def process(self, count: int, *, binary: bool = False) -> list[Event]:
        """Receive and acknowledge so many events."""
        events = []
        for _ in range(count):
            events.append(await self.receive())
            await self.acknowledge(events[-1], binary=binary)
        return events


@asynccontextmanager
async def channel(session: aiohttp.ClientSession, path: str = "/channel") -> AsyncIterator[TapClient]:
    async with session.ws_connect(path) as websocket:
        yield TapClient(websocket)


def summary(event: Event) -> tuple[Any, ...]:
    """Return what happened to which record or account."""
    if event["type"] == "identity":
        identity = event["identity"]
        return ("identity", identity["handle"], identity["is_active"], identity["status"])
    record = event["record"]
    return (record["action"], record["rkey"], record["live"], record.get("record", {}).get("text"))


async def wait_until_delivered(daemon: RunningDaemon) -> None:
    """Wait until all acknowledgements are stored."""

    async def delivered() -> bool:
        rows = await daemon.execute("select behind from atproto.readers where name = 'tap-feed'")
        return [row["behind"] for row in rows] == [0]

    await until(delivered)


class Tap(NamedTuple):
    """A daemon with the role `feed`, and a session with its HTTP server."""

    daemon: RunningDaemon
    session: aiohttp.ClientSession

    def channel(self, path: str = "/channel") -> AbstractAsyncContextManager[TapClient]:
        return channel(self.session, path)

    @asynccontextmanager
    async def processing(self, refuses: Callable[[Event], bool] = lambda _: False) -> AsyncIterator[list[Event]]:
        """Let a client acknowledge events during the block, except those that it refuses; yield what it gets.

        It connects again after lost connections.
        """
        received: list[Event] = []

        async def process() -> None:
            while True:
                async with self.channel() as client:
                    while (message := await client.websocket.receive()).type is aiohttp.WSMsgType.TEXT:
                        received.append(json.loads(message.data))
                        if not refuses(received[-1]):
                            await client.acknowledge(received[-1])

        task = asyncio.create_task(process())
        try:
            yield received
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def consumers(self) -> list[str]:
        return [row["name"] for row in await self.daemon.execute("select name from atproto.readers")]

    def gauge(self, name: str, **labels: str) -> float | None:
        return self.daemon.stages.metrics.registry.get_sample_value(f"indexer_feed_{name}", labels)
