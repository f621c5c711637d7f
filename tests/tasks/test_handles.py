"""Handle checks: from the claim in a DID document, by DNS and HTTP, to the handle in the public view."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from time import monotonic
from typing import Any

import asyncpg
import dns.rcode
import pytest

from indexer.db import Database, DatabaseError
from indexer.net.identity.handle_verifier import HandleVerifier
from indexer.reasons import FetchFailure
from indexer.sync.identity import INVALID_HANDLE, StoredIdentity
from indexer.sync.shard import Shard
from indexer.tasks.identities import MAX_ATTEMPTS, HandleChecks
from tests.db.repo_rows import did, insert, synchronized
from tests.net.http.scripted_host import http_response
from tests.net.identity.conftest import Loopback, loopback, name_server
from tests.net.identity.name_server import NameServer
from tests.waiting import until

pytestmark = pytest.mark.slow

__all__ = ["loopback", "name_server"]

QUICK: dict[str, Any] = {"idle": 0.02, "first_retry": 100_000.0, "max_retry": 100_000.0}
WELL_KNOWN_PATH = "/.well-known/atproto-did"


class HandleScenario:
    """Accounts that claim handles, their name server and their host."""

    def __init__(self, db: Database, sql: asyncpg.Connection, names: NameServer, loopback: Loopback) -> None:
        self.db = db
        self.sql = sql
        self.names = names
        self.loopback = loopback
        self._read_at = 5.0

    async def claim(self, name: object, handle: str | None) -> None:
        await self.claim_all({name: handle})

    async def claim_all(self, handles: Mapping[object, str | None]) -> None:
        """Store the claims of accounts, in their order."""
        known = await self.db.repos.load([did(name) for name in handles])
        await insert(self.db, *[synchronized(name) for name in handles if did(name) not in known])
        times = count(self._read_at + 1)
        self._read_at += len(handles)
        await self.db.identities.save([
            StoredIdentity(did(name), handle, "https://pds.test", "did:key:zabc", next(times))
            for name, handle in handles.items()
        ])  # fmt: skip

    def answer(self, name: object, handle: str) -> None:
        self.names.texts[f"_atproto.{handle}"] = [f'"did={did(name)}"']

    @asynccontextmanager
    async def checking(
        self, rate: float = 1_000.0, check: float = 8.0, dns_timeout: float = 10.0
    ) -> AsyncIterator[asyncio.Task[None]]:
        handles = HandleVerifier(
            self.loopback, [self.names.address], allow_private_hosts=True, dns_timeout=dns_timeout, http_timeout=10.0
        )
        checks = HandleChecks(self.db, handles, Shard(), rate=rate, check=check, **QUICK)
        task = asyncio.create_task(checks.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def shown(self, name: object) -> str | None:
        handle: str | None = await self.sql.fetchval("select handle from atproto.repos where did = $1", did(name))
        return handle

    async def until_shown(self, name: object, handle: str | None) -> None:
        async def holds() -> bool:
            return await self.shown(name) == handle

        await until(holds, lambda: f"{name}: not {handle}")

    async def attempts(self, name: object) -> int:
        value: int = await self.sql.fetchval("select handle_attempts from indexer.identity where did = $1", did(name))
        return value

    async def make_due(self, name: object) -> None:
        await self.sql.execute("update indexer.identity set handle_due_at = now() where did = $1", did(name))


@pytest.fixture
def scenario(db: Database, sql: asyncpg.Connection, name_server: NameServer, loopback: Loopback) -> HandleScenario:
    return HandleScenario(db, sql, name_server, loopback)


async def test_verified_handles_are_shown_and_resolve(scenario: HandleScenario) -> None:
    await scenario.claim("ann", "ann.test")
    await scenario.claim("liar", "ann.test")
    await scenario.claim("nobody", None)
    scenario.answer("ann", "ann.test")
    async with scenario.checking():
        await scenario.until_shown("ann", "ann.test")
        await scenario.until_shown("liar", INVALID_HANDLE)
        await scenario.until_shown("nobody", INVALID_HANDLE)
        assert await scenario.db.identities.did_of_handle("ann.test") == did("ann")
        scenario.answer("ann", "ann2.test")
        await scenario.claim("ann", "ann2.test")
        await scenario.until_shown("ann", "ann2.test")
        assert await scenario.db.identities.did_of_handle("ann.test") is None


async def test_handle_that_cannot_be_checked_stays_unknown_and_is_retried(scenario: HandleScenario) -> None:
    await scenario.claim("ann", "ann.test")
    scenario.names.rcode = dns.rcode.SERVFAIL
    scenario.loopback.host.pages[WELL_KNOWN_PATH] = http_response(status=500)
    async with scenario.checking():
        await until(attempted(scenario, 1))
    scenario.names.rcode = None
    scenario.answer("ann", "ann.test")
    await scenario.claim("bob", "bob.test")
    scenario.answer("bob", "bob.test")
    async with scenario.checking():  # as in another process
        await scenario.until_shown("bob", "bob.test")
        assert await scenario.shown("ann") is None, "her handle is not due yet"
        assert await scenario.attempts("ann") == 1
        await scenario.make_due("ann")
        await scenario.until_shown("ann", "ann.test")
        assert await scenario.attempts("ann") == 0
    assert len(scenario.loopback.requests) == 1


async def test_verified_handle_is_shown_during_an_outage_until_the_last_attempt(scenario: HandleScenario) -> None:
    await scenario.claim("ann", "ann.test")
    scenario.answer("ann", "ann.test")
    async with scenario.checking():
        await scenario.until_shown("ann", "ann.test")
        scenario.names.rcode = dns.rcode.SERVFAIL
        scenario.loopback.host.pages[WELL_KNOWN_PATH] = http_response(status=500)
        for attempt in range(1, MAX_ATTEMPTS):
            await scenario.make_due("ann")
            await until(attempted(scenario, attempt))
            assert await scenario.shown("ann") == "ann.test"
        await scenario.make_due("ann")
        await scenario.until_shown("ann", None)


def attempted(scenario: HandleScenario, attempts: int) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return await scenario.attempts("ann") == attempts

    return holds


async def test_slow_name_servers_do_not_delay_other_checks(scenario: HandleScenario) -> None:
    """A check of a silent name takes 0.3 s, and enough checks run at the same time to reach the rate."""
    await scenario.claim_all({number: f"silent{number}.test" for number in range(150)})
    await scenario.claim("ann", "ann.test")
    scenario.answer("ann", "ann.test")
    scenario.names.silent = "_atproto.silent"
    scenario.loopback.host.pages[WELL_KNOWN_PATH] = http_response(status=404)
    async with scenario.checking(check=0.3, dns_timeout=0.3):
        await asyncio.wait_for(scenario.until_shown("ann", "ann.test"), 10.0)


async def test_handles_of_one_domain_do_not_delay_those_of_others(scenario: HandleScenario) -> None:
    """400 accounts claim newer handles of one domain; 50 handles are checked per second."""
    honest = [f"honest{number}" for number in range(5)]
    for name in honest:
        await scenario.claim(name, f"{name}.{name}.test")
        scenario.answer(name, f"{name}.{name}.test")
    await scenario.claim_all({number: f"h{number}.hostile.test" for number in range(400)})
    for number in range(400):
        scenario.answer(number, f"h{number}.hostile.test")
    async with scenario.checking(rate=50.0, check=1.6):
        for name in honest:
            await scenario.until_shown(name, f"{name}.{name}.test")
        assert max(hostile_before(scenario, f"_atproto.{name}.{name}.test") for name in honest) < 60
        checked = len(hostile(scenario.names.queries))
        late = "late"
        await scenario.claim(late, "late.other.test")
        scenario.answer(late, "late.other.test")
        await scenario.until_shown(late, "late.other.test")
        assert hostile_before(scenario, "_atproto.late.other.test") < checked + 140


async def test_a_handle_amid_many_of_one_domain_waits_for_a_part_of_them_only(
    scenario: HandleScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither among the oldest nor among the newest. New ones are still checked soon."""
    monkeypatch.setattr("indexer.tasks.identities.WINDOW", 50)
    claims = {number: f"h{number}.hostile.test" for number in range(450)}
    await scenario.claim_all(dict(list(claims.items())[:150]) | {"amid": "amid.other.test"})
    await scenario.claim_all(dict(list(claims.items())[150:]))
    scenario.answer("amid", "amid.other.test")
    scenario.loopback.host.pages[WELL_KNOWN_PATH] = http_response(status=404)
    async with scenario.checking(rate=50.0, check=0.16):  # eight checks at a time
        await scenario.until_shown("amid", "amid.other.test")
        checked = len(hostile(scenario.names.queries))
        assert checked < 150
        await scenario.claim("late", "late.third.test")
        scenario.answer("late", "late.third.test")
        await scenario.until_shown("late", "late.third.test")
        assert hostile_before(scenario, "_atproto.late.third.test") < checked + 40


def hostile(queries: Sequence[str]) -> set[str]:
    return {name for name in queries if name.endswith(".hostile.test")}


def hostile_before(scenario: HandleScenario, name: str) -> int:
    """Return how many names of the hostile domain were asked for before this one."""
    return len(hostile(scenario.names.queries[: scenario.names.queries.index(name)]))


async def test_a_host_is_not_asked_again_at_once_if_the_result_cannot_be_stored(
    scenario: HandleScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 0

    async def fail(_: object) -> None:
        nonlocal failures
        failures += 1
        raise DatabaseError(FetchFailure.UNREACHABLE, "the disk is full")

    monkeypatch.setattr(scenario.db.identities, "save_handle_check", fail)
    await scenario.claim("ann", "ann.test")
    scenario.answer("ann", "ann.test")
    async with scenario.checking():
        await until(lambda: failures > 0)
        await asyncio.sleep(0.5)
    assert (failures, scenario.names.queries) == (1, ["_atproto.ann.test"])


async def test_rate_is_limited(scenario: HandleScenario) -> None:
    for number in range(10):
        await scenario.claim(number, f"h{number}.test")
    scenario.loopback.host.pages[WELL_KNOWN_PATH] = http_response(status=404)
    began = monotonic()
    async with scenario.checking(rate=20.0):
        await until(lambda: len({name for name in scenario.names.queries if name.startswith("_atproto")}) == 10)
    assert monotonic() - began >= 9 / 20.0 * 0.9
