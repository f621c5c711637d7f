"""The pool's sweep, on a real database: what was given up on is tried again, and what lacks values is fetched again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.record import Problem
from indexer.errors import UnavailableError
from indexer.identity import Known
from indexer.metrics import Metrics
from indexer.reasons import Desync, FetchFailure
from indexer.service.pool import Pace, Pool
from indexer.store import Store
from indexer.sync.planning import synchronize
from indexer.sync.repo import PARKED, Repo
from indexer.sync.shard import Shard
from tests.service.test_pool import Hosts
from tests.serving import until
from tests.store.rows import did, head, insert, put, synchronized
from tests.sync.people import EVERYTHING

QUICK = Pace(idle=0.01, sweep=0.02, breath=0.0)
DAY = 86_400.0
LACKING = (put("app.test/a")._replace(value=None, problem=Problem.MISSING),)
_AGE = """
    update indexer.repo set updated_at = now() - interval '1 day 1 second',
        synchronized_at = case when status = 'synchronized' then now() - interval '1 day 1 second' end
    where did = any($1)
"""


class Sweeps:
    """The store, and how many repos each sweep found; a sweep is known by the time at which it began."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.found: dict[float, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def mark_missing(self, buckets: range, seconds: float, now: float) -> int:
        return self._note(now, await self._store.mark_missing(buckets, seconds, now))

    async def wake_parked(self, buckets: range, seconds: float, now: float) -> int:
        return self._note(now, await self._store.wake_parked(buckets, seconds, now))

    def _note(self, now: float, found: int) -> int:
        self.found[now] = self.found.get(now, 0) + found
        return found


class Tries:
    """Resyncs that find no repo, or, of one that was synchronized before, what it was, and still not its value."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.tried: dict[str, list[Desync | None]] = {}

    async def attempt(self, claimed: Repo, _known: Known, _large: Callable[[], None]) -> str:
        self.tried.setdefault(claimed.did, []).append(claimed.reason)
        if claimed.head is None:
            raise UnavailableError(FetchFailure.REPO_NOT_FOUND)
        await self._store.amend(claimed.did, lambda repo: synchronize(repo, head(), time()))
        return "synchronized"


@asynccontextmanager
async def sweeping(store: Store, *, interval: float = DAY) -> AsyncIterator[tuple[Tries, Sweeps]]:
    """A pool at work, whose sweeps follow each other at once."""
    tries, sweeps, identities = Tries(store), Sweeps(store), Hosts(lambda _did: "one.example")
    parties: tuple[Any, Any, Any] = (sweeps, identities, tries)
    pool = Pool(*parties, EVERYTHING, Shard(), Metrics(), workers=4, sweep_interval=interval, pace=QUICK)
    task = asyncio.create_task(pool.run())
    try:
        yield tries, sweeps
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def parked(name: object) -> Repo:
    return Repo(did(name), version=1, next_attempt_at=PARKED, last_error="repo-not-found")


async def three_more(sweeps: Sweeps) -> None:
    before = len(sweeps.found)
    await until(lambda: len(sweeps.found) > before + 3)


async def test_what_was_given_up_on_is_tried_again_once_in_an_interval(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, parked("long ago"), parked("just now"))
    await sql.execute(_AGE, [did("long ago")])
    async with sweeping(store) as (tries, sweeps):
        await until(lambda: did("long ago") in tries.tried)
        await three_more(sweeps)
    assert tries.tried == {did("long ago"): [Desync.NEW]}
    rows = await store.repos([did("long ago"), did("just now")])
    assert {(row.did, row.next_attempt_at, row.attempts) for row in rows.values()} == {
        (did("long ago"), PARKED, 1),
        (did("just now"), PARKED, 0),
    }


async def test_one_sweep_comes_to_all_that_are_due(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few are of a batch: the next sweep would find the first ones again, parked once more."""
    monkeypatch.setattr("indexer.store.resync.MARKED_AT_ONCE", 3)
    names = [did(n) for n in range(10)]
    await insert(store, *map(parked, range(10)))
    await sql.execute(_AGE, names)
    async with sweeping(store) as (tries, sweeps):
        await until(lambda: len(tries.tried) == len(names))
        await three_more(sweeps)
    assert [found for found in sweeps.found.values() if found] == [len(names)]
    assert sorted(tries.tried) == sorted(names)


async def test_values_that_no_export_had_are_wanted_a_day_later(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all such repos in one sweep."""
    monkeypatch.setattr("indexer.store.resync.MARKED_AT_ONCE", 3)
    names = [did(n) for n in range(7)]
    await insert(store, *map(synchronized, range(7)), changes=LACKING)
    await insert(store, synchronized("just now", synchronized_at=time()), changes=LACKING)
    await insert(store, synchronized("whole"), changes=(put("app.test/a"),))
    await sql.execute(_AGE, [*names, did("whole")])
    async with sweeping(store) as (tries, sweeps):
        await until(lambda: len(tries.tried) == len(names))
        await three_more(sweeps)
    assert [found for found in sweeps.found.values() if found] == [len(names)]
    assert tries.tried == {name: [Desync.RECORD_MISSING] for name in names}


async def test_an_interval_of_none_wakes_nothing(store: Store, sql: asyncpg.Connection) -> None:
    """Values are wanted all the same."""
    await insert(store, parked("long ago"))
    await insert(store, synchronized("lacking"), changes=LACKING)
    await sql.execute(_AGE, [did("long ago"), did("lacking")])
    async with sweeping(store, interval=0.0) as (tries, sweeps):
        await until(lambda: did("lacking") in tries.tried)
        await three_more(sweeps)
    assert list(tries.tried) == [did("lacking")]
    assert (await store.repos([did("long ago")]))[did("long ago")] == parked("long ago")
