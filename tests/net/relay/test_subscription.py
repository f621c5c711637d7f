import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from time import monotonic

import pytest
from websockets.asyncio.server import ServerConnection, serve

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.net.relay.stream_socket import STREAM_PATH, ConnectionSettings
from indexer.net.relay.subscription import Subscription
from indexer.sync.events import StreamError, decode_frame
from tests.event_loop_watch import EventLoopWatch
from tests.faulty_network import FaultyNetwork
from tests.net.http.scripted_host import ScriptedHost, http_response
from tests.waiting import until

QUICK = ConnectionSettings(
    connect_timeout=20, ping_interval=20, message_timeout=20, first_delay=0.01, max_delay=0.05, switch_after=0.0
)
IMPATIENT = replace(QUICK, message_timeout=0.5)


@pytest.fixture
async def net() -> AsyncIterator[FaultyNetwork]:
    async with FaultyNetwork() as network:
        yield network


def subscription(*relays: str, max_bytes: int = 5_000_000, settings: ConnectionSettings = QUICK) -> Subscription:
    return Subscription(relays, max_bytes, "tests", settings)


class Cursors:
    """Returns the given cursors in order, then the last one again; records the relays in `asked`."""

    def __init__(self, *cursors: int | None) -> None:
        self.cursors = list(cursors)
        self.asked: list[str] = []

    async def __call__(self, relay: str) -> int | None:
        self.asked.append(relay)
        return self.cursors.pop(0) if len(self.cursors) > 1 else self.cursors[0]


async def next_seqs(source: Subscription, cursors: Cursors, count: int) -> list[int | None]:
    """Return the sequence numbers of the next `count` messages."""
    seqs: list[int | None] = []
    async with asyncio.timeout(20), aclosing(source.frames(cursors)) as frames:
        async for frame in frames:
            seqs.append(decode_frame(frame, DEFAULT_LIMITS).seq)
            if len(seqs) == count:
                return seqs
    raise AssertionError("the frames ended")


async def test_pause_before_a_reconnection_grows_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def sleep_shorter(seconds: float) -> None:
        if asyncio.current_task() is reading:  # the server of the databases has tasks in another thread
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep_shorter)
    source = subscription("ws://127.0.0.1:1", settings=replace(QUICK, first_delay=1, max_delay=12))
    reading = asyncio.create_task(next_seqs(source, Cursors(0), 1))
    await until(lambda: len(pauses) >= 7)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    for pause, expected in zip(pauses, (1, 2, 4, 8, 12, 12, 12), strict=False):
        assert 0.75 * expected <= pause <= 1.25 * expected


async def test_a_reconnection_asks_for_the_cursor_again(net: FaultyNetwork) -> None:
    net.relay.inclusive = False
    account = net.create_account()
    source, cursors = subscription(net.relay_url), Cursors(0, 2)
    seqs = []
    async with asyncio.timeout(20), aclosing(source.frames(cursors)) as frames:
        async for frame in frames:
            seqs.append(decode_frame(frame, DEFAULT_LIMITS).seq)
            if len(seqs) == 3:
                assert net.relay.abort_connections() == 1
                account.create("com.example.note", {})
            if seqs[-1] == net.relay.seq and len(seqs) > 4:
                break
    assert seqs[:3] == [1, 2, 3]
    assert seqs[seqs.index(3, 3) :] == list(range(3, net.relay.seq + 1))
    assert len(cursors.asked) == 2


async def error_of_second_connection(source: Subscription) -> str:
    """Return `last_error` when the third connection starts. Fails if a frame is received before that."""
    errors: list[str] = []
    third = asyncio.Event()

    async def cursor_of(_relay: str) -> None:
        errors.append(source.last_error or "")
        if len(errors) == 3:
            third.set()

    async with aclosing(source.frames(cursor_of)) as frames:
        tasks = asyncio.ensure_future(anext(frames)), asyncio.ensure_future(third.wait())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        received, reached = (task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert reached
    assert not received
    return errors[2]


async def test_a_text_message_is_yielded_as_bytes(net: FaultyNetwork) -> None:
    net.relay.inclusive = False
    net.create_account()
    net.relay.inject("text")
    source, cursors = subscription(net.relay_url), Cursors(net.relay.seq - 1)
    async with asyncio.timeout(20), aclosing(source.frames(cursors)) as frames:
        assert await anext(frames) == b"text"
    assert len(cursors.asked) == 1


async def test_a_redirect_is_not_followed(net: FaultyNetwork) -> None:
    for target in ("ws://[", net.relay_url):
        async with ScriptedHost() as host:
            host.pages[STREAM_PATH] = http_response(status=302, headers={"Location": target})
            assert "HTTP 302" in await error_of_second_connection(subscription(f"ws://127.0.0.1:{host.port}"))
    assert net.relay.requests.total() == 0


async def test_the_next_relay_is_used_when_one_is_unreachable(net: FaultyNetwork) -> None:
    net.create_account()
    unreachable = "ws://127.0.0.1:1"
    source, cursors = subscription(unreachable, net.relay_url), Cursors(0)
    assert len(await next_seqs(source, cursors, 2)) == 2
    assert cursors.asked[:2] == [unreachable, net.relay_url]


async def test_a_relay_is_tried_for_some_time_before_the_next_one(net: FaultyNetwork) -> None:
    net.create_account()
    unreachable = "ws://127.0.0.1:1"
    settings = replace(QUICK, switch_after=0.2)
    source, cursors = subscription(unreachable, net.relay_url, settings=settings), Cursors(0)
    assert len(await next_seqs(source, cursors, 2)) == 2
    assert cursors.asked[:2] == [unreachable, unreachable]
    assert cursors.asked[-1] == net.relay_url


async def test_an_error_frame_is_yielded_before_the_connection_ends(net: FaultyNetwork) -> None:
    net.create_account()
    source = subscription(net.relay_url)
    async with asyncio.timeout(20), aclosing(source.frames(Cursors(10_000))) as frames:
        event = decode_frame(await anext(frames), DEFAULT_LIMITS)
    assert isinstance(event, StreamError)
    assert event.error == "FutureCursor"


MANY = 150_000
"""Frames without content. 128,000 of them may arrive at once, in 256 KiB."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frames", "messages"),
    [
        pytest.param(b"\x82\x00" * MANY, MANY, id="empty messages"),
        pytest.param(b"\x02\x00" + b"\x00\x00" * MANY + b"\x80\x00", 1, id="fragments"),
        pytest.param(b"\x89\x00" * MANY, 0, id="pings"),
        pytest.param(b"\x8a\x00" * MANY, 0, id="pongs"),
    ],
)
async def test_many_tiny_messages_do_not_block_the_event_loop(frames: bytes, messages: int) -> None:
    last = b"the last one"

    async def send(connection: ServerConnection) -> None:
        connection.transport.write(frames)
        await connection.send(last)
        await connection.wait_closed()

    async def receive(relay: str) -> int:
        received, patient = 0, replace(QUICK, message_timeout=60, ping_interval=60)
        async with aclosing(subscription(relay, settings=patient).frames(Cursors(0))) as all_:
            async for frame in all_:
                if frame == last:
                    break
                received += 1
        return received

    async with relay_that(send) as relay:
        with EventLoopWatch() as watch:
            task = asyncio.create_task(receive(relay), context=watch.context)
            async with asyncio.timeout(60):
                received = await task
    assert received == messages
    watch.check()


@asynccontextmanager
async def relay_that(handle: Callable[[ServerConnection], Awaitable[None]]) -> AsyncIterator[str]:
    """Serve each connection with `handle`; yield the address."""
    async with serve(handle, "127.0.0.1", 0, close_timeout=0.1) as server:
        [socket] = server.sockets
        yield f"ws://127.0.0.1:{socket.getsockname()[1]}"


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(b"\x82\x7e" + (20_001).to_bytes(2), id="announced"),
        pytest.param(b"\x82\x7f" + (2**63 - 1).to_bytes(8), id="announced, largest number with a sign"),
        pytest.param(b"\x82\x7f" + (2**63).to_bytes(8), id="announced, over the largest number with a sign"),
        pytest.param(b"\x02\x7d" + bytes(125) + (b"\x00\x7d" + bytes(125)) * 159 + b"\x00\x01", id="fragments"),
    ],
)
async def test_the_size_limit_applies_before_the_content_arrives(first: bytes) -> None:
    """The frame that exceeds the limit is only announced. The relay would send it again."""
    paths: list[str] = []

    async def send(connection: ServerConnection) -> None:
        assert connection.request is not None
        paths.append(connection.request.path)
        connection.transport.write(first if len(paths) == 1 else b"\x82\x04next")
        await connection.wait_closed()

    async with relay_that(send) as relay, asyncio.timeout(20):
        source = subscription(relay, max_bytes=20_000)
        async with aclosing(source.frames(Cursors(5, None))) as frames:
            assert await anext(frames) == b"next"
    assert paths == [f"{STREAM_PATH}?cursor=5", STREAM_PATH]
    assert source.oversized == {relay}


async def test_a_message_as_large_as_the_limit_is_received() -> None:
    async def send(connection: ServerConnection) -> None:
        await connection.send(bytes(20_000))
        await connection.send([bytes(12_000), bytes(8_000)])
        await connection.wait_closed()

    async with relay_that(send) as relay:
        frames = subscription(relay, max_bytes=20_000).frames(Cursors(0))
        async with asyncio.timeout(20), aclosing(frames):
            assert [await anext(frames), await anext(frames)] == [bytes(20_000)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "error"),
    [(replace(QUICK, ping_interval=0.2), "no answer to a ping"), (IMPATIENT, "no message for 0.5 s")],
)
async def test_a_connection_ends_although_the_relay_does_not_answer(settings: ConnectionSettings, error: str) -> None:
    """It answers neither pings nor the close frame."""

    async def read_nothing(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await connection.wait_closed()

    async with relay_that(read_nothing) as relay:
        assert error in await error_of_second_connection(subscription(relay, settings=settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "again"),
    [
        pytest.param(b"", b"", id="nothing"),
        pytest.param(b"", b"\x89\x00", id="pings only"),
        pytest.param(b"\x82\x7e" + (20_000).to_bytes(2), b"x", id="one byte at a time"),
        pytest.param(b"\x02\x01x", b"\x00\x00", id="a message without end"),
    ],
)
async def test_relay_that_completes_no_message_is_replaced_by_the_next_one(first: bytes, again: bytes) -> None:
    """Also if each of its connections lasts long enough to be stable, as with the settings of a daemon."""

    async def send(connection: ServerConnection) -> None:
        connection.transport.write(first)
        while not connection.transport.is_closing():
            connection.transport.write(again)
            await asyncio.sleep(0.01)

    async def send_message(connection: ServerConnection) -> None:
        await connection.send(b"honest")
        await connection.wait_closed()

    cursors, settings = Cursors(5), replace(QUICK, message_timeout=0.1, stable_after=0)
    async with (
        relay_that(send) as hostile,
        relay_that(send_message) as honest,
        asyncio.timeout(20),
        aclosing(subscription(hostile, honest, settings=settings).frames(cursors)) as frames,
    ):
        assert await anext(frames) == b"honest"
    assert cursors.asked == [hostile, honest]


@pytest.mark.slow
async def test_a_connection_that_ends_while_its_messages_are_processed_is_no_failure_of_the_relay() -> None:
    """The relay may not have waited, or its answer to a ping was not read in time."""

    async def send_one(connection: ServerConnection) -> None:
        await connection.send(bytes(1))

    cursors, settings = Cursors(None), replace(QUICK, ping_interval=1.0)
    async with relay_that(send_one) as first, relay_that(send_one) as second:
        source = subscription(first, second, settings=settings)
        async with asyncio.timeout(20), aclosing(source.frames(cursors)) as frames:
            await anext(frames)
            received = monotonic()
            await until(lambda: monotonic() > received + settings.ping_interval / 2)
            await anext(frames)
            assert cursors.asked == [first, first]
            await anext(frames)
            assert cursors.asked == [first, first, second]


@pytest.mark.slow
async def test_a_connection_ends_if_the_relay_does_not_read_the_answers_to_its_pings() -> None:
    async def send_pings(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        connection.transport.write((b"\x89\x7d" + bytes(125)) * MANY)
        await connection.wait_closed()

    async with relay_that(send_pings) as relay, asyncio.timeout(15):
        assert "connection lost" in await error_of_second_connection(subscription(relay))


async def test_the_handshake_uses_no_proxy_or_extension(net: FaultyNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HTTP_PROXY", "WS_PROXY", "ALL_PROXY"):
        for name in (variable, variable.lower()):
            monkeypatch.setenv(name, net.relay_url.replace("ws", "http"))
    async with ScriptedHost() as host:
        host.pages[STREAM_PATH] = http_response(status=503, headers={"Set-Cookie": "name=value"})
        assert "HTTP 503" in await error_of_second_connection(subscription(f"ws://127.0.0.1:{host.port}"))
    assert net.relay.requests.total() == 0
    for head in host.requests:
        assert "\r\nuser-agent: tests\r\n" in head
        assert "cookie" not in head
        assert "sec-websocket-extensions" not in head


@pytest.mark.slow
async def test_bytes_are_not_received_faster_than_they_are_parsed() -> None:
    size, count = 4 << 20, 16
    frame = b"\x82\x7f" + size.to_bytes(8) + bytes(size)
    connections: list[ServerConnection] = []

    async def send(connection: ServerConnection) -> None:
        connection.transport.write(frame * count)
        connections.append(connection)
        await connection.wait_closed()

    async with (
        relay_that(send) as relay,
        aclosing(subscription(relay, settings=replace(QUICK, message_timeout=60)).frames(Cursors(0))) as all_,
    ):
        assert await anext(all_) == bytes(size)
        assert connections[0].transport.get_write_buffer_size() > size * count / 2, "the rest is still to be sent"
