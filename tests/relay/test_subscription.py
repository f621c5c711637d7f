import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.localnet.network import LocalNetwork
from indexer.relay.subscription import Pace, Subscription
from indexer.sync.events import StreamError
from indexer.sync.frames import decode_frame

QUICK = Pace(open=5, ping=5, silence=0.5, pause_first=0.01, pause_most=0.05)


@pytest.fixture
async def net() -> AsyncIterator[LocalNetwork]:
    async with LocalNetwork() as network:
        yield network


def subscription(*relays: str, max_bytes: int = 5_000_000) -> Subscription:
    return Subscription(relays, max_bytes, "tests", pace=QUICK)


class Cursors:
    """What the subscription is told to begin with, and what it asked."""

    def __init__(self, *cursors: int | None) -> None:
        self.cursors = list(cursors)
        self.asked: list[str] = []

    async def __call__(self, relay: str) -> int | None:
        self.asked.append(relay)
        return self.cursors.pop(0) if len(self.cursors) > 1 else self.cursors[0]


async def take(source: Subscription, cursors: Cursors, count: int) -> list[int | None]:
    """The sequence numbers of the next `count` messages."""
    seqs: list[int | None] = []
    async with asyncio.timeout(20), aclosing(source.frames(cursors)) as frames:
        async for frame in frames:
            seqs.append(decode_frame(frame, DEFAULT_LIMITS).seq)
            if len(seqs) == count:
                return seqs
    raise AssertionError("the frames ended")


async def test_it_begins_behind_the_cursor(net: LocalNetwork) -> None:
    net.relay.inclusive = False
    account = net.create_account()
    for n in range(3):
        account.create("com.example.note", {"n": n})
    assert await take(subscription(net.relay_url), Cursors(2), 3) == [3, 4, 5]


async def test_a_lost_connection_is_made_again_with_the_cursor_of_then(net: LocalNetwork) -> None:
    net.relay.inclusive = False
    account = net.create_account()
    source, cursors = subscription(net.relay_url), Cursors(0, 2)
    seqs = []
    async with asyncio.timeout(20), aclosing(source.frames(cursors)) as frames:
        async for frame in frames:
            seqs.append(decode_frame(frame, DEFAULT_LIMITS).seq)
            if len(seqs) == 3:
                assert net.relay.cut() == 1
                account.create("com.example.note", {})
            if seqs[-1] == net.relay.seq and len(seqs) > 4:
                break
    assert seqs[:3] == [1, 2, 3]
    assert seqs[seqs.index(3, 3) :] == list(range(3, net.relay.seq + 1))
    assert len(cursors.asked) == 2


async def test_silence_ends_a_connection(net: LocalNetwork) -> None:
    thrice = asyncio.Event()

    async def cursor_of(_relay: str) -> int | None:
        asked.append(None)
        if len(asked) == 3:
            thrice.set()
        return None

    asked: list[None] = []
    source = subscription(net.relay_url)
    async with aclosing(source.frames(cursor_of)) as frames:
        reading = asyncio.ensure_future(anext(frames))
        await asyncio.wait_for(thrice.wait(), 20)
        assert source.last_error is not None
        assert "no message for 0.5 s" in source.last_error
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_text_message_is_handed_out_to_be_refused(net: LocalNetwork) -> None:
    net.relay.inclusive = False
    net.create_account()
    net.relay.inject("text")
    source, cursors = subscription(net.relay_url), Cursors(net.relay.seq - 1)
    async with asyncio.timeout(20), aclosing(source.frames(cursors)) as frames:
        assert await anext(frames) == b"text"
    assert len(cursors.asked) == 1


async def test_a_message_over_the_limit_is_stepped_over(net: LocalNetwork) -> None:
    net.relay.inclusive = False
    account = net.create_account()
    before = net.relay.seq
    account.create("com.example.note", {"text": "x" * 30_000})
    account.create("com.example.note", {"text": "small"})
    source = subscription(net.relay_url, max_bytes=20_000)
    seqs = await take(source, Cursors(before), 1)
    assert seqs == [before + 2]
    assert source.skipped == 1


LARGE, SMALL = {"text": "x" * 30_000}, {"text": "small"}


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize(
    "records",
    [
        pytest.param([SMALL, LARGE, SMALL, SMALL, LARGE, SMALL], id="apart"),
        pytest.param([SMALL, LARGE, LARGE, LARGE, SMALL, SMALL, SMALL], id="in-a-row"),
        pytest.param([LARGE, LARGE, LARGE, SMALL, LARGE, SMALL], id="first"),
    ],
)
async def test_only_what_is_too_large_is_stepped_over(
    net: LocalNetwork, inclusive: bool, records: list[dict[str, str]]
) -> None:
    """Wherever it lies in the stream, and however often; whether relays send the cursor's own message or not."""
    net.relay.inclusive = inclusive
    account = net.create_account()
    first = net.relay.seq + 1
    for record in records:
        account.create("com.example.note", record)
    source = subscription(net.relay_url, max_bytes=20_000)
    assert await each_seq(source, first, net.relay.seq) == [first + n for n, r in enumerate(records) if r is SMALL]
    assert source.skipped > 0


async def test_a_connection_that_brought_messages_and_broke_has_passed_what_was_too_large(net: LocalNetwork) -> None:
    net.relay.inclusive = False
    account = net.create_account()
    first = net.relay.seq + 1
    for record in (SMALL, LARGE, SMALL):
        account.create("com.example.note", record)
    source = subscription(net.relay_url, max_bytes=20_000)
    seen: list[int] = []

    async def cursor_of(_relay: str) -> int:
        begun.append(len(seen))
        if len(begun) == 3:  # the connection behind the large message ended by silence
            for _ in range(2):
                account.create("com.example.note", SMALL)
        return seen[-1] if seen else first - 1

    begun: list[int] = []
    async with asyncio.timeout(20), aclosing(source.frames(cursor_of)) as frames:
        async for frame in frames:
            seen.append(decode_frame(frame, DEFAULT_LIMITS).seq or 0)
            if seen[-1] == first + 4:
                break
    assert seen == [first, first + 2, first + 3, first + 4]
    assert source.skipped == 1


async def each_seq(source: Subscription, first: int, last: int) -> list[int]:
    """The numbers from `first` to `last` that come, without repetitions; the cursor is always the last that came."""
    seen: list[int] = []

    async def cursor_of(_relay: str) -> int:
        return seen[-1] if seen else first - 1

    async with asyncio.timeout(20), aclosing(source.frames(cursor_of)) as frames:
        async for frame in frames:
            seq = decode_frame(frame, DEFAULT_LIMITS).seq
            assert seq is not None
            if seq >= first and seq not in seen:
                seen.append(seq)
            if seq == last:
                break
    return seen


async def test_a_relay_that_sends_nothing_but_too_large_messages_is_left_for_another(
    net: LocalNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.relay.subscription.STEPS", 2)
    account = net.create_account()
    before = net.relay.seq
    for _ in range(9):
        account.create("com.example.note", LARGE)
    net.relay.inclusive = False
    cursors = Cursors(before, before, 0)
    async with LocalNetwork() as other:
        other.create_account()
        source = subscription(net.relay_url, other.relay_url, max_bytes=20_000)
        await take(source, cursors, 1)
    assert cursors.asked == [net.relay_url, net.relay_url, other.relay_url]


@pytest.mark.parametrize("location", ["ws://[", "elsewhere"])
async def test_a_redirect_is_one_more_lost_connection(net: LocalNetwork, location: str) -> None:
    """Wherever it leads: nobody is asked for a stream whom the operator hasn't named."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        target = net.relay_url if location == "elsewhere" else location
        writer.write(f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    thrice = asyncio.Event()

    async def cursor_of(_relay: str) -> None:
        asked.append(None)
        if len(asked) == 3:
            thrice.set()

    asked: list[None] = []
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        source = subscription(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with aclosing(source.frames(cursor_of)) as frames:
            reading = asyncio.ensure_future(anext(frames))
            await asyncio.wait({reading, asyncio.ensure_future(thrice.wait())}, return_when=asyncio.FIRST_COMPLETED)
            assert not reading.done()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    assert "HTTP 302" in (source.last_error or "")
    assert net.relay.requests.total() == 0


async def test_the_next_relay_is_tried_when_one_is_away(net: LocalNetwork) -> None:
    net.create_account()
    away = "ws://127.0.0.1:1"
    source, cursors = subscription(away, net.relay_url), Cursors(0)
    assert len(await take(source, cursors, 2)) == 2
    assert cursors.asked[:2] == [away, net.relay_url]


async def test_error_frames_are_handed_out_before_the_end(net: LocalNetwork) -> None:
    net.create_account()
    source = subscription(net.relay_url)
    async with asyncio.timeout(20), aclosing(source.frames(Cursors(10_000))) as frames:
        event = decode_frame(await anext(frames), DEFAULT_LIMITS)
    assert isinstance(event, StreamError)
    assert event.error == "FutureCursor"
