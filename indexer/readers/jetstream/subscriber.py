"""One subscriber of `/subscribe`: send it the events that it selects, from its position on, and read its messages."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from aiohttp import WSCloseCode, WSMsgType, web

from indexer.concurrency.event_wait import wait_for_event
from indexer.db import DatabaseError
from indexer.db.feed_page import LogTrimmedError
from indexer.readers.frame_writer import SEND_SECONDS, FrameWriter
from indexer.readers.jetstream.events import EventChunk, LogPosition
from indexer.readers.jetstream.options import BadOptionsError, SubscriberOptions, parse_message
from indexer.readers.jetstream.pages import ReplayPages
from indexer.readers.jetstream.window import EventWindow

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


TOO_SLOW = Ending(
    "too-slow",
    WSCloseCode.POLICY_VIOLATION,
    "too slow: the next events are no longer in memory; reconnect with a cursor",
)
NOT_READING = Ending("not-reading", None, f"the subscriber has read nothing for {SEND_SECONDS:.0f} seconds")
TRIMMED = Ending(
    "log-trimmed",
    WSCloseCode.POLICY_VIOLATION,
    "the events after your position were trimmed from the change log; reconnect",
)
NO_HELLO = Ending("no-hello", WSCloseCode.POLICY_VIOLATION, "no options_update came in time after requireHello=true")
DISPLACED = Ending(
    "displaced",
    WSCloseCode.TRY_AGAIN_LATER,
    "your network has the most connections, and another one needs one; reconnect later",
)


class Subscriber:
    """A connected subscriber."""

    def __init__(
        self,
        websocket: web.WebSocketResponse,
        writer: FrameWriter,
        options: SubscriberOptions,
        network: str,
        on_sent: Callable[[int], None],
    ) -> None:
        """Serve the websocket of a client in `network`. `on_sent` gets the numbers of events that were sent."""
        self._network = network
        self._websocket = websocket
        self._writer = writer
        self._options = options
        self._on_sent = on_sent
        self._events = options.events
        self._ready = asyncio.Event()
        if not options.require_hello:
            self._ready.set()

    async def serve(self, window: EventWindow, pages: ReplayPages, displaced: asyncio.Event) -> Ending | None:
        """Send events until the connection ends; return why the daemon ended it, None if the subscriber did."""

        async def wait_until_displaced() -> Ending:
            await displaced.wait()
            return DISPLACED

        work = (self._send_events(window, pages), self._receive_messages(), wait_until_displaced())
        tasks = [asyncio.create_task(coroutine) for coroutine in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ending = next(task for task in tasks if task.done()).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if ending is not None:
            await self._close(ending)
        return ending

    async def _receive_messages(self) -> Ending | None:
        async for message in self._websocket:
            if message.type is WSMsgType.PING:
                try:
                    await self._writer.answer_ping(message.data)
                except TimeoutError:
                    return NOT_READING
                except ConnectionError:
                    return None
            if message.type is WSMsgType.TEXT:  # Jetstream ignores binary messages, too
                try:
                    events = parse_message(message.data, self._events)
                except BadOptionsError as error:
                    return Ending(
                        "bad-message", WSCloseCode.OK, str(error)
                    )  # the code that Jetstream sends: clients do not reconnect
                if events is not None:
                    self._events = events
                    self._ready.set()
            await asyncio.sleep(MESSAGE_SECONDS)
        return None

    async def _send_events(self, window: EventWindow, pages: ReplayPages) -> Ending | None:
        silent_until = monotonic() + HELLO_SECONDS
        try:
            while not await wait_for_event(self._ready, min(PING_SECONDS, HELLO_SECONDS)):
                if monotonic() >= silent_until:
                    return NO_HELLO
                await self._writer.write(_PING_FRAME)
            return await self._send_from_start(window, pages)
        except TimeoutError:
            return NOT_READING
        except ConnectionError:
            return None

    async def _send_from_start(self, window: EventWindow, pages: ReplayPages) -> Ending:
        """Send events until the daemon has to end the connection; raise the errors of `FrameWriter.write`."""
        position = await self._start(window, pages)
        is_live = self._options.cursor is None
        while True:
            if window.is_open and position.seq >= window.first:
                chunk = window.after(position.seq)
                is_live = is_live or chunk is None
            elif is_live and window.is_open:
                return TOO_SLOW
            else:
                try:
                    chunk = await self._load(pages, position)
                except LogTrimmedError:
                    return TRIMMED
            if chunk is not None:
                await self._send(chunk, position.seq)
                position = chunk.end
            elif not await window.wait(PING_SECONDS):
                await self._writer.write(_PING_FRAME)

    async def _start(self, window: EventWindow, pages: ReplayPages) -> LogPosition:
        """Return the position of the cursor; without one, the position of the newest event."""
        if self._options.cursor is not None:
            while True:
                try:
                    return await pages.start(self._network, self._options.cursor)
                except DatabaseError:
                    await asyncio.sleep(RETRY_SECONDS)
        while window.end is None:
            await window.wait(PING_SECONDS)
        return window.end

    async def _load(self, pages: ReplayPages, position: LogPosition) -> EventChunk | None:
        """Return the next events of a replay; None if there are none yet. Wait while the database is unavailable."""
        while True:
            try:
                return await pages.load(self._network, position, self._events)
            except DatabaseError:
                await asyncio.sleep(RETRY_SECONDS)

    async def _send(self, chunk: EventChunk, after: int) -> None:
        payload = chunk.select(self._events, after, compress=self._options.compress)
        await self._writer.write(payload.data)
        self._on_sent(payload.events)

    async def _close(self, ending: Ending) -> None:
        """Send the reason, if the subscriber may read it."""
        if ending.code is not None and not self._writer.within_frame:
            reason = ending.reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore").encode()
            with suppress(TimeoutError):  # it does not read, so the connection is closed without a reason
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._websocket.close(code=ending.code, message=reason)
