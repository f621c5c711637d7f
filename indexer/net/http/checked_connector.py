"""Connect only to addresses that were checked (docs/protocol.md#outbound-requests).

A name is resolved once, its addresses are checked, and the connection goes to one of these addresses. The name is not
resolved again for the connection, so a name server that changes its answer (DNS rebinding) has no effect.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from itertools import zip_longest
from textwrap import shorten
from time import monotonic
from typing import Any

import aiohttp
import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver
from aiohttp import AddrInfoType
from aiohttp.abc import AbstractResolver, ResolveResult
from dns.rdatatype import AAAA, A, RdataType

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.errors import SettingsError, UnavailableError
from indexer.reasons import FetchFailure

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Return the addresses of a host name and port, as IP literals in the order to try them.

Raises `UnavailableError`: NO_SUCH_HOST if the name does not exist or has no address, others (or OSError) if that is
unknown.
"""

MAX_DETAIL = 400
"""Maximum length of the description of a DNS error, in characters."""
_MAX_ADDRESSES = 4
_MAX_CACHED = 4_096
_CACHE_SECONDS = 10.0  # the addresses are known before the connection is made, which must go to the same ones
_KEEPALIVE_SECONDS = 5.0  # a busy host reuses its connection; idle connections to many other hosts do not pile up


class DnsResolver:
    """Resolve names with DNS alone. A name server that does not answer delays only its own names."""

    def __init__(self, servers: Sequence[tuple[str, int]] = (), timeout: float = 5.0) -> None:
        """Use `servers`, or the system's if there are none; `timeout` is in seconds for each record type of a name.

        Raises:
            SettingsError: There are no servers and the system has none.
        """
        try:
            self._dns = dns.asyncresolver.Resolver(configure=not servers)
        except dns.resolver.NoResolverConfiguration:
            raise SettingsError("INDEXER_DNS_SERVERS is not set, and the system has no DNS servers; set it") from None
        self._dns.lifetime = timeout
        if servers:
            self._dns.nameservers = [dns.nameserver.Do53Nameserver(host, port) for host, port in servers]
        self._servers = ", ".join([f"{host}:{port}" for host, port in servers] or map(str, self._dns.nameservers))

    async def __call__(self, host: str, _port: int) -> list[str]:
        """Return the addresses of `host`, IPv4 and IPv6 alternating; see `Resolve` for the errors."""
        if literal := _literal(host):
            return [literal]
        # Some name servers answer queries for AAAA with an error, or not at all (RFC 4074). Then A alone counts.
        answers = await asyncio.gather(*[self.query(host, type_) for type_ in (A, AAAA)], return_exceptions=True)
        families = [answer for answer in answers if not isinstance(answer, BaseException)]
        if addresses := [record.address for pair in zip_longest(*families) for record in pair if record]:
            return addresses
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        raise UnavailableError(FetchFailure.NO_SUCH_HOST, host[:253])

    async def query(self, name: str, type_: RdataType) -> list[Any]:
        """Return the records of one type; none if the name does not exist or has no such record.

        Raises:
            UnavailableError: TIMEOUT or UNREACHABLE if there is no definite answer.
        """
        try:
            return list(await self._dns.resolve(dns.name.from_text(name), type_, search=False))
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return []
        except dns.exception.Timeout:
            detail = f"{name[:253]}: no answer within {self._dns.lifetime:g} s from {self._servers}"
            raise UnavailableError(FetchFailure.TIMEOUT, detail) from None
        except dns.exception.DNSException as error:
            detail = shorten(f"{name[:253]}: {type(error).__name__} {error}", MAX_DETAIL, placeholder=" ...")
            raise UnavailableError(FetchFailure.UNREACHABLE, detail) from None


def _literal(host: str) -> str | None:
    """Return the canonical form of an IP address in any notation that systems accept; None for a name."""
    try:
        return str(ip_address(host))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except (OSError, ValueError):
        return None


async def resolve_with_system(host: str, port: int) -> list[str]:
    """Return addresses from the system's resolver, which also knows local names; see `Resolve` for the errors.

    Use it only on local networks: it runs in threads, and a hostile name server could occupy all of them.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno != socket.EAI_NONAME:
            raise
        raise UnavailableError(FetchFailure.NO_SUCH_HOST, host[:253]) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class CheckedResolver(AbstractResolver):
    """Resolve names for aiohttp, and return only public addresses unless `allow_private`."""

    def __init__(self, resolve: Resolve, timeout: float, *, allow_private: bool) -> None:
        """Resolve with `resolve`, within `timeout` seconds."""
        self._resolve = resolve
        self._timeout = timeout
        self._allow_private = allow_private
        self._cache = BoundedDict[tuple[str, int], tuple[float, list[ResolveResult]]](_MAX_CACHED)

    async def servers(self, host: str, port: int) -> list[str]:
        """Return the allowed addresses of `host` as `server_of` names them; see `resolve` for the errors."""
        if literal := _literal(host):
            return [server_of(literal, port)]
        return [server_of(result["host"], port) for result in await self.resolve(host, port)]

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002 - the library's signature
    ) -> list[ResolveResult]:
        """Return the allowed addresses of `host`. They are remembered for a few seconds.

        Raises:
            UnavailableError: As `Resolve` raises it, or REFUSED_ADDRESS if no address is allowed.
            OSError: The name could not be resolved; TimeoutError if that took too long.
        """
        expires_at, cached = self._cache.get((host, port), (0.0, []))
        if expires_at > monotonic():
            return cached
        try:
            async with asyncio.timeout(self._timeout):
                addresses = await self._resolve(host, port)
        except UnicodeError as error:  # a label is empty or too long
            raise OSError(str(error)) from None
        allowed = addresses if self._allow_private else [address for address in addresses if is_public(address)]
        if not allowed:
            raise UnavailableError(FetchFailure.REFUSED_ADDRESS, f"{host[:253]}: {', '.join(addresses[:4])}")
        results = [
            ResolveResult(
                hostname=host, host=address, port=port, proto=0,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in allowed[:_MAX_ADDRESSES]
        ]  # fmt: skip
        self._cache[host, port] = monotonic() + _CACHE_SECONDS, results
        return results

    async def close(self) -> None:
        """Do nothing."""


def server_of(address: str, port: int) -> str:
    """Return the name of a server in limits, from a network address and a port."""
    return f"{network_of(address)}:{port}"


def public_socket(address: AddrInfoType) -> socket.socket:
    """Return a socket for `address`, also if a URL contained it and it was never resolved.

    Raises:
        UnavailableError: REFUSED_ADDRESS if the address is not public.
    """
    family, kind, protocol, _, (host, *_) = address
    if not is_public(str(host)):
        raise UnavailableError(FetchFailure.REFUSED_ADDRESS, str(host))
    return socket.socket(family, kind, protocol)


def checked_connector(resolver: CheckedResolver, tls: ssl.SSLContext, *, allow_private: bool) -> aiohttp.TCPConnector:
    """Return a connector that connects only to public addresses; with `allow_private`, to any address."""
    return aiohttp.TCPConnector(
        resolver=resolver,
        socket_factory=None if allow_private else public_socket,
        use_dns_cache=False,
        ssl=tls,
        limit=0,  # `HostLimits` limits the connections
        keepalive_timeout=_KEEPALIVE_SECONDS,
    )


# The standard library's `is_global` does not cover all of these, and its coverage depends on the patch release.
_REFUSED_V4 = tuple(map(IPv4Network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4",
    "168.63.129.16/32",  # the metadata server of Azure has a public address
)))  # fmt: skip
_UNICAST_V6 = IPv6Network("2000::/3")
_REFUSED_V6 = [IPv6Network(network) for network in ("2001::/23", "2001:db8::/32", "3fff::/20")]
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP, _ISATAP_MASK = 0x0000_5EFE, 0xFCFF_FFFF  # the third quarter of the address; the mask ignores two flag bits


def is_public(address: str) -> bool:
    """Return True if `address`, an IP literal, is a public unicast address.

    For an IPv6 address that represents an IPv4 address (mapped, NAT64, 6to4), the IPv4 address decides. For one that
    may lead to an IPv4 address (ISATAP, RFC 5214), both must be public. Teredo addresses are never public here.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv4Address):
        return _is_public_v4(ip)
    low, inner = _low_v4(ip), _represented_v4(ip)
    if int(ip) >> 32 & _ISATAP_MASK == _ISATAP and not _is_public_v4(low):
        return False
    if inner is not None:
        return _is_public_v4(inner)
    return ip.is_global and ip in _UNICAST_V6 and not any(ip in network for network in _REFUSED_V6)


def network_of(address: str) -> str:
    """Return the network of one machine: an IPv4 address, also in an IPv6 address, or an IPv6 network of 64 bits."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address) and (inner := _represented_v4(ip)) is None:
        return str(IPv6Network((ip, 64), strict=False))
    return str(ip if isinstance(ip, IPv4Address) else inner)


def _represented_v4(ip: IPv6Address) -> IPv4Address | None:
    return _low_v4(ip) if ip in _NAT64 else ip.ipv4_mapped or ip.sixtofour


def _low_v4(ip: IPv6Address) -> IPv4Address:
    return IPv4Address(int(ip) & 0xFFFF_FFFF)


def _is_public_v4(ip: IPv4Address) -> bool:
    return ip.is_global and not any(ip in network for network in _REFUSED_V4)
