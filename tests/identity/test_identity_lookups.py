"""Lookups in flight: shared, limited, cancelled, and failed ones."""

import asyncio

import pytest

from indexer.errors import UnavailableError
from indexer.identity import CachedIdentity
from indexer.identity.identity_cache import MAX_LOOKUPS, IdentityCache
from tests.identity.identity_world import DID, KEYS, World, cached_key, dids

Lookup = asyncio.Task[CachedIdentity]


async def begin_lookups(world: World, identities: IdentityCache, count: int) -> list[Lookup]:
    """Begin lookups of one DID. The directory has received a request, and does not respond until its gate is set."""
    world.directory_gate.clear()
    lookups = [asyncio.create_task(identities.lookup(DID)) for _ in range(count)]
    await asyncio.wait_for(world.request_received.wait(), 10)
    return lookups


async def begin_all_lookups_of_new_dids(world: World, identities: IdentityCache) -> list[Lookup]:
    """Begin as many lookups of new DIDs as may be in flight. DID is known; the directory does not respond any more."""
    await identities.lookup(DID)
    world.directory_gate.clear()
    lookups = [asyncio.create_task(identities.lookup(did)) for did in dids(MAX_LOOKUPS)]
    await world.settle()
    return lookups


async def test_concurrent_lookups_share_one_request(world: World) -> None:
    lookups = await begin_lookups(world, world.identities(), 20)
    world.directory_gate.set()
    assert {(await task).key for task in lookups} == {KEYS[0]}
    assert world.requests == 1
    assert world.lookups == [("plc", "found")]


async def test_cancelled_caller_does_not_cancel_the_lookup_of_others(world: World) -> None:
    first, second = await begin_lookups(world, world.identities(), 2)
    first.cancel()
    world.directory_gate.set()
    assert (await second).key == KEYS[0]


async def test_close_cancels_lookups(world: World) -> None:
    identities = world.identities()
    [lookup] = await begin_lookups(world, identities, 1)
    await asyncio.wait_for(identities.close(), 10)
    with pytest.raises(asyncio.CancelledError):
        await lookup


async def test_lookups_in_flight_are_limited(world: World) -> None:
    identities = world.identities(max_entries=500)
    lookups = await begin_all_lookups_of_new_dids(world, identities)
    with pytest.raises(UnavailableError):
        await identities.lookup("did:plc:aaaaaaaaaaaaaaaaaaaaaaaa")
    world.directory_gate.set()
    await asyncio.gather(*lookups)
    assert world.requests == 1 + MAX_LOOKUPS


async def test_lookups_of_new_dids_do_not_prevent_those_of_known_identities(world: World) -> None:
    identities = world.identities(max_entries=500)
    lookups = await begin_all_lookups_of_new_dids(world, identities)
    world.key = 1
    refreshed = asyncio.create_task(identities.lookup(DID, refresh=True))
    await world.settle()
    world.directory_gate.set()
    assert (await refreshed).key == KEYS[1]
    await asyncio.gather(*lookups)
    assert world.known_requests == 1


async def test_waiting_for_a_refresh_has_a_timeout(world: World) -> None:
    identities = world.identities(timeout=0.01)
    await identities.lookup(DID)
    identities.mark_stale([DID])
    world.directory_gate.clear()
    assert (await asyncio.wait_for(identities.lookup(DID), 10)).key == KEYS[0]
    world.key = 1
    world.directory_gate.set()
    await world.settle()
    assert cached_key(identities) == KEYS[1]


async def test_known_identity_is_used_during_an_outage(world: World) -> None:
    identities = world.identities()
    await identities.lookup(DID)
    world.directory_down = True
    assert (await identities.lookup(DID, refresh=True)).stale
    identities.mark_stale([DID])
    world.now += 100_000
    identity = await identities.lookup(DID)
    assert (identity.key, identity.stale) == (KEYS[0], True)
    with pytest.raises(UnavailableError):
        await identities.lookup("did:plc:aaaaaaaaaaaaaaaaaaaaaaaa")
    assert world.lookups[1:] == [("plc", "identity-unavailable")] * 3


@pytest.mark.parametrize("waits", [True, False])
async def test_run_raises_the_exception_of_a_bug_in_a_lookup(world: World, waits: bool) -> None:
    identities = world.identities()
    await identities.lookup(DID)
    running = asyncio.create_task(identities.run())
    world.now += 86_400
    world.bug = True
    if waits:
        with pytest.raises(ZeroDivisionError):
            await identities.lookup(DID, refresh=True)
    else:
        await identities.preload([DID])
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(running, 10)
