"""Whether a handle leads back to the DID that claims it (spec §5.5).

It is for display alone, and a look-up of its own: no key and no host waits for it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver
from dns.rdatatype import TXT, RdataType

from indexer.atproto.syntax import HANDLE_CHARACTERS, is_did, is_handle, is_resolvable
from indexer.errors import SettingsError, UnavailableError
from indexer.identity.resolver import Getter
from indexer.reasons import FetchFailure
from indexer.sync.identity import INVALID_HANDLE

DNS_SECONDS = 3.0
HTTP_SECONDS = 5.0
WELL_KNOWN_BYTES = 2_048
_PREFIX = "_atproto."
_CLIENT_ERRORS = range(400, 500)
_OK = 200


class Handles:
    """Asks name servers, then the handle's own host.

    `dns_servers` are IP addresses and ports, the system's if there are none; raises `SettingsError` if it has none.
    `on_lookup(method, result)` hears of each look-up.
    """

    def __init__(
        self,
        outbound: Getter,
        dns_servers: Sequence[tuple[str, int]] = (),
        *,
        allow_private_hosts: bool,
        dns_seconds: float = DNS_SECONDS,
        http_seconds: float = HTTP_SECONDS,
        on_lookup: Callable[[str, str], None] = lambda _method, _result: None,
    ) -> None:
        self._outbound = outbound
        self._allow_private_hosts = allow_private_hosts
        self._dns_seconds = dns_seconds
        self._http_seconds = http_seconds
        self._on_lookup = on_lookup
        try:
            self._dns = dns.asyncresolver.Resolver(configure=not dns_servers)
        except dns.resolver.NoResolverConfiguration:
            raise SettingsError("dns_servers: none are given, and the system names none") from None
        if dns_servers:
            self._dns.nameservers = [dns.nameserver.Do53Nameserver(host, port) for host, port in dns_servers]

    async def verify_handle(self, did: str, claimed: str) -> str:
        """`claimed` in lower case if it resolves to `did`, else `handle.invalid`.

        Raises `UnavailableError` if that could not be found out just now, after at most the seconds of both look-ups.
        """
        handle = claimed.lower()
        if not is_handle(handle) or not is_resolvable(handle, local=self._allow_private_hosts):
            return INVALID_HANDLE
        unasked = None
        try:
            dids = await self._heard("dns", self._by_dns(handle))
        except UnavailableError as error:
            dids, unasked = set(), error
        if not dids:
            dids = await self._heard("https", self._by_http(handle))
        if not dids and unasked is not None:
            raise unasked
        return handle if dids == {did} else INVALID_HANDLE

    async def _by_dns(self, handle: str) -> set[str]:
        """The DIDs in the handle's TXT records; several that differ speak for none."""
        if len(_PREFIX + handle) > HANDLE_CHARACTERS:
            return set()
        records = await self._records(_PREFIX + handle, TXT)
        texts = [b"".join(record.strings).decode("ascii", "replace") for record in records]
        return {text[4:] for text in texts if text.startswith("did=") and is_did(text[4:])}

    async def _records(self, name: str, kind: RdataType) -> list[Any]:
        """None if the name has none of this kind, or doesn't exist."""
        try:
            answer = await self._dns.resolve(dns.name.from_text(name), kind, search=False, lifetime=self._dns_seconds)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return []
        except dns.exception.Timeout as error:
            raise UnavailableError(FetchFailure.TIMEOUT, f"{error!s:.200}") from None
        except dns.exception.DNSException as error:
            raise UnavailableError(FetchFailure.UNREACHABLE, f"{error!s:.200}") from None
        return list(answer)

    async def _heard(self, method: str, look_up: Awaitable[set[str]]) -> set[str]:
        try:
            dids = await look_up
        except UnavailableError as error:
            self._on_lookup(method, error.reason)
            raise
        self._on_lookup(method, "found" if dids else "missing")
        return dids

    async def _by_http(self, handle: str) -> set[str]:
        url = f"https://{handle}/.well-known/atproto-did"
        try:
            async with asyncio.timeout(self._http_seconds):  # over all hops and turns
                answer = await self._outbound.get(
                    url, max_bytes=WELL_KNOWN_BYTES, timeout=self._http_seconds, accept="text/plain"
                )
        except TimeoutError:
            raise UnavailableError(FetchFailure.TIMEOUT, url) from None
        except UnavailableError as error:
            if error.reason is FetchFailure.NO_SUCH_HOST:
                return set()
            raise
        if answer.status in _CLIENT_ERRORS:
            return set()
        if answer.status != _OK:
            raise UnavailableError(FetchFailure.HTTP_STATUS, f"{answer.status} from {url}")
        text = answer.body.decode("ascii", "replace").strip()
        return {text} if is_did(text) else set()
