"""Worker pools that die before or after any of their own writes, as by kill -9, among repos that cause every write.

A process does one write at a time, so that a death is either before or after a write, never within one.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random
from time import time
from typing import Any, Literal

import asyncpg

from indexer.atproto.cid import cid_text, parse_cid
from indexer.atproto.record import Problem
from indexer.errors import UnavailableError
from indexer.identity import CachedIdentity
from indexer.monitoring.conditions import Conditions
from indexer.monitoring.metrics import Metrics
from indexer.pds import ExportDownload
from indexer.reasons import FetchFailure
from indexer.service.resync.attempt import ResyncAttempts
from indexer.service.resync.queue_maintenance import MaintenanceSettings, QueueMaintenance
from indexer.service.resync.worker_pool import WorkerPool, WorkerPoolSettings
from indexer.store import ResyncTransaction, Store
from indexer.store.apply_batch import AppliedBatch
from indexer.sync.plans import Batch, RepoWrite
from indexer.sync.repo_state import PARKED, Head, Repo
from indexer.sync.shard import Shard
from tests.service.resync.simulated_network import AccountOwner, LivePath, SimulatedDirectory, SimulatedHost
from tests.service.resync.stepped_resync import CONNECTIONS, EXPIRED, LATER, TERMINATE, KilledError
from tests.store.repo_rows import put, synchronized
from tests.sync.signing_account import STORE_ALL, received_message
from tests.waiting import until

WORKERS = 4  # one host gets at most three of them; large repos have one slot beside them
CROWD = ["crowd 1", "crowd 2", "crowd 3", "crowd 4"]
LARGE = ["large 1", "large 2"]
NAMES = ["well", "broken", "unknown", "orphan", "parked", "lacking", *LARGE, *CROWD]
LEASE = 9.0  # seconds
LONG_AGO = 43_200.0  # seconds; longer than the hour of `heal`

When = Literal["before", "after"]
Point = tuple[When, str, int]
"""Before or after the write of this kind, after so many writes of the same kind."""

EXPIRE = "expire leases"
CLAIM = "claim"
RENEW = "renew a lease"
COMPLETE = "complete a resync"
POSTPONE = "postpone before the start"
POSTPONE_CHANGED = "postpone again, because the row changed"
POSTPONE_RUNNING = "postpone a running attempt"
FAIL = "record a failure"
GIVE_BACK = "give a claim back"
REQUEST_VALUES = "request missing values"
UNPARK = "unpark"
KINDS = [
    EXPIRE,
    CLAIM,
    RENEW,
    COMPLETE,
    POSTPONE,
    POSTPONE_CHANGED,
    POSTPONE_RUNNING,
    FAIL,
    GIVE_BACK,
    REQUEST_VALUES,
    UNPARK,
]
"""Every kind of write of a pool and its maintenance."""

_NUMBERS = count()
_MAKE_A_DAY_OLD = "update indexer.repo set updated_at = now() - interval '1 day' where did = $1"
_AN_HOUR_PASSES = """
    update indexer.repo set updated_at = updated_at - interval '1 hour', lease_until = lease_until - interval '1 hour',
        next_attempt_at = next_attempt_at - interval '1 hour', synchronized_at = synchronized_at - interval '1 hour'
"""
_SETTLED = """
    select min(lease) > 0 and count(*) filter (where sync_status = 'in-progress') = $1 and not bool_or(
        sync_status = 'desynchronized' and coalesce(next_attempt_at, '-infinity') < now() + interval '1 second'
    ) from indexer.repo
"""


async def _no_step(_step: str) -> None:
    pass


class ResyncWorld:
    """Accounts, named by how their resyncs end until `healed`: then all but the unknown one succeed.

    It is also the identity cache and the PDS client of the pools. `claims` and `costs` count, by DID, how often a repo
    was claimed and how many attempts should have been counted.
    """

    def __init__(self, store: Store, sql: asyncpg.Connection, spool_directory: Path) -> None:
        self._store = store
        self._sql = sql
        self._asking = asyncio.Lock()
        self._spool_directory = spool_directory
        self.owners = {owner.did: owner for owner in map(AccountOwner, NAMES)}
        self.name_of = dict(zip(self.owners, NAMES, strict=True))
        self.did_of = dict(zip(NAMES, self.owners, strict=True))
        self.healed = False
        self._crowd_postponed = asyncio.Event()
        self.claims = Counter[str]()
        self.costs = Counter[str]()
        self._change_delivered = False
        self._fetching: set[str] = set()
        self._started: dict[str, int] = {}
        self._failed: dict[str, int] = {}

    async def begin(self) -> None:
        """Add the repos: most wait for their first resync, and one is claimed by a process that died."""
        await self.query("truncate indexer.repo, indexer.record, indexer.buffered_event")
        random = Random(7)
        for owner in self.owners.values():
            while len(owner.history[owner.rev]) < 2:
                owner.change(*owner.some_writes(random))
        orphan, parked, lacking = (self.did_of[name] for name in ("orphan", "parked", "lacking"))
        await self._store.add_repos([orphan])
        self.claims.update(repo.did for repo in await self._store.claim(1, range(256), EXPIRED, time() + LATER))
        await self.deliver(orphan)
        parked_repo = Repo(parked, 1, next_attempt_at=PARKED, last_error=FetchFailure.REPO_NOT_FOUND)
        head = self.owners[lacking].repo.head
        done = synchronized("", did=lacking, head=Head(head.rev, head.data, head.cid))
        changes = tuple(
            put(path)._replace(rev=head.rev, cid=parse_cid(cid), value=None, problem=Problem.MISSING)
            for path, cid in self.owners[lacking].history[head.rev].items()
        )
        await self._store.write(Batch((RepoWrite(0, parked_repo), RepoWrite(0, done, changes))))
        await self.query(_MAKE_A_DAY_OLD, parked)
        await self._store.add_repos(self.owners)

    async def query(self, statement: str, *values: object) -> list[asyncpg.Record]:
        async with self._asking:
            rows: list[asyncpg.Record] = await self._sql.fetch(statement, *values)
            return rows

    async def rows(self) -> dict[str, Repo]:
        """Return the rows by name."""
        return {self.name_of[did]: repo for did, repo in (await self._store.repos(list(self.owners))).items()}

    async def records(self, did: str) -> dict[str, str]:
        """Return the CIDs of the stored records, by path."""
        records = await self._store.visible_records(did)
        return {path: cid_text(cid) for path, cid in records.items()}

    async def settled(self) -> bool:
        """Return True if every repo was claimed and none is due. One hangs until the world is healed."""
        [(settled,)] = await self.query(_SETTLED, 0 if self.healed else 1)
        return bool(settled)

    async def heal(self) -> None:
        """Let an hour pass, and let all resyncs succeed from now on, except of the unknown repo."""
        self.healed = True
        await self.query(_AN_HOUR_PASSES)

    async def deliver(self, did: str) -> None:
        """Deliver the account's next commit on the live path."""
        directory = SimulatedDirectory(self.owners[did])
        directory.fetch_key()
        live = LivePath(self._store, self.owners[did], directory, STORE_ALL)
        await live.deliver([received_message("commit", self.owners[did].commit())])

    def note_postponed(self, written: Iterable[RepoWrite]) -> None:
        """Let the attempts of the crowd end once one of the crowd was postponed."""
        if any(self.name_of[write.repo.did] in CROWD for write in written):
            self._crowd_postponed.set()

    async def change_once(self, batch: Batch) -> None:
        """Deliver one commit while its repo is being postponed."""
        if not self._change_delivered:
            self._change_delivered = True
            await self.deliver(batch.writes[0].repo.did)

    async def preload(self, _dids: list[str]) -> None:
        """Do nothing: every identity is cached."""

    def peek(self, did: str) -> CachedIdentity:
        name = self.name_of[did]
        host = "crowd" if name in CROWD else name.replace(" ", "-")
        return CachedIdentity(
            self.owners[did].key.public, f"https://{host}.test", problem=None, fetched_at=time(), stale=False
        )

    async def lookup(self, did: str, **_: object) -> CachedIdentity:
        self._started[did] = self.claims[did]
        return self.peek(did)

    def attempt_started(self, did: str) -> bool:
        """Return True if the attempt of the present claim has begun."""
        return self._started.get(did) == self.claims[did]

    def fetch_failed(self, did: str) -> bool:
        """Return True if the attempt of the present claim has failed."""
        return self._failed.get(did) == self.claims[did]

    async def fetch_latest_commit(self, did: str, _host: str) -> tuple[bytes, str]:
        return self.owners[did].repo.head.cid, self.owners[did].rev

    @asynccontextmanager
    async def open_export(self, did: str, _host: str) -> AsyncIterator[ExportDownload]:
        assert did not in self._fetching, f"{self.name_of[did]} is claimed twice"
        self._fetching.add(did)
        try:
            await self._answer(did)
            host = SimulatedHost(self.owners[did], self._spool_directory, lambda: 0, _no_step)
            async with host.open_export(did, "") as download:
                endless = self.name_of[did] in LARGE and not self.healed
                yield EndlessDownload() if endless else download  # type: ignore[misc]
        finally:
            self._fetching.remove(did)

    async def _answer(self, did: str) -> None:
        name = self.name_of[did]
        if name == "unknown":
            self._count_failure(did)
            raise UnavailableError(FetchFailure.REPO_NOT_FOUND)
        if name == "broken" and not self.healed:
            self._count_failure(did)
            raise UnavailableError(FetchFailure.HTTP_STATUS, "500")
        if name in CROWD and not self.healed:
            await self._crowd_postponed.wait()

    def _count_failure(self, did: str) -> None:
        self.costs[did] += 1
        self._failed[did] = self.claims[did]


class EndlessDownload:
    """A large export that never ends; the second one is postponed, because large repos have one slot."""

    server = None
    complete = False
    rate = 0.0
    received = 0

    async def fetch(self, max_bytes: int | None = None) -> bool:
        if max_bytes is None:
            await asyncio.Event().wait()
        return False


class MortalPool:
    """A connection pool that lends nothing once its process has died."""

    def __init__(self, pool: asyncpg.Pool, died: asyncio.Event) -> None:
        self._pool = pool
        self._died = died

    async def acquire(self) -> asyncpg.pool.PoolConnectionProxy:
        if self._died.is_set():
            raise KilledError
        return await self._pool.acquire()

    async def release(self, connection: asyncpg.pool.PoolConnectionProxy) -> None:
        await self._pool.release(connection)


class MortalStore(Store):
    """The store of one process, with its own connections, that dies at the point `last`.

    Then its connections are terminated, and nothing of the process continues. `reached` has the points that it passed.
    """

    def __init__(self, pool: asyncpg.Pool, dsn: str, name: str, world: ResyncWorld, last: Point | None) -> None:
        self.died = asyncio.Event()
        mortal_pool: Any = MortalPool(pool, self.died)
        super().__init__(mortal_pool, CONNECTIONS, dsn)
        self._name = name
        self._world = world
        self._last = last
        self._one_at_a_time = asyncio.Lock()
        self._changed: set[str] = set()
        self.shutting_down = False
        self.written = Counter[str]()
        self.reached: set[Point] = set()

    @asynccontextmanager
    async def _write(self, kind: str) -> AsyncIterator[list[object]]:
        """Run one write; the block appends what it wrote, which may be nothing."""
        written = list[object]()
        async with self._one_at_a_time:
            await self._pass(("before", kind, self.written[kind]))
            yield written
            if written:
                await self._pass(("after", kind, self.written[kind]))
                self.written[kind] += 1

    async def _pass(self, point: Point) -> None:
        if self.died.is_set():
            raise KilledError
        self.reached.add(point)
        if point == self._last:
            self.died.set()
            await self._world.query(TERMINATE, self._name)
            raise KilledError

    async def expire_leases(self, buckets: Sequence[int], now: float) -> int:
        async with self._write(EXPIRE) as written:
            written.extend([None] * await super().expire_leases(buckets, now))
        return len(written)

    async def claim(self, count: int, buckets: Sequence[int], lease_seconds: float, now: float) -> list[Repo]:
        async with self._write(CLAIM) as written:
            claimed = await super().claim(count, buckets, lease_seconds, now)
            self._world.claims.update(repo.did for repo in claimed)
            written.extend(claimed)
        return claimed

    async def renew(self, did: str, lease: int, seconds: float) -> bool:
        async with self._write(RENEW) as written:
            written.extend([did] * await super().renew(did, lease, seconds))
        return bool(written)

    async def request_missing_values(self, buckets: Sequence[int], seconds: float, now: float) -> int:
        async with self._write(REQUEST_VALUES) as written:
            written.extend([None] * await super().request_missing_values(buckets, seconds, now))
            self._world.costs[self._world.did_of["lacking"]] += len(written)
        return len(written)

    async def unpark(self, buckets: Sequence[int], seconds: float, now: float) -> int:
        async with self._write(UNPARK) as written:
            written.extend([None] * await super().unpark(buckets, seconds, now))
        return len(written)

    async def write(self, batch: Batch) -> AppliedBatch:
        if not batch.writes:
            return await super().write(batch)
        kind = self._kind_of(batch)
        async with self._write(kind) as written:
            if kind == POSTPONE:
                await self._world.change_once(batch)
            applied = await super().write(batch)
            done = [write for write in batch.writes if write.repo.did not in applied.skipped]
            written.extend(done)
        self._changed = set(applied.skipped) if kind == POSTPONE else self._changed - {write.repo.did for write in done}
        if kind == POSTPONE:
            self._world.note_postponed(done)
        return applied

    def _kind_of(self, batch: Batch) -> str:
        did = batch.writes[0].repo.did
        if self.shutting_down:
            return GIVE_BACK
        if did in self._changed:
            return POSTPONE_CHANGED
        if not self._world.attempt_started(did):
            return POSTPONE
        return FAIL if self._world.fetch_failed(did) else POSTPONE_RUNNING

    @asynccontextmanager
    async def resync(self, claimed: Repo, scope_version: int = 0) -> AsyncIterator[ResyncTransaction]:
        """Its only write is its commit."""
        async with AsyncExitStack() as stack, super().resync(claimed, scope_version) as transaction:
            yield transaction
            written = await stack.enter_async_context(self._write(COMPLETE))
            written.append(claimed)


class WorkerProcess:
    """A pool and its maintenance on a store that may die. It runs until `done`, and then gives its claims back."""

    def __init__(self, world: ResyncWorld, store: MortalStore) -> None:
        self.store = store
        simulated: Any = world
        attempts = ResyncAttempts(store, simulated, simulated, lambda: STORE_ALL, Metrics(), (None,), Conditions())
        pool_settings = WorkerPoolSettings(workers=WORKERS, idle_interval=0.01, lease=LEASE)
        maintenance_settings = MaintenanceSettings(
            unpark_after=LONG_AGO,
            missing_values_after=LONG_AGO,
            lease_interval=0.01,
            search_interval=0.05,
            batch_pause=0.0,
        )
        self._pool = WorkerPool(
            store, simulated, attempts, STORE_ALL.deletion_grace, Shard(), Metrics(), Conditions(), pool_settings
        )
        self._maintenance = QueueMaintenance(store, Shard(), Metrics(), maintenance_settings)

    async def live(self, done: Callable[[], Awaitable[bool]]) -> None:
        tasks = [asyncio.create_task(self._pool.run()), asyncio.create_task(self._maintenance.run())]

        async def over() -> bool:
            return self.store.died.is_set() or any(task.done() for task in tasks) or await done()

        self.store.shutting_down = False
        try:
            await until(over, lambda: self.store.reached)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        if not self.store.died.is_set():
            assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
            self.store.shutting_down = True
            with suppress(KilledError):
                await self._pool.give_back()


@asynccontextmanager
async def process(world: ResyncWorld, dsn: str, last: Point | None = None) -> AsyncIterator[WorkerProcess]:
    name = f"process {next(_NUMBERS)}"
    pool = await asyncpg.create_pool(
        dsn, min_size=1, max_size=CONNECTIONS, server_settings={"application_name": name, "jit": "off"}
    )
    try:
        yield WorkerProcess(world, MortalStore(pool, dsn, name, world, last))
    finally:
        pool.terminate()
