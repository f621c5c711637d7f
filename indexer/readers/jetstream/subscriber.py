"""The streams of Jetstream: send each subscriber the events that it selects, in its version of the protocol."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import orjson
import structlog
from aiohttp import WSCloseCode, WSMsgType, hdrs, web

from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.turns import Turns
from indexer.db import Database, DatabaseError
from indexer.db.change_log_reads import LogTrimmedError
from indexer.db.periodic import when_available
from indexer.net.server.connection_limit import WEBSOCKETS, client_network
from indexer.readers.connection import READ_PIECE_BYTES, SEND_SECONDS, FrameWriter, LimitedReading, reading_seconds
from indexer.readers.jetstream.events import EventFilter, LogPosition, dictionary, message_frame, v2_payload
from indexer.readers.jetstream.log_reading import EventWindow, JetstreamReader, ReplayPages, Start
from indexer.readers.jetstream.options import (
    BAD_REQUEST,
    BadOptionsError,
    SubscriberOptions,
    parse_message,
    parse_query,
    parse_v2_query,
)
from indexer.telemetry.metrics import Metrics

MAX_MESSAGE_BYTES = 1 << 20
"""Maximum size of a message of a subscriber. 10,000 DIDs of did:plc have 350 kB."""
MAX_REASON_BYTES = 123
"""Maximum length of the reason in a close frame (RFC 6455, section 5.5)."""
CLOSE_SECONDS = 5.0
PING_SECONDS = 30.0
"""Interval of pings while there are no events to send, or the subscriber has not said hello."""
RETRY_SECONDS = 1.0
HELLO_SECONDS = 60.0
"""Time for the first valid `options_update` of a subscriber with `requireHello=true`."""
MESSAGE_SECONDS = 0.1
"""Minimum time between two messages of a subscriber, of any type: each one may have 10,000 DIDs to check."""
_PING_FRAME = b"\x89\x00"
SUBPROTOCOL = "xrpc.v1.json"

log = structlog.get_logger(__name__)


class Ending(NamedTuple):
    """Why the daemon ends a connection."""

    cause: str  # the label of the metric
    code: WSCloseCode | None  # the code of the close frame; None if nobody reads it
    reason: str  # the reason, for a person


_POLICY = WSCloseCode.POLICY_VIOLATION
TOO_SLOW = Ending("too-slow", _POLICY, "too slow: the next events are no longer in memory; reconnect with a cursor")
NOT_READING = Ending("not-reading", None, f"the subscriber has read nothing for {SEND_SECONDS:.0f} seconds")
TRIMMED = Ending("log-trimmed", _POLICY, "the events after your position were trimmed from the change log; reconnect")
NO_MESSAGES = Ending("bad-message", _POLICY, "this stream takes no messages")
NO_HELLO = Ending("no-hello", _POLICY, "no options_update came in time after requireHello=true")
DISPLACED = Ending(
    "displaced",
    WSCloseCode.TRY_AGAIN_LATER,
    "your network has the most connections, and another one needs one; reconnect later",
)


class Subscriptions:
    """Serves subscribers. Like Jetstream's, they need no password: they only get public records."""

    def __init__(self, db: Database, reader: JetstreamReader, metrics: Metrics, *, values_stored: bool) -> None:
        self._reader = reader
        self._pages = ReplayPages(db)
        self._metrics = metrics
        self._values_stored = values_stored
        self._reading_turns = Turns()

    async def subscribe(self, request: web.Request) -> web.StreamResponse:
        """Serve one subscriber of `/subscribe` until its connection ends."""
        return await self._answer(request, parse_query, _refusal)

    async def subscribe_events(self, request: web.Request) -> web.StreamResponse:
        """Serve one subscriber of the second version until its connection ends."""
        return await self._answer(request, parse_v2_query, xrpc_refusal)

    async def _answer(
        self,
        request: web.Request,
        parse: Callable[[str, str], SubscriberOptions],
        refusal: Callable[[int, str, str], web.Response],
    ) -> web.StreamResponse:
        if not self._values_stored:
            message = "events have the values of records, which are not stored: INDEXER_STORE_VALUES is off"
            return refusal(501, "MethodNotImplemented", message)
        try:
            options = parse(request.query_string, request.headers.get("Socket-Encoding", ""))
        except BadOptionsError as error:
            return refusal(400, error.name, str(error))
        # Events are sent as complete frames, so the connection must not have a compression of its own.
        websocket = web.WebSocketResponse(
            protocols=(SUBPROTOCOL,) if options.is_v2 else (),
            compress=False,
            max_msg_size=MAX_MESSAGE_BYTES,
            timeout=CLOSE_SECONDS,
            autoping=False,
            decode_text=False,
        )
        if not websocket.can_prepare(request):
            message = f"connect with a websocket client: ws://HOST:PORT{request.path}"
            return refusal(400, BAD_REQUEST, message)
        try:
            with request.app[WEBSOCKETS].hold(request, websocket, for_anyone=True) as held, self._reader.subscriber():
                start = None
                if options.is_v2 and options.cursor is not None:
                    start = await self._pages.start(client_network(request), options.cursor)
                    if start.is_seq and start.too_old:
                        return refusal(400, "CursorTooOld", f"the oldest event has seq {start.position.seq + 1}")
                await self._serve(request, websocket, options, start, held.displaced)
        except (web.HTTPServiceUnavailable, DatabaseError) as error:
            self._metrics.feed_disconnections["jetstream", "refused"].inc()
            message = (error.text or "") if isinstance(error, web.HTTPException) else "the database is unavailable"
            return refusal(503, "ServiceUnavailable", message)
        return websocket

    async def _serve(
        self,
        request: web.Request,
        websocket: web.WebSocketResponse,
        options: SubscriberOptions,
        start: Start | None,
        displaced: asyncio.Event,
    ) -> None:
        network = client_network(request)
        # The library parses bytes that follow the handshake before they can be counted. So a connection is a piece.
        await self._reading_turns.spend(network, reading_seconds(READ_PIECE_BYTES))
        await websocket.prepare(request)
        if (transport := request.transport) is None:
            return
        writer = FrameWriter(transport)
        LimitedReading(transport, self._reading_turns, network)
        on_sent = self._metrics.feed_events["jetstream"].inc
        subscriber = Subscriber(websocket, writer, options, network, on_sent, self._reader.window, self._pages, start)
        try:
            ending = await subscriber.serve(displaced)
        finally:
            await writer.close()
        self._metrics.feed_disconnections["jetstream", ending.cause if ending else "client"].inc()
        if ending is not None:
            log.debug("jetstream.disconnected", client=network, reason=ending.reason)


@dataclass
class Subscriber:
    """A connected subscriber."""

    websocket: web.WebSocketResponse
    writer: FrameWriter
    options: SubscriberOptions
    network: str
    on_sent: Callable[[int], None]  # called with the number of events that were sent
    window: EventWindow
    pages: ReplayPages
    start: Start | None = None  # where it begins; None if that is not known yet
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._events: EventFilter = self.options.events
        self._next = 0
        if not self.options.require_hello:
            self._ready.set()

    async def serve(self, displaced: asyncio.Event) -> Ending | None:
        """Send events until the connection ends; return why the daemon ended it, None if the subscriber did."""

        async def wait_until_displaced() -> Ending:
            await displaced.wait()
            return DISPLACED

        work = self._send_events(), self._receive_messages(), wait_until_displaced()
        tasks: list[asyncio.Task[Ending | None]] = [asyncio.create_task(coroutine) for coroutine in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ending = next(task for task in tasks if task.done()).result()
        except TimeoutError:
            ending = NOT_READING
        except ConnectionError:
            ending = None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if ending is not None:
            await self._close(ending)
        return ending

    async def _receive_messages(self) -> Ending | None:
        async for message in self.websocket:
            if message.type is WSMsgType.PING:
                await self.writer.answer_ping(message.data)
            if self.options.is_v2 and message.type in {WSMsgType.TEXT, WSMsgType.BINARY}:
                return NO_MESSAGES
            if message.type is WSMsgType.TEXT:  # Jetstream ignores binary messages, too
                try:
                    events = parse_message(message.data, self._events)
                except BadOptionsError as error:
                    # The code that Jetstream sends: clients do not reconnect.
                    return Ending("bad-message", WSCloseCode.OK, str(error))
                if events is not None:
                    self._events = events
                    self._ready.set()
            await asyncio.sleep(MESSAGE_SECONDS)
        return None

    async def _send_events(self) -> Ending:
        """Send events until the daemon has to end the connection; raise the errors of `FrameWriter.write`."""
        silent_until = monotonic() + HELLO_SECONDS
        while not await wait_for_event(self._ready, min(PING_SECONDS, HELLO_SECONDS)):
            if monotonic() >= silent_until:
                return NO_HELLO
            await self.writer.write(_PING_FRAME)
        window, position = self.window, await self._begin()
        is_live = self.options.cursor is None
        while True:
            self._next = position.seq + 1
            if window.end is not None and position.seq >= window.first:
                chunk = window.after(position.seq)
                is_live = is_live or chunk is None
            elif is_live and window.end is not None:
                return TOO_SLOW
            else:
                try:
                    load = partial(self.pages.load, self.network, position, self._events)
                    chunk = await when_available(load, RETRY_SECONDS)
                except LogTrimmedError:
                    return TRIMMED
            if chunk is not None:
                data, events = chunk.select(
                    self._events, position.seq, self.options.wire, compress=self.options.compress
                )
                await self.writer.write(data)
                self.on_sent(events)
                position = chunk.end
            elif not await window.wait(PING_SECONDS):
                await self.writer.write(_PING_FRAME)

    async def _begin(self) -> LogPosition:
        """Return the position of the cursor; without one, the position of the newest event."""
        if (cursor := self.options.cursor) is not None:
            if (start := self.start) is None:
                start = await when_available(lambda: self.pages.start(self.network, cursor), RETRY_SECONDS)
            elif start.too_old or start.ahead:
                info = {
                    "name": "FutureCursor" if start.ahead else "OutdatedCursor",
                    "message": f"events are sent from seq {start.position.seq + 1}",
                }
                await self._send(v2_payload("info", info))
            return start.position
        while self.window.end is None:
            await self.window.wait(PING_SECONDS)
        return self.window.end

    async def _send(self, message: dict[str, Any]) -> None:
        await self.writer.write(b"".join(message_frame(orjson.dumps(message), compress=self.options.compress)))

    async def _close(self, ending: Ending) -> None:
        """Send the reason, if the subscriber may read it."""
        if ending.code is not None and not self.writer.within_frame:
            reason = ending.reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore").encode()
            with suppress(TimeoutError, ConnectionError):  # it does not read: the connection is closed without a reason
                async with asyncio.timeout(CLOSE_SECONDS):
                    if self.options.is_v2 and ending in (TOO_SLOW, TRIMMED):
                        message = f"{ending.reason}: cursor={self._next}"
                        await self._send({"$type": "error", "error": "ConsumerTooSlow", "message": message})
                    await self.websocket.close(code=ending.code, message=reason)


def _refusal(status: int, _: str, message: str) -> web.Response:
    return web.Response(text=f"{message}\n", status=status)


def xrpc_refusal(status: int, name: str, message: str) -> web.Response:
    """Return an error of XRPC."""
    return web.json_response({"error": name, "message": message}, status=status)


async def get_dictionary(request: web.Request) -> web.Response:
    """Answer the zstd dictionary, as `network.bsky.jetstream.getZstdDictionary` does."""
    current = str(dictionary().dict_id)
    asked = request.query.get("id", current)
    if not (asked.isascii() and asked.isdecimal()):
        return xrpc_refusal(400, BAD_REQUEST, "id is not an integer")
    if asked != current:
        return xrpc_refusal(404, "DictionaryNotFound", f"the dictionary is {current}")
    headers = {
        hdrs.ETAG: f'"zstd-dict-{current}"',
        hdrs.CACHE_CONTROL: "public, max-age=31536000, immutable",
        "X-Zstd-Dictionary-Id": current,
    }
    return web.Response(body=dictionary().dict_content, headers=headers, content_type="application/octet-stream")
