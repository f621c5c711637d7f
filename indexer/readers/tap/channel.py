"""The websocket `/channel`: send events to one client, and receive its acknowledgements.

The connection always ends without a close frame, because the client `@atproto/tap` connects again only then.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

import orjson
from aiohttp import WSMsgType, web

from indexer.concurrency.turns import Turns
from indexer.db import DatabaseError
from indexer.net.server.connection_limit import WEBSOCKETS, client_network
from indexer.readers.access import problem
from indexer.readers.connection import LimitedReading
from indexer.readers.tap.deliveries import Deliveries
from indexer.readers.tap.feed import TapFeed
from indexer.telemetry.metrics import Metrics

MAX_IN_FLIGHT = 1_000
"""Events that one client may have before it acknowledges the first of them, so that clients share the work."""
TAKE = 100
RETRY_SECONDS = 60.0
DATABASE_RETRY_SECONDS = 1.0
HEARTBEAT_SECONDS = 30.0
"""Interval of pings. A client that does not answer in half of this time is disconnected."""
MAX_MESSAGE_BYTES = 4_096
"""Size of a message of a client; an acknowledgement has some ten bytes."""


class Channel:
    """Serves the websockets of clients. It shares the changes among all of them.

    Attributes:
        retry_seconds: An event is sent again if it is not acknowledged for so long. New connections use it.
    """

    def __init__(self, feed: TapFeed, metrics: Metrics) -> None:
        self._feed = feed
        self._metrics = metrics
        self.retry_seconds = RETRY_SECONDS
        self._reading_turns = Turns()

    async def connect(self, request: web.Request) -> web.StreamResponse:
        """Serve one client until its connection ends, or until this process no longer owns the feed.

        With `?acks=false`, an event counts as acknowledged as soon as it was sent.
        """
        websocket = web.WebSocketResponse(heartbeat=HEARTBEAT_SECONDS, max_msg_size=MAX_MESSAGE_BYTES)
        with request.app[WEBSOCKETS].hold(request, None, for_anyone=False):
            await websocket.prepare(request)
            if request.transport is not None:
                LimitedReading(request.transport, self._reading_turns, client_network(request))
            self._feed.clients += 1
            try:
                reason = await self._serve(websocket, acks=request.query.get("acks") != "false")
                self._metrics.feed_disconnections["tap", reason].inc()
            finally:
                self._feed.clients -= 1
                if request.transport is not None:  # after a close frame, the client of tap would not connect again
                    request.transport.abort()
        return websocket

    async def _serve(self, websocket: web.WebSocketResponse, *, acks: bool) -> str:
        """Serve a client; return why the connection ends. The end is noticed even if another process owns the feed."""
        deliveries = asyncio.create_task(self._feed.deliveries())
        sent = self._metrics.feed_events["tap"].inc
        client = _Client(websocket, deliveries, self.retry_seconds, sent, acks)
        tasks = [
            asyncio.create_task(work()) for work in (client.receive, client.send, client.retry, client.wait_for_end)
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                with suppress(ConnectionError):  # the client has closed the connection
                    task.result()
        finally:
            for running in (*tasks, deliveries):
                running.cancel()
            await asyncio.gather(*tasks, deliveries, return_exceptions=True)
            client.give_back()
        return "feed-ended" if tasks[-1] in done else "client"


async def refuse_channel(_: web.Request) -> web.Response:
    """Answer clients if a webhook gets the events."""
    return problem(400, "websocket not available in webhook mode: INDEXER_WEBHOOK_URL is set")


@dataclass
class _Client:
    """One connection, with the events that were sent to it and not acknowledged. Times are monotonic seconds."""

    websocket: web.WebSocketResponse
    deliveries: "asyncio.Task[Deliveries]"
    retry_seconds: float
    on_sent: Callable[[], None]
    acks: bool
    sent_at: dict[int, float] = field(default_factory=dict)  # when each event in flight was sent
    newest_acknowledged: float = -inf  # when the newest acknowledged event was sent
    acknowledged_at: float = -inf
    acknowledged: asyncio.Event = field(default_factory=asyncio.Event)  # set when there may be room for more events

    async def wait_for_end(self) -> None:
        """Wait until this process no longer owns the feed."""
        deliveries = await asyncio.shield(self.deliveries)
        await deliveries.ended.wait()

    async def send(self) -> None:
        """Send events until the deliveries end, while fewer than `MAX_IN_FLIGHT` are unacknowledged."""
        deliveries = await asyncio.shield(self.deliveries)
        while True:
            while (room := MAX_IN_FLIGHT - len(self.sent_at)) <= 0:
                self.acknowledged.clear()
                await self.acknowledged.wait()
            if not (changes := await deliveries.take(min(TAKE, room))):
                return
            now = monotonic()
            self.sent_at.update(dict.fromkeys([change.seq for change in changes], now))
            try:
                events = await deliveries.events(changes)
            except DatabaseError:
                self._give_back(deliveries, [change.seq for change in changes])
                await asyncio.sleep(DATABASE_RETRY_SECONDS)
                continue
            unsent = {change.seq for change in changes} - {event.seq for event in events}
            for seq in unsent:
                self.sent_at.pop(seq, None)
            for event in events:
                await self.websocket.send_str(event.message.decode())
                self.on_sent()
                if not self.acks:
                    self._acknowledge(deliveries, event.seq)

    async def receive(self) -> None:
        """Receive acknowledgements until the connection ends: as text or binary messages, as tap does (`ReadJSON`)."""
        async for message in self.websocket:
            if message.type not in {WSMsgType.TEXT, WSMsgType.BINARY} or not self.deliveries.done():
                continue
            seq = acknowledged_seq(message.data)
            if self.acks and seq is not None:
                self._acknowledge(self.deliveries.result(), seq)

    async def retry(self) -> None:
        """Give back events that the client has not acknowledged in time.

        An event that waits behind others is not late as long as the client acknowledges some.
        """
        deliveries = await asyncio.shield(self.deliveries)
        while True:
            await asyncio.sleep(self.retry_seconds / 4)
            limit = monotonic() - self.retry_seconds
            newest = inf if self.acknowledged_at < limit else self.newest_acknowledged
            late = [seq for seq, sent_at in self.sent_at.items() if sent_at < limit and sent_at < newest]
            for seq in late:
                deliveries.count_failure(seq, f"no acknowledgement within {self.retry_seconds:g} seconds")
            self._give_back(deliveries, late)

    def give_back(self) -> None:
        """Let other clients have the events that were not acknowledged.

        The client may have failed because of the first one.
        """
        if self.deliveries.done() and not self.deliveries.cancelled():
            deliveries, unacknowledged = self.deliveries.result(), list(self.sent_at)
            for seq in unacknowledged[:1]:
                deliveries.count_failure(seq, "the connection ended before its acknowledgement")
            self._give_back(deliveries, unacknowledged)

    def _acknowledge(self, deliveries: Deliveries, seq: int) -> None:
        if seq in deliveries.window:  # a repeated acknowledgement says nothing about the events that wait
            self.newest_acknowledged = max(self.newest_acknowledged, self.sent_at.get(seq, -inf))
            self.acknowledged_at = monotonic()
        deliveries.acknowledge(seq)
        self.sent_at.pop(seq, None)
        self.acknowledged.set()

    def _give_back(self, deliveries: Deliveries, seqs: list[int]) -> None:
        deliveries.window.give_back(seqs)
        for seq in seqs:
            self.sent_at.pop(seq, None)
        self.acknowledged.set()


def acknowledged_seq(text: str | bytes) -> int | None:
    """Return the number in an acknowledgement; None for any other message, which has no effect."""
    try:
        message: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(message, dict) or message.get("type") != "ack":
        return None
    seq = message.get("id")
    return seq if isinstance(seq, int) and not isinstance(seq, bool) else None
