"""Waits for events with a time limit, and the bounded dict, compared with a list of writes."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.concurrency.event_wait import wait_for_event


async def test_wait_ends_when_the_event_is_set_or_the_time_is_over() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_for_event(event, None))
    await asyncio.sleep(0)
    assert not waiting.done()
    event.set()
    assert await waiting
    assert not await wait_for_event(asyncio.Event(), 0.01)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers())), st.integers(1, 5))
def test_bounded_dict_has_the_entries_that_were_written_last(writes: list[tuple[int, int]], max_entries: int) -> None:
    bounded = BoundedDict[int, int](max_entries)
    expected: list[tuple[int, int]] = []
    for key, value in writes:
        bounded[key] = value
        expected = [*(entry for entry in expected if entry[0] != key), (key, value)][-max_entries:]
        assert list(bounded.items()) == expected
