"""The rate limit of directories: known identities first, then new DIDs, the newest first."""

import asyncio
from contextlib import suppress

import pytest

from indexer.net.identity.did_resolver import MAX_NEW, DirectoryTurns
from tests.waiting import until


async def start(turns: DirectoryTurns, served: list[str], name: str, *, known: bool) -> asyncio.Task[None]:
    """Start to wait for a turn, and return when the waiter is in the queue."""

    async def wait() -> None:
        if await turns.wait(known=known):
            served.append(name)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


async def test_known_identities_come_before_new_dids() -> None:
    turns, served = DirectoryTurns(40.0), list[str]()
    for _ in range(40):
        await turns.wait(known=True)
    waiting = [await start(turns, served, f"new {number}", known=False) for number in range(6)]
    waiting += [await start(turns, served, f"known {number}", known=True) for number in range(2)]
    await asyncio.gather(*waiting)
    assert served == ["known 0", "known 1", "new 5", "new 4", "new 3", "new 2", "new 1", "new 0"]


@pytest.mark.slow
async def test_the_queue_of_new_dids_is_bounded_and_takes_newcomers() -> None:
    turns, served = DirectoryTurns(4.0), list[str]()
    for _ in range(4):
        await turns.wait(known=True)
    waiting = [await start(turns, served, str(number), known=False) for number in range(10 * MAX_NEW)]
    await until(lambda: len(served) >= 4)
    assert sum(not task.done() for task in waiting) <= MAX_NEW, "the wait of the others has ended"
    assert all(task.done() for task in waiting[: 9 * MAX_NEW]), "no lookup waits for long"
    assert str(10 * MAX_NEW - 1) in served, "the newest one had its turn"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.slow
async def test_cancelled_waiters_use_no_turn() -> None:
    """The hundred known ones would take 25 seconds. Some may get their turn before they are cancelled."""
    turns, served = DirectoryTurns(4.0), list[str]()
    for _ in range(4):
        await turns.wait(known=False)
    cancelled = [await start(turns, served, "cancelled", known=known) for known in (True, False) for _ in range(100)]
    for task in cancelled:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await asyncio.wait_for(await start(turns, served, "next", known=False), 10)
    assert served[-1] == "next"


@pytest.mark.slow
async def test_the_rate_holds_after_a_burst_of_one_second() -> None:
    loop, turns = asyncio.get_running_loop(), DirectoryTurns(100.0)
    began = loop.time()
    await asyncio.gather(*[turns.wait(known=number % 2 == 0) for number in range(120)])
    assert loop.time() - began >= 0.18
