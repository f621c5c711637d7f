"""The path `/subscribe`, as Jetstream serves it: send each subscriber the events that it selects."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs

import orjson
import structlog
from aiohttp import WSCloseCode, WSMsgType, web

from indexer.atproto.limits import max_items
from indexer.atproto.syntax import CollectionFilter, is_did
from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.turns import Turns
from indexer.db import Database, DatabaseError
from indexer.db.change_log_reads import LogTrimmedError
from indexer.net.server.connection_limit import WEBSOCKETS, client_network
from indexer.readers.connection import READ_PIECE_BYTES, SEND_SECONDS, FrameWriter, LimitedReading, reading_seconds
from indexer.readers.jetstream.events import EventFilter, LogPosition
from indexer.readers.jetstream.log_reading import EventWindow, JetstreamReader, ReplayPages
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
MAX_COLLECTIONS = 100
MAX_DIDS = 10_000
MAX_ITEMS = 16_384
"""Maximum number of items in the JSON of a message. They are counted before it is decoded."""
_MAX_SIZE = (1 << 32) - 1
_SHOWN_CHARACTERS = 80

T = TypeVar("T")
log = structlog.get_logger(__name__)


class BadOptionsError(ValueError):
    """The options of a subscriber are invalid; the message is one line for a person."""


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """The options of one connection.

    Attributes:
        events: The events to send. A message can replace this filter.
        cursor: Replay the events from this time on, in microseconds since the Unix epoch; None: only new events. A time
            after the newest event selects only new events, too. No clock is asked whether it is in the future: the
            times of events are those of the database's clock, which may be ahead, or may have been ahead.
        compress: Send binary messages, compressed with Jetstream's zstd dictionary.
        require_hello: Send nothing before the first valid `options_update` message.
    """

    events: EventFilter
    cursor: int | None
    compress: bool
    require_hello: bool


class Ending(NamedTuple):
    """Why the daemon ends a connection.

    Attributes:
        cause: The label of the metric.
        code: The code of the close frame; None if nobody reads it.
        reason: The reason, for a person.
    """

    cause: str
    code: WSCloseCode | None
    reason: str


_POLICY = WSCloseCode.POLICY_VIOLATION
TOO_SLOW = Ending("too-slow", _POLICY, "too slow: the next events are no longer in memory; reconnect with a cursor")
NOT_READING = Ending("not-reading", None, f"the subscriber has read nothing for {SEND_SECONDS:.0f} seconds")
TRIMMED = Ending("log-trimmed", _POLICY, "the events after your position were trimmed from the change log; reconnect")
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
        """Serve one subscriber until its connection ends."""
        if not self._values_stored:
            return _refusal(501, "events have the values of records, which are not stored: INDEXER_STORE_VALUES is off")
        try:
            options = parse_query(request.query_string, request.headers.get("Socket-Encoding", ""))
        except BadOptionsError as error:
            return _refusal(400, str(error))
        # Events are sent as complete frames, so the connection must not have a compression of its own.
        websocket = web.WebSocketResponse(
            compress=False, max_msg_size=MAX_MESSAGE_BYTES, timeout=CLOSE_SECONDS, autoping=False, decode_text=False
        )
        if not websocket.can_prepare(request):
            return _refusal(400, "connect with a websocket client: ws://HOST:PORT/subscribe")
        try:
            with request.app[WEBSOCKETS].hold(request, websocket, for_anyone=True) as held, self._reader.subscriber():
                await self._serve(request, websocket, options, held.displaced)
        except web.HTTPServiceUnavailable:
            self._metrics.feed_disconnections["jetstream", "refused"].inc()
            raise
        return websocket

    async def _serve(
        self,
        request: web.Request,
        websocket: web.WebSocketResponse,
        options: SubscriberOptions,
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
        subscriber = Subscriber(websocket, writer, options, network, on_sent, self._reader.window, self._pages)
        try:
            ending = await subscriber.serve(displaced)
        finally:
            await writer.close()
        self._metrics.feed_disconnections["jetstream", ending.cause if ending else "client"].inc()
        if ending is not None:
            log.debug("jetstream.disconnected", client=network, reason=ending.reason)


@dataclass
class Subscriber:
    """A connected subscriber.

    Attributes:
        network: The network of the client.
        on_sent: Called with the number of events that were sent.
    """

    websocket: web.WebSocketResponse
    writer: FrameWriter
    options: SubscriberOptions
    network: str
    on_sent: Callable[[int], None]
    window: EventWindow
    pages: ReplayPages
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._events: EventFilter = self.options.events
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
        window, position = self.window, await self._start()
        is_live = self.options.cursor is None
        while True:
            if window.end is not None and position.seq >= window.first:
                chunk = window.after(position.seq)
                is_live = is_live or chunk is None
            elif is_live and window.end is not None:
                return TOO_SLOW
            else:
                try:
                    chunk = await _when_available(partial(self.pages.load, self.network, position, self._events))
                except LogTrimmedError:
                    return TRIMMED
            if chunk is not None:
                data, events = chunk.select(self._events, position.seq, compress=self.options.compress)
                await self.writer.write(data)
                self.on_sent(events)
                position = chunk.end
            elif not await window.wait(PING_SECONDS):
                await self.writer.write(_PING_FRAME)

    async def _start(self) -> LogPosition:
        """Return the position of the cursor; without one, the position of the newest event."""
        if (cursor := self.options.cursor) is not None:
            return await _when_available(lambda: self.pages.start(self.network, cursor))
        while self.window.end is None:
            await self.window.wait(PING_SECONDS)
        return self.window.end

    async def _close(self, ending: Ending) -> None:
        """Send the reason, if the subscriber may read it."""
        if ending.code is not None and not self.writer.within_frame:
            reason = ending.reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore").encode()
            with suppress(TimeoutError):  # it does not read, so the connection is closed without a reason
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.websocket.close(code=ending.code, message=reason)


async def _when_available(read: Callable[[], Awaitable[T]]) -> T:
    """Read from the database, as soon as it is available."""
    while True:
        try:
            return await read()
        except DatabaseError:
            await asyncio.sleep(RETRY_SECONDS)


def _refusal(status: int, message: str) -> web.Response:
    return web.Response(text=f"{message}\n", status=status)


def parse_query(query: str, socket_encoding: str) -> SubscriberOptions:
    """Return the options in the query of the URL, and in the header `Socket-Encoding`; raise `BadOptionsError`."""
    parameters = parse_qs(query, keep_blank_values=True)

    def first(name: str) -> str:
        return parameters.get(name, [""])[0]

    events = _event_filter(
        parameters.get("wantedCollections", ()),
        parameters.get("wantedDids", ()),
        _parse_size(first("maxMessageSizeBytes")),
        live_only=first("live") == "true",
    )
    return SubscriberOptions(
        events=events,
        cursor=_parse_cursor(first("cursor")),
        compress=first("compress") == "true" or "zstd" in socket_encoding,
        require_hello=first("requireHello") == "true",
    )


def parse_message(text: bytes, before: EventFilter) -> EventFilter | None:
    """Return the filter that a message of the subscriber asks for; None if the message has another type.

    An `options_update` replaces the collections, the DIDs and the size limit of `before`, also by their absence.

    Raises:
        BadOptionsError: The message has too many items or is not JSON, or its options are invalid.
    """
    if max_items(text) > MAX_ITEMS:
        raise BadOptionsError(f"the message has more than {MAX_ITEMS} items")
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadOptionsError(f"the message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise BadOptionsError("the message is not a JSON object")
    if message.get("type") != "options_update":
        return None
    payload = message.get("payload")
    if not isinstance(payload, dict):
        raise BadOptionsError("the payload of options_update is not a JSON object")
    size = payload.get("maxMessageSizeBytes", 0)
    if type(size) is not int:
        raise BadOptionsError("maxMessageSizeBytes is not an integer")
    return _event_filter(
        _texts(payload, "wantedCollections"), _texts(payload, "wantedDids"), size, live_only=before.live_only
    )


def _parse_cursor(text: str) -> int | None:
    if not text:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < _SHOWN_CHARACTERS):
        raise BadOptionsError(f"invalid cursor: {text[:_SHOWN_CHARACTERS]!r} is not a time in microseconds")
    return int(text)


def _parse_size(text: str) -> int:
    """Return the size; 0 for anything else, as Jetstream does."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < _SHOWN_CHARACTERS else 0


def _texts(payload: Mapping[str, Any], name: str) -> Sequence[str]:
    values = payload.get(name)
    if values is None:
        return ()
    if not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        raise BadOptionsError(f"{name} is not a list of strings")
    return values


def _event_filter(collections: Sequence[str], dids: Sequence[str], max_bytes: int, *, live_only: bool) -> EventFilter:
    patterns, accounts = dict.fromkeys(collections), frozenset(dids)
    if len(patterns) > MAX_COLLECTIONS:
        raise BadOptionsError(f"too many wanted collections: {len(patterns)}; at most {MAX_COLLECTIONS} are allowed")
    if len(accounts) > MAX_DIDS:
        raise BadOptionsError(f"too many wanted DIDs: {len(accounts)}; at most {MAX_DIDS} are allowed")
    try:
        wanted = CollectionFilter(patterns) if patterns else None
    except ValueError as error:
        raise BadOptionsError(f"invalid collection: {str(error)[: 2 * _SHOWN_CHARACTERS]}") from None
    invalid = next((did for did in dids if not is_did(did)), None)
    if invalid is not None:
        raise BadOptionsError(f"invalid DID: {invalid[:_SHOWN_CHARACTERS]!r}")
    return EventFilter(wanted, accounts, min(max(max_bytes, 0), _MAX_SIZE), live_only)
