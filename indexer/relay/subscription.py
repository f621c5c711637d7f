"""A connection to `com.atproto.sync.subscribeRepos` that reconnects whenever it ends (docs/protocol.md#frames).

The subscription returns frames and does not decode them. A lost connection, silence, or a message over the size limit
leads to a new connection after a growing delay. Several relays are tried in order.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from random import uniform
from time import monotonic
from typing import Any

import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.frames import CloseCode

PATH = "/xrpc/com.atproto.sync.subscribeRepos"
MAX_QUEUED_FRAMES = 4
"""Frames that are received before the caller asks for them. More of them would only use more memory."""
PIECE_BYTES = 8_192
"""Received bytes that are parsed at a time."""
TURN_SECONDS = 0.005
"""Time to parse pieces, or to yield frames, before other tasks get a turn. Each turn of the event loop costs a
wait for the interpreter's lock while a batch is planned."""
_SILENT = "no message"

log = structlog.get_logger(__name__)


class _ConnectWithoutRedirects(connect):
    """Does not follow redirects: they could lead to an address that only this machine can reach."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class _SlicedConnection(ClientConnection):
    """Parses received bytes in pieces, and gives other tasks a turn between them.

    One read returns up to 256 KiB. These may be 100,000 messages or pings, which take a second to parse. The next read
    waits until all pieces are parsed and the queue of messages has room.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting: deque[Callable[[], object]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.recv_messages.resume = self._resume_reading

    def data_received(self, data: bytes) -> None:
        parse = super().data_received
        self._run_later(partial(parse, data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES))

    def eof_received(self) -> None:
        self._run_later([super().eof_received])

    def connection_lost(self, exc: Exception | None) -> None:
        self._run_later([partial(super().connection_lost, exc)])

    def _run_later(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Run callbacks after those that are waiting; begin at once if none is."""
        idle = not self._waiting
        self._waiting.extend(callbacks)
        if idle:
            self._run_waiting()

    def _run_waiting(self) -> None:
        turn_ends = monotonic() + TURN_SECONDS
        while self._waiting and monotonic() < turn_ends:
            self._waiting.popleft()()
        if self._waiting:
            self.transport.pause_reading()
            self.loop.call_soon(self._run_waiting)
        self._resume_reading()

    def _resume_reading(self) -> None:
        if not (self._waiting or self.recv_messages.paused):
            self.transport.resume_reading()


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Timeouts and delays of the connection, in seconds.

    Attributes:
        connect_timeout: For the TCP connection and the handshakes.
        ping_interval: Between pings, and for the answer to each ping.
        message_timeout: Without any message, before the connection is closed. It doubles, up to `max_message_timeout`,
            while reconnections bring nothing new.
        first_delay: Before the first reconnection. The delay doubles each time that all relays have failed.
        max_delay: The upper bound of the delay, before the jitter of 25 %.
        stable_after: A connection that lasted this long resets the delay.
        max_skips: How many sequence numbers are skipped for a message over the size limit. After that, the relay counts
            as failed.
    """

    connect_timeout: float = 15.0
    ping_interval: float = 30.0
    message_timeout: float = 90.0
    max_message_timeout: float = 1_800.0
    first_delay: float = 1.0
    max_delay: float = 12.0
    stable_after: float = 60.0
    max_skips: int = 32


@dataclass(slots=True)
class Connection:
    """The open connection, for readiness and the status page.

    Attributes:
        cursor: The cursor in the request; None: only new messages.
        skips: The number of positions at which messages over the size limit were skipped before this connection.
        opened_at: Monotonic seconds.
        frames: The number of received frames.
        reading: True while the subscription waits for a frame, False while the caller processes one.
    """

    relay: str
    cursor: int | None
    skips: int = 0
    opened_at: float = field(default_factory=monotonic)
    frames: int = 0
    reading: bool = True


@dataclass(slots=True)
class _OversizedMessage:
    """A message over the size limit that follows `cursor`.

    Its sequence number is not known. Each reconnection adds one to the requested cursor until the message is skipped,
    so no message after it is lost.
    """

    cursor: int | None
    skips: int = 0
    counted: bool = False


@dataclass(slots=True)
class _Silence:
    """The time that a relay may be silent. Few accounts are active on a small relay or PDS, and most of the time none.

    Attributes:
        cursor: The cursor of the last connection.
        timeout: Seconds without a message after which the connection is closed.
    """

    cursor: int | None
    timeout: float


@dataclass(slots=True)
class Subscription:
    """Receives frames from the first of `relays` that works.

    Attributes:
        max_bytes: The size limit. A larger message is not received: it ends the connection, and a later connection
            skips it.
        skipped: The number of positions at which messages over the size limit were skipped.
        connection: None while not connected.
        disconnected_since: When the last connection ended, or this object was made (monotonic seconds).
    """

    relays: Sequence[str]
    max_bytes: int
    user_agent: str
    settings: ConnectionSettings = field(default_factory=ConnectionSettings)
    skipped: int = field(default=0, init=False)
    connection: Connection | None = field(default=None, init=False)
    disconnected_since: float = field(default_factory=monotonic, init=False)
    last_error: str | None = field(default=None, init=False)
    _silences: dict[str, _Silence] = field(default_factory=dict, init=False)
    _socket: ClientConnection | None = field(default=None, init=False)
    _failed_attempts: int = field(default=0, init=False)
    _same_relay_next: bool = field(default=False, init=False)

    def reconnect(self) -> None:
        """End the connection; the next one is to the same relay."""
        self._same_relay_next = True
        if self._socket is not None:
            self._socket.transport.abort()

    async def frames(self, cursor_of: Callable[[str], Awaitable[int | None]]) -> AsyncGenerator[bytes, None]:
        """Yield frames without end.

        Each connection starts after `cursor_of(relay)`; None requests only new messages. An OSError or a websocket
        error of `cursor_of` counts as a lost connection. Once `cursor_of` has been called, no frame of an earlier
        connection follows. A text message, which the protocol does not allow, is yielded as bytes, so that the decoder
        rejects it.
        """
        attempt = 0
        oversized_by_relay: dict[str, _OversizedMessage] = {}
        while True:
            relay = self.relays[attempt % len(self.relays)]
            started = asyncio.get_running_loop().time()
            self._same_relay_next = False
            oversized = oversized_by_relay.pop(relay, None)
            try:
                cursor = await cursor_of(relay)
                if oversized is None or oversized.cursor != cursor:
                    oversized = _OversizedMessage(cursor)
                async with aclosing(self._frames_of(relay, cursor, oversized.skips)) as frames:
                    async for frame in frames:
                        if oversized.skips and not oversized.counted:
                            oversized.counted = True
                            self.skipped += 1
                        yield frame
            except (ConnectionClosed, OSError, TimeoutError, InvalidHandshake, InvalidURI, EOFError) as error:
                self._log_lost(relay, error)
                if oversized is not None and is_too_large(error):
                    oversized.skips += 1
                    oversized_by_relay[relay] = oversized
            finally:
                if self.connection is not None:
                    self.connection, self.disconnected_since = None, monotonic()
            stable = asyncio.get_running_loop().time() - started > self.settings.stable_after
            # An oversized message is not a failure of the relay: the next connection is to the same relay.
            skipping = relay in oversized_by_relay and oversized_by_relay[relay].skips < self.settings.max_skips
            if not (skipping or self._same_relay_next):
                attempt = 0 if stable else attempt + 1
            await asyncio.sleep(self._delay(attempt))

    def _delay(self, attempt: int) -> float:
        rounds = max(0, attempt - 1) // len(self.relays)
        delay = min(self.settings.first_delay * 2.0 ** min(rounds, 16), self.settings.max_delay)
        return delay * uniform(0.75, 1.25)  # noqa: S311 - jitter, not secrecy

    async def _frames_of(self, relay: str, cursor: int | None, skips: int) -> AsyncGenerator[bytes, None]:
        cursor = None if cursor is None else cursor + skips
        log.debug("relay.connecting", relay=relay, cursor=cursor)
        async with await self._connect(relay, cursor) as socket:
            self._socket = socket
            self.connection = Connection(relay, cursor, skips)
            self.last_error = None
            self._failed_attempts = 0
            log.info("relay.connected", relay=relay, cursor=cursor)
            timeout = self._message_timeout(relay, cursor)
            silence = asyncio.create_task(_close_when_silent(socket, self.connection, timeout))
            turn_ends = monotonic() + TURN_SECONDS
            try:
                while True:
                    frame = await socket.recv(decode=False)
                    self.connection.frames += 1
                    self.connection.reading = False
                    yield frame
                    self.connection.reading = True
                    if monotonic() > turn_ends:
                        await asyncio.sleep(0)  # frames that arrived together would not let other tasks run
                        turn_ends = monotonic() + TURN_SECONDS
            finally:
                silence.cancel()
                await asyncio.wait([silence])
                self._socket = None
                if not silence.cancelled():
                    silence.result()

    def _message_timeout(self, relay: str, cursor: int | None) -> float:
        """Return twice the last timeout of the relay if its last connection brought nothing new."""
        last, timeout = self._silences.get(relay), self.settings.message_timeout
        if last is not None and last.cursor == cursor:
            timeout = min(2 * last.timeout, self.settings.max_message_timeout)
        self._silences[relay] = _Silence(cursor, timeout)
        return timeout

    async def _connect(self, relay: str, cursor: int | None) -> ClientConnection:
        return await open_stream(relay, cursor, self.max_bytes, self.user_agent, self.settings)

    def _log_lost(self, relay: str, error: BaseException) -> None:
        self.last_error = f"{type(error).__name__}: {error}"[:300]
        if _is_silent(error):
            log.info("relay.silent", relay=relay, error=self.last_error)
        elif self.connection is not None:
            log.warning("relay.lost", relay=relay, error=self.last_error)
        else:
            self._failed_attempts += 1
            if self._failed_attempts.bit_count() == 1:  # a power of two
                log.warning("relay.unreachable", relay=relay, error=self.last_error, attempts=self._failed_attempts)


async def _close_when_silent(socket: ClientConnection, connection: Connection, seconds: float) -> None:
    """Close the connection when no message has come for `seconds`.

    Polling the frame counter is cheaper than one timer per frame.
    """
    frames = -1
    while frames != connection.frames or not connection.reading:
        frames = connection.frames
        await asyncio.sleep(seconds)
    await socket.close(code=CloseCode.NORMAL_CLOSURE, reason=f"{_SILENT} for {seconds:g} s")


def _is_silent(error: BaseException) -> bool:
    """Return True if this side closed the connection because no message came."""
    return isinstance(error, ConnectionClosed) and error.sent is not None and error.sent.reason.startswith(_SILENT)


def is_too_large(error: BaseException) -> bool:
    """Return True if this side closed the connection because of a message over the size limit."""
    return (
        isinstance(error, ConnectionClosed) and error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG
    )


async def open_stream(
    relay: str, cursor: int | None, max_bytes: int, user_agent: str, settings: ConnectionSettings
) -> ClientConnection:
    """Return a connection to the stream of `relay` after `cursor`; None requests only new messages.

    Raises:
        OSError: The relay cannot be reached (includes TimeoutError).
        InvalidHandshake: The relay refused the connection.
        InvalidURI: The address of the relay is not a websocket URL.
    """
    return await _ConnectWithoutRedirects(
        f"{relay.rstrip('/')}{PATH}" + ("" if cursor is None else f"?cursor={cursor}"),
        max_size=max_bytes,
        max_queue=MAX_QUEUED_FRAMES,
        compression=None,
        open_timeout=settings.connect_timeout,
        ping_interval=settings.ping_interval,
        ping_timeout=settings.ping_interval,
        close_timeout=1,
        proxy=None,
        user_agent_header=user_agent,
        create_connection=_SlicedConnection,
    )
