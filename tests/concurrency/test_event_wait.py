"""Waits for events with a time limit."""

import asyncio

from indexer.concurrency.event_wait import wait_for_event


async def test_wait_ends_when_the_event_is_set() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_for_event(event, None))
    await asyncio.sleep(0)
    assert not waiting.done()
    event.set()
    assert await waiting


async def test_wait_ends_when_the_time_is_over() -> None:
    assert not await wait_for_event(asyncio.Event(), 0.01)
