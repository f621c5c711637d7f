"""Connections that go where they were checked to go.

A name is resolved here and nowhere else, its addresses are judged, and the connection is made to one of these very
addresses: a name server that answers differently the next time (DNS rebinding) is not asked a next time.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpcore
import httpx

from indexer.errors import UnavailableError
from indexer.outbound.addresses import is_public
from indexer.reasons import FetchFailure

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A host's addresses, as IP literals in the order to try them; raises OSError if it has none."""

_MOST_ADDRESSES = 4
_LOOKUPS_AT_ONCE = 32
_CONNECTIONS = 256
_IDLE_CONNECTIONS = 64
_IDLE_SECONDS = 15.0


class SystemResolver:
    """The system's name look-ups, on threads of their own: hostile name servers may keep them for half a minute."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOKUPS_AT_ONCE, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        found = await asyncio.get_running_loop().run_in_executor(self._threads, _addresses, host, port)
        return list(dict.fromkeys(found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects by name to public addresses, or to any if `allow_private`.

    Raises `UnavailableError(REFUSED_ADDRESS)` for a name that has none that is allowed.
    """

    def __init__(self, resolve: Resolve, *, allow_private: bool) -> None:
        self._resolve = resolve
        self._allow_private = allow_private
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._allowed(host, port)
        except TimeoutError:
            raise httpcore.ConnectTimeout(f"{host}: the name look-up took too long") from None
        share = timeout / len(addresses) if timeout else None
        for place, address in enumerate(addresses, start=1):
            try:
                return await self._inner.connect_tcp(address, port, share, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if place == len(addresses):
                    raise
        raise httpcore.ConnectError(f"{host}: no address")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109, ARG002
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,  # noqa: ARG002
    ) -> httpcore.AsyncNetworkStream:
        raise UnavailableError(FetchFailure.REFUSED_ADDRESS, path)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _allowed(self, host: str, port: int) -> Sequence[str]:
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or too long
            raise httpcore.ConnectError(f"{host[:253]}: {error}") from None
        allowed = addresses if self._allow_private else [address for address in addresses if is_public(address)]
        if not allowed:
            raise UnavailableError(FetchFailure.REFUSED_ADDRESS, f"{host[:253]}: {', '.join(addresses[:4])}")
        return allowed[:_MOST_ADDRESSES]


class CheckedTransport(httpx.AsyncHTTPTransport):
    """httpx over a `CheckedNetwork`; it has no argument for that, so its pool is put in place."""

    def __init__(self, network: CheckedNetwork, context: ssl.SSLContext) -> None:
        super().__init__(verify=context, trust_env=False)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context,
            max_connections=_CONNECTIONS,
            max_keepalive_connections=_IDLE_CONNECTIONS,
            keepalive_expiry=_IDLE_SECONDS,
            network_backend=network,
        )
