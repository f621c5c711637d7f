"""Identities in memory and in the database, with a scripted clock, directory and database."""

import asyncio

import pytest

from indexer.errors import UnavailableError
from tests.identity.identity_world import DID, KEYS, World, cached_key, dids


async def test_found_identities_survive_a_restart(world: World) -> None:
    await world.identities().lookup(DID)
    restarted = world.identities()
    assert restarted.peek(DID) is None
    world.found_in.clear()
    await restarted.preload([DID, *dids(2)])
    await restarted.preload([DID])
    identity = restarted.peek(DID)
    assert identity is not None
    assert identity.key == KEYS[0]
    assert (world.queries, world.requests) == (2, 1), "one query for all identities"
    assert world.found_in == {"memory": 1, "database": 1, "nowhere": 2}


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
    assert world.lookups == [("plc", "missing")] * 2


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
