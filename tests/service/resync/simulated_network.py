"""Simulated collaborators of a resync: the account, its PDS and a mirror, its directory, and the live path."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from time import time
from typing import Any

from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.crypto import PrivateKey, PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import tid_of
from indexer.errors import UnavailableError
from indexer.localnet.local_repo import LocalChange, Write
from indexer.pds import ExportDownload, Spool
from indexer.reasons import FetchFailure
from indexer.store import DatabaseError, Store
from indexer.sync.events import AccountEvent, CommitEvent, SyncEvent
from indexer.sync.plan_batch import ReceivedMessage, SettledMessage, plan_batch
from indexer.sync.plans import Batch
from indexer.sync.policy import UNAVAILABLE, KeyState, PlanContext, Policy
from indexer.sync.repo_state import Repo
from indexer.sync.repo_transitions import Outcome
from tests.sync.signing_account import SigningAccount

MIRROR = "https://relay.test"
COLLECTIONS = ("com.example.a", "com.example.note", "com.example.note.draft")
NO_COLLECTION = "com.example.no-name"  # takes part in every tree, and names no records

Step = Callable[[str], Awaitable[None]]


class AccountOwner(SigningAccount):
    """An account that remembers its records and its export at each rev."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.published = self.key  # the key in the directory
        self.active = True
        self.history: dict[str, dict[str, str]] = {}
        self.exports: list[bytes] = []
        self._numbers = 0
        self._remember()

    @property
    def rev(self) -> str:
        return self.repo.head.rev

    def change(self, *writes: Write) -> LocalChange:
        change = self.repo.write(writes, self.key, self.next_rev())
        self._remember()
        return change

    def commit(self, *writes: Write) -> dict[str, Any]:
        return self.commit_payload(self.change(*writes))

    def some_writes(self, random: Random) -> list[Write]:
        """Return valid writes, which may name a path more than once."""
        present, writes = set(self.repo.records), []
        for _ in range(random.choice([1, 1, 2, 5])):
            path = f"{random.choice([*COLLECTIONS, NO_COLLECTION])}/{random.randint(0, 5)}"
            if path not in present:
                writes.append(Write.create(path, self._record()))
            elif random.random() < 0.5:
                writes.append(Write.update(path, self._record()))
            else:
                writes.append(Write.delete(path))
            present ^= {path} if writes[-1].action != "update" else set()
        return writes

    def swap_key(self) -> None:
        self._numbers += 1
        self.key = self.published = PrivateKey.from_seed("k256", f"{self.did} {self._numbers}".encode())

    def _record(self) -> dict[str, Any]:
        self._numbers += 1
        return {"$type": COLLECTIONS[0], "number": self._numbers}

    def _remember(self) -> None:
        self.history[self.rev] = {
            path: cid_text(cid_of(block))
            for path, block in self.repo.records.items()
            if not path.startswith(NO_COLLECTION)
        }
        self.exports.append(b"".join(self.repo.export()))

    def next_rev(self) -> str:
        self.ticks += 1
        return tid_of(int((time() - 3_600) * 1_000_000) + self.ticks)


class SimulatedHost:
    """The account's PDS, and a mirror that is `mirror_lag()` commits behind it."""

    def __init__(self, owner: AccountOwner, spool_directory: Path, mirror_lag: Callable[[], int], step: Step) -> None:
        self._owner = owner
        self._spool_directory = spool_directory
        self._mirror_lag = mirror_lag
        self._step = step

    async def fetch_latest_commit(self, _did: str, _host: str) -> tuple[bytes, str]:
        await self._step("ask for the latest commit")
        self._refuse()
        answer = self._owner.repo.head.cid, self._owner.rev
        await self._step("latest commit answered")
        return answer

    @asynccontextmanager
    async def open_export(self, _did: str, host: str) -> AsyncIterator[ExportDownload]:
        await self._step("ask for the export")
        self._refuse()
        lag = self._mirror_lag() if host == MIRROR else 0
        export = self._owner.exports[max(-1 - lag, -len(self._owner.exports))]
        await self._step("export requested")
        with Spool(self._spool_directory, DEFAULT_LIMITS) as spool:
            yield ExportDownload(spool, self._chunks(export), AsyncExitStack())

    async def _chunks(self, export: bytes) -> AsyncIterator[bytes]:
        yield export
        await self._step("export fetched")

    def _refuse(self) -> None:
        if not self._owner.active:
            raise UnavailableError(FetchFailure.REPO_DEACTIVATED)


class SimulatedDirectory:
    """The account's key: in the cache, or in the directory while that is `up`."""

    def __init__(self, owner: AccountOwner) -> None:
        self._owner = owner
        self.cached: PublicKey | None = None
        self.fetched_at = 0.0
        self.up = True

    def fetch_key(self) -> PublicKey:
        if not self.up:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE)
        self.cached, self.fetched_at = self._owner.published.public, time()
        return self.cached


class LivePath:
    """Plans and writes messages in their order, as the batch writer does.

    `newest` is the newest rev of a message that arrived while the account was active, verified or not.
    """

    def __init__(self, store: Store, owner: AccountOwner, directory: SimulatedDirectory, policy: Policy) -> None:
        self._store = store
        self._owner = owner
        self._directory = directory
        self._policy = policy
        self._lock = asyncio.Lock()
        self.newest = ""
        self.outcomes = Counter[Outcome]()

    async def deliver(self, messages: Sequence[ReceivedMessage]) -> None:
        """Deliver in one batch, and in another one those that wait for a key."""
        async with self._lock:
            answer: KeyState | None = None
            while messages:
                key_state = answer or self._cached_key()
                repos = await self._store.repos([self._owner.did])
                context = PlanContext(self._policy, MIRROR, time())
                plan = plan_batch(messages, repos, lambda _did, key_state=key_state: key_state, context)  # type: ignore[misc]
                stale = frozenset(plan.stale_identities)
                try:
                    moved = (await self._store.write(Batch(plan.writes, tuple(plan.dead_letters), stale))).skipped
                except DatabaseError:  # a deadlock with a worker that has not noticed that its claim is lost
                    continue
                if moved:
                    continue
                self._note(plan.settled, repos)
                if stale:
                    self._directory.cached = None
                messages = plan.waiting
                answer = self._fetched_key() if plan.needed_keys else None

    def _cached_key(self) -> KeyState | None:
        return KeyState(self._directory.cached) if self._directory.cached else None

    def _fetched_key(self) -> KeyState:
        try:
            return KeyState(self._directory.fetch_key(), final=True)
        except UnavailableError:
            return UNAVAILABLE

    def _note(self, settled: Sequence[SettledMessage], repos: Mapping[str, Repo]) -> None:
        active = repos.get(self._owner.did, Repo(self._owner.did)).active
        for item in settled:
            self.outcomes[item.outcome] += 1
            match item.received.event:
                case AccountEvent() as event if item.outcome is Outcome.APPLIED:
                    active = event.active
                case CommitEvent() | SyncEvent() as event if active and item.outcome is not Outcome.REJECTED:
                    self.newest = max(self.newest, event.rev)
