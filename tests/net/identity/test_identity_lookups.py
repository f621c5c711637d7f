"""Identities in memory and in the database, and lookups in flight: shared, limited, cancelled, and failed ones."""

import asyncio

import pytest

from indexer.errors import UnavailableError
from indexer.net.identity.identity_cache import MAX_LOOKUPS, CachedIdentity, IdentityCache
from indexer.telemetry.metrics import Metrics
from tests.net.identity.identity_world import DID, KEYS, World, cached_key, dids

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
    assert world.counted("identity_lookups") == {("plc", "found"): 1}


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
    assert world.counted("identity_lookups") == {("plc", "found"): 1, ("plc", "identity-unavailable"): 3}


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


# Memory and database


async def test_found_identities_survive_a_restart(world: World) -> None:
    await world.identities().lookup(DID)
    world.metrics = Metrics()
    restarted = world.identities()
    assert restarted.peek(DID) is None
    await restarted.preload([DID, *dids(2)])
    await restarted.preload([DID])
    identity = restarted.peek(DID)
    assert identity is not None
    assert identity.key == KEYS[0]
    assert (world.queries, world.requests) == (2, 1), "one query for all identities"
    assert world.counted("identity_cache") == {("memory",): 1, ("database",): 1, ("nowhere",): 2}


async def test_identity_that_cannot_be_saved_keeps_no_other_one_from_being_saved(world: World) -> None:
    first, refused, *others = dids(4)
    world.refused = {refused}
    identities = world.identities()
    world.directory_gate.clear()
    lookups = [asyncio.create_task(identities.lookup(did)) for did in (first, refused, *others)]
    await world.settle()
    world.table_gate.clear()
    world.directory_gate.set()
    await world.settle()
    world.table_gate.set()  # the first save ends, and the others are one
    await asyncio.gather(*lookups)
    assert world.table.keys() == {first, *others}


async def test_missing_identity_is_remembered_for_two_minutes(world: World) -> None:
    world.problem = "not registered"
    identities = world.identities()
    assert (await identities.lookup(DID)).key is None
    world.now += 119
    assert (await identities.lookup(DID)).problem == "not registered"
    assert world.requests == 1
    world.now += 2
    await identities.lookup(DID)
    assert world.requests == 2
    assert world.counted("identity_lookups") == {("plc", "missing"): 2}


async def test_nothing_is_stored_about_a_new_did_that_the_directory_denies(world: World) -> None:
    world.problem = "not registered"
    world.host = ""
    identities = world.identities()
    assert (await identities.lookup(DID)).problem == "not registered"
    assert world.table == {}
    world.problem = None
    world.now += 200
    assert (await identities.lookup(DID)).key == KEYS[0]
    assert list(world.table) == [DID]


async def test_lookup_works_without_the_database(world: World) -> None:
    world.database_down = True
    identities = world.identities()
    assert (await identities.lookup(DID)).key == KEYS[0]
    assert cached_key(identities) == KEYS[0]
    with pytest.raises(UnavailableError):
        await identities.preload(["did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"])


async def test_least_recently_used_identities_are_evicted(world: World) -> None:
    identities = world.identities(max_entries=2)
    first, second, third = dids(3)
    await identities.lookup(first)
    await identities.lookup(second)
    await identities.preload([first])
    await identities.lookup(third)
    assert [did for did in (first, second, third) if identities.peek(did)] == [first, third]


async def test_preload_does_not_replace_an_identity_that_was_fetched_meanwhile(world: World) -> None:
    await world.identities().lookup(DID)
    identities = world.identities()
    world.table_gate.clear()
    preloading = asyncio.create_task(identities.preload([DID]))
    await world.settle()
    world.table_gate.set()
    world.key = 1
    identities.mark_stale([DID])
    assert (await identities.lookup(DID, refresh=True)).key == KEYS[1]
    await preloading
    assert cached_key(identities) == KEYS[1]
