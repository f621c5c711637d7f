"""Those who take part in a resync, beside its worker: the account, its hosts, its directory, the live path."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from time import time
from typing import Any

from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.crypto import PrivateKey, PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import tid_of
from indexer.errors import UnavailableError
from indexer.localnet.repo import Change, Write
from indexer.pds import Spool
from indexer.reasons import FetchFailure
from indexer.store import DatabaseError, Store
from indexer.sync.batch import Received, Settled, plan_batch
from indexer.sync.events import AccountEvent, CommitEvent, SyncEvent
from indexer.sync.plan import Batch
from indexer.sync.planning import UNAVAILABLE, Ground, Policy, Signer
from indexer.sync.repo import Outcome, Repo
from tests.sync.people import Person

MIRROR = "https://relay.test"
COLLECTIONS = ("com.example.a", "com.example.note", "com.example.note.draft")
NO_COLLECTION = "com.example.no-name"  # takes part in every tree, and names no records

Step = Callable[[str], Awaitable[None]]


class Owner(Person):
    """An account that remembers its records at each revision, as its own repo has them, and what it exported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.published = self.key  # what the directory says
        self.active = True
        self.history: dict[str, dict[str, str]] = {}
        self.exports: list[bytes] = []
        self._numbers = 0
        self._remember()

    @property
    def rev(self) -> str:
        return self.repo.head.rev

    def change(self, *writes: Write) -> Change:
        change = self.repo.write(writes, self.key, self._rev())
        self._remember()
        return change

    def write(self, *writes: Write) -> dict[str, Any]:
        return self.payload(self.change(*writes))

    def some_writes(self, random: Random) -> list[Write]:
        """Valid ones, which may name a path more than once."""
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

    def _rev(self) -> str:
        self._ticks += 1
        return tid_of(int((time() - 3_600) * 1_000_000) + self._ticks)


class Host:
    """The account's PDS, and a mirror of it that may be `behind` by so many commits, as a resync asks them."""

    def __init__(self, owner: Owner, spool_directory: Path, behind: Callable[[], int], step: Step) -> None:
        self._owner = owner
        self._spool_directory = spool_directory
        self._behind = behind
        self._step = step

    async def latest_commit(self, _did: str, _host: str) -> tuple[bytes, str]:
        await self._step("ask for the latest commit")
        self._refuse()
        answer = self._owner.repo.head.cid, self._owner.rev
        await self._step("latest commit answered")
        return answer

    @asynccontextmanager
    async def fetch_repo(self, _did: str, host: str, _large: Callable[[], None]) -> AsyncIterator[Spool]:
        await self._step("ask for the export")
        self._refuse()
        behind = self._behind() if host == MIRROR else 0
        export = self._owner.exports[max(-1 - behind, -len(self._owner.exports))]
        await self._step("export under way")
        with Spool(self._spool_directory, DEFAULT_LIMITS) as spool:
            await spool.fill(_whole(export))
            await self._step("export fetched")
            yield spool

    def _refuse(self) -> None:
        if not self._owner.active:
            raise UnavailableError(FetchFailure.REPO_DEACTIVATED)


async def _whole(export: bytes) -> AsyncIterator[bytes]:
    yield export


class Directory:
    """What the process knows of the account's key: `cached`, or else what the directory says, if it is `up`."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.cached: PublicKey | None = None
        self.up = True

    def ask(self) -> PublicKey:
        if not self.up:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE)
        self.cached = self._owner.published.public
        return self.cached


class Live:
    """The live path: what arrives is planned and written in its order, as `service.writer` does it.

    `newest` is the newest revision of a message that came while the account was active, proven or not.
    """

    def __init__(self, store: Store, owner: Owner, directory: Directory, policy: Policy) -> None:
        self._store = store
        self._owner = owner
        self._directory = directory
        self._policy = policy
        self._turn = asyncio.Lock()
        self.newest = ""
        self.outcomes = Counter[Outcome]()

    async def deliver(self, messages: Sequence[Received]) -> None:
        """In one batch, and another one for those that have to wait for a key."""
        async with self._turn:
            answer: Signer | None = None
            while messages:
                signer = answer or self._at_hand()
                repos = await self._store.repos([self._owner.did])
                ground = Ground(self._policy, MIRROR, time())
                plan = plan_batch(messages, repos, lambda _did, signer=signer: signer, ground)  # type: ignore[misc]
                stale = frozenset(plan.stale_identities)
                try:
                    moved = await self._store.apply(Batch(plan.writes, tuple(plan.dead_letters), stale))
                except DatabaseError:  # a deadlock with a worker that has lost its claim and doesn't know yet
                    continue
                if moved:
                    continue
                self._note(plan.settled, repos)
                if stale:
                    self._directory.cached = None
                messages = plan.waiting
                answer = self._answer() if plan.needs else None

    def _at_hand(self) -> Signer | None:
        return Signer(self._directory.cached) if self._directory.cached else None

    def _answer(self) -> Signer:
        try:
            return Signer(self._directory.ask(), final=True)
        except UnavailableError:
            return UNAVAILABLE

    def _note(self, settled: Sequence[Settled], repos: Mapping[str, Repo]) -> None:
        active = repos.get(self._owner.did, Repo(self._owner.did)).active
        for item in settled:
            self.outcomes[item.outcome] += 1
            match item.received.event:
                case AccountEvent() as event if item.outcome is Outcome.APPLIED:
                    active = event.active
                case CommitEvent() | SyncEvent() as event if active and item.outcome is not Outcome.REJECTED:
                    self.newest = max(self.newest, event.rev)
