"""Connections that go where they were checked to go.

A name is resolved here and nowhere else, its addresses are judged, and the connection is made to one of these very
addresses: a name server that answers differently the next time (DNS rebinding) is not asked a next time.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import ip_address
from itertools import zip_longest

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver
import httpcore
import httpx

from indexer.errors import SettingsError, UnavailableError
from indexer.outbound.addresses import is_public
from indexer.reasons import FetchFailure

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A host's addresses, as IP literals in the order to try them.

Raises `UnavailableError(NO_SUCH_HOST)` if it definitely has none, OSError if that can't be said.
"""

_MOST_ADDRESSES = 4
_IDLE_CONNECTIONS = 64
_IDLE_SECONDS = 15.0


class NameServers:
    """Look-ups in the DNS alone. A name server that never answers holds up its own name and no other.

    `servers` are IP addresses and ports, the system's if there are none; raises `SettingsError` if it has none. Of each
    name's records they have `seconds` to tell.
    """

    def __init__(self, servers: Sequence[tuple[str, int]] = (), seconds: float = 5.0) -> None:
        try:
            self._dns = dns.asyncresolver.Resolver(configure=not servers)
        except dns.resolver.NoResolverConfiguration:
            raise SettingsError("dns_servers: none are given, and the system names none") from None
        self._dns.lifetime = seconds
        if servers:
            self._dns.nameservers = [dns.nameserver.Do53Nameserver(host, port) for host, port in servers]

    async def __call__(self, host: str, _port: int) -> list[str]:
        if literal := _literal(host):
            return [literal]
        try:
            answers = await self._dns.resolve_name(dns.name.from_text(host), search=False)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            raise UnavailableError(FetchFailure.NO_SUCH_HOST, host[:253]) from None
        except dns.exception.Timeout as error:
            raise TimeoutError(str(error)) from None
        except dns.exception.DNSException as error:
            raise OSError(str(error) or type(error).__name__) from None
        families = [list(answers.addresses(family)) for family in (socket.AF_INET, socket.AF_INET6)]
        addresses = [address for pair in zip_longest(*families) for address in pair if address]
        if not addresses:
            raise UnavailableError(FetchFailure.NO_SUCH_HOST, host[:253])
        return addresses


def _literal(host: str) -> str | None:
    """An address in any of the forms in which systems take one, as it is usually written."""
    try:
        return str(ip_address(host))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except (OSError, ValueError):
        return None


async def system_addresses(host: str, port: int) -> list[str]:
    """The system's look-up, with its list of hosts and its local names: for local networks, since hostile name
    servers can hold up all its threads.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno != socket.EAI_NONAME:
            raise
        raise UnavailableError(FetchFailure.NO_SUCH_HOST, host[:253]) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


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
        except TimeoutError:
            raise
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or too long
            raise httpcore.ConnectError(f"{host[:253]}: {error}") from None
        allowed = addresses if self._allow_private else [address for address in addresses if is_public(address)]
        if not allowed:
            raise UnavailableError(FetchFailure.REFUSED_ADDRESS, f"{host[:253]}: {', '.join(addresses[:4])}")
        return allowed[:_MOST_ADDRESSES]


class CheckedTransport(httpx.AsyncHTTPTransport):
    """httpx over a `CheckedNetwork`; it has no argument for that, so its pool is put in place."""

    def __init__(self, network: CheckedNetwork, context: ssl.SSLContext, connections: int) -> None:
        super().__init__(verify=context, trust_env=False)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context,
            max_connections=connections,
            max_keepalive_connections=_IDLE_CONNECTIONS,
            keepalive_expiry=_IDLE_SECONDS,
            network_backend=network,
        )
