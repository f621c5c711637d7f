"""A daemon with the role `feed`, and a Jetstream subscriber with another websocket implementation than its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson
import websockets
from websockets.asyncio.client import ClientConnection

from indexer.net.server.address import Address
from tests.daemon.running_daemon import RunningDaemon, running_daemon
from tests.faulty_network import FaultyNetwork
from tests.waiting import TIMEOUT

ROLES = "live,resync,feed"


@asynccontextmanager
async def feed(
    database: str, directory: Path, network: FaultyNetwork | None = None, **settings: Any
) -> AsyncIterator[tuple[RunningDaemon, Address]]:
    """Run a daemon with the role `feed`, and its HTTP server."""
    settings = {"roles": ROLES, "http_bind": "127.0.0.1:0"} | settings
    async with (
        running_daemon(database, directory, network, **settings) as daemon,
        daemon.stages.serve_http() as address,
    ):
        yield daemon, address


class JetstreamClient:
    """A connected subscriber."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def next(self) -> dict[str, Any]:
        """Return the next event."""
        async with asyncio.timeout(TIMEOUT):
            event: dict[str, Any] = orjson.loads(await self.connection.recv())
        return event

    async def take(self, count: int) -> list[dict[str, Any]]:
        """Return the next events."""
        return [await self.next() for _ in range(count)]

    async def update_options(self, **payload: Any) -> None:
        """Send an `options_update`."""
        await self.connection.send(orjson.dumps({"type": "options_update", "payload": payload}).decode())

    async def rest(self) -> tuple[list[dict[str, Any]], tuple[int, str]]:
        """Read until the daemon closes the connection; return the events, and the code and the reason."""
        events = []
        async with asyncio.timeout(TIMEOUT):
            try:
                while True:
                    events.append(orjson.loads(await self.connection.recv()))
            except websockets.ConnectionClosed as closed:
                return events, (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (1006, "")


@asynccontextmanager
async def subscribed(
    address: object, *parameters: tuple[str, object], path: str = "/subscribe", **options: Any
) -> AsyncIterator[JetstreamClient]:
    """Connect to a path of the HTTP server at `address` with these parameters."""
    url = f"ws://{address}{path}?{urlencode(parameters)}"
    async with websockets.connect(url, max_size=None, proxy=None, close_timeout=1, **options) as connection:
        yield JetstreamClient(connection)


def describe(event: dict[str, Any]) -> str:
    """Return an event as `operation collection/rkey`, or its kind."""
    commit = event.get("commit")
    return f"{commit['operation']} {commit['collection']}/{commit['rkey']}" if commit else event["kind"]
