"""One account, its host, the live path and resyncs of its repo, step by step; and what must hold at every step.

The truth is the account's own: it remembers what its records were at each of its revisions.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from time import time
from typing import Any

import asyncpg
import orjson

from indexer.errors import UnavailableError, UpstreamError
from indexer.identity import Known
from indexer.metrics import Metrics
from indexer.reasons import FetchFailure
from indexer.service.resync import ClaimLostError, Resync
from indexer.store import DatabaseError, ResyncTransaction, Store
from indexer.sync.batch import Received
from indexer.sync.plan import Batch, KeptEvent, RecordChange
from indexer.sync.planning import Policy
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.resync import plan_failure
from tests.service.parties import MIRROR, Directory, Host, Live, Owner, Step
from tests.sync.people import EVERYTHING, received

PDS = "https://pds.test"
LATER = 1e7  # seconds from now: every back-off is over by then, and nothing that is parked comes up
OUTWORN = -LATER - 1  # a lease from then, so that it has run out by now
CONNECTIONS = 4


_STATE = """
    select status, rev, (
        select coalesce(jsonb_object_agg(collection || '/' || rkey, atproto.cid_text(cid)), '{}')
        from indexer.record where did = $1
    )::text as records
    from indexer.repo where did = $1
"""
_CHANGES = """
    select action, collection || '/' || rkey as path, cid from atproto.changes
    where did = $1 and rkey is not null order by seq
"""
_WAITING = (
    "select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')"
)
_TERMINATE = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = $1"


class Killed(BaseException):
    """The worker is dead from here on."""


class Stepping:
    """A store as a resync knows it, with a step between every two things that are done with it."""

    def __init__(self, store: Store, step: Step) -> None:
        self._store = store
        self._step = step

    @asynccontextmanager
    async def resync(self, claimed: Repo) -> AsyncIterator["SteppingTransaction"]:
        await self._step("begin")
        async with self._store.resync(claimed) as transaction:
            yield SteppingTransaction(transaction, self._step)
            await self._step("commit")
        await self._step("committed")


class SteppingTransaction:
    def __init__(self, transaction: ResyncTransaction, step: Step) -> None:
        self._transaction = transaction
        self._step = step

    async def stored(self) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        await self._step("read")
        async for chunk in self._transaction.stored():
            yield chunk
            await self._step("chunk compared")

    async def holds(self) -> bool:
        return await self._transaction.holds()

    async def write(self, changes: Sequence[RecordChange]) -> None:
        await self._step("write")
        await self._transaction.write(changes)
        await self._step("written")

    async def lock(self) -> Repo | None:
        await self._step("lock")
        return await self._transaction.lock()

    async def kept(self) -> list[KeptEvent]:
        await self._step("locked")
        return await self._transaction.kept()

    async def finish(self, batch: Batch) -> None:
        await self._step("finish")
        await self._transaction.finish(batch)


class Worker:
    """Claims the repo and resyncs it over connections of its own; dies without a word at its `last` step."""

    def __init__(self, world: "World", store: Store, name: str, last: int | None) -> None:
        self._world = world
        self._store = store
        self._name = name
        self._last = last
        self.steps = 0
        self.died_at: str | None = None
        stepping: Any = Stepping(store, self._step)
        host: Any = Host(world.owner, world.spool_directory, world.behind, self._step)
        myself: Any = self
        self._resync = Resync(stepping, myself, host, world.policy, Metrics(), (MIRROR, None))

    async def attempt(self) -> bool:
        """One claim, and the resync of what was claimed; whether there was anything. Raises `Killed`."""
        claims = await self._store.claim(1, range(256), OUTWORN, time() + LATER)
        for claimed in claims:
            await self._attempt(claimed)
        return bool(claims)

    async def lookup(self, _did: str, *, refresh: bool = False) -> Known:
        """As `Identities`."""
        await self._step("look up the key")
        directory = self._world.directory
        key = directory.cached if directory.cached and not refresh else directory.ask()
        return Known(key, PDS, problem=None, fetched_at=0.0, stale=False)

    async def _attempt(self, claimed: Repo) -> None:
        await self._step("claimed")
        try:
            known = await self.lookup(claimed.did, refresh=claimed.attempts > 0)
            self._world.results[await self._resync.attempt(claimed, known, lambda: None)] += 1
        except (ClaimLostError, DatabaseError):
            if self.died_at is not None:
                raise Killed from None
            self._world.results["lost"] += 1
        except UpstreamError as error:
            await self._fail(claimed, UnavailableError(FetchFailure.EXPORT_REJECTED, str(error)))
        except UnavailableError as error:
            await self._fail(claimed, error)

    async def _fail(self, claimed: Repo, failure: UnavailableError) -> None:
        """As `Pool` does it."""

        def failed(repo: Repo) -> Repo:
            held = repo.lease == claimed.lease and repo.status is SyncStatus.IN_PROGRESS
            return plan_failure(repo, claimed, failure, time()) if held else repo

        self._world.results[failure.reason] += 1
        await self._step("failed")
        await self._store.amend(claimed.did, failed)
        await self._step("failure written")

    async def _step(self, name: str) -> None:
        if self.died_at is not None:
            raise Killed
        self.steps += 1
        await self._world.happen(name)
        if self.steps == self._last:
            self.died_at = name
            await self._world.ask(_TERMINATE, self._name)
            raise Killed


class World:
    """All of it. `random` decides what happens at each step; `restless` is how likely anything does."""

    def __init__(
        self,
        dsn: str,
        store: Store,
        sql: asyncpg.Connection,
        spool_directory: Path,
        name: str,
        policy: Policy = EVERYTHING,
        seed: str = "",
    ) -> None:
        self.dsn = dsn
        self._sql = sql
        self._asking = asyncio.Lock()
        self.spool_directory = spool_directory
        self.policy = policy
        self.random = Random(seed or name)
        self.restless = 0.4
        self.owner = Owner(name)
        self.directory = Directory(self.owner)
        self.live = Live(store, self.owner, self.directory, policy)
        self.results = Counter[str]()
        self.story: list[str] = []
        self._store = store
        self._mirror = self.random.choice([0, 3])
        self._late: list[Received] = []
        self._stands_still = False
        self._under_way: list[asyncio.Task[Any]] = []
        self._workers = 0
        self._risen = ""
        self._doings: dict[Callable[[], Awaitable[None]], int] = {
            self._write: 10,
            self._write_nothing: 1,
            self._lose_commits: 2,
            self._announce: 2,
            self._rotate_key: 1,
            self._rotate_key_in_silence: 1,
            self._leave: 1,
            self._come_back: 2,
            self._be_away_for_a_moment: 3,
            self._lose_directory_or_find_it: 1,
            self._let_relay_stand_still_or_go_on: 2,
            self._ask_for_resync: 2,
            self._take_over: 2,
        }

    @asynccontextmanager
    async def worker(self, last: int | None = None) -> AsyncIterator[Worker]:
        self._workers += 1
        name = f"{self.owner.did} {self._workers}"
        pool = await asyncpg.create_pool(
            self.dsn, min_size=1, max_size=CONNECTIONS, server_settings={"application_name": name, "jit": "off"}
        )
        try:
            yield Worker(self, Store(pool, CONNECTIONS, self.dsn), name, last)
        finally:
            pool.terminate()

    async def ask(self, statement: str, *values: Any) -> list[asyncpg.Record]:
        async with self._asking:
            rows: list[asyncpg.Record] = await self._sql.fetch(statement, *values)
            return rows

    def behind(self) -> int:
        return self.random.randint(0, self._mirror)

    async def begin(self) -> None:
        """The repo is known: by its first commit, or because somebody asked for it."""
        if self.random.random() < 0.5:
            await self.live.deliver([received("commit", self.owner.first())])
        else:
            await self._store.add([self.owner.did])
        for _ in range(self.random.randint(0, 4)):
            self.owner.change(*self.owner.some_writes(self.random))

    async def happen(self, where: str) -> None:
        """A step: perhaps something happens, and in any case all is well."""
        if self.random.random() < self.restless:
            [doing] = self.random.choices(list(self._doings), list(self._doings.values()))
            self.story.append(f"{where}: {doing.__name__}")
            await doing()
        await self.check()

    async def check(self) -> None:
        """The records are those of the row's revision, which only rises, and if synchronized, up to what was proven."""
        newest, risen = self.live.newest, self._risen
        for status, rev, records in await self.ask(_STATE, self.owner.did):
            assert orjson.loads(records) == (self.owner.history[rev] if rev else {}), (status, self.story)
            assert (rev or "") >= risen, self.story
            self._risen = max(self._risen, rev or "")
            assert status != "synchronized" or rev >= newest, self.story

    async def check_changes(self) -> None:
        """The change log, played from the beginning, never contradicts itself, and ends at the records."""
        records: dict[str, str] = {}
        for action, path, cid in await self.ask(_CHANGES, self.owner.did):
            assert (action == "create") == (path not in records), (action, path, self.story)
            if action == "delete":
                del records[path]
            else:
                assert records.get(path) != cid, (action, path, self.story)
                records[path] = cid
        for *_, stored in await self.ask(_STATE, self.owner.did):
            assert records == orjson.loads(stored), self.story

    async def rest(self) -> None:
        """Whatever was blocked by a transaction has been done."""
        while self._under_way:
            await self._under_way.pop(0)

    async def settle(self) -> None:
        """The account is active, everything late is delivered, and one more commit: then all ends equal."""
        self.restless = 0.0
        await self.rest()
        self._stands_still = False
        self._mirror = 0
        self.directory.up = True
        self.owner.active = True
        await self._store.expire_leases(range(256), time())
        await self.live.deliver(
            [
                *self._late,
                received("account", self.owner.account(active=True)),
                received("identity", self.owner.identity()),
                received("commit", self.owner.write()),
            ]
        )
        async with self.worker() as worker:
            for _ in range(10):
                if not await worker.attempt():
                    break
        [(status, rev, _)] = await self.ask(_STATE, self.owner.did)
        assert (status, rev) == ("synchronized", self.owner.rev), (self.results, self.story)
        await self.check()
        await self.check_changes()
        assert await self.ask("select seq from indexer.kept_event where did = $1", self.owner.did) == []

    async def _write(self) -> None:
        await self._tell("commit", self.owner.write(*self.owner.some_writes(self.random)))

    async def _write_nothing(self) -> None:
        await self._tell("commit", self.owner.write())

    async def _lose_commits(self) -> None:
        self.owner.change(*self.owner.some_writes(self.random))
        await self._write()

    async def _announce(self) -> None:
        await self._tell("sync", self.owner.sync())

    async def _rotate_key(self) -> None:
        self.owner.swap_key()
        self.owner.change()
        await self._tell("identity", self.owner.identity())
        await self._announce()

    async def _rotate_key_in_silence(self) -> None:
        self.owner.swap_key()

    async def _leave(self) -> None:
        self.owner.active = False
        await self._tell("account", self.owner.account(active=False, status="deactivated"))

    async def _come_back(self) -> None:
        self.owner.active = True
        await self._tell("account", self.owner.account(active=True))
        await self._announce()

    async def _be_away_for_a_moment(self) -> None:
        await self._leave()
        await self._come_back()

    async def _lose_directory_or_find_it(self) -> None:
        self.directory.up = not self.directory.up or self.random.random() < 0.5

    async def _let_relay_stand_still_or_go_on(self) -> None:
        self._stands_still = not self._stands_still

    async def _ask_for_resync(self) -> None:
        await self._in_time(self._request())

    async def _take_over(self) -> None:
        """Another worker comes, in the middle of the former one's resync, and perhaps dies as well."""
        await self._in_time(self._resync_once_more())

    async def _request(self) -> None:
        await self._store.mark_resync([self.owner.did])

    async def _resync_once_more(self) -> None:
        if await self._store.expire_leases(range(256), time()):
            async with self.worker(self.random.choice([None, None, 6, 12])) as worker:
                with suppress(Killed):
                    await worker.attempt()

    async def _tell(self, kind: str, payload: dict[str, Any]) -> None:
        """The message arrives, or it is lost, or comes twice, or late, after newer ones perhaps."""
        message, fate = received(kind, payload), self.random.random()
        self.story.append(f"  {kind} {payload.get('rev', '')} {fate:.2f}")
        if self._stands_still or fate < 0.15:
            self._late.append(message)
        elif fate < 0.75:
            messages = [message]
            if self.random.random() < 0.5:
                messages, self._late = [*self._late, message], []
            await self._in_time(self.live.deliver(messages))
        elif fate < 0.85:
            await self._in_time(self.live.deliver([message, message]))

    async def _in_time(self, doing: Coroutine[Any, Any, None]) -> None:
        """Waits for the end, unless a transaction stands in the way that is waiting for us: then `rest` does."""
        task = asyncio.create_task(doing)
        while not task.done():
            await asyncio.wait({task}, timeout=0.02)
            if not task.done() and (await self.ask(_WAITING))[0][0]:
                self._under_way.append(task)
                return
        task.result()
