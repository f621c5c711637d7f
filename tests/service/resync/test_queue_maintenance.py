"""Maintenance of the resync queue on a real database: parked repos are tried again, missing values are requested."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.record import Problem
from indexer.errors import UnavailableError
from indexer.identity import CachedIdentity
from indexer.monitoring.metrics import Metrics
from indexer.reasons import Desync, FetchFailure
from indexer.service.resync.queue_maintenance import MaintenanceSettings, QueueMaintenance
from indexer.service.resync.worker_pool import WorkerPool, WorkerPoolSettings
from indexer.store import Store
from indexer.sync.repo_state import PARKED, Repo
from indexer.sync.repo_transitions import Trigger, synchronize
from indexer.sync.shard import Shard
from tests.service.resync.test_worker_pool import FixedIdentities
from tests.store.repo_rows import did, head, insert, put, synchronized
from tests.sync.signing_account import STORE_ALL
from tests.waiting import until

DAY = 86_400.0
WITHOUT_VALUE = (put("app.test/a")._replace(value=None, problem=Problem.MISSING),)
_MAKE_A_DAY_OLD = """
    update indexer.repo set updated_at = now() - interval '1 day 1 second',
        synchronized_at = case when sync_status = 'synchronized' then now() - interval '1 day 1 second' end
    where did = any($1)
"""


class CountingStore:
    """The store, and how many repos each search found; a search is known by the time at which it began."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.found: dict[float, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def request_missing_values(self, buckets: range, seconds: float, now: float) -> int:
        return self._count(now, await self._store.request_missing_values(buckets, seconds, now))

    async def unpark(self, buckets: range, seconds: float, now: float) -> int:
        return self._count(now, await self._store.unpark(buckets, seconds, now))

    def _count(self, now: float, found: int) -> int:
        self.found[now] = self.found.get(now, 0) + found
        return found


class RecordedAttempts:
    """Attempts that find no repo if it was never synchronized, and otherwise synchronize it without its value."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.reasons: dict[str, list[Desync | None]] = {}

    async def attempt(self, claimed: Repo, _identity: CachedIdentity, _enlarge: object) -> str:
        self.reasons.setdefault(claimed.did, []).append(claimed.sync_reason)
        if claimed.head is None:
            raise UnavailableError(FetchFailure.REPO_NOT_FOUND)
        await self._store.update_repo(claimed.did, lambda repo: synchronize(repo, Trigger.COMPLETED, head(), time()))
        return "synchronized"


@asynccontextmanager
async def maintained(
    store: Store, *, unpark_after: float = DAY
) -> AsyncIterator[tuple[RecordedAttempts, CountingStore]]:
    """Run a pool and its maintenance, with one search after the other."""
    attempts, counting = RecordedAttempts(store), CountingStore(store)
    collaborators: tuple[Any, Any, Any] = (counting, FixedIdentities(lambda _did: "one.example"), attempts)
    settings = MaintenanceSettings(unpark_after=unpark_after, search_interval=0.02, batch_pause=0.0)
    pool = WorkerPool(*collaborators, STORE_ALL, Shard(), Metrics(), WorkerPoolSettings(workers=4, idle_interval=0.01))
    maintenance = QueueMaintenance(collaborators[0], Shard(), Metrics(), settings)
    tasks = [asyncio.create_task(pool.run()), asyncio.create_task(maintenance.run())]
    try:
        yield attempts, counting
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def parked(name: object) -> Repo:
    return Repo(did(name), version=1, next_attempt_at=PARKED, last_error="repo-not-found")


async def three_more_searches(counting: CountingStore) -> None:
    before = len(counting.found)
    await until(lambda: len(counting.found) > before + 3)


async def test_parked_repo_is_tried_once_per_interval(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, parked("long ago"), parked("just now"))
    await sql.execute(_MAKE_A_DAY_OLD, [did("long ago")])
    async with maintained(store) as (attempts, counting):
        await until(lambda: did("long ago") in attempts.reasons)
        await three_more_searches(counting)
    assert attempts.reasons == {did("long ago"): [Desync.NEW]}
    rows = await store.repos([did("long ago"), did("just now")])
    assert {(row.did, row.next_attempt_at, row.attempts) for row in rows.values()} == {
        (did("long ago"), PARKED, 1),
        (did("just now"), PARKED, 0),
    }


async def test_one_search_unparks_all_due_repos_in_batches(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.store.resync_queue.BATCH_SIZE", 3)
    dids = [did(n) for n in range(10)]
    await insert(store, *map(parked, range(10)))
    await sql.execute(_MAKE_A_DAY_OLD, dids)
    async with maintained(store) as (attempts, counting):
        await until(lambda: len(attempts.reasons) == len(dids))
        await three_more_searches(counting)
    assert [found for found in counting.found.values() if found] == [len(dids)]
    assert sorted(attempts.reasons) == sorted(dids)


async def test_missing_values_are_requested_a_day_later(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.store.resync_queue.BATCH_SIZE", 3)
    dids = [did(n) for n in range(7)]
    await insert(store, *map(synchronized, range(7)), changes=WITHOUT_VALUE)
    await insert(store, synchronized("just now", synchronized_at=time()), changes=WITHOUT_VALUE)
    await insert(store, synchronized("complete"), changes=(put("app.test/a"),))
    await sql.execute(_MAKE_A_DAY_OLD, [*dids, did("complete")])
    async with maintained(store) as (attempts, counting):
        await until(lambda: len(attempts.reasons) == len(dids))
        await three_more_searches(counting)
    assert [found for found in counting.found.values() if found] == [len(dids)]
    assert attempts.reasons == {one: [Desync.RECORD_MISSING] for one in dids}


async def test_interval_zero_never_unparks_but_requests_missing_values(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, parked("long ago"))
    await insert(store, synchronized("incomplete"), changes=WITHOUT_VALUE)
    await sql.execute(_MAKE_A_DAY_OLD, [did("long ago"), did("incomplete")])
    async with maintained(store, unpark_after=0.0) as (attempts, counting):
        await until(lambda: did("incomplete") in attempts.reasons)
        await three_more_searches(counting)
    assert list(attempts.reasons) == [did("incomplete")]
    assert (await store.repos([did("long ago")]))[did("long ago")] == parked("long ago")
