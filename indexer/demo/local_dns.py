"""A DNS server for the handles of the local network: one TXT record for each."""

import asyncio
from types import TracebackType
from typing import Any, Self

import dns.exception
import dns.message
import dns.rcode
import dns.rrset

from indexer.demo.local_plc import LocalPlc

_PREFIX = "_atproto."
_TTL = 1


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
            if identity is not None and name == _PREFIX + identity.handle.lower()
        ]
        response = dns.message.make_response(query)
        if not dids:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif question.rdtype.name == "TXT":
            texts = [f'"did={did}"' for did in dids]
            response.answer.append(dns.rrset.from_text(question.name, _TTL, "IN", "TXT", *texts))
        return response
