"""Limits on refreshes of identities: for each host, for all of them, and for those in the background."""

from collections.abc import Sequence

import pytest

from indexer.net.identity.identity_cache import MAX_LOOKUPS_IN_BACKGROUND, IdentityCache
from tests.net.identity.identity_world import KEYS, World, dids


async def look_up_on_separate_hosts(world: World, identities: IdentityCache, unknown: Sequence[str]) -> None:
    """Look up DIDs whose accounts are on a host each."""
    for number, did in enumerate(unknown):
        world.host = f"pds{number}.test"
        await identities.lookup(did)


async def refresh_all(identities: IdentityCache, known: Sequence[str]) -> None:
    for did in known:
        await identities.lookup(did, refresh=True)


@pytest.mark.slow
async def test_forged_signatures_of_one_host_spend_only_its_share(world: World) -> None:
    """One host has a thousand accounts with forged messages. Other accounts and new ones are looked up as usual."""
    identities = world.identities(max_entries=2_000, refresh_rate=5.0)
    forged = dids(1_000)
    for did in forged:
        await identities.lookup(did)
    honest, world.host = "did:plc:hhhhhhhhhhhhhhhhhhhhhhhh", "elsewhere.test"
    await identities.lookup(honest)
    known, started = world.requests, world.now
    for second in range(60):
        await refresh_all(identities, forged)
        if second % 10 == 0:
            before = world.requests
            await identities.lookup(f"did:plc:{'n' * 22}{second // 10 + 2}a")
            assert world.requests == before + 1
        world.now += 1
    new = 6
    assert world.requests - known - new == 10 + 59, "a burst of ten, and one per second"
    world.key = 1
    assert (await identities.lookup(honest, refresh=True)).key == KEYS[1]
    assert world.now - started == 60
    refreshes = world.counted("identity_refreshes")
    assert refreshes["signature", "over-budget"] + refreshes["signature", "too-soon"] > 50_000


async def test_background_refreshes_are_limited(world: World) -> None:
    identities = world.identities(max_entries=500)
    many = dids(200)
    for did in many:
        await identities.lookup(did)
    world.now += 86_400
    world.directory_gate.clear()
    await identities.preload(many)
    await world.settle()
    assert world.requests == 200 + MAX_LOOKUPS_IN_BACKGROUND
    world.directory_gate.set()


async def test_background_refreshes_have_their_own_budget(world: World) -> None:
    identities = world.identities(max_entries=500, refresh_rate=2.0)
    many = dids(200)
    await look_up_on_separate_hosts(world, identities, many)
    world.now += 86_400
    for _ in range(30):
        await identities.preload(many)
        await world.settle()
    assert world.requests == 200 + 10, "half of the budget of other refreshes"
    world.key = 1
    assert (await identities.lookup(many[199], refresh=True)).key == KEYS[1]
