"""The HTTP server of the daemon: health checks, metrics, and the routes of the status page and of feeds."""

import asyncio
import errno
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from time import monotonic
from typing import cast

from aiohttp import hdrs, web
from aiohttp.http import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from indexer import __version__
from indexer.concurrency.turns import Turns
from indexer.errors import SettingsError
from indexer.net.server.address import Address
from indexer.net.server.connection_limit import WEBSOCKETS, ConnectionLimit, Websockets, client_network
from indexer.serve.status_document import ReadinessReason
from indexer.telemetry.conditions import Conditions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


Check = Callable[[], Sequence[ReadinessReason]]
"""Returns at once, without I/O, the reasons why a check fails; none if it succeeds."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the HTTP server.

    Attributes:
        max_connections: Open connections. It is far below the number of files that a process may open, because the
            relay, the database and the hosts need files, too.
        max_websockets: Open websockets, in addition.
        backlog: Connections that are accepted at once, in addition. It is below `max_connections`, so that a connection
            is read before newer ones close it.
        header_timeout: Seconds within which a client must send the headers of its next request.
        scrape_interval: Seconds for which the metrics are not computed again.
        request_interval: Seconds between the starts of two requests of all clients together. The networks of the
            clients take turns.
    """

    max_connections: int = 128
    max_websockets: int = 128
    backlog: int = 32
    header_timeout: float = 15.0
    scrape_interval: float = 1.0
    request_interval: float = 0.002


DEFAULT_HTTP_LIMITS = HttpLimits()


class Listener:
    """An address that is bound. It refuses connections until `start`.

    Attributes:
        address: The address, with the real port if port 0 was asked for.
    """

    def __init__(self, bind: Address, backlog: int = DEFAULT_HTTP_LIMITS.backlog) -> None:
        self.address = bind
        self._backlog = backlog
        self._server: asyncio.Server | None = None
        self._make_protocol: Callable[[], asyncio.BaseProtocol] = asyncio.Protocol

    async def bind(self) -> None:
        """Bind the address.

        Raises:
            SettingsError: Another process uses the address, this machine does not have it, or this account may not use
                it.
        """
        loop, (host, port) = asyncio.get_running_loop(), self.address
        with self._wrong_setting():
            self._server = await loop.create_server(
                self._protocol, host, port, backlog=self._backlog, start_serving=False
            )
        self.address = Address(host, self._server.sockets[0].getsockname()[1])

    async def start(self, make_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        """Accept connections, each with a protocol that this function makes. Bind the address before, if it is not.

        Raises:
            SettingsError: As `bind`.
        """
        self._make_protocol = make_protocol
        if self._server is None:
            await self.bind()
        with self._wrong_setting():
            await cast(asyncio.Server, self._server).start_serving()

    def _protocol(self) -> asyncio.BaseProtocol:
        return self._make_protocol()

    def close(self) -> None:
        """Accept no connections any more."""
        if self._server is not None:
            self._server.close()

    @contextmanager
    def _wrong_setting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            in_use = "another process uses it; end that process, or choose another port"
            why = in_use if error.errno == errno.EADDRINUSE else error.strerror
            raise SettingsError(f"INDEXER_HTTP_BIND: cannot listen at {self.address}: {why}") from error


@asynccontextmanager
async def serve_http(
    listener: Listener,
    checks: Mapping[str, Check],
    registry: CollectorRegistry,
    conditions: Conditions,
    limits: HttpLimits = DEFAULT_HTTP_LIMITS,
    routes: Sequence[web.RouteDef] = (),
) -> AsyncIterator[Address]:
    """Run the HTTP server until the block ends; yield its address, with the real port if that of `listener` is 0.

    It serves the health checks by their paths, the metrics, and `routes`: the status page and feeds.

    Raises:
        SettingsError: As `Listener.bind`.
    """
    turns = Turns()

    @web.middleware
    async def in_turn(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request after a turn, so that requests leave the event loop time for the stream."""
        await turns.spend(client_network(request), limits.request_interval)
        return await handler(request)

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    app = web.Application(middlewares=[in_turn])
    app.add_routes([web.get(path, partial(_answer_check, check)) for path, check in checks.items()])
    metrics = _metrics_page(registry, limits.scrape_interval)
    app.add_routes([web.get("/metrics", metrics), web.get("/xrpc/_health", version), *routes])
    app[WEBSOCKETS] = websockets = Websockets(limits.max_websockets, conditions)
    app.on_shutdown.append(lambda _: websockets.close())
    logger = logging.getLogger("aiohttp.server")
    logger.addFilter(_is_not_malformed_request)
    logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)  # clients may offer unknown subprotocols
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=1,
        keepalive_timeout=limits.header_timeout,  # it also applies to the first request of a connection
        logger=logger,
    )
    await runner.setup()
    try:
        server = cast(web.Server, runner.server)  # `setup` has made it
        connections = ConnectionLimit(server, limits.max_connections, conditions, websockets)
        await listener.start(connections)
        try:
            yield listener.address
        finally:
            listener.close()
    finally:
        await runner.cleanup()


def _metrics_page(registry: CollectorRegistry, interval: float) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the handler for the metrics, which computes them at most once per `interval` seconds and format."""
    pages: dict[str, tuple[float, bytes]] = {}

    async def respond(request: web.Request) -> web.Response:
        # Only the two formats are told apart, not their versions: each one is computed and stored for itself.
        openmetrics = "application/openmetrics-text" in request.headers.get(hdrs.ACCEPT, "")
        encode, content_type = choose_encoder("application/openmetrics-text; version=1.0.0" if openmetrics else "")
        computed_at, text = pages.get(content_type, (-math.inf, b""))
        if monotonic() - computed_at >= interval:
            text = encode(registry)
            pages[content_type] = monotonic(), text
        return web.Response(body=text, headers={hdrs.CONTENT_TYPE: content_type})

    return respond


def _is_not_malformed_request(record: logging.LogRecord) -> bool:
    """Return False for a malformed request: it is answered with status 400 and is not logged."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _answer_check(check: Check, _: web.Request) -> web.Response:
    reasons = check()
    if not reasons:
        return web.json_response({"status": "ok"})
    body = {"status": "unavailable", "reason": reasons[0].message, "reasons": [asdict(reason) for reason in reasons]}
    return web.json_response(body, status=503)
