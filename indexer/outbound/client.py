"""The one door for outbound requests."""

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from time import time

import aiohttp
from yarl import URL

from indexer.errors import UnavailableError
from indexer.outbound.encoding import ACCEPTED, decoder_of
from indexer.outbound.hosts import Hosts, Rates, Turn
from indexer.outbound.network import NameServers, Resolve, checked_connector, system_addresses
from indexer.outbound.throttle import pause_asked
from indexer.reasons import FetchFailure

_MOST_HOPS = 4
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK = 65_536
_BRIEF_BYTES = 16_384  # of a body that is no success: enough for an error's name and message
_HTTPS_PORT = 443
_HOST = re.compile(r"[a-z0-9._:-]{1,253}").fullmatch


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: to look a name up and connect (and once more for TLS), to wait for the next bytes, and of waiting
    for a body before its rate is judged.
    """

    connect: float = 10.0
    silence: float = 60.0
    judged_after: float = 30.0


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer. `headers` are looked up in any case; `url` is where the redirects ended.

    The body of any status but a success is cut after 16 KiB.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str


class Outbound:
    """Requests to hosts that others name: https on port 443 of public addresses, no cookies, credentials or proxies.

    `allow_private_hosts` opens http, every port and every address, for local networks. `user_agent` should say whom
    to write to. Names are asked of the `dns_servers` (by default the system's) and of nothing else, or of the system
    if private hosts are allowed. `on_request` hears what came of each request, one of `RESULTS`; `hosts` is
    what is known of them.

    Every failure is an `UnavailableError`: UNREACHABLE, NO_SUCH_HOST, TIMEOUT, TOO_LARGE, REFUSED_ADDRESS, BAD_ANSWER,
    HTTP_STATUS (a redirect that leads nowhere), and, with `retry_after`, THROTTLED for a host that asked for a pause,
    HOST_PAUSED for one that failed too often; these get no request until then. All other statuses are the caller's to
    judge.

    Make it, and use it, in one event loop.
    """

    def __init__(
        self,
        *,
        user_agent: str,
        allow_private_hosts: bool = False,
        rates: Rates | None = None,
        patience: Patience | None = None,
        on_request: Callable[[str], None] = lambda _result: None,
        dns_servers: Sequence[tuple[str, int]] = (),
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        rates = rates or Rates()
        self.hosts = Hosts(rates, time, on_request)
        self._on_request = on_request
        self._allow_private_hosts = allow_private_hosts
        self._patience = patience or Patience()
        resolve = resolve or (system_addresses if allow_private_hosts else NameServers(dns_servers))
        connect, silence = self._patience.connect, self._patience.silence
        self._session = aiohttp.ClientSession(
            connector=checked_connector(
                resolve, tls or ssl.create_default_context(), connect, allow_private=allow_private_hosts
            ),
            headers={"User-Agent": user_agent, "Accept-Encoding": ACCEPTED},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=silence),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(
        self,
        url: str,
        *,
        max_bytes: int,
        timeout: float = 30.0,  # noqa: ASYNC109 - it is for each hop, and our own turns don't count
        accept: str = "application/json",
    ) -> Response:
        """The answer at `url`, redirects followed; at most `max_bytes` decompressed, `timeout` seconds a hop."""
        async with self.stream(url, max_bytes=max_bytes, timeout=timeout, min_rate=0, accept=accept) as stream:
            return Response(stream.status, stream.headers, await stream.read(), stream.url)

    @asynccontextmanager
    async def stream(
        self,
        url: str,
        *,
        max_bytes: int,
        timeout: float,  # noqa: ASYNC109
        min_rate: float,
        accept: str,
    ) -> AsyncIterator["Stream"]:
        """Like `get`, with the body in pieces as they come, at `min_rate` bytes a second on the wire or more."""
        target = self._checked(url)
        for _ in range(_MOST_HOPS):
            host = target.host_port_subcomponent or ""
            async with self.hosts.turn(host) as turn, self._answer(target, accept, timeout, turn) as stream:
                pause = pause_asked(stream.status, stream.headers, time())
                turn.answered(stream.status, pause)
                if pause is not None:
                    detail = f"{host}: {stream.status}"
                    raise UnavailableError(FetchFailure.THROTTLED, detail, retry_after=pause, host=host)
                if stream.status not in _REDIRECTS:
                    stream.bound(max_bytes, min_rate)
                    yield stream
                    return
                await stream.read()  # so that the connection can be used again
                target = self._next_hop(target, stream)
        raise UnavailableError(FetchFailure.HTTP_STATUS, f"more than {_MOST_HOPS - 1} redirects from {url[:200]}")

    @asynccontextmanager
    async def _answer(self, url: URL, accept: str, seconds: float, turn: Turn) -> AsyncIterator["Stream"]:
        deadline = asyncio.get_running_loop().time() + seconds
        with turn.watch(), _failures(url):
            async with asyncio.timeout_at(deadline):
                response = await self._session.get(url, headers={"Accept": accept}, allow_redirects=False)
        try:
            yield Stream(url, response, deadline, self._patience.judged_after, turn)
        finally:
            response.release()

    def _next_hop(self, url: URL, stream: "Stream") -> URL:
        location = stream.headers.get("location")
        if not location:
            raise UnavailableError(FetchFailure.HTTP_STATUS, f"{_shown(url)}: {stream.status} to nowhere")
        return self._checked(location, url)

    def _checked(self, text: str, base: URL | None = None) -> URL:
        """The URL of a request that may be made; raises `UnavailableError(REFUSED_ADDRESS)`."""
        try:
            url = _bare(base.join(URL(text)) if base else URL(text))
        except ValueError as error:
            raise self._refused(f"{text[:200]!r}: {error}") from None
        schemes = {"http", "https"} if self._allow_private_hosts else {"https"}
        if url.scheme not in schemes or url.raw_user is not None or not _HOST(url.raw_host or ""):
            raise self._refused(f"{_shown(url)}: not a URL that we may ask")
        if not self._allow_private_hosts and url.port != _HTTPS_PORT:
            raise self._refused(f"{_shown(url)}: port {url.port}")
        return url

    def _refused(self, detail: str) -> UnavailableError:
        self._on_request(FetchFailure.REFUSED_ADDRESS)
        return UnavailableError(FetchFailure.REFUSED_ADDRESS, detail)


class Stream:
    """An answer whose body is still to be read, once. `headers` are looked up in any case."""

    def __init__(
        self, url: URL, response: aiohttp.ClientResponse, deadline: float, judged_after: float, turn: Turn
    ) -> None:
        self.status = response.status
        self.headers = response.headers
        self.url = str(url)
        self._target = url
        self._success = HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES
        self._body = response.content
        self._deadline = deadline
        self._judged_after = judged_after
        self._turn = turn
        self._max_bytes = _BRIEF_BYTES + _CHUNK
        self._min_rate = 0.0
        self._received = 0
        self._waited = 0.0

    def bound(self, max_bytes: int, min_rate: float) -> None:
        """Sets the limits for a success; a body of another kind is read only at its beginning."""
        if self._success:
            self._max_bytes, self._min_rate = max_bytes, min_rate

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The decompressed body, at most 64 KiB at a time; raises `UnavailableError` as `Outbound` says."""
        with self._turn.watch():
            decoder = decoder_of(", ".join(self.headers.getall("content-encoding", ())))
            decoded = 0
            while piece := await self._receive():
                for chunk in decoder.feed(piece):
                    decoded += len(chunk)
                    self._refuse_over(decoded)
                    yield chunk
                    await asyncio.sleep(0)  # what has arrived may be many small pieces, or a few that inflate to many
            decoder.close()

    async def read(self) -> bytes:
        """The whole body of a success, the first 16 KiB of any other."""
        most = self._max_bytes if self._success else _BRIEF_BYTES
        body = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > most:
                    break
        return bytes(body[:most])

    async def _receive(self) -> bytes:
        """The next bytes from the wire, none at the end. Only the time of waiting for them counts against the rate."""
        clock = asyncio.get_running_loop().time
        started = clock()
        with _failures(self._target):
            async with asyncio.timeout_at(self._deadline):
                piece = await self._body.read(_CHUNK)
        self._waited += clock() - started
        self._received += len(piece)
        self._refuse_over(self._received - _CHUNK)  # an encoding may add a little
        if piece and self._received < self._min_rate * (self._waited - self._judged_after):
            raise UnavailableError(
                FetchFailure.TIMEOUT, f"{_shown(self._target)}: {self._received} bytes in {self._waited:.0f} s"
            )
        return piece

    def _refuse_over(self, size: int) -> None:
        if size > self._max_bytes:
            raise UnavailableError(FetchFailure.TOO_LARGE, f"{_shown(self._target)}: over {self._max_bytes} bytes")


@contextmanager
def _failures(url: URL) -> Iterator[None]:
    """The transport's errors as this program's."""
    try:
        yield
    except TimeoutError as error:
        raise UnavailableError(FetchFailure.TIMEOUT, f"{_shown(url)}: {_told(error)}") from error
    except aiohttp.InvalidURL as error:  # addresses in unusual forms
        raise UnavailableError(FetchFailure.REFUSED_ADDRESS, f"{_shown(url)}: {_told(error)}") from error
    except (aiohttp.ClientError, OSError, UnicodeError) as error:  # OSError: TLS records that break rules
        raise UnavailableError(FetchFailure.UNREACHABLE, f"{_shown(url)}: {_told(error)}") from error


@lru_cache(maxsize=4_096)  # asked for each event, of a few hosts
def host_of(url: str) -> str:
    """The name under which a host is counted: in lower case, with its port if that isn't the scheme's own.

    Empty for what is no URL: nothing can be asked there.
    """
    try:
        return _bare(URL(url)).host_port_subcomponent or ""
    except ValueError:
        return ""


def _bare(url: URL) -> URL:
    """Without the dot that may stand behind a name and makes no other host of it."""
    host = url.raw_host or ""
    return url.with_host(host.rstrip(".")) if host.endswith(".") else url


def _shown(url: URL) -> str:
    """Without what may be secret or long."""
    return f"{url.scheme}://{url.host_port_subcomponent}{url.raw_path}"[:200]


def _told(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()[:200]
