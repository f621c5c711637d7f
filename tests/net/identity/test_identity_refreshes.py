"""Refreshes of known identities: after a change, a bad signature, or a day."""

import asyncio

import pytest

from indexer.errors import UnavailableError
from tests.net.identity.identity_world import DID, KEYS, World, cached_key, dids


async def test_changed_identity_is_fetched_at_once(world: World) -> None:
    identities = world.identities()
    await identities.lookup(DID)
    world.key = 1
    identities.mark_stale([DID])
    assert identities.peek(DID) is None
    assert (await identities.lookup(DID)).key == KEYS[1]


async def test_result_of_a_lookup_from_before_a_change_is_stale(world: World) -> None:
    world.directory_gate.clear()
    identities = world.identities()
    waiting = asyncio.create_task(identities.lookup(DID))
    await asyncio.wait_for(world.request_received.wait(), 10)
    identities.mark_stale([DID])
    world.directory_gate.set()
    assert (await waiting).stale
    assert world.table[DID].stale
    world.key = 1
    identity = await identities.lookup(DID)
    assert (identity.key, identity.stale) == (KEYS[1], False)


async def test_missing_identity_is_unknown_after_a_change(world: World) -> None:
    world.problem = "not registered"
    identities = world.identities(refresh_rate=0.001)
    await identities.lookup(DID)
    identities.mark_stale([DID])
    assert (await identities.lookup(DID)).problem == "not registered"
    identities.mark_stale([DID])
    world.now += 5
    with pytest.raises(UnavailableError):  # the budget is spent
        await identities.lookup(DID)
    assert world.requests == 2


async def test_lookups_after_changes_are_at_least_five_seconds_apart(world: World) -> None:
    """Every change is fetched, but not earlier than five seconds after the previous lookup."""
    identities = world.identities()
    await identities.lookup(DID)
    started = world.now
    for _ in range(100):
        world.key = (world.key + 1) % len(KEYS)
        identities.mark_stale([DID])
        world.now += identities.refresh_delay(DID)
        assert (await identities.lookup(DID)).key == KEYS[world.key]
    assert world.requests == 101
    assert world.now - started >= 99 * 5


async def test_lookup_is_retried_early_if_the_directory_did_not_know_the_change(world: World) -> None:
    identities = world.identities()
    await identities.lookup(DID)
    identities.mark_stale([DID])
    assert (await identities.lookup(DID)).key == KEYS[0]
    world.key = 1
    assert identities.refresh_delay(DID, refresh=True) == 5
    world.now += 5
    assert (await identities.lookup(DID, refresh=True)).key == KEYS[1]
    assert identities.refresh_delay(DID, refresh=True) == 0, "nothing waits for a whole minute"
    assert (await identities.lookup(DID, refresh=True)).key == KEYS[1]
    refreshes = {("change", "asked"): 1, ("signature", "asked"): 1, ("signature", "too-soon"): 1}
    assert world.counted("identity_refreshes") == refreshes


async def test_refreshes_of_one_did_are_limited_to_one_per_minute(world: World) -> None:
    identities = world.identities()
    await identities.lookup(DID)
    for minute in (1, 2):
        world.key = minute
        for _ in range(1_000):
            assert (await identities.lookup(DID, refresh=True)).key == KEYS[minute]
        assert world.requests == 1 + minute
        world.now += 60


async def test_identity_is_refreshed_after_a_day_and_used_meanwhile(world: World) -> None:
    identities = world.identities()
    await identities.lookup(DID)
    world.key = 1
    world.now += 86_399
    await identities.preload([DID])
    await world.settle()
    assert world.requests == 1
    world.now += 1
    world.directory_gate.clear()
    await identities.preload([DID])
    assert cached_key(identities) == KEYS[0]
    assert (await identities.lookup(DID)).key == KEYS[0]
    world.directory_gate.set()
    await world.settle()
    assert cached_key(identities) == KEYS[1]
    assert world.requests == 2


async def test_failed_background_refresh_has_no_effect(world: World) -> None:
    identities = world.identities()
    await identities.lookup(DID)
    world.now += 86_400
    world.directory_down = True
    for _ in range(3):
        await identities.preload([DID])
        await world.settle()
        assert cached_key(identities) == KEYS[0]
    assert world.requests == 2
    world.now += 60
    await identities.preload([DID])
    await world.settle()
    assert world.requests == 3


async def test_identity_that_was_not_saved_is_refreshed_with_its_next_message(world: World) -> None:
    world.database_down = True
    identities = world.identities()
    await identities.lookup(DID)
    assert world.saves == 2, "the second time alone"
    world.database_down = False
    await identities.preload([DID])
    await world.settle()
    assert DID in world.table
    world.now += 3_600
    await identities.preload([DID])
    await world.settle()
    assert world.requests == 2


async def test_identity_is_looked_up_again_when_the_clock_is_set_back(world: World) -> None:
    """It has no key, so it is looked up again soon. Another one has, and its signature requests a refresh."""
    identities, (with_key, without) = world.identities(), dids(2)
    world.now += 86_400
    await identities.lookup(with_key)
    await identities.lookup(with_key, refresh=True)
    world.host, world.problem = "", "no PDS"
    await identities.lookup(without)
    world.now -= 86_400
    world.host, world.problem, world.key = "pds.example", None, 1
    assert (await identities.lookup(with_key, refresh=True)).key == KEYS[1]
    assert (await identities.lookup(without)).pds == "https://pds.example"


@pytest.mark.parametrize("change", ["all", "notification", "message"])
async def test_row_that_changes_while_it_is_loaded_is_looked_up(world: World, change: str) -> None:
    identities = world.identities()
    world.table[DID] = await world.resolve(DID, known=True)
    world.table_gate.clear()
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(identities.preload([DID]))
        await world.settle()
        world.key = 1
        if change == "message":
            identities.mark_stale([DID])
        else:
            identities.forget(None if change == "all" else [DID])
        world.table_gate.set()
    assert loading.done()
    assert (await identities.lookup(DID)).key == KEYS[1]
    world.key = 2
    assert (await identities.lookup(DID)).key == KEYS[1], "later loads are not in doubt"
