"""An HTTP server on loopback that can be told to misbehave."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import orjson
from aiohttp import hdrs, web

_CHUNK = 1 << 16
_DRIPS_PER_SECOND = 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What a handler says; `chunks` is sent chunked unless it is a tuple, whose length is known."""

    chunks: Iterable[bytes] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def json_answer(body: Any, status: int = 200, content_type: str = "application/json") -> Answer:
    return Answer((orjson.dumps(body),), status, {hdrs.CONTENT_TYPE: content_type})


class Refused(Exception):  # noqa: N818  the protocol's way to say no, not a failure of the server
    """Ends a handler with an XRPC error."""

    def __init__(self, error: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.answer = json_answer({"error": error, "message": message}, status)


@dataclass
class Fault:
    """One way to misbehave towards requests whose path ends in `path`, and whose `did` is `did` if given.

    The ways: `status` (with `headers` and `body`) answers so instead; `hang` never answers; `cut` breaks the
    connection after so many bytes of the body; `sections` ends the body in good order after so many of its
    parts (a CAR's header, then its sections); `rate` sends so many bytes a second.
    `times` is how often it will fire, None for ever; `fired` how often it has.
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

    def meets(self, request: web.Request) -> bool:
        return (
            request.path.endswith(self.path)
            and self.did in (None, request.query.get("did"))
            and (self.times is None or self.fired < self.times)
        )


Handler = Callable[[web.Request], Answer]


class Server:
    """Serves handlers at 127.0.0.1 on a port that the system chose, and keeps it over a stop and start.

    `requests` counts by path; `faults` are tried in their order, and the first that meets a request fires.
    """

    def __init__(self) -> None:
        self.port = 0
        self.requests: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self._handlers: dict[str, Handler] = {}
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        if not self.port:
            raise RuntimeError("the server has no address before its first start")
        return f"http://127.0.0.1:{self.port}"

    def route(self, path: str, handler: Handler) -> None:
        self._handlers[path] = handler

    def application(self) -> web.Application:
        application = web.Application()
        for path, handler in self._handlers.items():
            application.router.add_get(path, partial(self._respond, handler))
        return application

    async def start(self) -> None:
        self._runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _respond(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        self.requests[request.path] += 1
        fault = next((fault for fault in self.faults if fault.meets(request)), None)
        if fault is not None:
            fault.fired += 1
            if fault.hang:
                await asyncio.get_running_loop().create_future()  # cancelled when the server stops
            if fault.status is not None:
                return await self._send(request, Answer((fault.body,), fault.status, fault.headers))
        try:
            answer = handler(request)
        except Refused as refusal:
            answer = refusal.answer
        return await self._send(request, answer, fault)

    async def _send(self, request: web.Request, answer: Answer, fault: Fault | None = None) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        dripping = fault is not None and fault.rate is not None  # an encoder would hold it all back until the end
        if "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, "") and not dripping:
            response.enable_compression(web.ContentCoding.gzip)
        elif isinstance(answer.chunks, tuple) and fault is None:
            response.content_length = sum(map(len, answer.chunks))
        await response.prepare(request)
        if fault is None:
            for chunk in _gather(answer.chunks, _CHUNK):
                await response.write(chunk)
        else:
            await self._misbehave(request, response, answer.chunks, fault)
        return response

    @staticmethod
    async def _misbehave(
        request: web.Request, response: web.StreamResponse, chunks: Iterable[bytes], fault: Fault
    ) -> None:
        body = b"".join(islice(chunks, fault.sections))[: fault.cut]
        step = max(fault.rate // _DRIPS_PER_SECOND, 1) if fault.rate else _CHUNK
        for start in range(0, len(body), step):
            await response.write(body[start : start + step])
            if fault.rate:
                await asyncio.sleep(step / fault.rate)
        if fault.cut is not None and request.transport is not None:
            request.transport.close()


def _gather(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of at least `size`, the last one excepted."""
    gathered = bytearray()
    for chunk in chunks:
        gathered += chunk
        if len(gathered) >= size:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)
