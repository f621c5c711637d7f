"""A name server on loopback that says what a test wants said."""

import asyncio
from types import TracebackType
from typing import Any, Self

import dns.message
import dns.rcode
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """TXT records over UDP. `texts` has each name's records as they are written in zone files; others don't exist.

    With `rcode` every answer is that; `silent`: there is none.
    """

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
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
        texts = self.texts.get(name)
        if texts:
            answer.answer.append(dns.rrset.from_text_list(question.name, 60, "IN", "TXT", texts))
        answer.set_rcode(self.rcode or (dns.rcode.NXDOMAIN if texts is None else dns.rcode.NOERROR))
        self._transport.sendto(answer.to_wire(), addr)
