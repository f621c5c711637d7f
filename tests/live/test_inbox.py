import asyncio
from time import monotonic

import pytest

from indexer.live.inbox import MESSAGE_BYTES, Inbox
from indexer.reasons import Rejection
from indexer.sync.batch import ReceivedMessage
from indexer.sync.events import MalformedEvent
from indexer.sync.stream import NO_STREAM, Origin


def message(seq: int, size: int = 10, origin: Origin = NO_STREAM) -> ReceivedMessage:
    return ReceivedMessage(origin, seq, b"x" * size, MalformedEvent(Rejection.FIELD_INVALID, "", "", seq, None))


async def test_full_inbox_blocks_put_until_messages_are_settled() -> None:
    inbox = Inbox(max_bytes=2 * MESSAGE_BYTES + 25)
    for seq in (1, 2, 3):
        await inbox.put(message(seq))
    waiting = asyncio.create_task(inbox.put(message(4)))
    taken = await inbox.take(2)
    await asyncio.sleep(0)
    assert not waiting.done(), "a message that was taken still counts"
    inbox.settle(taken)
    await waiting
    assert [item.seq for item in await inbox.take(10)] == [3, 4]
    assert inbox.unsettled_bytes == 2 * (MESSAGE_BYTES + 10)


async def test_message_larger_than_the_bound_fits() -> None:
    inbox = Inbox(max_bytes=5)
    await asyncio.wait_for(inbox.put(message(1, size=1_000)), 5)
    assert len(await inbox.take(1)) == 1


async def test_messages_put_back_come_first_in_their_order() -> None:
    inbox = Inbox(max_bytes=100_000)
    for seq in range(1, 6):
        await inbox.put(message(seq))
    first = await inbox.take(3)
    inbox.put_back(first[1:])
    assert [item.seq for item in await inbox.take(10)] == [2, 3, 4, 5]


async def test_peek_returns_the_messages_that_take_returns_next() -> None:
    inbox = Inbox(max_bytes=100_000)
    for seq in range(1, 4):
        await inbox.put(message(seq))
    assert [item.seq for item in inbox.peek(2)] == [1, 2]
    assert len(inbox.peek(10)) == len(await inbox.take(10)) == 3
    assert inbox.peek(10) == []


async def test_take_returns_what_is_queued_up_to_the_maximum() -> None:
    inbox = Inbox(max_bytes=100_000)
    taking = asyncio.create_task(inbox.take(2))
    await asyncio.sleep(0)
    await inbox.put(message(1))
    assert len(await asyncio.wait_for(taking, 5)) == 1, "the first message is enough"
    for seq in (2, 3, 4):
        await inbox.put(message(seq))
    assert len(await asyncio.wait_for(inbox.take(2), 5)) == 2, "maximum size"
    assert len(inbox) == 1


async def test_take_waits_for_more_until_a_time_or_until_there_are_enough() -> None:
    inbox = Inbox(max_bytes=5 * (MESSAGE_BYTES + 10))
    await inbox.put(message(1))
    taking = asyncio.create_task(inbox.take(3, not_before=monotonic() + 60))
    await inbox.put(message(2))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(taking), 0.05)
    inbox.put_back([message(0)])
    assert [item.seq for item in await asyncio.wait_for(taking, 5)] == [0, 1, 2], "enough"
    await inbox.put(message(3))
    assert await asyncio.wait_for(inbox.take(3, not_before=monotonic() + 0.05), 5) == [message(3)], "the time is over"
    for seq in (4, 5):
        await inbox.put(message(seq))
    assert inbox.is_full(NO_STREAM)
    assert len(await asyncio.wait_for(inbox.take(10, not_before=monotonic() + 60), 5)) == 2, "no more can arrive"


async def test_take_returns_nothing_after_the_idle_timeout() -> None:
    inbox = Inbox(max_bytes=100_000)
    assert await asyncio.wait_for(inbox.take(2, idle_timeout=0.01), 5) == []


async def test_messages_that_were_taken_are_unsettled() -> None:
    inbox = Inbox(max_bytes=100_000)
    await asyncio.wait_for(inbox.wait_until_settled(), 5)
    await inbox.put(message(1))
    taken = await inbox.take(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(inbox.wait_until_settled(), 0.05)
    inbox.settle(taken)
    await asyncio.wait_for(inbox.wait_until_settled(), 5)
    assert (inbox.unsettled, inbox.unsettled_bytes) == (0, 0)


async def test_a_stream_that_floods_does_not_delay_another() -> None:
    flood, other = Origin("wss://flood.test"), Origin("wss://other.test")
    inbox = Inbox(max_bytes=8 * (MESSAGE_BYTES + 10), streams=2)
    for seq in range(1, 5):
        await inbox.put(message(seq, origin=flood))
    waiting = asyncio.create_task(inbox.put(message(5, origin=flood)))
    for seq in (1, 2):
        await asyncio.wait_for(inbox.put(message(seq, origin=other)), 5)
    assert not waiting.done(), "half of the bytes"
    in_turn = [(flood, 1), (other, 1), (flood, 2), (other, 2), (flood, 3), (flood, 4)]
    assert [(item.origin, item.seq) for item in inbox.peek(10)] == in_turn
    taken = await inbox.take(3)
    assert [(item.origin, item.seq) for item in taken] == in_turn[:3]
    inbox.put_back(taken[1:])
    rest = [(other, 1), (flood, 2), (flood, 3), (other, 2), (flood, 4)]
    assert [(item.origin, item.seq) for item in await inbox.take(10)] == rest, "those put back come first"
    inbox.settle([item for item in taken if item.origin == flood][:1])
    await asyncio.wait_for(waiting, 5)
    assert (len(inbox), inbox.unsettled) == (1, 6)


async def test_streams_are_settled_apart() -> None:
    first, second = Origin("wss://first.test"), Origin("wss://second.test", epoch=1)
    inbox = Inbox(max_bytes=100_000, streams=2)
    for origin in (first, second):
        await inbox.put(message(1, origin=origin))
    inbox.settle([one for one in await inbox.take(2) if one.origin == first])
    await asyncio.wait_for(inbox.wait_until_settled(first), 5)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(inbox.wait_until_settled(second), 0.05)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(inbox.wait_until_settled(), 0.05)
    assert inbox.is_full(first) is False
    await inbox.put(message(2, origin=first))
    assert inbox.unsettled == 2
