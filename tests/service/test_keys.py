import asyncio
from collections.abc import Callable

import pytest

from indexer.atproto.crypto import PrivateKey
from indexer.errors import UnavailableError
from indexer.identity import Known
from indexer.reasons import FetchFailure
from indexer.service.inbox import Inbox
from indexer.service.keys import QUEUED, KeyDesk
from indexer.sync.batch import Received
from indexer.sync.plan import NeedsKey
from indexer.sync.planning import UNAVAILABLE
from tests.serving import until
from tests.sync.people import Person, received

KEY = PrivateKey.from_seed("k256", b"desk").public
ERIN = "did:plc:erinerinerinerinerinerin"
WEB = "did:web:erin.example.com"


def dids(count: int) -> list[str]:
    return [f"did:plc:{number:024}" for number in range(count)]


class Answers:
    """In place of `Identities`: look-ups that end when `gate` opens, with a key, or with `error`."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.error: Exception | None = None
        self.asked: list[str] = []
        self.pauses: dict[str, float] = {}

    def peek(self, _did: str) -> Known | None:
        return None

    def pause(self, did: str, *, refresh: bool = False) -> float:  # noqa: ARG002
        return self.pauses.get(did, 0.0)

    async def lookup(self, did: str, *, refresh: bool = False) -> Known:  # noqa: ARG002
        self.asked.append(did)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Known(KEY, "https://pds.test", None, 0.0, stale=False)


class Desk:
    """A desk, its inbox and what is needed to ask something of it."""

    def __init__(self, *, at_once: int = 2, patience: float = 60.0) -> None:
        self.answers = Answers()
        self.inbox = Inbox(10**9)
        self.keys = KeyDesk(self.answers, self.inbox, patience=patience, at_once=at_once)  # type: ignore[arg-type]
        self._message = received("commit", Person().post("x"))

    async def wait(self, *dids: str) -> None:
        for did in dids:
            await self.inbox.put(self._message)
            [message] = await self.inbox.take(1, 0)
            self.keys.wait(NeedsKey(did, refresh=False), [message])

    async def back(self) -> list[Received]:
        """The messages that are in the inbox again, at least one."""
        return await asyncio.wait_for(self.inbox.take(1_000, 0), 10)

    def unavailable(self, dids: list[str]) -> Callable[[], bool]:
        return lambda: [did for did in dids if self.keys.signer(did) is not UNAVAILABLE] == []


async def test_messages_come_back_with_their_key() -> None:
    desk = Desk()
    await desk.wait(ERIN)
    assert len(desk.keys) == 1
    desk.answers.gate.set()
    assert len(await desk.back()) == 1
    signer = desk.keys.signer(ERIN)
    assert signer is not None
    assert (signer.key, signer.available, len(desk.keys)) == (KEY, True, 0)
    desk.keys.answered([ERIN])
    assert desk.keys.signer(ERIN) is None


async def test_a_key_that_can_not_be_had_is_an_answer() -> None:
    desk = Desk()
    desk.answers.error = UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "down")
    desk.answers.gate.set()
    await desk.wait(ERIN)
    await desk.back()
    assert desk.keys.signer(ERIN) is UNAVAILABLE


async def test_a_bug_in_a_look_up_is_loud_though_no_message_follows() -> None:
    desk = Desk()
    desk.answers.error = RuntimeError("a bug")
    await desk.wait(ERIN)
    running = asyncio.create_task(desk.keys.run())
    desk.answers.gate.set()
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(running, 10)


async def test_patience_begins_with_the_place() -> None:
    """Those who wait for a place are not worse off for it."""
    desk = Desk(at_once=1, patience=0.2)
    await desk.wait(ERIN, *dids(2))
    await until(desk.unavailable([ERIN, *dids(2)]))
    assert desk.answers.asked == [ERIN, *dids(2)], "each was asked for, one after the other"


async def test_the_queue_for_places_is_bounded() -> None:
    desk = Desk(at_once=2)
    many = dids(2 * (1 + QUEUED) + 3)
    await desk.wait(*many)
    await until(desk.unavailable(many[-3:]))
    assert len(desk.answers.asked) == 2
    assert len(await desk.back()) == 3
    desk.answers.gate.set()
    await until(lambda: len(desk.answers.asked) == len(many) - 3)


async def test_hosts_that_hang_take_no_place_from_the_directory() -> None:
    desk = Desk(at_once=1)
    await desk.wait(*(f"did:web:host{number}.example.com" for number in range(3)))
    await until(lambda: len(desk.answers.asked) == 1)
    await desk.wait(ERIN)
    await until(lambda: desk.answers.asked[-1] == ERIN)


async def test_who_waits_for_a_change_takes_no_place() -> None:
    desk = Desk(at_once=1)
    changed = dids(50)
    desk.answers.pauses = dict.fromkeys(changed, 3_600.0)
    await desk.wait(*changed, ERIN)
    desk.answers.gate.set()
    await desk.back()
    assert desk.answers.asked == [ERIN]
    assert len(desk.keys) == len(changed)
    await desk.keys.close()


async def test_the_end_waits_for_no_key() -> None:
    desk = Desk()
    await desk.wait(ERIN, WEB)
    await asyncio.wait_for(desk.keys.close(), 10)
