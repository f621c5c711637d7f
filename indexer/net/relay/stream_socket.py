"""The websocket on which a relay sends its stream. The only module of this package that knows the websocket library."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf
from time import monotonic
from typing import Any, Literal

import aiohttp
from aiohttp import WSCloseCode, WSMsgType

from indexer.errors import UnavailableError

STREAM_PATH = "/xrpc/com.atproto.sync.subscribeRepos"
SUBSCRIBE_PATH = "/subscribe"
"""Path of the stream of a Jetstream."""
TURN_SECONDS = 0.005
"""Time to receive messages before other tasks get a turn. Each turn of the event loop costs a wait for the
interpreter's lock while a batch is planned."""
FEW_BYTES, MANY_BYTES = 96 << 10, 240 << 10
"""Bytes of messages within one interval: with few, the next one has its full length; with many, the socket is read
without pauses. One read takes at most 256 KiB."""
SHORT_INTERVAL = 2 / 3
"""The length of an interval after one with more than a few bytes."""
MESSAGE_COST = 1_000
"""Bytes that a message costs besides its size, where `ConnectionSettings.bytes_per_second` limits a stream."""
_SEND_SECONDS = 1.0
"""Time to send a pong or a close frame, if the relay does not read what was sent before."""
_LOST = "connection lost without a close frame"


class ReadTimes:
    """The times at which several streams are read next: about the same times are made equal.

    So copies of a message are in one batch, and a batch has the messages of all streams.
    """

    def __init__(self) -> None:
        self._times: dict[object, float] = {}

    def plan(self, stream: object, at: float, tolerance: float) -> float:
        """Return when to read a stream that is to be read about `at`, in the time of the event loop."""
        nearest = min(self._times.values(), key=lambda time: abs(time - at), default=at)
        self._times[stream] = nearest if abs(nearest - at) <= tolerance else at
        return self._times[stream]

    def remove(self, stream: object) -> None:
        """Note that a stream is read now, or no longer."""
        self._times.pop(stream, None)


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Timeouts and delays of the connection, in seconds.

    Attributes:
        read_interval: The longest time from one read of the socket to the next, unless many bytes arrive: each read
            costs a turn of the event loop. 0: messages are read when they arrive.
        read_times: Shared by connections that are read together.
        ping_interval: Without any bytes, before a ping is sent. If nothing arrives in half of that time after the ping,
            the connection is closed.
        stable_after: A connection that lasted this long, and was not silent at its end, resets the delay, and the next
            one is to the first relay.
        switch_after: Without a stable connection, before the next relay is tried: without a cursor of it, all repos
            would be compared with its list.
        bytes_per_second: The rate at which messages are received, in the mean of some seconds. Each one also costs
            `MESSAGE_COST`. Whoever sends faster has to wait.
    """

    connect_timeout: float = 15.0  # for the TCP connection and the handshakes
    read_interval: float = 0.0
    read_times: ReadTimes = field(default_factory=ReadTimes)
    ping_interval: float = 30.0
    message_timeout: float = 90.0  # without any message, before the connection is closed
    first_delay: float = 1.0  # before the first reconnection; it doubles each time
    max_delay: float = 12.0  # before the jitter of 25 %
    stable_after: float = 60.0
    switch_after: float = 60.0
    bytes_per_second: float = inf


Ending = Literal["lost", "closed by this side", "message over the size limit"]
Opening = Callable[[str], AbstractAsyncContextManager[aiohttp.BaseConnector]]
"""Allows the block to open one connection to a URL, with this connector. Raises `UnavailableError`."""


class StreamSocketError(ConnectionError):
    """The connection ended, or could not be opened."""

    def __init__(self, detail: str, ending: Ending = "lost") -> None:
        super().__init__(detail)
        self.ending = ending


class StreamSocket:
    """An open connection.

    The library parses up to 512 KiB of messages before they are asked for. Each one counts as its size and 128 bytes,
    so at most about 4,096 empty messages wait. It parses more when at most 256 KiB wait.
    """

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse[bool], transport: asyncio.Transport, settings: ConnectionSettings
    ) -> None:
        self._socket = socket
        self._transport = transport
        self._reading = _below_tls(transport)
        self._read_interval = settings.read_interval
        self._read_times = settings.read_times
        self._seconds_per_byte = 1 / settings.bytes_per_second
        self._paid_until = 0.0  # when the bytes so far have taken the time that the rate allows
        self._interval: asyncio.TimerHandle | None = None
        self._bytes = 0  # of messages, in the present interval
        self._paused = False
        self._turn_ends = 0.0
        self._closed_here: StreamSocketError | None = None

    async def receive(self) -> bytes:
        """Return the next message. A text message, which the protocol does not allow, is returned as bytes, too.

        Raises:
            StreamSocketError: There are no more messages.
        """
        while True:
            if monotonic() > self._turn_ends:
                await asyncio.sleep(0)  # messages that arrived together would not let other tasks run
                self._turn_ends = monotonic() + TURN_SECONDS
            if self._seconds_per_byte and (early := self._paid_until - monotonic()) > 1:
                await asyncio.sleep(early)
            message = await self._socket.receive()
            kind = message.type
            if kind is WSMsgType.BINARY or kind is WSMsgType.TEXT:
                data: bytes = message.data
                self._pause_reading(len(data))
                if self._seconds_per_byte:
                    cost = self._seconds_per_byte * (MESSAGE_COST + len(data))
                    self._paid_until = max(self._paid_until, monotonic()) + cost
                return data
            if kind is WSMsgType.PING:
                await self._pong(message.data)
            elif kind is not WSMsgType.PONG:
                raise self._closed_here or _end(kind, message.data or self._socket.exception(), message.extra)

    def _pause_reading(self, size: int) -> None:
        """Begin an interval with the first message after the last one; until its end, read no more unless many arrive.

        The library pauses a connection, too, while many bytes wait, and resumes it. Then nothing is done here.
        """
        self._bytes += size
        if self._interval is not None or not self._read_interval:
            return
        before, self._bytes = self._bytes - size, size
        if before < MANY_BYTES and self._reading.is_reading():
            self._reading.pause_reading()
            self._paused = True
        seconds = self._read_interval * (1 if before < FEW_BYTES else SHORT_INTERVAL)
        loop = asyncio.get_running_loop()
        self._interval = loop.call_at(
            self._read_times.plan(self, loop.time() + seconds, seconds / 2), self._resume_reading
        )
        self._turn_ends = monotonic() + TURN_SECONDS  # other tasks see the messages of one read together

    def _resume_reading(self) -> None:
        self._interval = None
        self._read_times.remove(self)
        if self._paused:
            self._paused = False
            self._reading.resume_reading()

    async def _pong(self, data: bytes) -> None:
        """Answer a ping. If the connection is lost or the relay does not read, the next message says so."""
        try:
            async with asyncio.timeout(_SEND_SECONDS):
                await self._socket.pong(data)
        except TimeoutError:
            self.abort()
        except ConnectionError:
            pass

    async def close(self, reason: str = "") -> None:
        """Send a close frame and end the connection; a waiting `receive` raises StreamSocketError with `reason`.

        The answer is not awaited: a relay that sends its window would not answer before it has sent all of it.
        """
        self._closed_here = self._closed_here or StreamSocketError(reason, "closed by this side")
        with suppress(ConnectionError, TimeoutError):  # it has ended already, or the relay does not read
            async with asyncio.timeout(_SEND_SECONDS):
                await self._socket.send_frame(WSCloseCode.OK.to_bytes(2) + reason.encode(), WSMsgType.CLOSE)
        self.abort()

    def abort(self) -> None:
        """End the connection at once."""
        self._read_times.remove(self)
        if self._interval is not None:
            self._interval.cancel()
        self._transport.abort()


def _below_tls(transport: asyncio.Transport) -> asyncio.Transport:
    """Return the transport that reads the socket. A pause of the one with TLS ends only the decryption.

    asyncio has no public name for it. Without it, each arrival still costs a turn of the event loop.
    """
    below: asyncio.Transport | None = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    return below or transport


def _end(kind: WSMsgType, data: Any, reason: str | None) -> StreamSocketError:
    """Return why the connection ended, from the last message: `data` is the code of a close frame, or an exception."""
    if kind is WSMsgType.CLOSE:
        return StreamSocketError(f"the relay closed the connection: code {data}, reason {reason!r}")
    if kind is WSMsgType.ERROR and not isinstance(data, TimeoutError):
        too_large = getattr(data, "code", None) == WSCloseCode.MESSAGE_TOO_BIG
        return StreamSocketError(str(data), "message over the size limit" if too_large else "lost")
    return StreamSocketError("no answer to a ping" if isinstance(data, TimeoutError) else _LOST)


@asynccontextmanager
async def open_to_any_address(_url: str) -> AsyncIterator[aiohttp.BaseConnector]:
    """Allow a connection to the URL of a relay, which the operator chose: to any address."""
    yield aiohttp.TCPConnector(resolver=aiohttp.ThreadedResolver())


@asynccontextmanager
async def open_stream(
    relay: str,
    cursor: int | None,
    max_bytes: int,
    user_agent: str,
    settings: ConnectionSettings,
    opening: Opening = open_to_any_address,
    path: str = STREAM_PATH,
) -> AsyncIterator[StreamSocket]:
    """Open the stream of `relay` at `path` after `cursor` (None: only new messages), and close it at the end.

    The path may have a query.

    It uses no proxy, redirect, cookie or compression. A message that announces more than `max_bytes` ends the
    connection. Bytes that are not read because of back-pressure do not count as received.

    Raises:
        OSError: The relay cannot be reached or refuses the connection (includes TimeoutError and StreamSocketError).
    """
    url = f"{relay.rstrip('/')}{path}" + ("" if cursor is None else f"{'&' if '?' in path else '?'}cursor={cursor}")
    handshake = _Handshake()
    async with AsyncExitStack() as stack:
        try:
            async with opening(url) as connector:
                session = aiohttp.ClientSession(
                    connector=connector,
                    headers={"User-Agent": user_agent},
                    timeout=aiohttp.ClientTimeout(total=None),
                    cookie_jar=aiohttp.DummyCookieJar(),
                    trust_env=False,
                    middlewares=[handshake],
                )
                await stack.enter_async_context(session)
                async with asyncio.timeout(settings.connect_timeout):
                    socket = await session.ws_connect(
                        url,
                        heartbeat=settings.ping_interval,
                        autoping=False,
                        autoclose=False,
                        max_msg_size=max_bytes + 1,
                        decode_text=False,
                    )
        except UnavailableError as error:
            raise StreamSocketError(str(error)) from error
        except TimeoutError as error:
            raise TimeoutError(f"not connected within {settings.connect_timeout:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise error.os_error from error
        except aiohttp.WSServerHandshakeError as error:
            raise StreamSocketError(f"HTTP {error.status}: {error.message}") from error
        except (aiohttp.ClientError, UnicodeError) as error:
            raise StreamSocketError(f"{type(error).__name__}: {error}") from error
        stream = StreamSocket(socket, handshake.transport, settings)
        try:
            yield stream
        finally:
            await stream.close()
            await socket.close()  # stops its timers


class _Handshake:
    """Accepts only the answer of a websocket, and keeps its transport.

    The library would follow redirects, which could lead to an address that only this machine can reach.
    """

    transport: asyncio.Transport

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await handler(request)
        transport = response.connection and response.connection.transport
        if response.status != HTTPStatus.SWITCHING_PROTOCOLS or transport is None:
            response.close()
            raise aiohttp.WSServerHandshakeError(
                response.request_info, (), status=response.status, message="not a websocket", headers=response.headers
            )
        self.transport = transport
        return response
