"""Cancellation of tasks that wait for a connection of the pool."""

import asyncio
from enum import Enum, auto

from indexer.store import Store

TRIALS = 200
DID = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"


class End(Enum):
    CANCELLED = auto()
    COMPLETED_BEFORE = auto()
    CANCELLATION_LOST = auto()


async def hold_connection(store: Store, held: asyncio.Event, release: asyncio.Event) -> None:
    async with store.consistent_read(DID):
        held.set()
        await release.wait()


async def cancel_waiting_task(store: Store, rounds: int) -> End:
    """Cancel a task that waits for the only connection, `rounds` event loop rounds after its holder may end."""
    held, release = asyncio.Event(), asyncio.Event()
    holder = asyncio.create_task(hold_connection(store, held, release))
    await held.wait()
    waiting = asyncio.create_task(store.repos([DID]))
    await asyncio.sleep(0)
    release.set()
    for _ in range(rounds):
        await asyncio.sleep(0)
    requested = waiting.cancel()
    await holder
    try:
        await waiting
    except asyncio.CancelledError:
        return End.CANCELLED
    return End.CANCELLATION_LOST if requested else End.COMPLETED_BEFORE


async def test_a_cancelled_wait_for_a_connection_ends_the_task(database: str) -> None:
    """Also when the connection becomes free in the same round of the event loop: the trials approach this round."""
    store = await Store.open(database, connections=1)
    ends: list[End] = []
    rounds, step = 0, 1
    try:
        for _ in range(TRIALS):
            ends.append(await cancel_waiting_task(store, rounds))
            completed = [end is End.COMPLETED_BEFORE for end in ends[-2:]]
            step = max(1, step // 2) if completed[0] != completed[-1] else 2 * step
            rounds = max(0, rounds - step) if completed[-1] else rounds + step
    finally:
        await store.close()
    assert {End.CANCELLED, End.COMPLETED_BEFORE} <= set(ends)
    assert End.CANCELLATION_LOST not in ends
