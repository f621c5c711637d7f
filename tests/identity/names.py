"""A name server on loopback that says what a test wants said."""

import asyncio
from types import TracebackType
from typing import Any, Self

import dns.message
import dns.rcode
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """TXT and address records over UDP. `texts` and `addresses` have each name's records as they are written in zone
    files; others don't exist.

    With `rcode` every answer is that; `silent`: there is none.
    """

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.addresses: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.rcode: dns.rcode.Rcode | None = None
        self.silent = False
        self.address = ("127.0.0.1", 0)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport: Any
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, ("127.0.0.1", 0))
        self.address = self._transport.get_extra_info("sockname")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        self.asked.append(name)
        if self.silent:
            return
        answer = dns.message.make_response(query)
        records = [("TXT", text) for text in self.texts.get(name, [])]
        records += [("AAAA" if ":" in address else "A", address) for address in self.addresses.get(name, [])]
        for kind, record in records:
            if kind == question.rdtype.name:
                answer.answer.append(dns.rrset.from_text(question.name, 60, "IN", kind, record))
        known = name in self.texts or name in self.addresses
        answer.set_rcode(self.rcode or (dns.rcode.NOERROR if known else dns.rcode.NXDOMAIN))
        self._transport.sendto(answer.to_wire(), addr)
