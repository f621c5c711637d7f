"""Limit what all clients of `/subscribe`, or of `/channel`, together make the daemon read and parse."""

import asyncio
from collections.abc import Hashable
from typing import cast

from indexer.concurrency.turns import Turns

PIECE_BYTES = 16 << 10
BYTES_PER_SECOND = 1 << 20
"""Rate of all clients together: a filter of `/subscribe` with 10,000 DIDs has 350 kB, an acknowledgement 30 bytes."""
PIECE_SECONDS = 0.004
"""Time that each piece takes in addition, however small it is."""


def reading_seconds(size: int) -> float:
    """Return the time that a piece of this many bytes takes."""
    return PIECE_SECONDS + size / BYTES_PER_SECOND


class LimitedReading(asyncio.BufferedProtocol):
    """Reads a connection for its protocol, piece by piece: no piece is parsed before the client has a turn.

    The library parses what arrives at once, and it counts neither fragments nor frames of other types than messages. So
    bytes are counted here, before they are parsed. A client that sends more than its share waits, and so do the others
    of its key; other keys wait for one piece of each.
    """

    def __init__(self, transport: asyncio.Transport, turns: Turns, key: Hashable) -> None:
        """Read the connection from now on, instead of its present protocol.

        Args:
            transport: The connection.
            turns: The turns of all clients.
            key: The clients of each key get the same share.
        """
        self._transport = transport
        self._protocol = cast(asyncio.Protocol, transport.get_protocol())
        self._turns = turns
        self._key = key
        self._buffer = bytearray(PIECE_BYTES)
        self._passing: asyncio.Task[None] | None = None
        transport.set_protocol(self)

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 - the caller names it
        """Return the buffer for the next piece."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Read nothing more until this piece has had its turn."""
        self._transport.pause_reading()
        self._passing = asyncio.create_task(self._pass(bytes(self._buffer[:nbytes])))

    async def _pass(self, piece: bytes) -> None:
        await self._turns.spend(self._key, reading_seconds(len(piece)))
        # In this order, because the protocol may pause the reading itself.
        self._transport.resume_reading()
        self._protocol.data_received(piece)

    def eof_received(self) -> bool | None:
        """Tell the protocol that the client has ended its side of the connection."""
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the protocol that the connection has ended."""
        if self._passing is not None:
            self._passing.cancel()
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Tell the protocol that the buffer of the connection is full."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Tell the protocol that the buffer of the connection has room."""
        self._protocol.resume_writing()
