"""A PLC directory, which serves the DID documents of the local network, and a DNS server for its handles."""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import dns.exception
import dns.message
import dns.rcode
import dns.rrset
from aiohttp import web

from indexer.atproto.did_document import build_did_document
from indexer.demo.http_server import HttpServer

_CONTEXT = [
    "https://www.w3.org/ns/did/v1",
    "https://w3id.org/security/multikey/v1",
    "https://w3id.org/security/suites/secp256k1-2019/v1",
]
_DNS_PREFIX = "_atproto."
_DNS_TTL = 1


@dataclass(frozen=True, slots=True)
class LocalIdentity:
    """The identity that the directory has for a DID: `key` is a did:key, `pds` a URL."""

    handle: str
    key: str
    pds: str


class LocalPlc(HttpServer):
    """The directory. Tests may change `identities` directly.

    Attributes:
        identities: The identity by DID; None for a tombstoned DID.
    """

    def __init__(self) -> None:
        super().__init__()
        self.identities: dict[str, LocalIdentity | None] = {}
        self.route("/{did}", self._resolve)

    async def _resolve(self, request: web.Request) -> web.Response:
        did = request.match_info["did"]
        if did not in self.identities:
            return web.json_response({"message": f"DID not registered: {did}"}, status=404)
        identity = self.identities[did]
        if identity is None:
            return web.json_response({"message": f"DID not available: {did}"}, status=410)
        return web.json_response(did_document(did, identity), content_type="application/did+ld+json")


def did_document(did: str, identity: LocalIdentity) -> dict[str, Any]:
    """Return the DID document of an identity."""
    return {"@context": _CONTEXT} | build_did_document(did, identity.handle, identity.key, identity.pds)


class LocalDns(asyncio.DatagramProtocol):
    """Serves the TXT record of each handle that the directory has, by UDP, inside `async with`."""

    def __init__(self, plc: LocalPlc, host: str, port: int) -> None:
        self._plc = plc
        self._address = (host, port)
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, self._address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()
        await self._closed.wait()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Respond to a query; ignore what is none."""
        try:
            query = dns.message.from_wire(data)
        except dns.exception.DNSException:
            return
        if query.question:
            self._transport.sendto(self._response(query).to_wire(), addr)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature is asyncio's
        """Note that the socket is closed."""
        self._closed.set()

    def _response(self, query: dns.message.Message) -> dns.message.Message:
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        dids = [
            did
            for did, identity in self._plc.identities.items()
            if identity is not None and name == _DNS_PREFIX + identity.handle.lower()
        ]
        response = dns.message.make_response(query)
        if not dids:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif question.rdtype.name == "TXT":
            texts = [f'"did={did}"' for did in dids]
            response.answer.append(dns.rrset.from_text(question.name, _DNS_TTL, "IN", "TXT", *texts))
        return response
