"""Verify that a handle resolves to the DID that claims it (docs/protocol.md#handles).

Handles are only for display. No key and no request to a host depends on this.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver
from dns.rdatatype import TXT

from indexer.atproto.syntax import MAX_HANDLE_CHARACTERS, is_did, is_handle, is_resolvable
from indexer.errors import SettingsError, UnavailableError
from indexer.net.identity.did_resolver import HttpGetter
from indexer.reasons import FetchFailure
from indexer.sync.identity import INVALID_HANDLE

DNS_TIMEOUT = 3.0
HTTP_TIMEOUT = 5.0
WELL_KNOWN_BYTES = 2_048
_DID = "did="
_PREFIX = "_atproto."
_OK = 200
_SERVER_ERROR = 500
_DEFINITE = frozenset(
    {FetchFailure.NO_SUCH_HOST, FetchFailure.TOO_LARGE, FetchFailure.BAD_ANSWER, FetchFailure.REFUSED_ADDRESS}
)
"""Failures that say that the host serves no DID: another attempt would get the same answer."""


class HandleVerifier:
    """Resolves handles with a DNS TXT record, and with a file on the handle's own host if there is no record."""

    def __init__(
        self,
        outbound: HttpGetter,
        dns_servers: Sequence[tuple[str, int]] = (),
        *,
        allow_private_hosts: bool,
        dns_timeout: float = DNS_TIMEOUT,
        http_timeout: float = HTTP_TIMEOUT,
        on_lookup: Callable[[str, str], None] = lambda _method, _result: None,
    ) -> None:
        """Use `dns_servers` (IP addresses and ports), or the system's if there are none; timeouts are in seconds.

        `on_lookup` is called with the method ("dns" or "https") and the result of each lookup.

        Raises:
            SettingsError: There are no DNS servers and the system has none.
        """
        self._outbound = outbound
        self._allow_private_hosts = allow_private_hosts
        self._http_timeout = http_timeout
        self._on_lookup = on_lookup
        self._dns = DnsRecords(dns_servers, timeout=dns_timeout)

    async def verify_handle(self, did: str, claimed: str) -> str:
        """Return `claimed` in lower case if it resolves to `did`, otherwise `handle.invalid`.

        Raises:
            UnavailableError: There is no definite result now. This takes at most the sum of both timeouts.
        """
        handle = claimed.lower()
        if not is_handle(handle) or not is_resolvable(handle, local=self._allow_private_hosts):
            return INVALID_HANDLE
        dns_failure = None
        try:
            dids = await self._counted("dns", self._resolve_by_dns(handle))
        except UnavailableError as error:
            dids, dns_failure = set(), error
        if not dids:
            dids = await self._counted("https", self._resolve_by_http(handle))
        if not dids and dns_failure is not None:
            raise dns_failure
        return handle if dids == {did} else INVALID_HANDLE

    async def _counted(self, method: str, lookup: Awaitable[set[str]]) -> set[str]:
        try:
            dids = await lookup
        except UnavailableError as error:
            self._on_lookup(method, error.reason)
            raise
        self._on_lookup(method, "found" if dids else "missing")
        return dids

    async def _resolve_by_dns(self, handle: str) -> set[str]:
        """Return the DIDs in the TXT records of the handle. More than one DID makes the handle invalid."""
        if len(_PREFIX + handle) > MAX_HANDLE_CHARACTERS:
            return set()
        return await self._dns.dids(_PREFIX + handle)

    async def _resolve_by_http(self, handle: str) -> set[str]:
        """Return the DID in the first line of the file, which the resolver of `@atproto/identity` reads, too.

        An answer of another form is definite, too: a large page, a status below 500, or redirects without end.
        """
        url = f"https://{handle}/.well-known/atproto-did"
        try:
            async with asyncio.timeout(self._http_timeout):  # includes redirects and the time to wait for slots
                response = await self._outbound.get(
                    url, max_bytes=WELL_KNOWN_BYTES, timeout=self._http_timeout, accept="text/plain"
                )
        except TimeoutError:
            raise UnavailableError(FetchFailure.TIMEOUT, url) from None
        except UnavailableError as error:
            if error.reason in _DEFINITE:
                return set()
            raise
        if response.status >= _SERVER_ERROR:
            raise UnavailableError(FetchFailure.HTTP_STATUS, f"{response.status} from {url}")
        text = response.body.decode("utf-8-sig", "replace").strip().partition("\n")[0].rstrip()
        return {text} if response.status == _OK and is_did(text) else set()


class DnsRecords:
    """A resolver for TXT records that name a DID: `did=did:plc:…`."""

    def __init__(self, dns_servers: Sequence[tuple[str, int]] = (), *, timeout: float = DNS_TIMEOUT) -> None:
        """Use `dns_servers` (IP addresses and ports), or the system's if there are none; `timeout` is in seconds.

        Raises:
            SettingsError: There are no DNS servers and the system has none.
        """
        self._timeout = timeout
        try:
            self._dns = dns.asyncresolver.Resolver(configure=not dns_servers)
        except dns.resolver.NoResolverConfiguration:
            raise SettingsError("INDEXER_DNS_SERVERS is not set, and the system has no DNS servers; set it") from None
        if dns_servers:
            self._dns.nameservers = [dns.nameserver.Do53Nameserver(host, port) for host, port in dns_servers]

    async def dids(self, name: str) -> set[str]:
        """Return the DIDs in the TXT records of a name; none if the name has no such record or does not exist.

        Raises:
            UnavailableError: There is no definite answer within the timeout.
        """
        try:
            answer = await self._dns.resolve(dns.name.from_text(name), TXT, search=False, lifetime=self._timeout)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return set()
        except dns.exception.Timeout as error:
            raise UnavailableError(FetchFailure.TIMEOUT, f"{error!s:.200}") from None
        except dns.exception.DNSException as error:
            raise UnavailableError(FetchFailure.UNREACHABLE, f"{error!s:.200}") from None
        texts = [b"".join(record.strings).decode("ascii", "replace") for record in answer]
        return {text.removeprefix(_DID) for text in texts if text.startswith(_DID) and is_did(text.removeprefix(_DID))}
