"""A DNS server on loopback that responds as a test wants."""

import asyncio
from types import TracebackType
from typing import Any, Self

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

TIMEOUT = 20.0


class NameServer(asyncio.DatagramProtocol):
    """Serves TXT and address records by UDP and TCP.

    Attributes:
        texts: TXT records by name, as in zone files. A name in neither `texts` nor `addresses` does not exist.
        addresses: IPv4 and IPv6 addresses by name.
        queries: The names of all queries.
        tcp_queries: The names of the queries by TCP.
        rcode: If set, the code of every response.
        silent: Send no response; if it is text, send none for names that begin with it.
        failing: The code of each response to a query for this type of record; None: send no response.
        truncated: Respond by UDP that the response does not fit.
        garbled: Send responses that are no DNS messages.
    """

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.addresses: dict[str, list[str]] = {}
        self.queries: list[str] = []
        self.tcp_queries: list[str] = []
        self.rcode: dns.rcode.Rcode | None = None
        self.silent: bool | str = False
        self.failing: dict[str, dns.rcode.Rcode | None] = {}
        self.truncated = False
        self.garbled = False
        self.address = ("127.0.0.1", 0)
        self._query_received = asyncio.Event()
        self._udp_closed = asyncio.Event()
        self._handlers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport: Any = None
        while self._transport is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.address = self._server.sockets[0].getsockname()
            try:
                self._transport, _ = await loop.create_datagram_endpoint(lambda: self, self.address)
            except OSError:  # another process uses this port for UDP
                self._server.close()
                await self._server.wait_closed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()
        self._server.close()
        await self._udp_closed.wait()
        await asyncio.gather(*self._handlers)
        await self._server.wait_closed()

    async def wait_for_queries(self, count: int) -> None:
        """Wait until `count` queries were received."""
        async with asyncio.timeout(TIMEOUT):
            while len(self.queries) < count:
                self._query_received.clear()
                await self._query_received.wait()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        response = self._response(data)
        if self._is_silent or self.failing.get(response.question[0].rdtype.name, dns.rcode.NOERROR) is None:
            return
        if self.truncated:
            response.answer.clear()
            response.flags |= dns.flags.TC
        self._transport.sendto(data[:2] + b"nonsense" if self.garbled else response.to_wire(), addr)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._udp_closed.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handlers.append(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
        response = self._response(data)
        self.tcp_queries.append(self.queries[-1])
        if not self._is_silent:
            wire = response.to_wire()
            writer.write(len(wire).to_bytes(2) + wire)
        writer.close()
        await writer.wait_closed()

    @property
    def _is_silent(self) -> bool:
        return self.queries[-1].startswith(self.silent) if isinstance(self.silent, str) else self.silent

    def _response(self, data: bytes) -> dns.message.Message:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        self.queries.append(name)
        self._query_received.set()
        response = dns.message.make_response(query)
        records = [("TXT", text) for text in self.texts.get(name, [])]
        records += [("AAAA" if ":" in address else "A", address) for address in self.addresses.get(name, [])]
        for kind, record in records:
            if kind == question.rdtype.name:
                response.answer.append(dns.rrset.from_text(question.name, 60, "IN", kind, record))
        known = name in self.texts or name in self.addresses
        rcode = self.failing.get(question.rdtype.name) or self.rcode
        response.set_rcode(rcode or (dns.rcode.NOERROR if known else dns.rcode.NXDOMAIN))
        return response
