import asyncio
from collections.abc import Sequence

import pytest

from indexer.atproto.crypto import PrivateKey
from indexer.errors import UnavailableError
from indexer.identity.cache import Identities
from indexer.reasons import FetchFailure
from indexer.sync.identity import StoredIdentity

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
KEYS = [PrivateKey.from_seed("k256", bytes([n])).public for n in range(3)]


class World:
    """A clock, a directory and a table, all of them obvious."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.asked = 0
        self.down = False
        self.key = 0
        self.problem: str | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.called = asyncio.Event()
        self.table: dict[str, StoredIdentity] = {}
        self.queries = 0
        self.heard: list[tuple[str, str]] = []

    async def resolve(self, did: str) -> StoredIdentity:
        self.asked += 1
        self.called.set()
        await self.gate.wait()
        if self.down:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "down")
        key = None if self.problem else KEYS[self.key].did_key()
        return StoredIdentity(did, "alice.test", "https://pds.test", key, self.now, problem=self.problem)

    async def load(self, dids: Sequence[str]) -> dict[str, StoredIdentity]:
        self.queries += 1
        return {did: self.table[did] for did in dids if did in self.table}

    async def save(self, identities: Sequence[StoredIdentity]) -> None:
        self.table |= {identity.did: identity for identity in identities}

    def identities(self, most: int = 10) -> Identities:
        return Identities(
            self, self, clock=lambda: self.now, most=most, on_lookup=lambda *heard: self.heard.append(heard)
        )


async def test_one_look_up_serves_all_who_wait() -> None:
    world = World()
    world.gate.clear()
    identities = world.identities()
    waiting = [asyncio.create_task(identities.lookup(DID)) for _ in range(20)]
    await asyncio.wait_for(world.called.wait(), 10)
    world.gate.set()
    assert {(await task).key for task in waiting} == {KEYS[0]}
    assert world.asked == 1
    assert world.heard == [("plc", "found")]


async def test_what_was_found_outlives_the_process() -> None:
    world = World()
    await world.identities().lookup(DID)
    again = world.identities()
    assert again.peek(DID) is None
    await again.warm([DID])
    known = again.peek(DID)
    assert known is not None
    assert known.key == KEYS[0]
    assert world.asked == 1


async def test_it_holds_for_a_day_and_not_longer() -> None:
    world = World()
    identities = world.identities()
    await identities.lookup(DID)
    world.now += 86_399
    await identities.lookup(DID)
    assert world.asked == 1
    world.now += 2
    assert identities.peek(DID) is None
    await identities.lookup(DID)
    assert world.asked == 2


async def test_that_there_is_none_is_remembered_for_a_while() -> None:
    world = World()
    world.problem = "not registered"
    identities = world.identities()
    assert (await identities.lookup(DID)).key is None
    world.now += 119
    assert (await identities.lookup(DID)).problem == "not registered"
    assert world.asked == 1
    world.now += 2
    await identities.lookup(DID)
    assert world.asked == 2
    assert world.heard == [("plc", "missing")] * 2


async def test_a_change_is_fetched_at_once() -> None:
    world = World()
    identities = world.identities()
    await identities.lookup(DID)
    world.key = 1
    identities.mark_stale([DID])
    assert identities.peek(DID) is None
    assert (await identities.lookup(DID)).key == KEYS[1]


async def test_refreshes_are_rationed() -> None:
    world = World()
    identities = world.identities()
    await identities.lookup(DID)
    world.key = 1
    assert (await identities.lookup(DID, refresh=True)).key == KEYS[0]
    world.now += 60
    for _ in range(1_000):
        assert (await identities.lookup(DID, refresh=True)).key == KEYS[1]
    assert world.asked == 2


async def test_an_outage_is_bridged_by_what_is_known() -> None:
    world = World()
    identities = world.identities()
    await identities.lookup(DID)
    world.down = True
    identities.mark_stale([DID])
    world.now += 100_000
    assert (await identities.lookup(DID)).key == KEYS[0]
    with pytest.raises(UnavailableError):
        await identities.lookup("did:plc:aaaaaaaaaaaaaaaaaaaaaaaa")


async def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    world = World()
    identities = world.identities(most=2)
    dids = [f"did:plc:{letter * 24}" for letter in "abc"]
    for did in dids:
        await identities.lookup(did)
    assert [did for did in dids if identities.peek(did)] == dids[1:]


async def test_warming_asks_the_database_once() -> None:
    world = World()
    identities = world.identities()
    await identities.warm([f"did:plc:{letter * 24}" for letter in "abcdef"])
    assert world.queries == 1
