"""A worker pool whose repos are in memory, and whose attempts end when a test says so."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import time
from typing import Any, Self

from indexer.atproto.crypto import PrivateKey
from indexer.db import DatabaseError
from indexer.db.write import WrittenBatch
from indexer.errors import UnavailableError
from indexer.net.identity.identity_cache import CachedIdentity
from indexer.net.new_accounts import NewAccounts
from indexer.reasons import FetchFailure
from indexer.resync.pool import WorkerPool, WorkerPoolSettings
from indexer.resync.shares import Resync, Shares
from indexer.sync.changes import Batch
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import Shard
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics
from tests.sync.signing_account import STORE_ALL

KEY = PrivateKey.from_seed("k256", b"anyone's").public
DID = "did:plc:" + "a" * 24


class MemoryDatabase:
    """Repo rows in memory, with the methods that the pool uses."""

    def __init__(self, dids: Sequence[str]) -> None:
        self.repos = self.resyncs = self
        self.rows = {did: Repo(did, version=1) for did in dids}
        self.claims: list[str] = []
        self.claim_sizes: list[int] = []
        self.claim_holds = True
        self.claims_answered = asyncio.Event()
        self.claims_answered.set()

    async def claim(self, count: int, _buckets: range, _seconds: float, now: float) -> list[Repo]:
        waiting = [repo for repo in self.rows.values() if repo.sync_status is SyncStatus.DESYNCHRONIZED]
        ordered = sorted(waiting, key=lambda repo: repo.next_attempt_at or 0)
        due = [repo for repo in ordered if (repo.next_attempt_at or 0) <= now][:count]
        claimed = [
            repo._replace(sync_status=SyncStatus.IN_PROGRESS, version=repo.version + 1, lease=repo.lease + 1)
            for repo in due
        ]
        self.rows.update({repo.did: repo for repo in claimed})
        self.claims += [repo.did for repo in claimed]
        self.claim_sizes.append(len(claimed))
        await self.claims_answered.wait()
        return claimed

    async def renew(self, _did: str, _lease: int, _seconds: float) -> bool:
        return self.claim_holds

    async def load(self, dids: Sequence[str]) -> dict[str, Repo]:
        return {did: self.rows[did] for did in dids}

    async def update(self, did: str, plan: Callable[[Repo], Repo]) -> Repo | None:
        before, after = self.rows[did], plan(self.rows[did])
        self.rows[did] = after
        return None if after is before else after

    async def write(self, batch: Batch) -> WrittenBatch:
        for write in batch.writes:
            assert self.rows[write.repo.did].version == write.before.version
            self.rows[write.repo.did] = write.repo
        return WrittenBatch(frozenset(), Counter())


class FixedIdentities:
    """An identity for every DID; only its host differs."""

    def __init__(self, host_of: Callable[[str], str]) -> None:
        self.host_of = host_of
        self.cached = True
        self.database_up = True
        self.failures: dict[str, UnavailableError] = {}
        self.hanging: set[str] = set()
        self.answered = asyncio.Event()
        self.preloaded: list[bool] = []

    def known(self, did: str) -> CachedIdentity:
        return CachedIdentity(KEY, f"https://{self.host_of(did)}", problem=None, fetched_at=0, stale=False)

    async def preload(self, _dids: Sequence[str]) -> None:
        if not self.database_up:
            raise DatabaseError(FetchFailure.TIMEOUT, "just now")

    def peek(self, did: str) -> CachedIdentity | None:
        return self.known(did) if self.cached else None

    async def lookup(self, did: str, *, preloaded: bool, **_: object) -> CachedIdentity:
        self.preloaded.append(preloaded)
        if did in self.failures:
            raise self.failures[did]
        if did in self.hanging:
            await self.answered.wait()
        return self.known(did)


@dataclass
class Download:
    """An export that `server` sends slowly. One that is large has more than `LARGE_BYTES`."""

    server: str | None
    rate: float = 1_500.0
    complete: bool = False
    received: int = 0
    large: bool = False


class ControlledAttempts:
    """Attempts that end when a test completes their future in `results`."""

    def __init__(self, db: MemoryDatabase) -> None:
        self.db = db
        self.started: list[str] = []
        self.ended: list[str] = []
        self.results: dict[str, asyncio.Future[str]] = {}
        self.downloads: dict[str, Download] = {}
        self.cancelled: list[str] = []
        self.cleaned_up = asyncio.Event()  # a cancelled attempt waits for it, as for the end of a transaction
        self.cleaned_up.set()

    async def keep_stored(self, _resync: Resync) -> bool:
        return False  # the repos are new

    async def attempt(self, resync: Resync, shares: Shares, _identity: CachedIdentity) -> str:
        claimed = resync.claimed
        self.started.append(claimed.did)
        download: Any = self.downloads.get(claimed.did)
        if download:
            shares.opened(resync, download, time())
            if download.large:
                shares.reserve(resync, time())
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.results[claimed.did] = future
        try:
            result = await future
        except asyncio.CancelledError:
            self.cancelled.append(claimed.did)
            await self.cleaned_up.wait()
            raise
        self.db.rows[claimed.did] = self.db.rows[claimed.did]._replace(
            sync_status=SyncStatus.SYNCHRONIZED, version=claimed.version + 1
        )
        self.ended.append(claimed.did)
        return result


class RunningPool:
    """A pool with controlled collaborators; cancelled at the end of the block."""

    def __init__(
        self,
        dids: Sequence[str],
        host_of: Callable[[str], str],
        workers: int,
        *,
        new_accounts: NewAccounts | None = None,
        **settings: Any,
    ) -> None:
        self.db = MemoryDatabase(dids)
        self.metrics = Metrics()
        self.attempts = ControlledAttempts(self.db)
        self.identities = FixedIdentities(host_of)
        db: Any = self.db
        identities: Any = self.identities
        attempts: Any = self.attempts
        times = {"idle_interval": 0.01, "lease": 30.0} | settings
        used = WorkerPoolSettings(workers=workers, **times)
        self.conditions = Conditions()
        self.pool = WorkerPool(
            db,
            identities,
            attempts,
            STORE_ALL.deletion_grace,
            Shard(),
            self.metrics,
            self.conditions,
            used,
            new_accounts or NewAccounts(0),
        )

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.pool.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.attempts.cleaned_up.set()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
