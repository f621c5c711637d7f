"""Repos that meet all that a pool writes of its own, and pools that die at any of these writes, as by kill -9.

One write is done at a time, so that a death is before it or after it, and in the middle of none.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random
from time import time
from traceback import walk_stack
from typing import Any, Literal

import asyncpg

from indexer.atproto.cid import cid_text, parse_cid
from indexer.atproto.record import Problem
from indexer.errors import UnavailableError
from indexer.identity import Known
from indexer.metrics import Metrics
from indexer.pds import Spool
from indexer.reasons import FetchFailure
from indexer.service import pool as pool_module
from indexer.service.pool import Pace, Pool
from indexer.service.resync import Resync
from indexer.store import ResyncTransaction, Store
from indexer.sync.plan import Batch, RepoWrite
from indexer.sync.repo import PARKED, Head, Repo
from indexer.sync.shard import Shard
from tests.service.parties import Directory, Host, Live, Owner
from tests.service.resyncing import _TERMINATE, CONNECTIONS, LATER, OUTWORN, Killed
from tests.serving import until
from tests.store.rows import put, synchronized
from tests.sync.people import EVERYTHING, received

WORKERS = 4  # a host has three of their places at most, and large repos one beside them
CROWD = ["crowd 1", "crowd 2", "crowd 3", "crowd 4"]
LARGE = ["large 1", "large 2"]
NAMES = ["well", "broken", "unknown", "orphan", "parked", "lacking", *LARGE, *CROWD]
LEASE = 9.0  # seconds
LONG_AGO = 43_200.0  # longer than it takes to heal

When = Literal["before", "after"]
Point = tuple[When, str, int]
"""Before or after a write at this place in the pool, which has written there so often before."""
PUTS_OFF = "run _begin apply"

_NUMBERS = count()
_AGE = "update indexer.repo set updated_at = now() - interval '1 day' where did = $1"
_AN_HOUR_PASSES = """
    update indexer.repo set updated_at = updated_at - interval '1 hour', lease_until = lease_until - interval '1 hour',
        next_attempt_at = next_attempt_at - interval '1 hour', synchronized_at = synchronized_at - interval '1 hour'
"""
_SETTLED = """
    select min(lease) > 0 and count(*) filter (where status = 'in-progress') = $1 and not bool_or(
        status = 'desynchronized' and coalesce(next_attempt_at, '-infinity') < now() + interval '1 second'
    ) from indexer.repo
"""


def place_of(method: str) -> str:
    """Where the pool is: the two innermost of its own functions that are under way, and what they ask of the store."""
    names = [frame.f_code.co_name for frame, _ in walk_stack(None) if frame.f_code.co_filename == pool_module.__file__]
    return " ".join([*reversed(names[:2]), method])


async def _go_on(_step: str) -> None:
    pass


class Village:
    """Accounts by what becomes of their resyncs until `healed`: then all but the unknown one do well.

    It is what the pools know as their identities and hosts. `claims` and `costs` count, by DID, how often a repo was
    claimed and what should have counted as an attempt.
    """

    def __init__(self, store: Store, sql: asyncpg.Connection, spool_directory: Path) -> None:
        self._store = store
        self._sql = sql
        self._asking = asyncio.Lock()
        self._spool_directory = spool_directory
        self.owners = {owner.did: owner for owner in map(Owner, NAMES)}
        self.name_of = dict(zip(self.owners, NAMES, strict=True))
        self.did_of = dict(zip(NAMES, self.owners, strict=True))
        self.healed = False
        self._put_off = asyncio.Event()
        self.claims = Counter[str]()
        self.costs = Counter[str]()
        self._moved = False
        self._fetching: set[str] = set()

    async def begin(self) -> None:
        """Most wait for their first resync, and a former process had one of them when it died."""
        await self.ask("truncate indexer.repo, indexer.record, indexer.kept_event")
        random = Random(7)
        for owner in self.owners.values():
            while len(owner.history[owner.rev]) < 2:
                owner.change(*owner.some_writes(random))
        orphan, parked, lacking = (self.did_of[name] for name in ("orphan", "parked", "lacking"))
        await self._store.add([orphan])
        self.claims.update(repo.did for repo in await self._store.claim(1, range(256), OUTWORN, time() + LATER))
        await self.deliver(orphan)
        given_up = Repo(parked, 1, next_attempt_at=PARKED, last_error=FetchFailure.REPO_NOT_FOUND)
        head = self.owners[lacking].repo.head
        done = synchronized("", did=lacking, head=Head(head.rev, head.data, head.cid))
        changes = tuple(
            put(path)._replace(rev=head.rev, cid=parse_cid(cid), value=None, problem=Problem.MISSING)
            for path, cid in self.owners[lacking].history[head.rev].items()
        )
        await self._store.apply(Batch((RepoWrite(0, given_up), RepoWrite(0, done, changes))))
        await self.ask(_AGE, parked)
        await self._store.add(self.owners)

    async def ask(self, statement: str, *values: object) -> list[asyncpg.Record]:
        async with self._asking:
            rows: list[asyncpg.Record] = await self._sql.fetch(statement, *values)
            return rows

    async def rows(self) -> dict[str, Repo]:
        """By name."""
        return {self.name_of[did]: repo for did, repo in (await self._store.repos(list(self.owners))).items()}

    async def records(self, did: str) -> dict[str, str]:
        """The CID of each, by path."""
        records = await self._store.visible_records(did)
        return {path: cid_text(cid) for path, cid in records.items()}

    async def settled(self) -> bool:
        """Whether each repo was claimed, and none is due; one hangs until it is healed."""
        [(settled,)] = await self.ask(_SETTLED, 0 if self.healed else 1)
        return bool(settled)

    async def heal(self) -> None:
        """An hour passes, and all do well from now on, as far as they ever will."""
        self.healed = True
        await self.ask(_AN_HOUR_PASSES)

    async def deliver(self, did: str) -> None:
        """A commit of its account arrives."""
        directory = Directory(self.owners[did])
        directory.ask()
        live = Live(self._store, self.owners[did], directory, EVERYTHING)
        await live.deliver([received("commit", self.owners[did].write())])

    def note_put_off(self, written: Iterable[RepoWrite]) -> None:
        """One of the crowd was: it leaves room for others from now on."""
        if any(self.name_of[write.repo.did] in CROWD for write in written):
            self._put_off.set()

    async def move(self, batch: Batch) -> None:
        """Once, a commit arrives when a repo is just being put off."""
        if not self._moved:
            self._moved = True
            await self.deliver(batch.writes[0].repo.did)

    async def warm(self, _dids: list[str]) -> None:
        """As `Identities`."""

    def peek(self, did: str) -> Known:
        name = self.name_of[did]
        host = "crowd" if name in CROWD else name.replace(" ", "-")
        return Known(self.owners[did].key.public, f"https://{host}.test", problem=None, fetched_at=0.0, stale=False)

    async def lookup(self, did: str, *, refresh: bool = False) -> Known:  # noqa: ARG002
        return self.peek(did)

    async def latest_commit(self, did: str, _host: str) -> tuple[bytes, str]:
        """As `PdsClient`."""
        return self.owners[did].repo.head.cid, self.owners[did].rev

    @asynccontextmanager
    async def fetch_repo(self, did: str, _host: str, large: Callable[[], None]) -> AsyncIterator[Spool]:
        assert did not in self._fetching, f"{self.name_of[did]} is claimed twice"
        self._fetching.add(did)
        try:
            await self._answer(did, large)
            host = Host(self.owners[did], self._spool_directory, lambda: 0, _go_on)
            async with host.fetch_repo(did, "", large) as spool:
                yield spool
        finally:
            self._fetching.remove(did)

    async def _answer(self, did: str, large: Callable[[], None]) -> None:
        name = self.name_of[did]
        if name == "unknown":
            self.costs[did] += 1
            raise UnavailableError(FetchFailure.REPO_NOT_FOUND)
        if self.healed:
            return
        if name == "broken":
            self.costs[did] += 1
            raise UnavailableError(FetchFailure.HTTP_STATUS, "500")
        if name in LARGE:
            large()  # the second one is put off
            await asyncio.Event().wait()
        if name in CROWD:
            await self._put_off.wait()


class Mortal(Store):
    """The store of one process, over connections of its own, which dies at a `last` point: they are cut, and nothing
    of the process goes on. `reached` is where it has been.
    """

    def __init__(self, pool: asyncpg.Pool, dsn: str, name: str, village: Village, last: Point | None) -> None:
        super().__init__(pool, CONNECTIONS, dsn)
        self._name = name
        self._village = village
        self._last = last
        self._one_at_a_time = asyncio.Lock()
        self.written = Counter[str]()
        self.reached: set[Point] = set()
        self.died = asyncio.Event()

    async def _acquire(self) -> asyncpg.pool.PoolConnectionProxy:
        if self.died.is_set():
            raise Killed
        return await super()._acquire()

    @asynccontextmanager
    async def _write(self, method: str) -> AsyncIterator[list[object]]:
        """The block notes what it has written, which may be nothing."""
        place, written = place_of(method), list[object]()
        async with self._one_at_a_time:
            await self._pass(("before", place, self.written[place]))
            yield written
            if written:
                await self._pass(("after", place, self.written[place]))
                self.written[place] += 1

    async def _pass(self, point: Point) -> None:
        if self.died.is_set():
            raise Killed
        self.reached.add(point)
        if point == self._last:
            self.died.set()
            await self._village.ask(_TERMINATE, self._name)
            raise Killed

    async def expire_leases(self, buckets: range, now: float) -> int:
        async with self._write("expire_leases") as written:
            written.extend([None] * await super().expire_leases(buckets, now))
        return len(written)

    async def claim(self, count: int, buckets: range, lease_seconds: float, now: float) -> list[Repo]:
        async with self._write("claim") as written:
            claimed = await super().claim(count, buckets, lease_seconds, now)
            self._village.claims.update(repo.did for repo in claimed)
            written.extend(claimed)
        return claimed

    async def renew(self, did: str, lease: int, seconds: float) -> bool:
        async with self._write("renew") as written:
            written.extend([did] * await super().renew(did, lease, seconds))
        return bool(written)

    async def mark_missing(self, buckets: range, seconds: float, now: float) -> int:
        async with self._write("mark_missing") as written:
            written.extend([None] * await super().mark_missing(buckets, seconds, now))
            self._village.costs[self._village.did_of["lacking"]] += len(written)
        return len(written)

    async def wake_parked(self, buckets: range, seconds: float, now: float) -> int:
        async with self._write("wake_parked") as written:
            written.extend([None] * await super().wake_parked(buckets, seconds, now))
        return len(written)

    async def apply(self, batch: Batch) -> frozenset[str]:
        if not batch.writes:
            return await super().apply(batch)
        async with self._write("apply") as written:
            if place_of("apply") == PUTS_OFF:
                await self._village.move(batch)
            moved = await super().apply(batch)
            done = [write for write in batch.writes if write.repo.did not in moved]
            written.extend(done)
        if place_of("apply") == PUTS_OFF:
            self._village.note_put_off(done)
        return moved

    @asynccontextmanager
    async def resync(self, claimed: Repo) -> AsyncIterator[ResyncTransaction]:
        """Its one write is its commit."""
        async with AsyncExitStack() as stack, super().resync(claimed) as transaction:
            yield transaction
            written = await stack.enter_async_context(self._write("resync"))
            written.append(claimed)


class Process:
    """A pool on a store that may die. It lives until `done`, and then gives back what is under way."""

    def __init__(self, village: Village, store: Mortal) -> None:
        self.store = store
        others: Any = village
        resync = Resync(store, others, others, EVERYTHING, Metrics(), (None,))
        parties = (store, others, resync, EVERYTHING, Shard(), Metrics())
        pace = Pace(idle=0.01, lease=LEASE, sweep=0.05, breath=0.0, heal_after=LONG_AGO)
        self._pool = Pool(*parties, workers=WORKERS, sweep_interval=LONG_AGO, pace=pace)

    async def live(self, done: Callable[[], Awaitable[bool]]) -> None:
        task = asyncio.create_task(self._pool.run())

        async def over() -> bool:
            return self.store.died.is_set() or task.done() or await done()

        try:
            await until(over, lambda: self.store.reached)
        finally:
            task.cancel()
            [end] = await asyncio.gather(task, return_exceptions=True)
        if not self.store.died.is_set():
            assert isinstance(end, asyncio.CancelledError), end
            with suppress(Killed):
                await self._pool.give_back()


@asynccontextmanager
async def process(village: Village, dsn: str, last: Point | None = None) -> AsyncIterator[Process]:
    name = f"process {next(_NUMBERS)}"
    pool = await asyncpg.create_pool(
        dsn, min_size=1, max_size=CONNECTIONS, server_settings={"application_name": name, "jit": "off"}
    )
    try:
        yield Process(village, Mortal(pool, dsn, name, village, last))
    finally:
        pool.terminate()
