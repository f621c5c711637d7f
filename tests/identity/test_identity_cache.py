"""The identity cache with a scripted clock, directory and database."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest

from indexer.atproto.crypto import PrivateKey, PublicKey
from indexer.errors import UnavailableError
from indexer.identity.identity_cache import MAX_LOOKUPS, MAX_LOOKUPS_IN_BACKGROUND, IdentityCache, IdentityLifetimes
from indexer.reasons import FetchFailure
from indexer.sync.stored_identity import StoredIdentity

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
KEYS = [PrivateKey.from_seed("k256", bytes([n])).public for n in range(3)]


def dids(count: int) -> list[str]:
    base32 = "abcdefghijklmnopqrstuvwxyz234567"
    return [f"did:plc:{'x' * 22}{base32[number // 32]}{base32[number % 32]}" for number in range(count)]


def cached_key(identities: IdentityCache) -> PublicKey | None:
    identity = identities.peek(DID)
    return None if identity is None else identity.key


class World:
    """A clock, a directory, a table of identities and an observer.

    Attributes:
        key: Index of the key in the documents of the directory.
        host: The PDS in the documents of the directory.
        problem: If set, the directory has no key for any DID, for this reason.
        requests: Number of requests to the directory.
        known_requests: Number of those that were made for known identities.
        request_received: Set when the directory receives a request.
        directory_gate: The directory responds only while it is set.
        directory_down: The directory fails.
        bug: The directory raises an exception that is no `UnavailableError`.
        queries: Number of queries to the table.
        saves: Number of saves in the table, with those that failed.
        table_gate: The table responds only while it is set.
        database_down: The table fails.
        refused: A save that contains one of these DIDs fails.
    """

    def __init__(self) -> None:
        self.now = 1_000.0
        self.requests = 0
        self.known_requests = 0
        self.directory_down = False
        self.key = 0
        self.host = "pds.test"
        self.bug = False
        self.problem: str | None = None
        self.directory_gate = asyncio.Event()
        self.directory_gate.set()
        self.request_received = asyncio.Event()
        self.table: dict[str, StoredIdentity] = {}
        self.database_down = False
        self.refused: set[str] = set()
        self.table_gate = asyncio.Event()
        self.table_gate.set()
        self.queries = 0
        self.saves = 0
        self.lookups: list[tuple[str, str]] = []
        self.refreshes: Counter[tuple[str, str]] = Counter()
        self.found_in: Counter[str] = Counter()
        self.caches: list[IdentityCache] = []

    async def resolve(self, did: str, *, known: bool) -> StoredIdentity:
        self.requests += 1
        self.known_requests += known
        self.request_received.set()
        await self.directory_gate.wait()
        if self.bug:
            raise ZeroDivisionError
        if self.directory_down:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "down")
        key = None if self.problem else KEYS[self.key].did_key()
        pds = f"https://{self.host}" if self.host else None
        return StoredIdentity(did, "alice.test", pds, key, self.now, problem=self.problem)

    async def load_identities(self, dids: Sequence[str]) -> dict[str, StoredIdentity]:
        self.queries += 1
        found = {did: self.table[did] for did in dids if did in self.table}
        await self.table_gate.wait()
        if self.database_down:
            raise UnavailableError(FetchFailure.UNREACHABLE, "the database")
        return found

    async def save_identities(self, identities: Sequence[StoredIdentity]) -> None:
        self.saves += 1
        await self.table_gate.wait()
        if self.database_down or not self.refused.isdisjoint(identity.did for identity in identities):
            raise UnavailableError(FetchFailure.UNREACHABLE, "the database")
        self.table |= {identity.did: identity for identity in identities}

    def identity_lookup(self, method: str, result: str) -> None:
        self.lookups.append((method, result))

    def identity_refresh(self, cause: str, result: str) -> None:
        self.refreshes[cause, result] += 1

    def identity_cache(self, found_in: str, count: int) -> None:
        self.found_in[found_in] += count

    async def settle(self) -> None:
        """Let all tasks run until they wait for something."""
        for _ in range(20):
            await asyncio.sleep(0)

    def identities(self, max_entries: int = 10, timeout: float = 5.0, refresh_rate: float = 10_000.0) -> IdentityCache:
        cache = IdentityCache(
            self,
            self,
            self,
            clock=lambda: self.now,
            refresh_rate=refresh_rate,
            lifetimes=IdentityLifetimes(timeout=timeout),
            max_entries=max_entries,
        )
        self.caches.append(cache)
        return cache


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    for cache in world.caches:
        await cache.close()


async def test_concurrent_lookups_share_one_request(world: World) -> None:
    world.directory_gate.clear()
    identities = world.identities()
    waiting = [asyncio.create_task(identities.lookup(DID)) for _ in range(20)]
    await asyncio.wait_for(world.request_received.wait(), 10)
    world.directory_gate.set()
    assert {(await task).key for task in waiting} == {KEYS[0]}
    assert world.requests == 1
    assert world.lookups == [("plc", "found")]


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


async def test_identity_that_was_not_saved_is_refreshed_with_its_next_message(world: World) -> None:
    world.database_down = True
    identities = world.identities()
    await identities.lookup(DID)
    assert world.saves == 1, "a save that nothing else can have made fail was repeated"
    world.database_down = False
    await identities.preload([DID])
    await world.settle()
    assert DID in world.table
    world.now += 3_600
    await identities.preload([DID])
    await world.settle()
    assert world.requests == 2


async def test_found_identities_survive_a_restart(world: World) -> None:
    await world.identities().lookup(DID)
    restarted = world.identities()
    assert restarted.peek(DID) is None
    await restarted.preload([DID])
    identity = restarted.peek(DID)
    assert identity is not None
    assert identity.key == KEYS[0]
    assert world.requests == 1


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


async def test_changed_identity_is_fetched_at_once(world: World) -> None:
    identities = world.identities()
    await identities.lookup(DID)
    world.key = 1
    identities.mark_stale([DID])
    assert identities.peek(DID) is None
    assert (await identities.lookup(DID)).key == KEYS[1]


async def test_refreshes_of_one_did_are_limited_to_one_per_minute(world: World) -> None:
    identities = world.identities()
    await identities.lookup(DID)
    for minute in (1, 2):
        world.key = minute
        for _ in range(1_000):
            assert (await identities.lookup(DID, refresh=True)).key == KEYS[minute]
        assert world.requests == 1 + minute
        world.now += 60


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


async def test_known_identity_is_used_during_an_outage(world: World) -> None:
    identities = world.identities()
    await identities.lookup(DID)
    world.directory_down = True
    identities.mark_stale([DID])
    world.now += 100_000
    identity = await identities.lookup(DID)
    assert (identity.key, identity.stale) == (KEYS[0], True)
    with pytest.raises(UnavailableError):
        await identities.lookup("did:plc:aaaaaaaaaaaaaaaaaaaaaaaa")
    assert world.lookups[1:] == [("plc", "identity-unavailable")] * 2


async def test_failed_refresh_returns_a_stale_identity(world: World) -> None:
    identities = world.identities()
    assert not (await identities.lookup(DID)).stale
    world.directory_down = True
    assert (await identities.lookup(DID, refresh=True)).stale


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


async def test_lookups_in_flight_are_limited(world: World) -> None:
    identities = world.identities(max_entries=500)
    await identities.lookup(DID)
    world.directory_gate.clear()
    waiting = [asyncio.create_task(identities.lookup(did)) for did in dids(MAX_LOOKUPS)]
    await world.settle()
    with pytest.raises(UnavailableError):
        await identities.lookup("did:plc:aaaaaaaaaaaaaaaaaaaaaaaa")
    world.directory_gate.set()
    await asyncio.gather(*waiting)
    assert world.requests == 1 + MAX_LOOKUPS


async def test_lookups_of_new_dids_do_not_prevent_those_of_known_identities(world: World) -> None:
    identities = world.identities(max_entries=500)
    await identities.lookup(DID)
    world.directory_gate.clear()
    waiting = [asyncio.create_task(identities.lookup(did)) for did in dids(MAX_LOOKUPS)]
    await world.settle()
    world.key = 1
    refreshed = asyncio.create_task(identities.lookup(DID, refresh=True))
    await world.settle()
    world.directory_gate.set()
    assert (await refreshed).key == KEYS[1]
    await asyncio.gather(*waiting)
    assert world.known_requests == 1


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


async def test_cancelled_caller_does_not_cancel_the_lookup_of_others(world: World) -> None:
    world.directory_gate.clear()
    identities = world.identities()
    first, second = (asyncio.create_task(identities.lookup(DID)) for _ in range(2))
    await asyncio.wait_for(world.request_received.wait(), 10)
    first.cancel()
    world.directory_gate.set()
    assert (await second).key == KEYS[0]


async def test_lookup_works_without_the_database(world: World) -> None:
    world.database_down = True
    identities = world.identities()
    assert (await identities.lookup(DID)).key == KEYS[0]
    assert cached_key(identities) == KEYS[0]
    with pytest.raises(UnavailableError):
        await identities.preload(["did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"])


async def test_close_cancels_lookups(world: World) -> None:
    world.directory_gate.clear()
    identities = world.identities()
    waiting = asyncio.create_task(identities.lookup(DID))
    await asyncio.wait_for(world.request_received.wait(), 10)
    await asyncio.wait_for(identities.close(), 10)
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_least_recently_used_identities_are_evicted(world: World) -> None:
    identities = world.identities(max_entries=2)
    first, second, third = dids(3)
    await identities.lookup(first)
    await identities.lookup(second)
    await identities.preload([first])
    await identities.lookup(third)
    assert [did for did in (first, second, third) if identities.peek(did)] == [first, third]


async def test_preload_uses_one_query_and_no_request(world: World) -> None:
    identities = world.identities()
    await identities.preload(dids(6))
    assert world.queries == 1
    assert world.requests == 0


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
    assert world.refreshes == {("change", "asked"): 1, ("signature", "asked"): 1, ("signature", "too-soon"): 1}


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
        for did in forged:
            await identities.lookup(did, refresh=True)
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
    assert world.refreshes["signature", "over-budget"] + world.refreshes["signature", "too-soon"] > 50_000


@pytest.mark.slow
async def test_refreshes_of_all_hosts_together_are_limited(world: World) -> None:
    identities = world.identities(max_entries=2_000, refresh_rate=5.0)
    forged = dids(1_000)
    for number, did in enumerate(forged):
        world.host = f"pds{number}.test"
        await identities.lookup(did)
    known = world.requests
    for _ in range(60):
        for did in forged:
            await identities.lookup(did, refresh=True)
        world.now += 1
    assert 5 * 68 < world.requests - known <= 5 * (10 + 59)


async def test_background_refreshes_have_their_own_budget(world: World) -> None:
    identities = world.identities(max_entries=500, refresh_rate=2.0)
    many = dids(200)
    for number, did in enumerate(many):
        world.host = f"pds{number}.test"
        await identities.lookup(did)
    world.now += 86_400
    for _ in range(30):
        await identities.preload(many)
        await world.settle()
    assert world.requests == 200 + 10, "half of the budget of other refreshes"
    world.key = 1
    assert (await identities.lookup(many[199], refresh=True)).key == KEYS[1]


async def test_places_where_identities_were_found_are_reported(world: World) -> None:
    await world.identities().lookup(DID)
    identities = world.identities()
    world.found_in.clear()
    await identities.preload([DID, *dids(2)])
    await identities.preload([DID])
    assert world.found_in == {"memory": 1, "database": 1, "nowhere": 2}
