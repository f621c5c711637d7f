"""The whole way of a handle: from a document that claims it, over name servers and hosts, to what readers see."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import asyncpg
import dns.rcode
import pytest

from indexer.identity import Handles
from indexer.service.handles import GIVEN_UP, HandleChecks, Pace
from indexer.store import Store
from indexer.sync.identity import INVALID_HANDLE, StoredIdentity
from indexer.sync.shard import Shard
from tests.identity.conftest import Loopback, loopback, name_server
from tests.identity.names import NameServer
from tests.outbound.host import answer
from tests.serving import until
from tests.store.rows import did, insert, synchronized

__all__ = ["loopback", "name_server"]

QUICK = Pace(idle=0.02, first=100_000.0, most=100_000.0)
PAGE = "/.well-known/atproto-did"


class Town:
    """Accounts that claim handles, and the checks at work."""

    def __init__(self, store: Store, sql: asyncpg.Connection, names: NameServer, loopback: Loopback) -> None:
        self.store = store
        self.sql = sql
        self.names = names
        self.loopback = loopback
        self._read_at = 5.0

    async def claim(self, name: object, handle: str | None) -> None:
        if did(name) not in await self.store.repos([did(name)]):
            await insert(self.store, synchronized(name))
        self._read_at += 1
        await self.store.save([StoredIdentity(did(name), handle, "https://pds.test", "did:key:zabc", self._read_at)])

    def answer(self, name: object, handle: str) -> None:
        self.names.texts[f"_atproto.{handle}"] = [f'"did={did(name)}"']

    @asynccontextmanager
    async def checking(self, rate: float = 1_000.0, pace: Pace = QUICK) -> AsyncIterator[asyncio.Task[None]]:
        handles = Handles(
            self.loopback, [self.names.address], allow_private_hosts=True, dns_seconds=0.5, http_seconds=0.5
        )
        checks = HandleChecks(self.store, handles, Shard(), rate=rate, pace=pace)
        task = asyncio.create_task(checks.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def shown(self, name: object) -> str | None:
        handle: str | None = await self.sql.fetchval("select handle from atproto.repos where did = $1", did(name))
        return handle

    async def shows(self, name: object, handle: str | None) -> None:
        async def so() -> bool:
            return await self.shown(name) == handle

        await until(so, lambda: f"{name}: not {handle}")

    async def attempts(self, name: object) -> int:
        value: int = await self.sql.fetchval("select handle_attempts from indexer.identity where did = $1", did(name))
        return value

    async def make_due(self, name: object) -> None:
        await self.sql.execute("update indexer.identity set handle_due_at = now() where did = $1", did(name))


@pytest.fixture
def town(store: Store, sql: asyncpg.Connection, name_server: NameServer, loopback: Loopback) -> Town:
    return Town(store, sql, name_server, loopback)


async def test_handles_come_to_be_shown_and_are_found_by(town: Town) -> None:
    await town.claim("ann", "ann.test")
    await town.claim("liar", "ann.test")
    await town.claim("nobody", None)
    town.answer("ann", "ann.test")
    async with town.checking():
        await town.shows("ann", "ann.test")
        await town.shows("liar", INVALID_HANDLE)
        await town.shows("nobody", INVALID_HANDLE)
        assert await town.store.did_of_handle("ann.test") == did("ann")
        town.answer("ann", "ann2.test")
        await town.claim("ann", "ann2.test")
        await town.shows("ann", "ann2.test")
        assert await town.store.did_of_handle("ann.test") is None


async def test_the_well_known_page_will_do(town: Town) -> None:
    await town.claim("ann", "ann.test")
    town.loopback.host.pages[PAGE] = answer(did("ann").encode())
    async with town.checking():
        await town.shows("ann", "ann.test")


async def test_what_can_not_be_checked_stays_unknown_and_is_tried_again(town: Town) -> None:
    await town.claim("ann", "ann.test")
    town.names.rcode = dns.rcode.SERVFAIL
    town.loopback.host.pages[PAGE] = answer(status=500)
    async with town.checking():
        await until(lambda: bool(town.loopback.asked))
    async with town.checking():  # another process: it is not its turn yet

        async def counted() -> bool:
            return await town.attempts("ann") == 1

        await until(counted)
        assert await town.shown("ann") is None
        town.names.rcode = None
        town.answer("ann", "ann.test")
        await town.make_due("ann")
        await town.shows("ann", "ann.test")
        assert await town.attempts("ann") == 0
    assert len(town.loopback.asked) == 1


async def test_what_held_is_shown_through_an_outage_but_not_for_ever(town: Town) -> None:
    await town.claim("ann", "ann.test")
    town.answer("ann", "ann.test")
    async with town.checking():
        await town.shows("ann", "ann.test")
        town.names.rcode = dns.rcode.SERVFAIL
        town.loopback.host.pages[PAGE] = answer(status=500)
        for attempt in range(1, GIVEN_UP):
            await town.make_due("ann")
            await until(attempted(town, attempt))
            assert await town.shown("ann") == "ann.test"
        await town.make_due("ann")
        await town.shows("ann", None)


def attempted(town: Town, attempts: int) -> Callable[[], Awaitable[bool]]:
    async def so() -> bool:
        return await town.attempts("ann") == attempts

    return so


async def test_name_servers_that_hang_do_not_keep_others_waiting(town: Town) -> None:
    """A check of a silent name takes its second; so many wait for one, and the rate is held all the same."""
    for number in range(30):
        await town.claim(number, f"silent{number}.test")
    await town.claim("ann", "ann.test")
    town.answer("ann", "ann.test")
    town.names.silent = "_atproto.silent"
    town.loopback.host.pages[PAGE] = answer(status=404)
    async with town.checking(pace=replace(QUICK, check=1.0)):
        await asyncio.wait_for(town.shows("ann", "ann.test"), 2.0)


async def test_the_rate_is_held(town: Town) -> None:
    for number in range(10):
        await town.claim(number, f"h{number}.test")
    async with town.checking(rate=0.01):
        await until(lambda: len(town.names.asked) >= 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.3)
    assert len({name for name in town.names.asked if name.startswith("_atproto")}) == 1


async def test_a_bug_is_loud(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    await town.claim("ann", "ann.test")
    town.loopback.gone.add("ann.test")
    async with town.checking() as task:
        await town.shows("ann", INVALID_HANDLE)

        async def bug(_did: str, _claimed: str) -> str:
            raise ZeroDivisionError

        monkeypatch.setattr(Handles, "verify_handle", lambda _self, did, claimed: bug(did, claimed))
        await town.make_due("ann")
        with pytest.raises(ExceptionGroup):
            await asyncio.wait_for(task, 10)
