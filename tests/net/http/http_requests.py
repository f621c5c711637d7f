"""Requests of the tests, and scripts of hosts that send pieces of a response."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from tests.net.http.scripted_host import Script, http_response

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def failure_of(request: Awaitable[object]) -> UnavailableError:
    with pytest.raises(UnavailableError) as failure:
        await request
    return failure.value


async def read_all(
    outbound: OutboundClient,
    url: str,
    *,
    max_bytes: int = 10_000_000,
    timeout: float = 5.0,  # noqa: ASYNC109
    min_rate: float = 0.0,
    after_each: Callable[[], Awaitable[object]] | None = None,
) -> int:
    """Stream a body; return its size."""
    size = 0
    async with outbound.stream(url, max_bytes=max_bytes, timeout=timeout, min_rate=min_rate, accept="*/*") as stream:
        async for chunk in stream.chunks():
            size += len(chunk)
            if after_each is not None:
                await after_each()
    return size


def writes(*pieces: bytes, every: float = 0.0, forever: bool = False) -> Script:
    """Return a script that sends a piece every `every` seconds; with `forever`, it repeats the last one."""

    async def script(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(every)
        while forever:
            writer.write(pieces[-1])
            await writer.drain()
            await asyncio.sleep(every)

    return script


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.write(http_response(b"half", length=8))
    await writer.drain()
    writer.transport.abort()
