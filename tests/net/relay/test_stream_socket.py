import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest
from aiohttp.client_proto import ResponseHandler
from websockets.asyncio.server import ServerConnection, serve

from indexer.net.relay import stream_socket
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
    messages: Iterable[Message], read_interval: float, tls: ssl.SSLContext | None = None, **rates: Any
) -> AsyncIterator[StreamSocket]:
    """Open the stream of a relay that sends these messages, and then nothing."""

    async def send(connection: ServerConnection) -> None:
        for pause, data in messages:
            await asyncio.sleep(pause)
            await connection.send(data)
        await connection.wait_closed()

    async with serve(send, "127.0.0.1", 0, ssl=tls, ping_interval=None) as server:
        port = server.sockets[0].getsockname()[1]
        settings = ConnectionSettings(read_interval=read_interval, **rates)
        scheme = "ws" if tls is None else "wss"
        async with open_stream(f"{scheme}://127.0.0.1:{port}", None, 1_000_000, "tests", settings) as stream:
            yield stream


class Recorded(ReadTimes):
    """Also counts the reads of the socket, and notes the lengths of the intervals in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.intervals: list[float] = []

    def plan(self, stream: object, at: float, tolerance: float) -> float:
        self.intervals.append(2 * tolerance)
        return super().plan(stream, at, tolerance)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded, received = Recorded(), ResponseHandler.data_received

    def count(protocol: ResponseHandler, data: bytes) -> None:
        recorded.reads += 1
        received(protocol, data)

    monkeypatch.setattr(ResponseHandler, "data_received", count)
    return recorded


async def test_few_messages_are_read_together_once_per_interval(recorded: Recorded) -> None:
    messages = [(0.01, b"%d" % number) for number in range(50)]
    async with asyncio.timeout(30), stream_of(messages, INTERVAL, read_times=recorded) as stream:
        began, recorded.reads = monotonic(), 0
        assert [await stream.receive() for _ in messages] == [data for _, data in messages]
    assert 3 <= recorded.reads <= (monotonic() - began) / INTERVAL + 1


async def test_intervals_are_shorter_while_more_than_few_bytes_arrive(recorded: Recorded) -> None:
    messages = [(0.01, bytes(FEW_BYTES))] * 10 + [(0.01, b"")] * 50
    async with asyncio.timeout(30), stream_of(messages, INTERVAL, read_times=recorded) as stream:
        for _ in messages:
            await stream.receive()
    first, second, *_, last = recorded.intervals
    assert [first, second, last] == pytest.approx([INTERVAL, INTERVAL * SHORT_INTERVAL, INTERVAL])


async def test_other_tasks_see_the_messages_of_one_read_together(recorded: Recorded) -> None:
    received = 0
    arrived = asyncio.Event()
    seen: list[int] = []

    async def take() -> None:
        while await arrived.wait():
            arrived.clear()
            seen.append(received)

    taking = asyncio.create_task(take())
    async with asyncio.timeout(30), stream_of([(0.01, b"a")] * 50, INTERVAL, read_times=recorded) as stream:
        recorded.reads = 0
        for _ in range(50):
            await stream.receive()
            received += 1
            arrived.set()
        await until(lambda: seen[-1] == 50)
    taking.cancel()
    assert len(seen) < 1.5 * recorded.reads


async def test_message_after_a_pause_is_read_at_once(recorded: Recorded) -> None:
    """Reading is not paused again at the end of an interval, before something has arrived."""
    messages = [(0, b"first"), (1.5 * INTERVAL, b"second")]
    async with asyncio.timeout(30), stream_of(messages, INTERVAL, read_times=recorded) as stream:
        assert [await stream.receive() for _ in messages] == [b"first", b"second"]
    assert recorded.intervals == [INTERVAL] * 2


async def test_many_messages_are_read_without_pauses() -> None:
    """The system holds only a part of them, so with a pause after each read they would take many intervals."""
    messages = [(0.0, number.to_bytes(2) * 25_000) for number in range(500)]
    assert sum(len(data) for _, data in messages) > 100 * MANY_BYTES
    async with asyncio.timeout(30), stream_of(messages, 10 * INTERVAL) as stream:
        assert [await stream.receive() for _ in messages] == [data for _, data in messages]


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
async def test_messages_are_received_at_the_limited_rate(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock only advances while messages wait for their turn."""
    clock, sleep, receiving = [0.0], asyncio.sleep, asyncio.current_task()

    async def pass_time(seconds: float) -> None:
        clock[0] += seconds if asyncio.current_task() is receiving else 0.0
        await sleep(0)

    monkeypatch.setattr(stream_socket, "monotonic", lambda: clock[0])
    monkeypatch.setattr(asyncio, "sleep", pass_time)
    cost = MESSAGE_COST + size
    messages: list[Message] = [(0, bytes(size))] * 250
    async with asyncio.timeout(30), stream_of(messages, 0, bytes_per_second=100 * cost) as stream:
        times = [clock[0] for _ in messages if await stream.receive()]
    assert times[99] == 0, "a short burst is received at once"
    assert 1.4 < times[-1] < 2.6


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
