import asyncio
import math
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic

import aiohttp
import pytest
from websockets.asyncio.server import ServerConnection, serve

from indexer.net.relay.stream_socket import (
    FEW_BYTES,
    MANY_BYTES,
    MESSAGE_COST,
    SHORT_INTERVAL,
    ConnectionSettings,
    ReadTimes,
    StreamSocket,
    open_stream,
)
from tests.waiting import until

INTERVAL = 0.1
Message = tuple[float, bytes]
"""A pause in seconds, and what is sent after it."""


@asynccontextmanager
async def stream_of(
    messages: Iterable[Message],
    read_interval: float,
    tls: ssl.SSLContext | None = None,
    bytes_per_second: float = math.inf,
) -> AsyncIterator[StreamSocket]:
    """Open the stream of a relay that sends these messages, and then nothing."""

    async def send(connection: ServerConnection) -> None:
        for pause, data in messages:
            await asyncio.sleep(pause)
            await connection.send(data)
        await connection.wait_closed()

    async with serve(send, "127.0.0.1", 0, ssl=tls) as server:
        port = server.sockets[0].getsockname()[1]
        settings = ConnectionSettings(read_interval=read_interval, bytes_per_second=bytes_per_second)
        scheme = "ws" if tls is None else "wss"
        async with open_stream(f"{scheme}://127.0.0.1:{port}", None, 1_000_000, "tests", settings) as stream:
            yield stream


async def arrivals(messages: Sequence[Message], read_interval: float) -> list[float]:
    """Receive all messages; return when each arrived, in seconds since the first one."""
    times = []
    async with asyncio.timeout(30), stream_of(messages, read_interval) as stream:
        for _, data in messages:
            assert await stream.receive() == data
            times.append(monotonic())
    return [time - times[0] for time in times]


def reads(times: Sequence[float]) -> int:
    """Return the number of groups of messages that arrived together."""
    return 1 + sum(after - before > INTERVAL / 2 for before, after in pairwise(times))


async def test_few_messages_are_read_together_once_per_interval() -> None:
    times = await arrivals([(0.01, b"%d" % number) for number in range(50)], INTERVAL)
    assert 3 <= reads(times) <= times[-1] / INTERVAL + 1


async def test_intervals_are_shorter_while_more_than_few_bytes_arrive() -> None:
    bytes_per_second = 2_000_000

    def messages() -> Iterable[Message]:
        """Yield as many bytes as the time since the last ones makes due, however slow the machine is."""
        last = monotonic()
        for _ in range(10_000):
            now = monotonic()
            yield 0.005, bytes(1 + int(bytes_per_second * (now - last)))
            last = now

    times: list[float] = []
    async with asyncio.timeout(30), stream_of(messages(), INTERVAL) as stream:
        while not times or times[-1] < times[0] + 15 * INTERVAL:
            await stream.receive()
            times.append(monotonic())
    assert bytes_per_second * INTERVAL * SHORT_INTERVAL > FEW_BYTES
    assert bytes_per_second * INTERVAL < MANY_BYTES
    assert reads(times) > 1.1 * (times[-1] - times[0]) / INTERVAL


async def test_other_tasks_see_the_messages_of_one_read_together() -> None:
    received: list[float] = []
    arrived = asyncio.Event()
    seen: list[int] = []

    async def take() -> None:
        while await arrived.wait():
            arrived.clear()
            seen.append(len(received))

    taking = asyncio.create_task(take())
    async with asyncio.timeout(30), stream_of([(0.01, b"a")] * 50, INTERVAL) as stream:
        for _ in range(50):
            await stream.receive()
            received.append(monotonic())
            arrived.set()
        await until(lambda: seen[-1] == 50)
    taking.cancel()
    assert len(seen) < 1.5 * reads(received)


async def test_message_after_a_pause_is_read_at_once() -> None:
    """The second message is sent after one and a half intervals. Reads at fixed times would get it after two."""
    async with asyncio.timeout(30), stream_of([(0, b"first"), (1.5, b"second")], 1.0) as stream:
        assert await stream.receive() == b"first"
        first_at = monotonic()
        assert await stream.receive() == b"second"
        assert monotonic() - first_at < 1.9


async def test_many_messages_are_read_without_pauses() -> None:
    """The system holds only a part of them, so with a pause after each read they would take many intervals."""
    messages = [(0.0, number.to_bytes(2) * 25_000) for number in range(500)]
    times = await arrivals(messages, 10 * INTERVAL)
    assert sum(len(data) for _, data in messages) > 100 * MANY_BYTES
    assert times[-1] < 5 * 10 * INTERVAL


async def test_reading_stays_paused_while_many_bytes_wait() -> None:
    """A relay that sends faster than messages are taken fills the buffers, and then waits."""
    sent = 0

    def messages() -> Iterable[Message]:
        nonlocal sent
        while sent < 10_000:
            sent += 1
            yield 0, bytes(50_000)

    async with stream_of(messages(), INTERVAL / 10) as stream:
        for _ in range(20):
            await stream.receive()
            await asyncio.sleep(INTERVAL / 5)
        before = sent
        await asyncio.sleep(5 * INTERVAL)
        assert sent - before < 100
        assert before < 1_000


@pytest.mark.parametrize("size", [1, 10_000])
async def test_messages_are_received_at_the_limited_rate(size: int) -> None:
    cost = MESSAGE_COST + size
    messages: list[Message] = [(0, bytes(size))] * 250
    async with asyncio.timeout(30), stream_of(messages, 0, bytes_per_second=100 * cost) as stream:
        await stream.receive()
        began, times = monotonic(), list[float]()
        for _ in messages[1:]:
            await stream.receive()
            times.append(monotonic() - began)
    assert times[50] < 0.5, "a short burst is received at once"
    assert times[-1] > 1.4


async def test_socket_is_read_once_per_interval_with_tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls, reads = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), 0
    tls.load_cert_chain(certificate)
    monkeypatch.setattr(aiohttp, "TCPConnector", partial(aiohttp.TCPConnector, ssl=False))
    updated = SSLProtocol.buffer_updated

    def count(protocol: SSLProtocol, size: int) -> None:
        nonlocal reads
        reads += 1
        updated(protocol, size)

    messages = [(0.01, b"%d" % number) for number in range(50)]
    async with asyncio.timeout(30), stream_of(messages, INTERVAL, tls) as stream:
        monkeypatch.setattr(SSLProtocol, "buffer_updated", count)
        assert [await stream.receive() for _ in messages] == [data for _, data in messages]
    assert reads < len(messages) / 2


def test_streams_that_are_read_at_about_the_same_time_are_read_together() -> None:
    times = ReadTimes()
    assert times.plan("a", 10.0, 0.5) == 10.0
    assert times.plan("b", 10.4, 0.5) == 10.0
    assert times.plan("c", 10.6, 0.5) == 10.6
    assert times.plan("d", 10.35, 0.5) == 10.6, "the nearest"
    times.remove("a")
    times.remove("b")
    assert times.plan("a", 10.2, 0.5) == 10.6
    assert times.plan("a", 12.0, 0.5) == 12.0
