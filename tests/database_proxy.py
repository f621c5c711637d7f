"""A proxy before a database: it can stop to answer, break connections between two messages, and slow statements."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import make_url

from tests.tcp_proxy import LOOPBACK, Messages, TcpProxy

NEGOTIATIONS = {(1234 << 16) + code for code in (5679, 5680)}
"""Codes of first messages that another first message follows: the requests for SSL and for GSSAPI."""
REFUSED, ACCEPTED = b"N", b"S"
"""The answers of a server to such a request: a single byte."""
CLIENT_KINDS = {
    "B": "Bind",
    "C": "Close",
    "D": "Describe",
    "E": "Execute",
    "H": "Flush",
    "P": "Parse",
    "Q": "Query",
    "S": "Sync",
    "X": "Terminate",
    "c": "CopyDone",
    "d": "CopyData",
}
SERVER_KINDS = {
    "1": "ParseComplete",
    "2": "BindComplete",
    "3": "CloseComplete",
    "C": "CommandComplete",
    "D": "DataRow",
    "E": "ErrorResponse",
    "G": "CopyInResponse",
    "K": "BackendKeyData",
    "N": "NoticeResponse",
    "R": "Authentication",
    "S": "ParameterStatus",
    "T": "RowDescription",
    "Z": "ReadyForQuery",
    "n": "NoData",
    "t": "ParameterDescription",
}
"""The names of messages in the documentation of Postgres, by type. Others are named by their type."""
HANDSHAKE = b"\x16"
"""The first byte of a client's TLS handshake. The length of a first message begins with 0."""
ENCRYPTED = "encrypted bytes"


class DatabaseProxy(TcpProxy):
    """Forwards connections to a database until it is told not to.

    Attributes:
        dsn: The database, through the proxy.
    """

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self._url = make_url(dsn)
        self.dsn = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        async with super().serve():
            url = self._url.set(host=LOOPBACK, port=self.port).difference_update_query(["host", "port"])
            self.dsn = url.render_as_string(hide_password=False)
            yield

    async def connect(self) -> tuple[StreamReader, StreamWriter]:
        host = self._url.host or str(self._url.query["host"])
        port = self._url.port or int(str(self._url.query.get("port", 5432)))
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, port)

    def messages(self) -> tuple[Messages, Messages]:
        return ClientMessages(), ServerMessages()


class PostgresMessages(Messages):
    """The messages of one side of a connection to Postgres. Encrypted bytes are messages as they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self._first = True
        self._encrypted = False


class ClientMessages(PostgresMessages):
    """The messages of a client: the first ones have a length only, the others a type and a length."""

    def first(self) -> tuple[str, int]:
        self._encrypted = self._encrypted or (self._first and self.buffer.startswith(HANDSHAKE))
        if self._encrypted:
            return ENCRYPTED, len(self.buffer)
        if not self._first:
            return _kind(self.buffer, CLIENT_KINDS), _size_after(self.buffer, 1)
        size = _size_after(self.buffer, 0)
        self._first = not size or int.from_bytes(self.buffer[4:8]) in NEGOTIATIONS
        return "request for encryption" if self._first else "StartupMessage", size


class ServerMessages(PostgresMessages):
    """The messages of a server: a type and a length, except for the answer to a request for encryption."""

    def first(self) -> tuple[str, int]:
        if self._encrypted:
            return ENCRYPTED, len(self.buffer)
        answers = self._first and self.buffer in (REFUSED, ACCEPTED)
        self._encrypted = answers and self.buffer == ACCEPTED
        size = 1 if answers else _size_after(self.buffer, 1)
        self._first = self._first and not size
        return "answer about encryption" if answers else _kind(self.buffer, SERVER_KINDS), size


def _kind(buffer: bytearray, kinds: dict[str, str]) -> str:
    """Return the name of the type that the first byte is."""
    letter = buffer[:1].decode("latin-1")
    return kinds.get(letter, letter)


def _size_after(buffer: bytearray, start: int) -> int:
    """Return the size of a message whose length is at this position; 0 if the message is not complete."""
    if len(buffer) < start + 4:
        return 0
    size = start + int.from_bytes(buffer[start : start + 4])
    return size if len(buffer) >= size else 0
