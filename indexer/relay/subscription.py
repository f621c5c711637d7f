"""A connection to `com.atproto.sync.subscribeRepos` that reconnects whenever it ends (docs/protocol.md#frames).

The subscription returns frames and does not decode them. A lost connection, silence, or a message over the size limit
leads to a new connection after a growing delay. Several relays are tried in order.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import uniform

import structlog
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.frames import CloseCode

PATH = "/xrpc/com.atproto.sync.subscribeRepos"
MAX_QUEUED_FRAMES = 4
"""Frames that are received before the caller asks for them. More of them would only use more memory."""

log = structlog.get_logger(__name__)


class _ConnectWithoutRedirects(connect):
    """Does not follow redirects: they could lead to an address that only this machine can reach."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Timeouts and delays of the connection, in seconds.

    Attributes:
        connect_timeout: For the TCP connection and the handshakes.
        ping_interval: Between pings, and for the answer to each ping.
        message_timeout: Without any message, before the connection is closed.
        first_delay: Before the first reconnection. The delay doubles each time that all relays have failed.
        max_delay: The upper bound of the delay.
        stable_after: A connection that lasted this long resets the delay.
        max_skips: How many sequence numbers are skipped for a message over the size limit. After that, the relay counts
            as failed.
    """

    connect_timeout: float = 15.0
    ping_interval: float = 30.0
    message_timeout: float = 90.0
    first_delay: float = 1.0
    max_delay: float = 60.0
    stable_after: float = 60.0
    max_skips: int = 32


@dataclass(slots=True)
class Connection:
    """The open connection, for readiness and the status page.

    Attributes:
        cursor: The cursor in the request; None: only new messages.
        frames: The number of received frames.
        reading: True while the subscription waits for a frame, False while the caller processes one.
    """

    relay: str
    cursor: int | None
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
class Subscription:
    """Receives frames from the first of `relays` that works.

    Attributes:
        max_bytes: The size limit. A larger message is not received: it ends the connection, and a later connection
            skips it.
        skipped: The number of positions at which messages over the size limit were skipped.
        connection: None while not connected.
    """

    relays: Sequence[str]
    max_bytes: int
    user_agent: str
    settings: ConnectionSettings = field(default_factory=ConnectionSettings)
    skipped: int = field(default=0, init=False)
    connection: Connection | None = field(default=None, init=False)
    last_error: str | None = field(default=None, init=False)

    async def frames(self, cursor_of: Callable[[str], Awaitable[int | None]]) -> AsyncGenerator[bytes, None]:
        """Yield frames without end.

        Each connection starts after `cursor_of(relay)`; None requests only new messages. Once `cursor_of` has been
        called, no frame of an earlier connection follows. A text message, which the protocol does not allow, is
        yielded as bytes, so that the decoder rejects it.
        """
        attempt = 0
        oversized_by_relay: dict[str, _OversizedMessage] = {}
        while True:
            relay = self.relays[attempt % len(self.relays)]
            started = asyncio.get_running_loop().time()
            cursor = await cursor_of(relay)
            oversized = oversized_by_relay.pop(relay, None)
            if oversized is None or oversized.cursor != cursor:
                oversized = _OversizedMessage(cursor)
            try:
                async with aclosing(self._frames_of(relay, cursor, oversized.skips)) as frames:
                    async for frame in frames:
                        if oversized.skips and not oversized.counted:
                            oversized.counted = True
                            self.skipped += 1
                        yield frame
            except (ConnectionClosed, OSError, TimeoutError, InvalidHandshake, InvalidURI, EOFError) as error:
                self._log_lost(relay, error)
                if _is_too_large(error):
                    oversized.skips += 1
                    oversized_by_relay[relay] = oversized
            finally:
                self.connection = None
            stable = asyncio.get_running_loop().time() - started > self.settings.stable_after
            # An oversized message is not a failure of the relay: the next connection is to the same relay.
            skipping = relay in oversized_by_relay and oversized.skips < self.settings.max_skips
            attempt = 0 if stable else attempt + (not skipping)
            await asyncio.sleep(self._delay(attempt))

    def _delay(self, attempt: int) -> float:
        rounds = max(0, attempt - 1) // len(self.relays)
        delay = min(self.settings.first_delay * 2.0 ** min(rounds, 16), self.settings.max_delay)
        return delay * uniform(0.75, 1.25)  # noqa: S311 - jitter, not secrecy

    async def _frames_of(self, relay: str, cursor: int | None, skips: int) -> AsyncGenerator[bytes, None]:
        cursor = None if cursor is None else cursor + skips
        log.info("relay.connecting", relay=relay, cursor=cursor)
        async with await self._connect(relay, cursor) as socket:
            self.connection = Connection(relay, cursor)
            self.last_error = None
            log.info("relay.connected", relay=relay)
            silence = asyncio.create_task(self._close_when_silent(socket, self.connection))
            try:
                while True:
                    frame = await socket.recv(decode=False)
                    self.connection.frames += 1
                    self.connection.reading = False
                    yield frame
                    self.connection.reading = True
            finally:
                silence.cancel()
                await asyncio.wait([silence])
                if not silence.cancelled():
                    silence.result()

    async def _close_when_silent(self, socket: ClientConnection, connection: Connection) -> None:
        """Close the connection when no message has come for `message_timeout` seconds.

        Polling the frame counter is cheaper than one timer per frame.
        """
        frames = -1
        while frames != connection.frames or not connection.reading:
            frames = connection.frames
            await asyncio.sleep(self.settings.message_timeout)
        await socket.close(reason=f"no message for {self.settings.message_timeout:g} s")

    async def _connect(self, relay: str, cursor: int | None) -> ClientConnection:
        return await _ConnectWithoutRedirects(
            f"{relay.rstrip('/')}{PATH}" + ("" if cursor is None else f"?cursor={cursor}"),
            max_size=self.max_bytes,
            max_queue=MAX_QUEUED_FRAMES,
            compression=None,
            open_timeout=self.settings.connect_timeout,
            ping_interval=self.settings.ping_interval,
            ping_timeout=self.settings.ping_interval,
            close_timeout=1,
            proxy=None,
            user_agent_header=self.user_agent,
        )

    def _log_lost(self, relay: str, error: BaseException) -> None:
        self.last_error = f"{type(error).__name__}: {error}"[:300]
        log.warning("relay.lost", relay=relay, error=self.last_error)


def _is_too_large(error: BaseException) -> bool:
    """Return True if this side closed the connection because of a message over the size limit."""
    return (
        isinstance(error, ConnectionClosed) and error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG
    )
