"""Read DIDs from TXT records: those of handles and those of lexicon authorities."""

from collections.abc import Sequence

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver
from dns.rdatatype import TXT

from indexer.atproto.syntax import is_did
from indexer.errors import SettingsError, UnavailableError
from indexer.reasons import FetchFailure

DNS_TIMEOUT = 3.0
_DID = "did="


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
