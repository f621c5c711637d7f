"""Limit the open connections of the HTTP server: a new connection closes an old one. Websockets are excepted.

Client networks share the limits: the network that has the most connections loses one first.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache

from aiohttp import WSCloseCode, web
from aiohttp.web_protocol import RequestHandler

from indexer.net.http.checked_connector import is_public, network_of
from indexer.telemetry.conditions import HTTP_CONNECTIONS_LIMITED, WEBSOCKETS_LIMITED, Conditions

FORWARDED_FOR = "X-Forwarded-For"
CLOSE_SECONDS = 2.0
"""Time in which a client must answer that its websocket is closed."""


@dataclass(eq=False)
class ConnectionLimit:
    """Makes the protocol object of each accepted connection, and closes connections above the limit.

    It closes the oldest connection of the peer network that has the most. An honest request is answered within
    milliseconds. So the oldest connections are idle, or their clients send or read slowly on purpose. Connections in
    `websockets` do not count: they have a limit of their own.
    """

    server: web.Server
    max_connections: int
    conditions: Conditions
    websockets: "Websockets"

    def __call__(self) -> RequestHandler:
        """Return the protocol object of a new connection."""
        # Several connections may be accepted before the first of them is registered with the server.
        asyncio.get_running_loop().call_soon(self._close_oldest)
        return self.server()

    def _close_oldest(self) -> None:
        transports = [handler.transport for handler in self.server.connections]
        alive = [
            transport
            for transport in transports
            if transport is not None and not transport.is_closing() and transport not in self.websockets
        ]
        count = max(0, len(alive) + 1 - self.max_connections)
        for _ in range(count):
            networks = [peer_network((one.get_extra_info("peername") or ("",))[0]) for one in alive]
            [(most, _)] = Counter(networks).most_common(1)
            alive.pop(networks.index(most)).abort()
        if count:
            message = (
                f"more than {self.max_connections} connections are open; new ones close the largest network's oldest"
            )
            self.conditions.report(HTTP_CONNECTIONS_LIMITED, message=message, count=count)


RESERVED_WEBSOCKETS = 16
"""Websockets that only routes with a password can open."""


@dataclass(eq=False)
class HeldWebsocket:
    """An open websocket."""

    websocket: web.WebSocketResponse | None
    network: str | None  # that of its client, if the route needs no password
    displaced: asyncio.Event = field(default_factory=asyncio.Event)  # it must be closed: other networks have fewer


@dataclass(eq=False)
class Websockets:
    """The open websockets of the HTTP server. They last for a long time, so that they need a limit of their own."""

    max_websockets: int
    conditions: Conditions
    _open: dict[asyncio.Transport, HeldWebsocket] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, transport: object) -> bool:
        return transport in self._open

    @contextmanager
    def hold(
        self, request: web.Request, websocket: web.WebSocketResponse | None, *, for_anyone: bool
    ) -> Iterator[HeldWebsocket]:
        """Except the connection of a request from the limit of connections during the block.

        When the server ends, the websocket is closed with a reason. Without it, the connection just ends. A route
        `for_anyone`, without a password, may not use up the websockets of those that need one. If all are open, one of
        the network that has the most is displaced, unless the client's network would then have more than that.

        Raises:
            web.HTTPServiceUnavailable: There are as many websockets as allowed.
        """
        if (transport := request.transport) is None:
            raise web.HTTPServiceUnavailable  # the client has closed the connection
        network = client_network(request) if for_anyone else None
        limit = self.max_websockets - (RESERVED_WEBSOCKETS if for_anyone else 0)
        if len(self._open) >= limit:
            message = f"{limit} websockets are open, which is the limit"
            self.conditions.report(WEBSOCKETS_LIMITED, message=message)
            if network is None or not self._displace(network):
                raise web.HTTPServiceUnavailable(text=message)
        self._open[transport] = held = HeldWebsocket(websocket, network)
        try:
            yield held
        finally:
            self._open.pop(transport, None)

    def _displace(self, newcomer: str) -> bool:
        """Remove the newest websocket of the network that has the most, unless the newcomer would then have more."""
        networks = Counter(held.network for held in self._open.values() if held.network is not None)
        for most, count in networks.most_common(1):
            if count > networks[newcomer] + 1:
                transport = next(key for key in reversed(self._open) if self._open[key].network == most)
                self._open.pop(transport).displaced.set()
                return True
        return False

    async def close(self) -> None:
        """Close all websockets, because the server ends."""
        websockets = [held.websocket for held in self._open.values() if held.websocket is not None]
        message = b"the server is stopping"
        closing = [one.close(code=WSCloseCode.GOING_AWAY, message=message) for one in websockets if one.prepared]
        with suppress(TimeoutError):  # a client that reads nothing gets no reason
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*closing)


WEBSOCKETS = web.AppKey("websockets", Websockets)
"""The key of the open websockets in the web application."""


def client_network(request: web.Request) -> str:
    """Return the network of the client: an IPv4 address, or an IPv6 network of 64 bits.

    A peer without a public address (loopback, a private network) may be a reverse proxy. Then the last address of the
    header X-Forwarded-For is the client's: the proxy has set or appended it. Without the header, all clients of the
    proxy count as one. A client that connects from such an address itself, or whose proxy passes on its header, can
    name any address. So a network only decides about shares, and never about access.
    """
    peer = request.remote or ""
    client = peer if _is_public(peer) else request.headers.getall(FORWARDED_FOR, [peer])[-1].rpartition(",")[2].strip()
    return peer_network(client) or peer_network(peer)


@lru_cache(maxsize=4_096)
def peer_network(address: str) -> str:
    """Return the network of an IP address; "" for any other text."""
    try:
        return network_of(address)
    except ValueError:
        return ""


_is_public = lru_cache(maxsize=4_096)(is_public)
