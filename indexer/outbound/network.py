"""Connections that go where they were checked to go.

A name is resolved here and nowhere else, its addresses are judged, and the connection is made to one of these very
addresses: a name server that answers differently the next time (DNS rebinding) is not asked a next time.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from itertools import zip_longest

import aiohttp
import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver
from aiohttp import AddrInfoType
from aiohttp.abc import AbstractResolver, ResolveResult

from indexer.errors import SettingsError, UnavailableError
from indexer.outbound.addresses import is_public
from indexer.reasons import FetchFailure

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A host's addresses, as IP literals in the order to try them.

Raises `UnavailableError(NO_SUCH_HOST)` if it definitely has none, OSError if that can't be said.
"""

_MOST_ADDRESSES = 4
_IDLE_SECONDS = 5.0  # a host that is asked one question after the other keeps its connection; few others lie about


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


class CheckedResolver(AbstractResolver):
    """Gives the public addresses of a name, or all if `allow_private`, within `seconds`.

    Raises `UnavailableError(REFUSED_ADDRESS)` for a name that has none that is allowed.
    """

    def __init__(self, resolve: Resolve, seconds: float, *, allow_private: bool) -> None:
        self._resolve = resolve
        self._seconds = seconds
        self._allow_private = allow_private

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002 - the library's signature
    ) -> list[ResolveResult]:
        try:
            async with asyncio.timeout(self._seconds):
                addresses = await self._resolve(host, port)
        except TimeoutError:
            raise
        except UnicodeError as error:  # a label that is empty or too long
            raise OSError(str(error)) from None
        allowed = addresses if self._allow_private else [address for address in addresses if is_public(address)]
        if not allowed:
            raise UnavailableError(FetchFailure.REFUSED_ADDRESS, f"{host[:253]}: {', '.join(addresses[:4])}")
        return [_result(host, address, port) for address in allowed[:_MOST_ADDRESSES]]

    async def close(self) -> None:
        """Nothing is held."""


def _result(host: str, address: str, port: int) -> ResolveResult:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=flags)


def public_socket(address: AddrInfoType) -> socket.socket:
    """A socket for this very address, whichever way it was come by: a URL may name it without any look-up.

    Raises `UnavailableError(REFUSED_ADDRESS)`.
    """
    family, kind, protocol, _, (host, *_) = address
    if not is_public(str(host)):
        raise UnavailableError(FetchFailure.REFUSED_ADDRESS, str(host))
    return socket.socket(family, kind, protocol)


def checked_connector(
    resolve: Resolve, tls: ssl.SSLContext, seconds: float, *, allow_private: bool
) -> aiohttp.TCPConnector:
    """Connects by name to addresses that `resolve` gives within `seconds`, and only to public ones unless told."""
    return aiohttp.TCPConnector(
        resolver=CheckedResolver(resolve, seconds, allow_private=allow_private),
        socket_factory=None if allow_private else public_socket,
        use_dns_cache=False,
        ssl=tls,
        limit=0,  # `Hosts` has them
        keepalive_timeout=_IDLE_SECONDS,
    )
