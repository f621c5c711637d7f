"""The search for an event time at a relay on loopback."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.demo.local_relay import message_frame
from indexer.net.relay.seek import Entry, Sighting, StreamSeek
from indexer.net.relay.subscription import STREAM_PATH
from tests.faulty_network import FaultyNetwork, FaultyRelay
from tests.net.http.scripted_host import ScriptedHost, hang, http_response

BEGIN = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
DID = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"


@pytest.fixture
async def net() -> AsyncIterator[FaultyNetwork]:
    async with FaultyNetwork() as network:
        yield network


def stream_seek(
    *, first_distance: int = 10, message_timeout: float = 5.0, connect_timeout: float = 5.0, pause_timeout: float = 0.1
) -> StreamSeek:
    return StreamSeek(
        DEFAULT_LIMITS,
        "tests",
        connect_timeout=connect_timeout,
        message_timeout=message_timeout,
        pause_timeout=pause_timeout,
        first_distance=first_distance,
    )


def send(relay: FaultyRelay, seconds: Iterable[float], *, distance: int = 1) -> None:
    """Let the relay send one #identity for each event time after BEGIN. `distance`: between sequence numbers."""
    for time in seconds:
        relay.seq += distance - 1
        moment = datetime.fromtimestamp(BEGIN + time, UTC).isoformat()
        relay.inject(message_frame("#identity", {"did": DID, "seq": relay.seq + 1, "time": moment}))


@pytest.mark.parametrize("announces", [True, False])
@pytest.mark.parametrize("inclusive", [True, False])
async def test_a_stream_is_entered_shortly_before_the_target(
    net: FaultyNetwork, inclusive: bool, announces: bool
) -> None:
    net.relay.inclusive, net.relay.announces, net.relay.window = inclusive, announces, 1_000
    send(net.relay, range(1_500), distance=3)
    search = asyncio.create_task(stream_seek(pause_timeout=5.0)(net.relay_url, BEGIN + 1_200))
    while not search.done():
        send(net.relay, [1_500.0], distance=3)  # the newest message is one that arrives during the search
        await asyncio.wait([search], timeout=0.05)
    entry = search.result()
    assert entry.oldest_time is not None
    assert BEGIN + 501 <= entry.oldest_time < BEGIN + 600
    assert entry.cursor is not None
    first_wanted = net.relay.log[1_200].seq
    assert first_wanted - 3 * 4 * 300 < entry.cursor < first_wanted


@pytest.mark.parametrize("announces", [True, False])
async def test_a_window_that_does_not_reach_back_is_wanted_as_a_whole(net: FaultyNetwork, announces: bool) -> None:
    assert await stream_seek(message_timeout=0.1)(net.relay_url, BEGIN) == Entry(None, None)
    net.relay.announces, net.relay.window = announces, 100
    send(net.relay, range(5))
    assert await stream_seek()(net.relay_url, BEGIN + 100) == Entry(0, BEGIN + 1)
    send(net.relay, range(5, 300))
    assert await stream_seek()(net.relay_url, BEGIN + 50) == Entry(0, BEGIN + 201)


async def test_a_cursor_in_the_future_is_not_in_the_stream(net: FaultyNetwork) -> None:
    send(net.relay, range(5))
    assert await stream_seek().probe(net.relay_url, 100) is None


async def test_a_relay_that_silently_continues_live_does_not_have_the_cursor(net: FaultyNetwork) -> None:
    net.relay.announces = False
    send(net.relay, range(5))
    probe = asyncio.create_task(stream_seek(message_timeout=30).probe(net.relay_url, 10_000))
    while not probe.done():  # the messages are newer than the connection, whenever it is ready
        send(net.relay, [6.0])
        await asyncio.wait([probe], timeout=0.01)
    assert probe.result() is None
    assert net.relay.seq > 5


async def test_messages_without_a_readable_time_do_not_count(net: FaultyNetwork) -> None:
    net.relay.inject("text")
    net.relay.inject(b"\xff")
    for time in ("", "yesterday", "2026-01-01T00:00:00", "9999-99-99T00:00:00Z"):
        net.relay.inject(message_frame("#identity", {"did": DID, "seq": net.relay.seq + 1, "time": time}))
    send(net.relay, [1.0, 2.0])
    assert await stream_seek().probe(net.relay_url, 0) == Sighting(3, (BEGIN + 1, BEGIN + 2))


async def test_a_first_message_over_the_limit_proves_nothing(net: FaultyNetwork) -> None:
    net.relay.inject(b"x" * (DEFAULT_LIMITS.frame_bytes + 1))
    send(net.relay, range(20))
    assert await stream_seek().probe(net.relay_url, 0) == Sighting(0, ())


async def test_a_relay_that_cannot_be_reached_ends_the_search() -> None:
    with pytest.raises(ConnectionRefusedError):
        await stream_seek()("ws://127.0.0.1:1", BEGIN)
    async with ScriptedHost() as host:
        host.pages[f"{STREAM_PATH}?cursor=0"] = http_response(status=503)
        with pytest.raises(ConnectionError, match="HTTP 503"):
            await stream_seek()(f"ws://127.0.0.1:{host.port}", BEGIN)
        host.pages[f"{STREAM_PATH}?cursor=0"] = hang
        with pytest.raises(TimeoutError):
            await stream_seek(connect_timeout=0.1)(f"ws://127.0.0.1:{host.port}", BEGIN)
