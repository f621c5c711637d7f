"""Run the resyncs of one account step by step, change the account between steps, and check the database after each.

The expected records come from the account itself, which remembers its records at each rev.
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
from indexer.identity import CachedIdentity
from indexer.monitoring.conditions import Conditions
from indexer.monitoring.metrics import Metrics
from indexer.pds import ExportDownload
from indexer.reasons import FetchFailure
from indexer.service.resync.attempt import ResyncAttempts
from indexer.service.resync.lease import ClaimLostError
from indexer.service.resync.phase import Phase
from indexer.store import DatabaseError, NewRepoRecords, NewReposTransaction, ResyncTransaction, Store
from indexer.sync.export import RecordChunk
from indexer.sync.plan_batch import ReceivedMessage
from indexer.sync.plan_resync import plan_failure
from indexer.sync.plans import Action, Batch, BufferedEvent, RecordChange
from indexer.sync.policy import Policy
from indexer.sync.repo_state import Repo, SyncStatus
from tests.service.resync.simulated_network import (
    MIRROR,
    AccountOwner,
    LivePath,
    SimulatedDirectory,
    SimulatedHost,
    Step,
)
from tests.sync.signing_account import STORE_ALL, received_message

PDS = "https://pds.test"
LATER = 1e7  # seconds from now: every back-off is over by then, but parked repos stay parked
EXPIRED = -LATER - 1  # a lease from then that has expired by now
CONNECTIONS = 4


_STATE = """
    select sync_status, rev, (
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
TERMINATE = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = $1"


class FreeSlots:
    """Slots that are always free."""

    def open_export(self, _download: ExportDownload) -> None: ...

    def enlarge(self) -> None: ...

    def start_writing(self) -> None: ...

    def enter(self, _phase: Phase) -> None: ...


class KilledError(BaseException):
    """The worker died; nothing of it continues."""


class SteppedStore:
    """A store that calls `step` between every two operations of a resync."""

    def __init__(self, store: Store, step: Step) -> None:
        self._store = store
        self._step = step
        self.shards = store.shards

    @asynccontextmanager
    async def resync(self, claimed: Repo, scope_version: int) -> AsyncIterator["SteppedTransaction"]:
        await self._step("begin")
        async with self._store.resync(claimed, scope_version) as transaction:
            yield SteppedTransaction(transaction, self._step)
            await self._step("commit")
        await self._step("committed")

    @asynccontextmanager
    async def write_new_repos(self, scope_version: int) -> AsyncIterator["SteppedNewRepos"]:
        await self._step("begin")
        async with self._store.write_new_repos(scope_version) as transaction:
            yield SteppedNewRepos(transaction, self._step)
            await self._step("commit")
        await self._step("committed")


class SteppedNewRepos:
    def __init__(self, transaction: NewReposTransaction, step: Step) -> None:
        self._transaction = transaction
        self._step = step

    async def eligible(self, claimed: Sequence[Repo]) -> dict[str, Repo]:
        await self._step("read")
        return await self._transaction.eligible(claimed)

    async def create(self, parts: Sequence[NewRepoRecords]) -> None:
        await self._step("create")
        await self._transaction.create(parts)
        await self._step("created")

    async def finish(self, batch: Batch) -> bool:
        await self._step("finish")
        return await self._transaction.finish(batch)


class SteppedTransaction:
    def __init__(self, transaction: ResyncTransaction, step: Step) -> None:
        self._transaction = transaction
        self._step = step

    async def stores_records(self) -> bool:
        await self._step("look for records")
        return await self._transaction.stores_records()

    async def create(self, chunk: RecordChunk) -> None:
        await self._step("write")
        await self._transaction.create(chunk)
        await self._step("written")

    async def stored(self) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        await self._step("read")
        async for chunk in self._transaction.stored():
            yield chunk
            await self._step("chunk compared")

    async def holds_claim(self) -> bool:
        return await self._transaction.holds_claim()

    async def write(self, changes: Sequence[RecordChange]) -> None:
        await self._step("write")
        await self._transaction.write(changes)
        await self._step("written")

    async def lock(self) -> Repo | None:
        await self._step("lock")
        return await self._transaction.lock()

    async def holds_scope(self) -> bool:
        return await self._transaction.holds_scope()

    async def buffered(self) -> list[BufferedEvent]:
        await self._step("read buffer")
        return await self._transaction.buffered()

    async def write_drained(self, changes: Sequence[RecordChange]) -> Counter[Action]:
        await self._step("write drained")
        return await self._transaction.write_drained(changes)

    async def finish(self, batch: Batch) -> None:
        await self._step("finish")
        await self._transaction.finish(batch)


class Worker:
    """Claims the repo and resyncs it over its own connections; dies at its step number `last`."""

    def __init__(self, world: "SteppedWorld", store: Store, name: str, last: int | None) -> None:
        self._world = world
        self._store = store
        self._name = name
        self._last = last
        self.steps = 0
        self.died_at: str | None = None
        stepping: Any = SteppedStore(store, self._step)
        host: Any = SimulatedHost(world.owner, world.spool_directory, world.mirror_lag, self._step)
        myself: Any = self
        sources, policy = (MIRROR, None), lambda: world.policy
        self._resync = ResyncAttempts(stepping, myself, host, policy, Metrics(), sources, Conditions())

    async def attempt(self) -> bool:
        """Claim the repo and resync it; return False if it was not due. Raises `KilledError`."""
        claims = await self._store.claim(1, range(256), EXPIRED, time() + LATER)
        for claimed in claims:
            await self._attempt(claimed)
        return bool(claims)

    async def lookup(self, _did: str, *, refresh: bool = False, **_: object) -> CachedIdentity:
        await self._step("look up the key")
        directory = self._world.directory
        key = directory.cached if directory.cached and not refresh else directory.fetch_key()
        return CachedIdentity(key, PDS, problem=None, fetched_at=directory.fetched_at, stale=False)

    async def _attempt(self, claimed: Repo) -> None:
        await self._step("claimed")
        try:
            known = await self.lookup(claimed.did, refresh=claimed.attempts > 0)
            result = await self._resync.attempt(claimed, known, FreeSlots())
            self._world.results[str(result)] += 1
        except (ClaimLostError, DatabaseError):
            if self.died_at is not None:
                raise KilledError from None
            self._world.results["lost"] += 1
        except UpstreamError as error:
            await self._fail(claimed, UnavailableError(FetchFailure.EXPORT_REJECTED, str(error)))
        except UnavailableError as error:
            await self._fail(claimed, error)

    async def _fail(self, claimed: Repo, failure: UnavailableError) -> None:
        """Record a failure as the worker pool does."""

        def failed(repo: Repo) -> Repo:
            held = repo.lease == claimed.lease and repo.sync_status is SyncStatus.IN_PROGRESS
            return plan_failure(repo, claimed, failure, time()) if held else repo

        self._world.results[failure.reason] += 1
        await self._step("failed")
        await self._store.update_repo(claimed.did, failed)
        await self._step("failure written")

    async def _step(self, name: str) -> None:
        if self.died_at is not None:
            raise KilledError
        self.steps += 1
        await self._world.happen(name)
        if self.steps == self._last:
            self.died_at = name
            await self._world.query(TERMINATE, self._name)
            raise KilledError


class SteppedWorld:
    """The account, its hosts, the live path, and the workers.

    `random` decides what happens at each step, `event_rate` is the probability that anything happens.
    """

    def __init__(
        self,
        dsn: str,
        store: Store,
        sql: asyncpg.Connection,
        spool_directory: Path,
        name: str,
        policy: Policy = STORE_ALL,
        seed: str = "",
    ) -> None:
        self.dsn = dsn
        self._sql = sql
        self._query_lock = asyncio.Lock()
        self.spool_directory = spool_directory
        self.policy = policy
        self.random = Random(seed or name)
        self.event_rate = 0.4
        self.owner = AccountOwner(name)
        self.directory = SimulatedDirectory(self.owner)
        self.live = LivePath(store, self.owner, self.directory, policy)
        self.results = Counter[str]()
        self.story: list[str] = []
        self._store = store
        self._max_mirror_lag = self.random.choice([0, 3])
        self._delayed: list[ReceivedMessage] = []
        self._relay_stalled = False
        self._blocked: list[asyncio.Task[Any]] = []
        self._workers = 0
        self._highest_rev = ""
        self._actions: dict[Callable[[], Awaitable[None]], int] = {
            self._write: 10,
            self._write_nothing: 1,
            self._lose_commits: 2,
            self._send_sync: 2,
            self._rotate_key: 1,
            self._rotate_key_silently: 1,
            self._deactivate: 1,
            self._reactivate: 2,
            self._deactivate_briefly: 3,
            self._toggle_directory: 1,
            self._toggle_relay: 2,
            self._request_resync: 2,
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

    async def query(self, statement: str, *values: Any) -> list[asyncpg.Record]:
        async with self._query_lock:
            rows: list[asyncpg.Record] = await self._sql.fetch(statement, *values)
            return rows

    def mirror_lag(self) -> int:
        return self.random.randint(0, self._max_mirror_lag)

    async def begin(self) -> None:
        """Add the repo: by its first commit, or by a request."""
        if self.random.random() < 0.5:
            await self.live.deliver([received_message("commit", self.owner.first_commit())])
        else:
            await self._store.add_repos([self.owner.did])
        for _ in range(self.random.randint(0, 4)):
            self.owner.change(*self.owner.some_writes(self.random))

    async def happen(self, where: str) -> None:
        """Perhaps let something happen at this step, then check the database."""
        if self.random.random() < self.event_rate:
            [action] = self.random.choices(list(self._actions), list(self._actions.values()))
            self.story.append(f"{where}: {action.__name__}")
            await action()
        await self.check()

    async def check(self) -> None:
        """Check that the records are those of the row's rev, and that the rev never falls.

        A synchronized repo is at the newest rev of the live path or above.
        """
        newest, highest = self.live.newest, self._highest_rev
        for status, rev, records in await self.query(_STATE, self.owner.did):
            assert orjson.loads(records) == (self.owner.history[rev] if rev else {}), (status, self.story)
            assert (rev or "") >= highest, self.story
            self._highest_rev = max(self._highest_rev, rev or "")
            assert status != "synchronized" or rev >= newest, self.story

    async def check_changes(self) -> None:
        """Check that folding the change log from its beginning is consistent and gives the stored records."""
        records: dict[str, str] = {}
        for action, path, cid in await self.query(_CHANGES, self.owner.did):
            assert (action == "create") == (path not in records), (action, path, self.story)
            if action == "delete":
                del records[path]
            else:
                assert records.get(path) != cid, (action, path, self.story)
                records[path] = cid
        for *_, stored in await self.query(_STATE, self.owner.did):
            assert records == orjson.loads(stored), self.story

    async def finish_blocked(self) -> None:
        """Finish the operations that waited for a transaction."""
        while self._blocked:
            await self._blocked.pop(0)

    async def settle(self) -> None:
        """Deliver everything that is late and one more commit; check that the repo ends synchronized and equal."""
        self.event_rate = 0.0
        await self.finish_blocked()
        self._relay_stalled = False
        self._max_mirror_lag = 0
        self.directory.up = True
        self.owner.active = True
        await self._store.expire_leases(range(256), time())
        await self.live.deliver(
            [
                *self._delayed,
                received_message("account", self.owner.account_event(active=True)),
                received_message("identity", self.owner.identity_event()),
                received_message("commit", self.owner.commit()),
            ]
        )
        async with self.worker() as worker:
            for _ in range(10):
                if not await worker.attempt():
                    break
        [(status, rev, _)] = await self.query(_STATE, self.owner.did)
        assert (status, rev) == ("synchronized", self.owner.rev), (self.results, self.story)
        await self.check()
        await self.check_changes()
        assert await self.query("select seq from indexer.buffered_event where did = $1", self.owner.did) == []

    async def _write(self) -> None:
        await self._send("commit", self.owner.commit(*self.owner.some_writes(self.random)))

    async def _write_nothing(self) -> None:
        await self._send("commit", self.owner.commit())

    async def _lose_commits(self) -> None:
        self.owner.change(*self.owner.some_writes(self.random))
        await self._write()

    async def _send_sync(self) -> None:
        await self._send("sync", self.owner.sync_event())

    async def _rotate_key(self) -> None:
        self.owner.swap_key()
        self.owner.change()
        await self._send("identity", self.owner.identity_event())
        await self._send_sync()

    async def _rotate_key_silently(self) -> None:
        self.owner.swap_key()

    async def _deactivate(self) -> None:
        self.owner.active = False
        await self._send("account", self.owner.account_event(active=False, status="deactivated"))

    async def _reactivate(self) -> None:
        self.owner.active = True
        await self._send("account", self.owner.account_event(active=True))
        await self._send_sync()

    async def _deactivate_briefly(self) -> None:
        await self._deactivate()
        await self._reactivate()

    async def _toggle_directory(self) -> None:
        self.directory.up = not self.directory.up or self.random.random() < 0.5

    async def _toggle_relay(self) -> None:
        self._relay_stalled = not self._relay_stalled

    async def _request_resync(self) -> None:
        await self._run_unless_blocked(self._request())

    async def _take_over(self) -> None:
        """Let another worker take over during a resync, and perhaps die as well."""
        await self._run_unless_blocked(self._resync_again())

    async def _request(self) -> None:
        await self._store.request_resyncs([self.owner.did])

    async def _resync_again(self) -> None:
        if await self._store.expire_leases(range(256), time()):
            async with self.worker(self.random.choice([None, None, 6, 12])) as worker:
                with suppress(KilledError):
                    await worker.attempt()

    async def _send(self, kind: str, payload: dict[str, Any]) -> None:
        """Deliver the message, or lose it, or deliver it twice, or late, perhaps after newer ones."""
        message, fate = received_message(kind, payload), self.random.random()
        self.story.append(f"  {kind} {payload.get('rev', '')} {fate:.2f}")
        if self._relay_stalled or fate < 0.15:
            self._delayed.append(message)
        elif fate < 0.75:
            messages = [message]
            if self.random.random() < 0.5:
                messages, self._delayed = [*self._delayed, message], []
            await self._run_unless_blocked(self.live.deliver(messages))
        elif fate < 0.85:
            await self._run_unless_blocked(self.live.deliver([message, message]))

    async def _run_unless_blocked(self, action: Coroutine[Any, Any, None]) -> None:
        """Run to the end, unless a lock blocks it until after this step: then leave it to `finish_blocked`."""
        task = asyncio.create_task(action)
        while not task.done():
            await asyncio.wait({task}, timeout=0.02)
            if not task.done() and (await self.query(_WAITING))[0][0]:
                self._blocked.append(task)
                return
        task.result()
