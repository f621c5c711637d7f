"""The HTTP client for all outbound requests (docs/protocol.md#outbound-requests)."""

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from http import HTTPStatus
from time import time
from typing import Self

import aiohttp
from aiohttp.connector import Connection
from yarl import URL

from indexer.errors import UnavailableError
from indexer.net.http.checked_connector import (
    CheckedResolver,
    DnsResolver,
    Resolve,
    checked_connector,
    resolve_with_system,
    server_of,
)
from indexer.net.http.content_decoding import ACCEPT_ENCODING, Decoder
from indexer.net.http.host_limits import HostLimits, RateLimits, RequestSlot, retry_after_seconds
from indexer.reasons import FetchFailure

_MAX_REQUESTS = 4  # the first one and three redirects
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK_BYTES = 65_536
_ERROR_BODY_BYTES = 16_384  # enough for the name and message of an error
_MAX_ERROR_BYTES = _ERROR_BODY_BYTES + _CHUNK_BYTES
_HTTPS_PORT = 443
_CONNECTION_CLOSED = "Connection closed."
"""The text of the `RuntimeError` that aiohttp raises if the connection ended before the body did, for some reasons."""
_INVALID_URL = (ValueError, IndexError)
"""Errors of `URL` for text that is no URL. It raises the second one for an empty host in brackets."""
_HOST = re.compile(r"[a-z0-9._:-]{1,253}").fullmatch


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of one request, in seconds."""

    connect: float = 10.0  # to resolve a name, to connect, and once more for TLS
    read: float = 60.0  # to wait for the next bytes
    rate_grace: float = 30.0  # to wait for a body in total before its minimum rate is enforced


@dataclass(frozen=True, slots=True)
class OutboundSettings:
    """The settings of an `OutboundClient`.

    Attributes:
        allow_private_hosts: Allow http, every port and every address; for local networks.
        dns_servers: IP addresses and ports; the system's servers if empty. With `allow_private_hosts` they are not
            used: the system resolves the names.
    """

    user_agent: str
    allow_private_hosts: bool = False
    rates: RateLimits = field(default_factory=RateLimits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    dns_servers: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response. The names of its headers are case-insensitive."""

    status: int
    headers: Mapping[str, str]
    body: bytes  # truncated to 16 KiB if the status is not a success
    server: str | None = None  # the network address that sends it, if it is known


class OutboundClient:
    """Sends requests to hosts whose names come from outside.

    It connects by https to port 443 of public addresses, without cookies, credentials or proxies. All failures are
    `UnavailableError`: UNREACHABLE, NO_SUCH_HOST, TIMEOUT, TOO_LARGE, REFUSED_ADDRESS, or BAD_ANSWER for a malformed
    body or redirect. THROTTLED and HOST_PAUSED mean that the host is paused until `retry_after`, see `HostLimits`. The
    caller handles all other statuses. Create and use a client in one event loop, and close it.
    """

    def __init__(
        self,
        settings: OutboundSettings,
        *,
        on_request: Callable[[str], None] = lambda _result: None,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Call `on_request` with the result of each request; `resolve` and `tls` replace the defaults."""
        self.hosts = HostLimits(settings.rates, time, on_request)
        self._on_request = on_request
        self._allow_private_hosts, self._timeouts = settings.allow_private_hosts, settings.timeouts
        connect, allow_private = settings.timeouts.connect, settings.allow_private_hosts
        if resolve is None:
            resolve = resolve_with_system if allow_private else DnsResolver(settings.dns_servers)
        self._resolver = CheckedResolver(resolve, connect, allow_private=allow_private)
        self._tls = tls or _default_tls()
        self._session = aiohttp.ClientSession(
            connector=self._connector(),
            response_class=_ResponseWithPeer,
            headers={"User-Agent": settings.user_agent, "Accept-Encoding": ACCEPT_ENCODING},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=settings.timeouts.read),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def get(
        self,
        url: str,
        *,
        max_bytes: int,
        timeout: float = 30.0,  # noqa: ASYNC109 - it applies to each request, and waiting for a slot does not count
        accept: str = "application/json",
    ) -> Response:
        """Return the response, after redirects: at most `max_bytes` decompressed, `timeout` seconds per request."""
        async with self.stream(url, max_bytes=max_bytes, timeout=timeout, min_rate=0, accept=accept) as stream:
            return Response(stream.status, stream.headers, await stream.read(), stream.server)

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        headers: Mapping[str, str],
        timeout: float = 30.0,  # noqa: ASYNC109 - see `get`
    ) -> int:
        """Send a body and return the status of the response. Redirects are not followed.

        Up to 16 KiB of the response are read, so that the connection can be used again.
        """
        async with self._request(self._allowed_url(url), timeout, headers, body=body) as stream:
            with suppress(UnavailableError):  # a body that is too long or malformed does not change the status
                await stream.read()
            return stream.status

    @asynccontextmanager
    async def stream(
        self,
        url: str,
        *,
        max_bytes: int,
        timeout: float,  # noqa: ASYNC109
        min_rate: float,
        accept: str,
    ) -> AsyncIterator["ResponseStream"]:
        """Open a response like `get`, with the body in chunks, at `min_rate` received bytes per second or more."""
        target, headers = self._allowed_url(url), {"Accept": accept}
        first = target.host_port_subcomponent
        for _ in range(_MAX_REQUESTS):
            redirected_by = None if target.host_port_subcomponent == first else first
            async with self._request(
                target, timeout, headers, redirected_by, max_bytes=max_bytes, min_rate=min_rate
            ) as stream:
                if stream.status not in _REDIRECTS:
                    yield stream
                    return
                await stream.read()  # so that the connection can be reused
                if not (location := stream.headers.get("location")):
                    detail = f"{_shown(target)}: {stream.status} without a Location"
                    raise UnavailableError(FetchFailure.BAD_ANSWER, detail)
                target = self._allowed_url(location, target)
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"more than {_MAX_REQUESTS - 1} redirects from {url[:200]}")

    @asynccontextmanager
    async def opening(self, url: str) -> AsyncIterator[aiohttp.BaseConnector]:
        """Allow the block to open one websocket to the URL, with this connector, when the limits of the host allow it.

        The block closes the connector. The handshake counts as one request.
        """
        target = self._allowed_url(url)
        host = target.host_port_subcomponent or ""
        async with self.hosts.slot(host, resolve=partial(self._servers, target)) as slot:
            with slot.record_errors(), _transport_errors(target):
                try:
                    yield self._connector()
                except aiohttp.WSServerHandshakeError as error:
                    slot.record_response(error.status, retry_after_seconds(error.status, error.headers or {}, time()))
                    detail = f"{_shown(target)}: HTTP {error.status}"
                    raise UnavailableError(FetchFailure.HTTP_STATUS, detail) from error
            slot.record_response(HTTPStatus.SWITCHING_PROTOCOLS, None)

    def _connector(self) -> aiohttp.TCPConnector:
        return checked_connector(self._resolver, self._tls, allow_private=self._allow_private_hosts)

    async def _servers(self, url: URL) -> list[str]:
        """Return the network addresses of the host of a URL; see `CheckedResolver.resolve` for the errors."""
        with _transport_errors(url):
            return await self._resolver.servers(url.raw_host or "", url.port or 0)

    @asynccontextmanager
    async def _request(
        self,
        url: URL,
        seconds: float,
        headers: Mapping[str, str],
        redirected_by: str | None = None,
        *,
        body: bytes | None = None,
        max_bytes: int = _MAX_ERROR_BYTES,
        min_rate: float = 0.0,
    ) -> AsyncIterator["ResponseStream"]:
        """Send a GET request, or with a body a POST request, when the limits of the host allow it.

        Raises:
            UnavailableError: As `OutboundClient` describes, also if the host asks for a pause. If `redirected_by` is
                not trusted, the pause counts only for the caller.
        """
        host = url.host_port_subcomponent or ""
        async with self.hosts.slot(host, redirected_by, partial(self._servers, url)) as slot:
            deadline = asyncio.get_running_loop().time() + seconds
            with slot.record_errors(), _transport_errors(url):
                async with asyncio.timeout_at(deadline):
                    method = "GET" if body is None else "POST"
                    response = await self._session.request(
                        method, url, data=body, headers=headers, allow_redirects=False
                    )
            try:
                stream = ResponseStream(url, response, deadline, self._timeouts, slot, max_bytes, min_rate)
                pause = retry_after_seconds(stream.status, stream.headers, time())
                slot.record_response(stream.status, pause)
                slot.server = stream.server
                if pause is not None and slot.may_pause:
                    detail = f"{host}: {stream.status}"
                    raise UnavailableError(FetchFailure.THROTTLED, detail, retry_after=pause, host=host)
                if pause is not None:
                    detail = f"{host}: {stream.status}, redirected by {redirected_by}"
                    raise UnavailableError(FetchFailure.HTTP_STATUS, detail, retry_after=pause)
                yield stream
            finally:
                response.release()

    def _allowed_url(self, text: str, base: URL | None = None) -> URL:
        """Parse a URL, relative to `base`.

        Raises:
            UnavailableError: REFUSED_ADDRESS if requests to this URL are not allowed.
        """
        try:
            url = _without_trailing_dots(base.join(URL(text)) if base else URL(text))
        except _INVALID_URL as error:
            raise self._refused(f"{text[:200]!r}: {error}") from None
        schemes = {"http", "https"} if self._allow_private_hosts else {"https"}
        if url.scheme not in schemes or url.raw_user is not None or not _HOST(url.raw_host or ""):
            raise self._refused(f"{_shown(url)}: requests to this URL are not allowed")
        if not self._allow_private_hosts and url.port != _HTTPS_PORT:
            raise self._refused(f"{_shown(url)}: port {url.port} is not allowed")
        return url

    def _refused(self, detail: str) -> UnavailableError:
        self._on_request(FetchFailure.REFUSED_ADDRESS)
        return UnavailableError(FetchFailure.REFUSED_ADDRESS, detail)


class _ResponseWithPeer(aiohttp.ClientResponse):
    """A response that remembers who sends it, also when all of it has arrived and the connection is free again."""

    server: str | None = None

    async def start(self, connection: Connection) -> Self:
        peer = connection.transport and connection.transport.get_extra_info("peername")
        self.server = server_of(peer[0], peer[1]) if peer else None
        await super().start(connection)
        return self


@dataclass(eq=False)
class ResponseStream:
    """A response with a body that can be read once.

    Attributes:
        url: The URL after all redirects.
        deadline: When the whole body must have arrived, in the time of the event loop.
        max_bytes: The limit of the decompressed body of a successful response. Other bodies have a small limit.
        min_rate: Bytes per second, for the body of a successful response.
        server: The network address and port that sends the response, see `server_of`.
    """

    url: URL
    response: aiohttp.ClientResponse
    deadline: float
    timeouts: Timeouts
    slot: RequestSlot
    max_bytes: int
    min_rate: float

    def __post_init__(self) -> None:
        self.status, self.headers = self.response.status, self.response.headers
        self.server: str | None = getattr(self.response, "server", None)
        self._success = HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES
        if not self._success:
            self.max_bytes, self.min_rate = _MAX_ERROR_BYTES, 0.0
        self._received = 0
        self._waited = 0.0

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the decompressed body, at most 64 KiB at a time.

        Raises:
            UnavailableError: The body is too large, too slow, malformed or cut off, see `OutboundClient`.
        """
        with self.slot.record_errors():
            decoder = Decoder(", ".join(self.headers.getall("content-encoding", ())))
            decoded = 0
            while received := await self._receive():
                for chunk in decoder.feed(received):
                    decoded += len(chunk)
                    self._check_size(decoded)
                    if chunk:
                        yield chunk
                    await asyncio.sleep(0)  # buffered chunks, empty, small or expanding, must not block the event loop
            decoder.close()

    async def read(self) -> bytes:
        """Return the whole body of a successful response, or the first 16 KiB of any other."""
        max_bytes = self.max_bytes if self._success else _ERROR_BODY_BYTES
        body = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > max_bytes:
                    break
        return bytes(body[:max_bytes])

    async def _receive(self) -> bytes:
        """Return the next bytes from the connection, none at the end. Only this time counts for the minimum rate."""
        clock = asyncio.get_running_loop().time
        started = clock()
        # After malformed chunks, aiohttp neither wakes the reader of the body nor ends its wait after `sock_read`.
        latest = min(self.deadline, started + self.timeouts.read)
        with _transport_errors(self.url):
            async with asyncio.timeout_at(latest):
                try:
                    received = await self.response.content.read(_CHUNK_BYTES)
                except RuntimeError as error:
                    if str(error) != _CONNECTION_CLOSED:
                        raise
                    raise aiohttp.ClientConnectionError("the connection ended within the body") from error
        self._waited += clock() - started
        self._received += len(received)
        self._check_size(self._received - _CHUNK_BYTES)  # compression can make a body slightly longer
        if received and self._received < self.min_rate * (self._waited - self.timeouts.rate_grace):
            raise UnavailableError(
                FetchFailure.TIMEOUT, f"{_shown(self.url)}: {self._received} bytes in {self._waited:.0f} s"
            )
        return received

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise UnavailableError(FetchFailure.TOO_LARGE, f"{_shown(self.url)}: over {self.max_bytes} bytes")


@contextmanager
def _transport_errors(url: URL) -> Iterator[None]:
    """Convert errors of the transport to `UnavailableError`."""
    try:
        yield
    except TimeoutError as error:
        raise UnavailableError(FetchFailure.TIMEOUT, f"{_shown(url)}: {_description(error)}") from error
    except aiohttp.InvalidURL as error:  # addresses in unusual notations
        raise UnavailableError(FetchFailure.REFUSED_ADDRESS, f"{_shown(url)}: {_description(error)}") from error
    except (aiohttp.ClientError, OSError, UnicodeError) as error:  # OSError: malformed TLS records
        raise UnavailableError(FetchFailure.UNREACHABLE, f"{_shown(url)}: {_description(error)}") from error


@lru_cache(maxsize=4_096)  # called for each event, with few different hosts
def host_of(url: str) -> str:
    """Return the name of a host in limits: in lower case, with an unusual port; "" for an invalid URL."""
    try:
        return _without_trailing_dots(URL(url)).host_port_subcomponent or ""
    except _INVALID_URL:
        return ""


@cache
def _default_tls() -> ssl.SSLContext:
    """Return the TLS context of all clients: each context reads the certificates of the system, which takes 40 ms."""
    return ssl.create_default_context()


def _without_trailing_dots(url: URL) -> URL:
    """Remove dots at the end of the host name: with and without them, it is the same host."""
    host = url.raw_host or ""
    return url.with_host(host.rstrip(".")) if host.endswith(".") else url


def _shown(url: URL) -> str:
    """Return the URL for messages, without credentials and query, which may be secret or long."""
    return f"{url.scheme}://{url.host_port_subcomponent}{url.raw_path}"[:200]


def _description(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()[:200]
