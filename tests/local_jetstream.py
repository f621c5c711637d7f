"""A Jetstream of a local network that tells lies on request."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from time import time_ns
from typing import Any

import orjson
from aiohttp import web

from indexer.atproto.syntax import CollectionFilter
from indexer.demo.http_server import HttpServer
from indexer.demo.local_network import LocalNetwork
from indexer.demo.local_pds import LocalPds

Message = bytes | str
Rewrite = Callable[[dict[str, Any]], Iterable[Message | dict[str, Any]]]
"""Returns what is sent in place of a true event: bytes and texts as they are."""


def honest(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield event


class LocalJetstream(HttpServer):
    """A Jetstream that follows the PDSes of a network from now on. It replays its log from a cursor.

    Attributes:
        rewrite: Changes the events that arrive from now on.
        queries: The `wantedCollections` and the cursor of each subscription.
        log: The times of the messages, their collections, and the messages.
        stalled: Clear to send nothing.
    """

    def __init__(self, network: LocalNetwork) -> None:
        super().__init__()
        self.rewrite: Rewrite = honest
        self.queries: list[tuple[list[str], int | None]] = []
        self.log: list[tuple[int, str | None, Message]] = []
        self.stalled = asyncio.Event()
        self.stalled.set()
        self._appended = asyncio.Event()
        self.route("/subscribe", self.subscribe)
        for pds in network.pdses:
            pds.listeners.append(self.receive)

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws", 1)

    def receive(self, _pds: LocalPds, did: str, kind: str, payload: dict[str, Any]) -> None:
        """Take an event of a PDS."""
        kind = kind.removeprefix("#")
        if kind in ("account", "identity"):
            self.tell({"did": did, "kind": kind, kind: payload | {"seq": 1}})
        for op in payload["ops"] if kind == "commit" else ():
            collection, _, rkey = op["path"].partition("/")
            commit = {"rev": payload["rev"], "operation": op["action"], "collection": collection, "rkey": rkey}
            content = {} if op["action"] == "delete" else {"record": {"$type": collection}, "cid": "bafyrei"}
            self.tell({"did": did, "kind": "commit", "commit": commit | content})

    def tell(self, event: dict[str, Any]) -> None:
        """Send what `rewrite` makes of an event."""
        collection = event.get("commit", {}).get("collection")
        for message in self.rewrite(event | {"time_us": time_ns() // 1_000}):
            self.say(orjson.dumps(message).decode() if isinstance(message, dict) else message, collection)

    def say(self, message: Message, collection: str | None = None) -> None:
        """Send a message; bytes in a binary frame."""
        self.log.append((time_ns() // 1_000, collection, message))
        appended, self._appended = self._appended, asyncio.Event()
        appended.set()

    async def subscribe(self, request: web.Request) -> web.StreamResponse:
        """Serve the stream to one subscriber."""
        wanted, cursor = request.query.getall("wantedCollections", []), request.query.get("cursor")
        position = sum(at < int(cursor) for at, _, _ in self.log) if cursor else len(self.log)
        self.queries.append((wanted, int(cursor) if cursor else None))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        sending = asyncio.create_task(self._send(socket, CollectionFilter(wanted or ["*"]), position))
        try:
            async for _ in socket:
                pass
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await sending
        return socket

    async def _send(self, socket: web.WebSocketResponse, wanted: CollectionFilter, position: int) -> None:
        while True:
            appended = self._appended
            await self.stalled.wait()
            while position < len(self.log):
                _, collection, message = self.log[position]
                position += 1
                if collection is not None and not wanted.matches(collection):
                    continue
                if isinstance(message, bytes):
                    await socket.send_bytes(message)
                else:
                    await socket.send_str(message)
            await appended.wait()


@asynccontextmanager
async def local_jetstream(network: LocalNetwork) -> AsyncIterator[LocalJetstream]:
    """Run a Jetstream of the network during the block."""
    jetstream = LocalJetstream(network)
    await jetstream.start()
    try:
        yield jetstream
    finally:
        await jetstream.stop()
