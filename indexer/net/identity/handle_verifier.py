"""Verify that a handle resolves to the DID that claims it (docs/protocol.md#handles).

Handles are only for display. No key and no request to a host depends on this.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus

from dns.rdatatype import TXT

from indexer.atproto.syntax import MAX_HANDLE_CHARACTERS, is_did, is_handle, is_resolvable
from indexer.errors import UnavailableError
from indexer.net.http.checked_connector import DnsResolver
from indexer.net.http.http_client import OutboundClient
from indexer.reasons import FetchFailure
from indexer.sync.identity import INVALID_HANDLE

WELL_KNOWN_BYTES = 2_048
_DID = "did="
_PREFIX = "_atproto."
_DEFINITE = frozenset(
    {FetchFailure.NO_SUCH_HOST, FetchFailure.TOO_LARGE, FetchFailure.BAD_ANSWER, FetchFailure.REFUSED_ADDRESS}
)
"""Failures that say that the host serves no DID: another attempt would get the same answer."""


@dataclass(eq=False)
class HandleVerifier:
    """Resolves handles with a DNS TXT record, and with a file on the handle's own host if there is no record.

    `on_lookup` is called with the method ("dns" or "https") and the result of each lookup.
    """

    outbound: OutboundClient
    dns_servers: Sequence[tuple[str, int]] = ()  # as of `DnsResolver`
    _: KW_ONLY
    allow_private_hosts: bool
    dns_timeout: float = 3.0  # seconds
    http_timeout: float = 5.0  # seconds, with redirects and the time to wait for request slots
    on_lookup: Callable[[str, str], object] = lambda _method, _result: None

    def __post_init__(self) -> None:
        self._dns = DnsResolver(self.dns_servers, self.dns_timeout)

    async def verify_handle(self, did: str, claimed: str) -> str:
        """Return `claimed` in lower case if it resolves to `did`, otherwise `handle.invalid`.

        More than one DID in the TXT records makes the handle invalid.

        Raises:
            UnavailableError: There is no definite result now. This takes at most the sum of both timeouts.
        """
        handle = claimed.lower()
        if not is_handle(handle) or not is_resolvable(handle, local=self.allow_private_hosts):
            return INVALID_HANDLE
        dids, dns_failure = set[str](), None
        try:
            if len(_PREFIX + handle) <= MAX_HANDLE_CHARACTERS:
                dids = await self._counted("dns", dids_in_dns(self._dns, _PREFIX + handle))
        except UnavailableError as error:
            dns_failure = error
        if not dids:
            dids = await self._counted("https", self._resolve_by_http(handle))
        if not dids and dns_failure is not None:
            raise dns_failure
        return handle if dids == {did} else INVALID_HANDLE

    async def _counted(self, method: str, lookup: Awaitable[set[str]]) -> set[str]:
        try:
            dids = await lookup
        except UnavailableError as error:
            self.on_lookup(method, error.reason)
            raise
        self.on_lookup(method, "found" if dids else "missing")
        return dids

    async def _resolve_by_http(self, handle: str) -> set[str]:
        """Return the DID in the first line of the file, which the resolver of `@atproto/identity` reads, too.

        An answer of another form is definite, too: a large page, a status below 500, or redirects without end.
        """
        url = f"https://{handle}/.well-known/atproto-did"
        try:
            async with asyncio.timeout(self.http_timeout):  # includes redirects and the time to wait for slots
                response = await self.outbound.get(
                    url, max_bytes=WELL_KNOWN_BYTES, timeout=self.http_timeout, accept="text/plain"
                )
        except TimeoutError:
            raise UnavailableError(FetchFailure.TIMEOUT, url) from None
        except UnavailableError as error:
            if error.reason in _DEFINITE:
                return set()
            raise
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise UnavailableError(FetchFailure.HTTP_STATUS, f"{response.status} from {url}")
        text = response.body.decode("utf-8-sig", "replace").strip().partition("\n")[0].rstrip()
        return {text} if response.status == HTTPStatus.OK and is_did(text) else set()


async def dids_in_dns(dns: DnsResolver, name: str) -> set[str]:
    """Return the DIDs in the TXT records of a name (`did=did:plc:…`); none if it has no such record.

    Raises:
        UnavailableError: There is no definite answer within the timeout.
    """
    records = await dns.query(name, TXT)
    texts = [b"".join(record.strings).decode("ascii", "replace") for record in records]
    return {text.removeprefix(_DID) for text in texts if text.startswith(_DID) and is_did(text.removeprefix(_DID))}
