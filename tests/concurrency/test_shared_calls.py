"""Shared calls: who gets which result, and what happens if a caller is cancelled or a call fails."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from indexer.concurrency.shared_calls import SharedCalls


def at_most(count: int) -> Callable[[Sequence[int]], bool]:
    return lambda numbers: len(numbers) <= count


class Doubler:
    """Doubles numbers. A call ends when `release` is set."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.begun = asyncio.Event()
        self.release = asyncio.Event()

    async def double(self, numbers: list[int]) -> dict[int, int]:
        self.calls.append(numbers)
        self.begun.set()
        await self.release.wait()
        if 0 in numbers:
            raise ZeroDivisionError
        return {number: 2 * number for number in numbers}


async def start(doubler: Doubler, shared: SharedCalls[int, dict[int, int]], *numbers: int) -> list[asyncio.Task]:  # type: ignore[type-arg]
    """Return one caller per number. The first call runs, and the others wait."""
    callers = [asyncio.create_task(shared.add([number])) for number in numbers]
    await doubler.begun.wait()
    return callers


async def test_items_that_wait_share_the_next_call() -> None:
    doubler = Doubler()
    callers = await start(doubler, SharedCalls(doubler.double, at_most(10)), 1, 2, 3)
    doubler.release.set()
    results = await asyncio.gather(*callers)
    assert [result[number] for number, result in enumerate(results, 1)] == [2, 4, 6]
    assert [sorted(call) for call in doubler.calls] == [[1, 2, 3]] or [sorted(c) for c in doubler.calls] == [
        [1],
        [2, 3],
    ]


async def test_one_call_gets_no_more_items_than_allowed_unless_one_caller_has_more() -> None:
    doubler = Doubler()
    callers = await start(doubler, SharedCalls(doubler.double, at_most(2)), *range(1, 6))
    doubler.release.set()
    await asyncio.gather(*callers)
    assert max(map(len, doubler.calls)) == 2
    assert sorted(number for call in doubler.calls for number in call) == [1, 2, 3, 4, 5]
    assert await SharedCalls(doubler.double, at_most(2)).add([1, 2, 3]) == {1: 2, 2: 4, 3: 6}


async def test_call_of_a_cancelled_caller_is_repeated_for_the_others() -> None:
    doubler = Doubler()
    first, *others = await start(doubler, SharedCalls(doubler.double, at_most(10)), 1, 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    doubler.release.set()
    assert [await other for other in others] == [{2: 4}]
    assert first.cancelled()


async def test_exception_reaches_the_callers_of_the_call_and_no_others() -> None:
    doubler = Doubler()
    callers = await start(doubler, SharedCalls(doubler.double, at_most(1)), 0, 1)
    doubler.release.set()
    failed, doubled = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(failed, ZeroDivisionError)
    assert doubled == {1: 2}


async def test_waiting_caller_that_is_cancelled_takes_its_items_away() -> None:
    doubler = Doubler()
    shared = SharedCalls(doubler.double, at_most(1))
    first, second = await start(doubler, shared, 1, 2)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    doubler.release.set()
    assert await first == {1: 2}
    assert doubler.calls == [[1]]


async def test_calls_of_several_objects_are_limited_and_get_the_items_that_arrive_before_they_begin() -> None:
    running = asyncio.Semaphore(1)
    doubler = Doubler()
    first, second = (SharedCalls(doubler.double, at_most(10), running) for _ in range(2))
    callers = [*await start(doubler, first, 1), *await start(doubler, second, 2)]
    await asyncio.sleep(0)
    callers += await start(doubler, second, 3)
    await asyncio.sleep(0)
    assert doubler.calls == [[1]], "a call began although another one was running"
    doubler.release.set()
    await asyncio.gather(*callers)
    assert doubler.calls == [[1], [2, 3]]


async def test_caller_that_is_cancelled_while_others_run_leaves_the_limit_as_it_was() -> None:
    running = asyncio.Semaphore(1)
    doubler = Doubler()
    first, second = (SharedCalls(doubler.double, at_most(10), running) for _ in range(2))
    [caller], [waiting] = await start(doubler, first, 1), await start(doubler, second, 2)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    doubler.release.set()
    assert await caller == {1: 2}
    assert await second.add([3]) == {3: 6}
    assert doubler.calls == [[1], [3]]
