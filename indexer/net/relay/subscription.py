"""A connection to `com.atproto.sync.subscribeRepos` that reconnects whenever it ends (docs/protocol.md#frames).

A lost connection, silence, or a message over the size limit leads to a new connection after a growing delay. Several
relays are tried in order.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from math import inf
from random import uniform
from time import monotonic

import structlog

from indexer.atproto.limits import Limits
from indexer.net.relay.stream_socket import (
    STREAM_PATH,
    ConnectionSettings,
    Opening,
    StreamSocket,
    StreamSocketError,
    open_stream,
    open_to_any_address,
)
from indexer.sync.events import Event, decode_frame

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Connection:
    """The open connection, for readiness and the status page."""

    relay: str
    opened_at: float = field(default_factory=monotonic)  # monotonic seconds
    frames: int = 0  # received
    reading: bool = True  # the subscription waits for a frame; otherwise the caller processes one
    processing_seconds: float = 0.0  # for which the caller has processed frames


@dataclass(slots=True)
class Subscription:
    """Receives frames from the first of `relays` that works.

    Attributes:
        opening: Allows each connection.
        path: The path of the stream, and its query. The next connection uses its present value.
        oversized: Relays whose last connection ended with a message over `max_bytes`. They would send it again.
        disconnected_since: When the last connection ended, or this object was made (monotonic seconds).
    """

    relays: Sequence[str]
    max_bytes: int  # a larger message is not received: it ends the connection
    user_agent: str
    settings: ConnectionSettings = field(default_factory=ConnectionSettings)
    opening: Opening = open_to_any_address
    path: str = STREAM_PATH
    oversized: set[str] = field(default_factory=set, init=False)
    connection: Connection | None = field(default=None, init=False)  # None while not connected
    disconnected_since: float = field(default_factory=monotonic, init=False)
    last_error: str | None = field(default=None, init=False)
    _socket: StreamSocket | None = field(default=None, init=False)
    _failed_attempts: int = field(default=0, init=False)
    _same_relay_next: bool = field(default=False, init=False)

    def reconnect(self) -> None:
        """End the connection; the next one is to the same relay."""
        self._same_relay_next = True
        if self._socket is not None:
            self._socket.abort()

    async def frames(self, cursor_of: Callable[[str], Awaitable[int | None]]) -> AsyncGenerator[bytes, None]:
        """Yield frames without end.

        Each connection starts after `cursor_of(relay)`; None requests only new messages. Once it has been called, no
        frame of an earlier connection follows. A text message, which the protocol does not allow, is yielded as bytes,
        so that the decoder rejects it.
        """
        attempt, number, failing_since = 0, 0, inf
        while True:
            relay = self.relays[number % len(self.relays)]
            self._same_relay_next = False
            silent = False
            cursor = await cursor_of(relay)
            started = monotonic()
            try:
                async with aclosing(self._frames_of(relay, cursor)) as frames:
                    async for frame in frames:
                        yield frame
            except OSError as error:
                self._log_lost(relay, error)
                ending = error.ending if isinstance(error, StreamSocketError) else None
                silent = ending == "closed by this side"
                if ending == "message over the size limit":
                    self.oversized.add(relay)
            finally:
                held_back = self._end_connection()
            if monotonic() - started > self.settings.stable_after and not silent:
                attempt, number, failing_since = 0, 0, inf
            elif not (self._same_relay_next or held_back):
                attempt, failing_since = attempt + 1, min(failing_since, started)
                if monotonic() - failing_since >= self.settings.switch_after:
                    number, failing_since = number + 1, inf
            await asyncio.sleep(self._delay(attempt))

    def _end_connection(self) -> bool:
        """Note that no connection is open; return True if it may have ended because the caller processed frames.

        Then answers to pings were not read in time, or the relay did not wait. This is no failure of the relay.
        """
        if (connection := self.connection) is None:
            return False
        self.connection, self.disconnected_since = None, monotonic()
        return connection.processing_seconds > self.settings.ping_interval / 2

    def _delay(self, attempt: int) -> float:
        delay = min(self.settings.first_delay * 2.0 ** min(max(0, attempt - 1), 16), self.settings.max_delay)
        return delay * uniform(0.75, 1.25)  # noqa: S311 - jitter, not secrecy

    async def _frames_of(self, relay: str, cursor: int | None) -> AsyncGenerator[bytes, None]:
        log.debug("relay.connecting", relay=relay, cursor=cursor)
        async with open_stream(
            relay, cursor, self.max_bytes, self.user_agent, self.settings, self.opening, self.path
        ) as socket:
            self._socket = socket
            self.connection = Connection(relay)
            self.last_error = None
            self._failed_attempts = 0
            log.info("relay.connected", relay=relay, cursor=cursor)
            closing = _close_when_silent(socket, self.connection, self.settings.message_timeout)
            silence = asyncio.create_task(closing)
            try:
                while True:
                    frame = await socket.receive()
                    self.connection.frames += 1
                    self.connection.reading = False
                    began = monotonic()
                    yield frame
                    self.connection.processing_seconds += monotonic() - began
                    self.connection.reading = True
            finally:
                silence.cancel()
                await asyncio.wait([silence])
                self._socket = None
                if not silence.cancelled():
                    silence.result()

    def _log_lost(self, relay: str, error: OSError) -> None:
        self.last_error = f"{type(error).__name__}: {error}"[:300]
        if isinstance(error, StreamSocketError) and error.ending == "closed by this side":
            log.info("relay.silent", relay=relay, error=self.last_error)
        elif self.connection is not None:
            log.warning("relay.lost", relay=relay, error=self.last_error)
        else:
            self._failed_attempts += 1
            if self._failed_attempts.bit_count() == 1:  # a power of two
                log.warning("relay.unreachable", relay=relay, error=self.last_error, attempts=self._failed_attempts)


async def _close_when_silent(socket: StreamSocket, connection: Connection, seconds: float) -> None:
    """Close the connection when no message has come for `seconds`.

    Polling the frame counter is cheaper than one timer per frame.
    """
    frames = -1
    while frames != connection.frames or not connection.reading:
        frames = connection.frames
        await asyncio.sleep(seconds)
    await socket.close(f"no message for {seconds:g} s")


async def first_event(
    relay: str, cursor: int | None, limits: Limits, user_agent: str, *, connect_timeout: float, message_timeout: float
) -> Event | None:
    """Return the first event after `cursor` (None: the next one); None if the relay sends nothing in time.

    Raises:
        OSError: The relay cannot be reached, refuses the connection, or ends it (includes TimeoutError).
    """
    settings = ConnectionSettings(connect_timeout=connect_timeout)
    async with open_stream(relay, cursor, limits.frame_bytes, user_agent, settings) as socket:
        try:
            async with asyncio.timeout(message_timeout):
                return decode_frame(await socket.receive(), limits)
        except TimeoutError:
            return None
