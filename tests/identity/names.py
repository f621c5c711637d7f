"""A name server on loopback that says what a test wants said."""

import asyncio
from types import TracebackType
from typing import Any, Self

import dns.flags
import dns.message
import dns.rcode
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """TXT and address records. `texts` and `addresses` have each name's records as they are written in zone files;
    others don't exist.

    With `rcode` every answer is that; `silent`: there is none, or none about names that begin so; `truncated`: over UDP
    it says that it doesn't fit; `garbled`: it is no DNS message. `asked` has all queries' names, `by_tcp` those that
    came so.
    """

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.addresses: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.by_tcp: list[str] = []
        self.rcode: dns.rcode.Rcode | None = None
        self.silent: bool | str = False
        self.truncated = False
        self.garbled = False
        self.address = ("127.0.0.1", 0)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport: Any = None
        while self._transport is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.address = self._server.sockets[0].getsockname()
            try:
                self._transport, _ = await loop.create_datagram_endpoint(lambda: self, self.address)
            except OSError:  # that port is somebody's for UDP
                self._server.close()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()
        self._server.close()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        answer = self._answer(data)
        if self.is_silent:
            return
        if self.truncated:
            answer.answer.clear()
            answer.flags |= dns.flags.TC
        self._transport.sendto(data[:2] + b"nonsense" if self.garbled else answer.to_wire(), addr)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
        answer = self._answer(data)
        self.by_tcp.append(self.asked[-1])
        if not self.is_silent:
            wire = answer.to_wire()
            writer.write(len(wire).to_bytes(2) + wire)
        writer.close()

    @property
    def is_silent(self) -> bool:
        """About the name that was asked for last."""
        return self.asked[-1].startswith(self.silent) if isinstance(self.silent, str) else self.silent

    def _answer(self, data: bytes) -> dns.message.Message:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        self.asked.append(name)
        answer = dns.message.make_response(query)
        records = [("TXT", text) for text in self.texts.get(name, [])]
        records += [("AAAA" if ":" in address else "A", address) for address in self.addresses.get(name, [])]
        for kind, record in records:
            if kind == question.rdtype.name:
                answer.answer.append(dns.rrset.from_text(question.name, 60, "IN", kind, record))
        known = name in self.texts or name in self.addresses
        answer.set_rcode(self.rcode or (dns.rcode.NOERROR if known else dns.rcode.NXDOMAIN))
        return answer
