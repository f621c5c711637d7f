import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from indexer.atproto.crypto import PrivateKey, PublicKey
from indexer.errors import UnavailableError
from indexer.identity.cache import MOST_FLIGHTS, MOST_RENEWALS, Freshness, Identities
from indexer.reasons import FetchFailure
from indexer.sync.identity import StoredIdentity

DID = "did:plc:ewvi7nxzyoun6zhxrhs64oiz"
KEYS = [PrivateKey.from_seed("k256", bytes([n])).public for n in range(3)]


def dids(count: int) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    return [f"did:plc:{'x' * 22}{letters[number // 32]}{letters[number % 32]}" for number in range(count)]


def key_at_hand(identities: Identities) -> PublicKey | None:
    known = identities.peek(DID)
    return None if known is None else known.key


class World:
    """A clock, a directory and a table, all of them obvious."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.asked = 0
        self.down = False
        self.key = 0
        self.host = "pds.test"
        self.bug = False
        self.problem: str | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.called = asyncio.Event()
        self.table: dict[str, StoredIdentity] = {}
        self.table_lost = False
        self.slow_table = asyncio.Event()
        self.slow_table.set()
        self.queries = 0
        self.heard: list[tuple[str, str]] = []
        self.refreshes: Counter[tuple[str, str]] = Counter()
        self.cache: Counter[str] = Counter()

    async def resolve(self, did: str) -> StoredIdentity:
        self.asked += 1
        self.called.set()
        await self.gate.wait()
        if self.bug:
            raise ZeroDivisionError
        if self.down:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "down")
        key = None if self.problem else KEYS[self.key].did_key()
        return StoredIdentity(did, "alice.test", f"https://{self.host}", key, self.now, problem=self.problem)

    async def load(self, dids: Sequence[str]) -> dict[str, StoredIdentity]:
        self.queries += 1
        found = {did: self.table[did] for did in dids if did in self.table}
        await self.slow_table.wait()
        if self.table_lost:
            raise UnavailableError(FetchFailure.UNREACHABLE, "the database")
        return found

    async def save(self, identities: Sequence[StoredIdentity]) -> None:
        if self.table_lost:
            raise UnavailableError(FetchFailure.UNREACHABLE, "the database")
        self.table |= {identity.did: identity for identity in identities}

    def identity_lookup(self, method: str, result: str) -> None:
        self.heard.append((method, result))

    def identity_refresh(self, cause: str, result: str) -> None:
        self.refreshes[cause, result] += 1

    def identity_cache(self, found_in: str, count: int) -> None:
        self.cache[found_in] += count

    async def settled(self) -> None:
        """All that can go on without a change of the world has gone on."""
        for _ in range(20):
            await asyncio.sleep(0)

    def identities(self, most: int = 10, patience: float = 5.0, refresh_rate: float = 10_000.0) -> Identities:
        return Identities(
            self,
            self,
            self,
            clock=lambda: self.now,
            refresh_rate=refresh_rate,
            freshness=Freshness(patience=patience),
            most=most,
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


async def test_after_a_day_it_is_renewed_while_it_serves_on() -> None:
    world = World()
    identities = world.identities()
    await identities.lookup(DID)
    world.key = 1
    world.now += 86_399
    await identities.warm([DID])
    await world.settled()
    assert world.asked == 1
    world.now += 1
    world.gate.clear()
    await identities.warm([DID])
    assert key_at_hand(identities) == KEYS[0]
    assert (await identities.lookup(DID)).key == KEYS[0]
    world.gate.set()
    await world.settled()
    assert key_at_hand(identities) == KEYS[1]
    assert world.asked == 2


async def test_a_renewal_that_fails_costs_nobody_anything() -> None:
    world = World()
    identities = world.identities()
    await identities.lookup(DID)
    world.now += 86_400
    world.down = True
    for _ in range(3):
        await identities.warm([DID])
        await world.settled()
        assert key_at_hand(identities) == KEYS[0]
    assert world.asked == 2
    world.now += 60
    await identities.warm([DID])
    await world.settled()
    assert world.asked == 3


async def test_renewals_leave_room_for_look_ups_that_somebody_waits_for() -> None:
    world = World()
    identities = world.identities(most=500)
    many = dids(200)
    for did in many:
        await identities.lookup(did)
    world.now += 86_400
    world.gate.clear()
    await identities.warm(many)
    await world.settled()
    assert world.asked == 200 + MOST_RENEWALS
    world.gate.set()


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
    for minute in (1, 2):
        world.key = minute
        for _ in range(1_000):
            assert (await identities.lookup(DID, refresh=True)).key == KEYS[minute]
        assert world.asked == 1 + minute
        world.now += 60


async def test_a_storm_of_changes_is_rationed_as_well() -> None:
    """Each change is looked up by who waits for it, none sooner than five seconds after the look-up before it."""
    world = World()
    identities = world.identities()
    await identities.lookup(DID)
    began = world.now
    for _ in range(100):
        world.key = (world.key + 1) % len(KEYS)
        identities.mark_stale([DID])
        world.now += identities.pause(DID)
        assert (await identities.lookup(DID)).key == KEYS[world.key]
    assert world.asked == 101
    assert world.now - began >= 99 * 5


async def test_an_answer_overtaken_by_a_change_is_asked_for_again() -> None:
    world = World()
    world.gate.clear()
    identities = world.identities()
    waiting = asyncio.create_task(identities.lookup(DID))
    await asyncio.wait_for(world.called.wait(), 10)
    identities.mark_stale([DID])
    world.gate.set()
    assert (await waiting).stale
    assert world.table[DID].stale
    world.key = 1
    known = await identities.lookup(DID)
    assert (known.key, known.stale) == (KEYS[1], False)


async def test_an_outage_is_bridged_by_what_is_known() -> None:
    world = World()
    identities = world.identities()
    await identities.lookup(DID)
    world.down = True
    identities.mark_stale([DID])
    world.now += 100_000
    known = await identities.lookup(DID)
    assert (known.key, known.stale) == (KEYS[0], True)
    with pytest.raises(UnavailableError):
        await identities.lookup("did:plc:aaaaaaaaaaaaaaaaaaaaaaaa")
    assert world.heard[1:] == [("plc", "identity-unavailable")] * 2


async def test_a_refresh_that_fails_says_so() -> None:
    world = World()
    identities = world.identities()
    assert not (await identities.lookup(DID)).stale
    world.down = True
    assert (await identities.lookup(DID, refresh=True)).stale


async def test_nobody_waits_long_for_a_newer_one() -> None:
    world = World()
    identities = world.identities(patience=0.01)
    await identities.lookup(DID)
    identities.mark_stale([DID])
    world.gate.clear()
    assert (await asyncio.wait_for(identities.lookup(DID), 10)).key == KEYS[0]
    world.key = 1
    world.gate.set()
    await world.settled()
    assert key_at_hand(identities) == KEYS[1]


async def test_look_ups_under_way_are_bounded() -> None:
    world = World()
    identities = world.identities(most=500)
    await identities.lookup(DID)
    world.gate.clear()
    waiting = [asyncio.create_task(identities.lookup(did)) for did in dids(MOST_FLIGHTS)]
    await world.settled()
    with pytest.raises(UnavailableError):
        await identities.lookup("did:plc:aaaaaaaaaaaaaaaaaaaaaaaa")
    known = await identities.lookup(DID, refresh=True)
    assert (known.key, known.stale) == (KEYS[0], False)
    world.gate.set()
    await asyncio.gather(*waiting)
    assert world.asked == 1 + MOST_FLIGHTS


async def test_who_gives_up_waiting_takes_it_from_nobody() -> None:
    world = World()
    world.gate.clear()
    identities = world.identities()
    first, second = (asyncio.create_task(identities.lookup(DID)) for _ in range(2))
    await asyncio.wait_for(world.called.wait(), 10)
    first.cancel()
    world.gate.set()
    assert (await second).key == KEYS[0]


async def test_the_network_does_without_the_database() -> None:
    world = World()
    world.table_lost = True
    identities = world.identities()
    assert (await identities.lookup(DID)).key == KEYS[0]
    assert key_at_hand(identities) == KEYS[0]
    with pytest.raises(UnavailableError):
        await identities.warm(["did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"])


async def test_the_end_waits_for_no_answer() -> None:
    world = World()
    world.gate.clear()
    identities = world.identities()
    waiting = asyncio.create_task(identities.lookup(DID))
    await asyncio.wait_for(world.called.wait(), 10)
    await asyncio.wait_for(identities.close(), 10)
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_memory_is_bounded_and_who_was_silent_longest_goes_first() -> None:
    world = World()
    identities = world.identities(most=2)
    first, second, third = dids(3)
    await identities.lookup(first)
    await identities.lookup(second)
    await identities.warm([first])
    await identities.lookup(third)
    assert [did for did in (first, second, third) if identities.peek(did)] == [first, third]


async def test_warming_asks_the_database_once() -> None:
    world = World()
    identities = world.identities()
    await identities.warm(dids(6))
    assert world.queries == 1
    assert world.asked == 0


async def test_what_the_database_had_does_not_replace_what_was_fetched_meanwhile() -> None:
    world = World()
    await world.identities().lookup(DID)
    identities = world.identities()
    world.slow_table.clear()
    warming = asyncio.create_task(identities.warm([DID]))
    await world.settled()
    world.slow_table.set()
    world.key = 1
    identities.mark_stale([DID])
    assert (await identities.lookup(DID, refresh=True)).key == KEYS[1]
    await warming
    assert key_at_hand(identities) == KEYS[1]


@pytest.mark.parametrize("waits", [True, False])
async def test_a_bug_in_a_look_up_is_loud_whether_or_not_somebody_waits(waits: bool) -> None:
    world = World()
    identities = world.identities()
    await identities.lookup(DID)
    running = asyncio.create_task(identities.run())
    world.now += 86_400
    world.bug = True
    if waits:
        with pytest.raises(ZeroDivisionError):
            await identities.lookup(DID, refresh=True)
    else:
        await identities.warm([DID])
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(running, 10)


async def test_a_directory_behind_the_change_is_asked_once_more() -> None:
    world = World()
    identities = world.identities()
    await identities.lookup(DID)
    identities.mark_stale([DID])
    assert (await identities.lookup(DID)).key == KEYS[0]
    world.key = 1
    assert identities.pause(DID, refresh=True) == 5
    world.now += 5
    assert (await identities.lookup(DID, refresh=True)).key == KEYS[1]
    assert identities.pause(DID, refresh=True) == 0, "a minute is not worth waiting for"
    assert (await identities.lookup(DID, refresh=True)).key == KEYS[1]
    assert world.refreshes == {("change", "asked"): 1, ("signature", "asked"): 1, ("signature", "too-soon"): 1}


async def test_that_there_was_none_says_nothing_after_a_change() -> None:
    world = World()
    world.problem = "not registered"
    identities = world.identities(refresh_rate=0.001)
    await identities.lookup(DID)
    identities.mark_stale([DID])
    assert (await identities.lookup(DID)).problem == "not registered"
    identities.mark_stale([DID])
    world.now += 5
    with pytest.raises(UnavailableError):  # the budget is spent
        await identities.lookup(DID)
    assert world.asked == 2


async def test_a_thousand_signatures_a_second_cause_what_the_budget_allows() -> None:
    """Of a thousand accounts of one host; accounts elsewhere, and new ones, are looked up as ever."""
    world = World()
    identities = world.identities(most=2_000, refresh_rate=5.0)
    forged = dids(1_000)
    for did in forged:
        await identities.lookup(did)
    honest, world.host = "did:plc:hhhhhhhhhhhhhhhhhhhhhhhh", "elsewhere.test"
    await identities.lookup(honest)
    known, began = world.asked, world.now
    for second in range(60):
        for did in forged:
            await identities.lookup(did, refresh=True)
        if second % 10 == 0:
            before = world.asked
            await identities.lookup(f"did:plc:{'n' * 22}{second // 10 + 2}a")
            assert world.asked == before + 1
        world.now += 1
    new = 6
    assert world.asked - known - new == 10 + 59, "one a second, and ten at once"
    world.key = 1
    assert (await identities.lookup(honest, refresh=True)).key == KEYS[1]
    assert world.now - began == 60
    assert world.refreshes["signature", "over-budget"] + world.refreshes["signature", "too-soon"] > 50_000


async def test_all_hosts_together_have_no_more_than_the_budget() -> None:
    world = World()
    identities = world.identities(most=2_000, refresh_rate=5.0)
    forged = dids(1_000)
    for number, did in enumerate(forged):
        world.host = f"pds{number}.test"
        await identities.lookup(did)
    known = world.asked
    for _ in range(60):
        for did in forged:
            await identities.lookup(did, refresh=True)
        world.now += 1
    assert 5 * 68 < world.asked - known <= 5 * (10 + 59)


async def test_renewals_have_a_budget_of_their_own() -> None:
    world = World()
    identities = world.identities(most=500, refresh_rate=2.0)
    many = dids(200)
    for number, did in enumerate(many):
        world.host = f"pds{number}.test"
        await identities.lookup(did)
    world.now += 86_400
    for _ in range(30):
        await identities.warm(many)
        await world.settled()
    assert world.asked == 200 + 10, "half of what refreshes have"
    world.key = 1
    assert (await identities.lookup(many[199], refresh=True)).key == KEYS[1]


async def test_where_identities_were_found_is_told() -> None:
    world = World()
    await world.identities().lookup(DID)
    identities = world.identities()
    world.cache.clear()
    await identities.warm([DID, *dids(2)])
    await identities.warm([DID])
    assert world.cache == {"memory": 1, "database": 1, "nowhere": 2}
