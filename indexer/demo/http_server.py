"""An HTTP server, usually on loopback, that can inject faults into its responses."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import orjson
from aiohttp import hdrs, web

LOOPBACK = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_SLOW_WRITES_PER_SECOND = 20
ACCEPT_CYCLES = 10
"""Cycles of the event loop in which an accepted connection becomes known to the server."""


@dataclass(frozen=True, slots=True)
class ServerResponse:
    """The response of a handler.

    Attributes:
        chunks: The body. A tuple is sent with its length, any other iterable with chunked transfer encoding.
    """

    chunks: Iterable[bytes] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def json_response(body: Any, status: int = 200, content_type: str = "application/json") -> ServerResponse:
    """Return a response whose body is `body` as JSON."""
    return ServerResponse((orjson.dumps(body),), status, {hdrs.CONTENT_TYPE: content_type})


class XrpcError(Exception):
    """Raised by a handler to end the request with an XRPC error."""

    def __init__(self, error: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.response = json_response({"error": error, "message": message}, status)


@dataclass
class Fault:
    """One fault, and the requests that it applies to.

    Attributes:
        path: The fault applies to requests whose path ends like this.
        did: If given, the fault applies only to requests with this `did` parameter.
        times: How many requests the fault applies to; None: no limit.
        status: Send this status, with `headers` and `body`, instead of the real response.
        hang: Never respond.
        cut: Break the connection after this many bytes of the body.
        sections: End the body cleanly after this many of its chunks (of a CAR: its header, then its sections).
        rate: Send this many bytes per second.
        fired: How many requests the fault was applied to.
    """

    path: str
    did: str | None = None
    times: int | None = 1
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    hang: bool = False
    cut: int | None = None
    sections: int | None = None
    rate: int | None = None
    fired: int = 0

    def matches(self, request: web.Request) -> bool:
        """Return True if the fault applies to this request."""
        return (
            request.path.endswith(self.path)
            and self.did in (None, request.query.get("did"))
            and (self.times is None or self.fired < self.times)
        )


Handler = Callable[[web.Request], ServerResponse]
"""Answers a request. `request[BODY]` is the body."""
BODY = web.RequestKey("body", bytes)


class HttpServer:
    """Serves handlers. If no port is set, the system chooses one at the first start; later starts use the same port.

    Attributes:
        host: The name or address that the server listens on and that its URL contains.
        port: The port; 0 until it is set or chosen.
        requests: The number of requests by path.
        faults: Faults to inject. The first one that matches a request is applied.
    """

    def __init__(self) -> None:
        self.host = LOOPBACK
        self.port = 0
        self.requests: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self._handlers: dict[tuple[str, str], Handler] = {}
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The base URL of the server.

        Raises:
            RuntimeError: The server has not been started yet.
        """
        if not self.port:
            raise RuntimeError("the server has no address before its first start")
        return f"http://{self.host}:{self.port}"

    def route(self, path: str, handler: Handler, method: str = "GET") -> None:
        """Let `handler` respond to requests for `path`. Call it before `start`."""
        self._handlers[method, path] = handler

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes."""
        application = web.Application()
        for (method, path), handler in self._handlers.items():
            application.router.add_route(method, path, partial(self._respond, handler))
        return application

    async def start(self) -> None:
        """Start serving."""
        # Cancel the handler of a request whose client disconnected: one that hangs would never end.
        self._runner = web.AppRunner(
            self.application(), access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections and stop serving; do nothing if the server is not running."""
        if self._runner is not None:
            # Python 3.11 leaves a connection open that is accepted while its server closes. So accept nothing more, and
            # wait until the connections that were accepted are known.
            loop = asyncio.get_running_loop()
            for site in self._runner.sites:
                server = site._server  # noqa: SLF001 - aiohttp does not show the sockets
                for listening in server.sockets if isinstance(server, asyncio.Server) else ():
                    loop.remove_reader(listening.fileno())
            for _ in range(ACCEPT_CYCLES):
                await asyncio.sleep(0)
            await self._runner.cleanup()
            self._runner = None

    async def _respond(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        self.requests[request.path] += 1
        request[BODY] = await request.read()
        fault = next((fault for fault in self.faults if fault.matches(request)), None)
        if fault is not None:
            fault.fired += 1
            if fault.hang:
                await asyncio.get_running_loop().create_future()  # cancelled at disconnection or when the server stops
            if fault.status is not None:
                return await self._send(request, ServerResponse((fault.body,), fault.status, fault.headers))
        try:
            answer = handler(request)
        except XrpcError as error:
            answer = error.response
        return await self._send(request, answer, fault)

    async def _send(
        self, request: web.Request, answer: ServerResponse, fault: Fault | None = None
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        # No compression for a slow response: the encoder would hold everything back until the end.
        slow = fault is not None and fault.rate is not None
        if "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, "") and not slow:
            response.enable_compression(web.ContentCoding.gzip)
        elif isinstance(answer.chunks, tuple) and fault is None:
            response.content_length = sum(map(len, answer.chunks))
        await response.prepare(request)
        if fault is None:
            for chunk in _merge_chunks(answer.chunks, _CHUNK_BYTES):
                await response.write(chunk)
        else:
            await self._send_faulty(request, response, answer.chunks, fault)
        return response

    @staticmethod
    async def _send_faulty(
        request: web.Request, response: web.StreamResponse, chunks: Iterable[bytes], fault: Fault
    ) -> None:
        body = b"".join(islice(chunks, fault.sections))[: fault.cut]
        step = max(fault.rate // _SLOW_WRITES_PER_SECOND, 1) if fault.rate else _CHUNK_BYTES
        for start in range(0, len(body), step):
            await response.write(body[start : start + step])
            if fault.rate:
                await asyncio.sleep(step / fault.rate)
        if fault.cut is not None and request.transport is not None:
            request.transport.close()


def _merge_chunks(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield the same bytes in chunks of at least `size`, except for the last one."""
    merged = bytearray()
    for chunk in chunks:
        merged += chunk
        if len(merged) >= size:
            yield bytes(merged)
            merged.clear()
    if merged:
        yield bytes(merged)
