import asyncio

import pytest

from indexer.reasons import Rejection
from indexer.service.inbox import MESSAGE_BYTES, Inbox
from indexer.sync.batch import Received
from indexer.sync.events import MalformedEvent


def message(seq: int, size: int = 10) -> Received:
    return Received(seq, b"x" * size, MalformedEvent(Rejection.FIELD_INVALID, "", "", seq, None))


async def test_a_full_inbox_stops_the_reader_until_messages_are_settled() -> None:
    inbox = Inbox(max_bytes=2 * MESSAGE_BYTES + 25)
    for seq in (1, 2, 3):
        await inbox.put(message(seq))
    waiting = asyncio.create_task(inbox.put(message(4)))
    taken = await inbox.take(2, linger=0)
    await asyncio.sleep(0)
    assert not waiting.done(), "what was taken is still held"
    inbox.finished(taken)
    await waiting
    assert [item.seq for item in await inbox.take(10, linger=0)] == [3, 4]
    assert inbox.held_bytes == 2 * (MESSAGE_BYTES + 10)


async def test_one_message_over_the_bound_still_fits() -> None:
    inbox = Inbox(max_bytes=5)
    await asyncio.wait_for(inbox.put(message(1, size=1_000)), 5)
    assert len(await inbox.take(1, linger=0)) == 1


async def test_messages_put_back_come_first_in_their_order() -> None:
    inbox = Inbox(max_bytes=100_000)
    for seq in range(1, 6):
        await inbox.put(message(seq))
    first = await inbox.take(3, linger=0)
    inbox.put_back(first[1:])
    assert [item.seq for item in await inbox.take(10, linger=0)] == [2, 3, 4, 5]


async def test_a_batch_is_cut_by_count_or_by_time() -> None:
    inbox = Inbox(max_bytes=100_000)
    taking = asyncio.create_task(inbox.take(2, linger=60))
    await inbox.put(message(1))
    await inbox.put(message(2))
    await inbox.put(message(3))
    assert len(await asyncio.wait_for(taking, 5)) == 2, "full before its time"
    assert len(await asyncio.wait_for(inbox.take(2, linger=0.01), 5)) == 1, "its time came"


async def test_empty_means_settled_not_taken() -> None:
    inbox = Inbox(max_bytes=100_000)
    await asyncio.wait_for(inbox.empty(), 5)
    await inbox.put(message(1))
    taken = await inbox.take(1, linger=0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(inbox.empty(), 0.05)
    inbox.finished(taken)
    await asyncio.wait_for(inbox.empty(), 5)
    assert (inbox.held, inbox.held_bytes) == (0, 0)
