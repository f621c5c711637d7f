"""A webhook on loopback that answers as a test says."""

import asyncio
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

Event = dict[str, Any]
LONG_BODY = 200_000
"""Bytes of each answer. Only its status counts."""


class WebhookServer:
    """Receives events, and answers with a status.

    Attributes:
        accepted: The events that were answered with status 200, in order.
        attempts: The number of requests.
        credentials: The headers `Authorization` that were sent.
        requests: The events of each request. A request without an array has one.
        arrays: Whether requests had arrays.
        status_of: Returns the status for an event. That of a request is the highest one.
        answering: While it is not set, no request is answered.
        overlaps: Repos with two requests at a time.
    """

    def __init__(self) -> None:
        self.accepted: list[Event] = []
        self.attempts = 0
        self.requests: list[list[Event]] = []
        self.arrays = set[bool]()
        self.credentials = set[str | None]()
        self.status_of: Callable[[Event], int] = lambda _event: 200
        self.answering = asyncio.Event()
        self.answering.set()
        self.overlaps = set[str]()
        self._running = set[str]()
        application = web.Application()
        application.router.add_post("/webhook", self._receive)
        self._server = TestServer(application)

    @property
    def url(self) -> str:
        return str(self._server.make_url("/webhook"))

    async def __aenter__(self) -> Self:
        await self._server.start_server()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.answering.set()
        await self._server.close()

    async def _receive(self, request: web.Request) -> web.Response:
        content = json.loads(await request.read())
        events = content if isinstance(content, list) else [content]
        dids = {event[event["type"]]["did"] for event in events}
        self.attempts += 1
        self.requests.append(events)
        self.arrays.add(isinstance(content, list))
        self.credentials.add(request.headers.get("Authorization"))
        self.overlaps |= dids & self._running
        self._running |= dids
        try:
            await self.answering.wait()
            status = max(self.status_of(event) for event in events)
        finally:
            self._running -= dids
        if status == 200:
            self.accepted += events
        return web.Response(status=status, body=bytes(LONG_BODY))
