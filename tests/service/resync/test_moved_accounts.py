"""Resyncs of accounts that moved to another PDS unnoticed, while the former one still answers."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.errors import UnavailableError
from indexer.identity import CachedIdentity
from indexer.localnet.local_repo import Write
from indexer.monitoring.conditions import Conditions
from indexer.monitoring.metrics import Metrics
from indexer.pds import ExportDownload, Spool
from indexer.reasons import FetchFailure
from indexer.service.resync.admission import Postponed
from indexer.service.resync.attempt import ResyncAttempts
from indexer.store import Store
from indexer.sync.repo_state import SyncStatus
from indexer.sync.repo_transitions import release
from tests.service.resync.simulated_network import MIRROR, AccountOwner
from tests.service.resync.stepped_resync import FreeSlots
from tests.sync.signing_account import STORE_ALL

pytestmark = pytest.mark.slow

FORMER, PRESENT = "https://former-pds.test", "https://pds.test"
A_DAY = 86_400.0


@dataclass
class Hosts:
    """The former PDS of an account, which lacks the last commit, the present one, and a mirror.

    Attributes:
        missing: The number of commits that each host lacks, or why it does not answer.
        requests: The requests, as kind and host.
    """

    owner: AccountOwner
    directory: Path
    heads: list[tuple[bytes, str]]
    missing: dict[str, int | FetchFailure] = field(default_factory=lambda: {FORMER: 1, PRESENT: 0, MIRROR: 0})
    requests: list[tuple[str, str]] = field(default_factory=list)

    def commit(self) -> None:
        """Change the repo. Nobody hears of it."""
        self.owner.change(Write.create(f"com.example.a/{len(self.heads)}", {"$type": "com.example.a"}))
        self.heads.append((self.owner.repo.head.cid, self.owner.rev))

    async def fetch_latest_commit(self, _did: str, host: str) -> tuple[bytes, str]:
        return self.heads[self._version_of("head", host)]

    @asynccontextmanager
    async def open_export(self, _did: str, host: str) -> AsyncIterator[ExportDownload]:
        export = self.owner.exports[self._version_of("export", host)]
        with Spool(self.directory, DEFAULT_LIMITS) as spool:
            yield ExportDownload(spool, _chunks(export), AsyncExitStack())

    def _version_of(self, kind: str, host: str) -> int:
        self.requests.append((kind, host))
        missing = self.missing[host]
        if isinstance(missing, FetchFailure):
            raise UnavailableError(missing)
        return -1 - missing


async def _chunks(export: bytes) -> AsyncIterator[bytes]:
    yield export


@dataclass
class Directory:
    """The identity of the account: as it was a day ago, until a lookup may ask the network."""

    owner: AccountOwner
    pds: str = PRESENT
    allows_lookups: bool = True
    cached: CachedIdentity | None = None

    async def lookup(self, _did: str, *, refresh: bool) -> CachedIdentity:
        if self.cached is None:
            self.cached = self._identity(FORMER, time() - A_DAY)
        elif refresh and self.allows_lookups:
            self.cached = self._identity(self.pds, time())
        return self.cached

    def _identity(self, pds: str, at: float) -> CachedIdentity:
        return CachedIdentity(self.owner.key.public, pds, problem=None, fetched_at=at, stale=False)


class World:
    """A repo that was synchronized before its last commit, and that a relay lists with the rev of that commit."""

    def __init__(self, store: Store, sql: asyncpg.Connection, directory: Path) -> None:
        self.owner = AccountOwner("ada")
        self.hosts = Hosts(self.owner, directory, [(self.owner.repo.head.cid, self.owner.rev)])
        self.directory = Directory(self.owner)
        self.store = store
        self._sql = sql
        collaborators: tuple[Any, Any] = (self.directory, self.hosts)
        sources = (MIRROR, None)
        self._attempts = ResyncAttempts(store, *collaborators, lambda: STORE_ALL, Metrics(), sources, Conditions())

    async def begin(self) -> None:
        await self.store.add_repos([self.owner.did])
        self.hosts.commit()
        assert await self.attempt() == "synchronized"
        self.hosts.commit()
        assert await self.store.desynchronize_behind({self.owner.did: self.owner.rev}, time()) == 1
        self.hosts.requests.clear()

    async def attempt(self) -> str | Postponed:
        [claimed] = await self.store.claim(1, range(256), 60.0, time() + A_DAY)
        identity = await self.directory.lookup(claimed.did, refresh=False)
        result = await self._attempts.attempt(claimed, identity, FreeSlots())
        if isinstance(result, Postponed):
            await self.store.update_repo(claimed.did, release)
        return result

    async def status(self) -> SyncStatus:
        return (await self.store.repos([self.owner.did]))[self.owner.did].sync_status

    async def has_all_records(self) -> bool:
        rows = await self._sql.fetch("select collection || '/' || rkey from indexer.record")
        return {path for (path,) in rows} == self.owner.history[self.owner.rev].keys()


@pytest.fixture
async def world(store: Store, sql: asyncpg.Connection, tmp_path: Path) -> World:
    world = World(store, sql, tmp_path)
    await world.begin()
    return world


ANSWERS = pytest.mark.parametrize("answer", [1, FetchFailure.REPO_DEACTIVATED], ids=["old head", "deactivated"])


@ANSWERS
async def test_former_pds_does_not_end_a_resync(world: World, answer: int | FetchFailure) -> None:
    """The limits of the directory allow no lookup, so only the relay leads to the present PDS."""
    world.directory.allows_lookups = False
    world.hosts.missing[FORMER] = answer
    assert await world.attempt() == "synchronized"
    assert await world.has_all_records()


@ANSWERS
async def test_resync_that_finds_another_pds_begins_again_there(world: World, answer: int | FetchFailure) -> None:
    world.hosts.missing |= {FORMER: answer, MIRROR: FetchFailure.UNREACHABLE}
    assert await world.attempt() == Postponed()
    assert await world.attempt() == "synchronized"
    assert await world.has_all_records()


@ANSWERS
async def test_resync_fails_while_only_a_former_pds_may_answer(world: World, answer: int | FetchFailure) -> None:
    """The failure is not permanent, so the repo is not parked."""
    world.directory.allows_lookups = False
    world.hosts.missing |= {FORMER: answer, MIRROR: FetchFailure.UNREACHABLE}
    with pytest.raises(UnavailableError) as failed:
        await world.attempt()
    assert not failed.value.reason.is_permanent
    assert await world.status() is SyncStatus.IN_PROGRESS


async def test_made_up_rev_in_a_list_causes_no_export_if_the_pds_is_certain(world: World) -> None:
    world.directory.pds = FORMER
    assert await world.attempt() == "unchanged"
    assert world.hosts.requests == [("head", FORMER)]


async def test_permanent_failure_counts_if_the_pds_is_certain(world: World) -> None:
    world.directory.pds = FORMER
    world.hosts.missing |= {FORMER: FetchFailure.REPO_DEACTIVATED, MIRROR: FetchFailure.UNREACHABLE}
    with pytest.raises(UnavailableError) as failed:
        await world.attempt()
    assert failed.value.reason is FetchFailure.REPO_DEACTIVATED
