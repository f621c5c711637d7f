import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from indexer.app.daemon import INBOX_BYTES
from indexer.atproto.crypto import PrivateKey
from indexer.errors import UnavailableError
from indexer.live.inbox import Inbox
from indexer.live.key_lookups import MAX_QUEUED_PER_SLOT, KeyLookups
from indexer.net.identity.identity_cache import CachedIdentity
from indexer.reasons import FetchFailure
from indexer.sync.batch import ReceivedMessage
from indexer.sync.changes import NeedsKey
from indexer.sync.events import IdentityEvent
from indexer.sync.policy import UNAVAILABLE
from indexer.sync.stream import NO_STREAM
from tests.sync.signing_account import SigningAccount, received_message
from tests.waiting import until

KEY = PrivateKey.from_seed("k256", b"key lookups").public
ERIN = "did:plc:erinerinerinerinerinerin"
WEB = "did:web:erin.example.com"


def dids(count: int) -> list[str]:
    return [f"did:plc:{number:024}" for number in range(count)]


class FakeIdentityCache:
    """Lookups that wait for `gate`, and then return a key or raise `error`. `lookups` lists the requested DIDs."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.error: Exception | None = None
        self.lookups: list[str] = []
        self.pauses: dict[str, float] = {}
        self.known: set[str] = set()

    def peek(self, _did: str) -> CachedIdentity | None:
        return None

    def knows(self, did: str) -> bool:
        return did in self.known

    def refresh_delay(self, did: str, *, refresh: bool = False) -> float:  # noqa: ARG002
        return self.pauses.get(did, 0.0)

    async def lookup(self, did: str, *, refresh: bool = False) -> CachedIdentity:  # noqa: ARG002
        self.lookups.append(did)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return CachedIdentity(KEY, "https://pds.test", None, 0.0, stale=False)


class LookupScenario:
    """Key lookups with a fake identity cache and an inbox."""

    def __init__(self, *, concurrency: int = 2, timeout: float = 60.0, inbox_bytes: int = 10**9) -> None:
        self.identities = FakeIdentityCache()
        self.inbox = Inbox(inbox_bytes)
        self.keys = KeyLookups(self.identities, self.inbox, timeout=timeout, concurrency=concurrency)  # type: ignore[arg-type]
        self._message = received_message("commit", SigningAccount().commit_post("x"))

    async def start(self, *dids: str) -> None:
        for did in dids:
            await self.inbox.put(self._message)
            [message] = await self.inbox.take(1)
            self.keys.start(NeedsKey(did, refresh=False), [message])

    async def returned(self) -> list[ReceivedMessage]:
        """Return the messages that are back in the inbox, at least one."""
        return await asyncio.wait_for(self.inbox.take(1_000), 10)

    def unavailable(self, dids: list[str]) -> Callable[[], bool]:
        return lambda: all(self.keys.key_state(did) is UNAVAILABLE for did in dids)


MakeScenario = Callable[..., LookupScenario]


@pytest.fixture
async def make_scenario() -> AsyncIterator[MakeScenario]:
    """Make scenarios, and cancel their lookups at the end of the test."""
    async with AsyncExitStack() as stack:

        def make(**options: Any) -> LookupScenario:
            scenario = LookupScenario(**options)
            stack.push_async_callback(scenario.keys.close)
            return scenario

        yield make


async def test_messages_return_to_the_inbox_with_their_key(make_scenario: MakeScenario) -> None:
    scenario = make_scenario()
    await scenario.start(ERIN)
    assert len(scenario.keys) == 1
    scenario.identities.gate.set()
    assert len(await scenario.returned()) == 1
    key_state = scenario.keys.key_state(ERIN)
    assert key_state is not None
    assert (key_state.key, key_state.available, len(scenario.keys)) == (KEY, True, 0)
    scenario.keys.discard_results([ERIN])
    assert scenario.keys.key_state(ERIN) is None
    scenario.identities.error = UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "down")
    await scenario.start(ERIN)
    await scenario.returned()
    assert scenario.keys.key_state(ERIN) is UNAVAILABLE


async def test_unexpected_exception_of_a_lookup_ends_run(make_scenario: MakeScenario) -> None:
    scenario = make_scenario()
    scenario.identities.error = RuntimeError("a bug")
    await scenario.start(ERIN)
    running = asyncio.create_task(scenario.keys.run())
    scenario.identities.gate.set()
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(running, 10)


async def test_timeout_begins_when_the_lookup_has_a_slot(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(concurrency=1, timeout=0.02)
    await scenario.start(ERIN, *dids(2))
    await until(scenario.unavailable([ERIN, *dids(2)]))
    assert scenario.identities.lookups == [ERIN, *dids(2)], "one after the other"


async def test_queue_for_slots_is_bounded(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(concurrency=2)
    many = dids(2 * (1 + MAX_QUEUED_PER_SLOT) + 3)
    await scenario.start(*many)
    await until(scenario.unavailable(many[-3:]))
    assert len(scenario.identities.lookups) == 2
    assert len(await scenario.returned()) == 3
    scenario.identities.gate.set()
    await until(lambda: len(scenario.identities.lookups) == len(many) - 3)


async def test_slow_web_hosts_take_no_slots_from_the_directory(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(concurrency=1)
    await scenario.start(*(f"did:web:host{number}.example.com" for number in range(3)))
    await until(lambda: len(scenario.identities.lookups) == 1)
    await scenario.start(ERIN)
    await until(lambda: scenario.identities.lookups[-1] == ERIN)


async def test_new_dids_take_no_slots_from_known_ones(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(concurrency=1)
    await scenario.start(*dids(100))
    await until(lambda: len(scenario.identities.lookups) == 1)
    scenario.identities.known.add(ERIN)
    await scenario.start(ERIN)
    await until(lambda: scenario.identities.lookups[-1] == ERIN)


async def test_lookup_that_pauses_first_takes_no_slot(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(concurrency=1)
    changed = dids(50)
    scenario.identities.pauses = dict.fromkeys(changed, 3_600.0)
    await scenario.start(*changed, ERIN)
    scenario.identities.gate.set()
    await scenario.returned()
    assert scenario.identities.lookups == [ERIN]
    assert len(scenario.keys) == len(changed)


async def write_batches(scenario: LookupScenario, outcomes: dict[str, list[str]]) -> None:
    """Settle messages like the batch writer: a message without a known key waits for it, except those of `ERIN`."""
    while True:
        messages = scenario.keys.hold_back(await scenario.inbox.take(20))
        by_did: dict[str, list[ReceivedMessage]] = {}
        for message in messages:
            by_did.setdefault(message.did or "", []).append(message)
        for did, own in by_did.items():
            key_state = scenario.keys.key_state(did)
            if did == ERIN or key_state is not None:
                outcome = "unavailable" if key_state is UNAVAILABLE else "planned"
                outcomes.setdefault(did, []).extend([outcome] * len(own))
                scenario.keys.discard_results([did])
                scenario.inbox.settle(own)
            else:
                scenario.keys.start(NeedsKey(did, refresh=False), own)
        scenario.keys.limit_waiting_bytes()


def large_message(did: str, size: int = 2_000_000) -> ReceivedMessage:
    event = IdentityEvent(seq=1, did=did, time="")
    return ReceivedMessage(NO_STREAM, 1, bytes(size), event)


@pytest.mark.parametrize("forged", [[WEB] * 40, [f"did:web:h{number % 30}.example.com" for number in range(90)]])
async def test_forged_commits_of_hanging_hosts_do_not_stop_the_stream(
    make_scenario: MakeScenario, forged: list[str]
) -> None:
    """The inbox holds fewer bytes than the messages that wait for keys. No lookup ends."""
    scenario = make_scenario(concurrency=64, inbox_bytes=INBOX_BYTES)
    outcomes: dict[str, list[str]] = {}
    writer = asyncio.create_task(write_batches(scenario, outcomes))
    try:
        for did in forged:
            await asyncio.wait_for(scenario.inbox.put(large_message(did)), 10)
        await scenario.inbox.put(large_message(ERIN, 1_000))
        await until(lambda: ERIN in outcomes)
        waiting = scenario.inbox.unsettled
        assert waiting < len(forged) / 2 + 1
        assert set(outcomes.pop(ERIN)) == {"planned"}
        ended = sum(map(len, outcomes.values()))
        assert {outcome for own in outcomes.values() for outcome in own} == {"unavailable"}
        scenario.identities.gate.set()
        await until(lambda: scenario.inbox.unsettled == 0)
        assert sum(map(len, outcomes.values())) == len(forged), "one outcome each"
        assert ended > 0
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)


async def test_large_wait_ends_and_small_ones_continue(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(concurrency=64, inbox_bytes=16_000_000)
    await scenario.start(ERIN)
    scenario.keys.start(NeedsKey(WEB, refresh=False), [large_message(WEB, 1_500_000)] * 2)
    assert scenario.keys.hold_back([large_message(WEB, 1_500_000), large_message(ERIN, 1_000)]) == []
    assert scenario.keys.key_state(WEB) is UNAVAILABLE
    assert [message.did for message in await scenario.returned()] == [WEB] * 3
    assert scenario.keys.key_state(ERIN) is None
    assert len(scenario.keys) == 2
