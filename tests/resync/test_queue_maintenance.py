"""Maintenance of the resync queue on a real database: parked repos are tried again, missing values are requested."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.record import Problem
from indexer.db import Database
from indexer.db.resync_queue import DENIED, HIDDEN, Resyncs
from indexer.errors import UnavailableError
from indexer.net.identity.identity_cache import CachedIdentity
from indexer.reasons import Desync, FetchFailure
from indexer.resync.pool import WorkerPool, WorkerPoolSettings
from indexer.resync.queue import MaintenanceSettings, QueueMaintenance
from indexer.resync.shares import Resync, Shares
from indexer.sync.account import plan_active, plan_hidden
from indexer.sync.identity import StoredIdentity
from indexer.sync.repo import PARKED, Repo, Trigger, amend, synchronize
from indexer.sync.shard import Shard
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics
from tests.db.repo_rows import did, head, insert, put, synchronized
from tests.resync.running_pool import FixedIdentities
from tests.sync.signing_account import STORE_ALL
from tests.waiting import until

pytestmark = pytest.mark.slow
DAY, HOUR = 86_400.0, 3_600.0
WITHOUT_VALUE = (put("app.test/a")._replace(value=None, problem=Problem.MISSING),)
_MAKE_A_DAY_OLD = """
    update indexer.repo set updated_at = now() - interval '1 day 1 second',
        synchronized_at = case when sync_status = 'synchronized' then now() - interval '1 day 1 second' end
    where did = any($1)
"""


class CountedSearches(Resyncs):
    """The queue, and the number of searches for repos that are due."""

    count = 0

    async def end_long_waits(self, buckets: Sequence[int], seconds: float, now: float) -> int:
        """Note that a search begins."""
        self.count += 1
        return await super().end_long_waits(buckets, seconds, now)

    async def three_more(self) -> None:
        before = self.count
        await until(lambda: self.count > before + 3)


class RecordedAttempts:
    """Attempts that find no repo if it was never synchronized, and otherwise synchronize it without its value."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.reasons: dict[str, list[Desync | None]] = {}

    async def attempt(self, resync: Resync, _shares: Shares, _identity: CachedIdentity) -> str:
        claimed = resync.claimed
        self.reasons.setdefault(claimed.did, []).append(claimed.sync_reason)
        if claimed.head is None:
            raise UnavailableError(FetchFailure.REPO_NOT_FOUND)
        await self._db.repos.update(claimed.did, lambda repo: synchronize(repo, Trigger.COMPLETED, head(), time(), 0))
        return "synchronized"


@asynccontextmanager
async def maintained(
    db: Database, *, unpark_after: float = DAY
) -> AsyncIterator[tuple[RecordedAttempts, CountedSearches]]:
    """Run a pool and its maintenance, with one search after the other."""
    attempts, searches = RecordedAttempts(db), CountedSearches(db)
    db.resyncs = searches
    collaborators: tuple[Any, Any] = (FixedIdentities(lambda _did: "one.example"), attempts)
    settings = MaintenanceSettings(unpark_after=unpark_after, search_interval=0.02, batch_pause=0.0)
    pool_settings = WorkerPoolSettings(workers=4, idle_interval=0.01)
    pool = WorkerPool(db, *collaborators, STORE_ALL.deletion_grace, Shard(), Metrics(), Conditions(), pool_settings)
    maintenance = QueueMaintenance(db, Shard(), Metrics(), settings)
    tasks = [asyncio.create_task(pool.run()), asyncio.create_task(maintenance.run())]
    try:
        yield attempts, searches
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def parked(name: object) -> Repo:
    return Repo(
        did(name),
        version=1,
        next_attempt_at=PARKED,
        last_failure=FetchFailure.REPO_NOT_FOUND,
        last_error="repo-not-found",
    )


async def test_all_due_repos_are_requested_once_in_batches(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were parked, or synchronized without all values, a day ago. A repo that fails is parked again."""
    monkeypatch.setattr("indexer.db.resync_queue.BATCH_SIZE", 3)
    waiting, lacking = [did(f"parked {n}") for n in range(5)], [did(f"lacking {n}") for n in range(4)]
    await insert(db, *[parked(f"parked {n}") for n in range(5)], parked("just now"))
    await insert(db, *[synchronized(f"lacking {n}") for n in range(4)], changes=WITHOUT_VALUE)
    await insert(db, synchronized("lacking just now", synchronized_at=time()), changes=WITHOUT_VALUE)
    await insert(db, synchronized("complete"), changes=(put("app.test/a"),))
    await sql.execute(_MAKE_A_DAY_OLD, [*waiting, *lacking, did("complete")])

    async def failed() -> bool:
        return all(repo.attempts > 0 for repo in (await db.repos.load(waiting)).values())

    async with maintained(db) as (attempts, searches):
        await until(failed)
        await until(lambda: len(attempts.reasons) == len(waiting) + len(lacking))
        await searches.three_more()
    assert attempts.reasons == {one: [Desync.NEW] for one in waiting} | {
        one: [Desync.RECORD_MISSING] for one in lacking
    }
    rows = await db.repos.load([*waiting, did("just now")])
    assert {(row.next_attempt_at, row.attempts) for row in rows.values()} == {(PARKED, 1), (PARKED, 0)}


async def test_repos_with_lenient_commits_are_requested_a_few_at_a_time_the_oldest_first(db: Database) -> None:
    """Repos that were synchronized within the hour, inactive ones, and those of other shards stay as they are."""
    now = float(int(time()))
    names = [name for name in range(40) if Shard(0, 2).owns(did(name))][:7]
    other = next(name for name in range(40) if not Shard(0, 2).owns(did(name)))
    marked = [synchronized(name, unproven_since=now - order) for order, name in enumerate(names)]
    others = [
        synchronized("recent", attempts=1, unproven_since=now - DAY, synchronized_at=now - HOUR + 60),
        synchronized("inactive", unproven_since=now - DAY, active=False),
        synchronized("unmarked"),
        synchronized(other, unproven_since=now - DAY),
    ]
    await insert(db, *marked, *others)
    oldest_first = [repo.did for repo in reversed(marked)]
    for requested in (3, 6, 7):
        await db.resyncs.request_unproven(Shard(0, 2).buckets, HOUR, time(), 3)
        found = await db.repos.load(oldest_first)
        assert [did for did in oldest_first if found[did].sync_reason] == oldest_first[:requested]
    rows = (await db.repos.load(oldest_first)).values()
    assert {(row.sync_reason, row.next_attempt_at) for row in rows} == {(Desync.LENIENT_COMMIT, None)}, "due at once"
    assert await db.repos.load([repo.did for repo in others]) == {repo.did: repo for repo in others}


async def test_interval_zero_never_unparks_but_requests_missing_values(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, parked("long ago"))
    await insert(db, synchronized("incomplete"), changes=WITHOUT_VALUE)
    await sql.execute(_MAKE_A_DAY_OLD, [did("long ago"), did("incomplete")])
    async with maintained(db, unpark_after=0.0) as (attempts, searches):
        await until(lambda: did("incomplete") in attempts.reasons)
        await searches.three_more()
    assert list(attempts.reasons) == [did("incomplete")]
    assert (await db.repos.load([did("long ago")]))[did("long ago")] == parked("long ago")


async def test_repos_that_cannot_be_fetched_are_forgotten_a_day_after_they_were_parked(
    db: Database, sql: asyncpg.Connection
) -> None:
    """If their DID never existed, or if only the stream has named them: any host can have an authentic message.

    Repos with records, with another failure, or taken down stay. A listed repo is tried again instead.
    """
    denied = Repo(
        did("denied"),
        version=1,
        next_attempt_at=PARKED,
        last_failure=FetchFailure.IDENTITY_GONE,
        last_error="identity-gone: not registered",
    )
    announced = parked("announced")._replace(from_stream=True, latest_verified_rev="3laaaaaaaaa22")
    stays = [
        denied._replace(did=did("synchronized"), head=head()),
        denied._replace(did=did("authentic"), latest_verified_rev="3laaaaaaaaa22"),
        denied._replace(did=did("taken down"), takedown=True),
        denied._replace(did=did("hidden"), active=False),
        parked("listed, and not at its host"),
        announced._replace(did=did("announced and synchronized"), head=head()),
    ]
    recent = denied._replace(did=did("recent"))
    await insert(db, denied, announced, *stays, recent)
    await db.identities.save([StoredIdentity(denied.did, None, None, None, 5.0, problem="no such host")])
    await db.identities.save([StoredIdentity(announced.did, "a.test", "https://a.test", None, 5.0)])
    await sql.execute(_MAKE_A_DAY_OLD, [repo.did for repo in (denied, announced, *stays)])
    assert await db.resyncs.forget_denied(range(256), DAY, time()) == 2
    assert await db.repos.load([denied.did, announced.did]) == {}
    assert await db.identities.load([denied.did, announced.did]) == {}
    assert len(await db.repos.load([repo.did for repo in (*stays, recent)])) == len(stays) + 1
    assert await db.resyncs.forget_denied(range(256), DAY, time()) == 0


async def test_hidden_accounts_of_which_nothing_is_stored_are_forgotten_after_a_day(
    db: Database, sql: asyncpg.Connection
) -> None:
    """Consumers are told that they are visible, as a repo is that is added later."""
    hidden = [
        Repo(did("new"), version=1, active=False, hosting_status="deactivated", next_attempt_at=5.0),
        Repo(did("parked"), version=1, active=False, hosting_status="takendown", next_attempt_at=PARKED),
        Repo(did("erased"), version=1, active=False, hosting_status="deleted", sync_reason=Desync.ERASED),
    ]
    stays = [
        hidden[0]._replace(did=did("active"), active=True),
        hidden[0]._replace(did=did("has records"), head=head()),
        hidden[0]._replace(did=did("taken down here"), takedown=True),
        hidden[2]._replace(did=did("is being erased"), erase_at=5.0),
    ]
    recent = hidden[0]._replace(did=did("recent"))
    await insert(db, *hidden, *stays, recent)
    await sql.execute(_MAKE_A_DAY_OLD, [repo.did for repo in (*hidden, *stays)])
    seq = await sql.fetchval("select atproto.latest_seq()")
    assert await db.resyncs.forget_hidden(range(256), DAY, time()) == len(hidden)
    assert await db.repos.load([repo.did for repo in hidden]) == {}
    assert len(await db.repos.load([repo.did for repo in (*stays, recent)])) == len(stays) + 1
    entries = await sql.fetch("select did, action from atproto.changes_after($1, 100)", seq)
    assert {tuple(entry) for entry in entries} == {(repo.did, "visible") for repo in hidden}
    assert await db.resyncs.forget_hidden(range(256), DAY, time()) == 0


async def untracked_and_tracked_again(db: Database, *names: object) -> list[str]:
    """Insert repos with a record, untrack them, and track them again before their records were erased."""
    dids = list(map(did, names))
    await insert(db, *map(synchronized, names), changes=(put("app.test/a"),))
    assert await db.scope.untrack(dids) == len(dids)
    assert await db.scope.track(dids) == len(dids)
    assert await db.repos.erase_batch(range(256), 1e12) is None, "the erasure was cancelled"
    return dids


async def test_hidden_accounts_with_records_that_an_erasure_left_stay(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not delay those of which nothing is stored, and are fetched as soon as they are active again."""
    monkeypatch.setattr("indexer.db.resync_queue.BATCH_SIZE", 2)
    with_records = await untracked_and_tracked_again(db, *"abcdef")
    for one, status in zip(with_records, ["deactivated", "takendown"] * 3, strict=True):
        await db.repos.update(one, partial(plan_hidden, status=status, now=time(), deletion_grace=DAY))
    await insert(db, *[Repo(did(number), version=1, active=False) for number in range(3)])
    await sql.execute(_MAKE_A_DAY_OLD, [*with_records, *map(did, range(3))])
    forgotten = [await db.resyncs.forget_hidden(range(256), DAY, time()) for _ in range(3)]
    assert forgotten == [2, 1, 0]
    assert (await db.repos.load(with_records)).keys() == set(with_records)
    assert await sql.fetchval("select count(*) from indexer.record") == len(with_records)
    for one in with_records:
        await db.repos.update(one, partial(plan_active, now=time()))
    claimed = await db.resyncs.claim(10, range(256), time() + 60, time())
    assert sorted(repo.did for repo in claimed) == sorted(with_records)


@pytest.mark.parametrize("from_stream", [False, True])
async def test_denied_dids_with_records_that_an_erasure_left_are_tried_again(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, *, from_stream: bool
) -> None:
    """They do not delay those of which nothing is stored."""
    monkeypatch.setattr("indexer.db.resync_queue.BATCH_SIZE", 2)
    fields: dict[str, Any] = {
        "next_attempt_at": PARKED,
        "last_failure": FetchFailure.IDENTITY_GONE,
        "last_error": "identity-gone: x",
        "from_stream": from_stream,
    }
    with_records = await untracked_and_tracked_again(db, *"abcdef")
    for one in with_records:
        await db.repos.update(one, lambda repo: amend(repo, **fields))
    await insert(db, *[parked(number)._replace(**fields) for number in range(3)])
    await sql.execute(_MAKE_A_DAY_OLD, [*with_records, *map(did, range(3))])
    async with maintained(db) as (attempts, searches):
        await until(lambda: len(attempts.reasons) == len(with_records))
        await searches.three_more()
    assert attempts.reasons == {one: [Desync.ERASED] for one in with_records}, "once a day, not with each search"
    assert {row["did"] for row in await sql.fetch("select did from indexer.repo")} == set(with_records)
    assert await sql.fetchval("select count(*) from indexer.record") == len(with_records)


async def test_maintenance_forgets_instead_of_unparking(db: Database, sql: asyncpg.Connection) -> None:
    """More hidden accounts, and more DIDs that the directory denies, than one batch has."""
    hidden = [Repo(did(number), version=1, active=False) for number in range(600)]
    made_up = [
        parked(f"made up {number}")._replace(
            last_failure=FetchFailure.IDENTITY_GONE, last_error="identity-gone: not registered"
        )
        for number in range(600)
    ]
    await insert(db, *hidden, *made_up, parked("real"))
    await sql.execute(_MAKE_A_DAY_OLD, [did("real"), *[repo.did for repo in (*hidden, *made_up)]])
    async with maintained(db) as (attempts, _):
        await until(lambda: did("real") in attempts.reasons)
        assert list(attempts.reasons) == [did("real")]
    assert await sql.fetchval("select count(*) from indexer.repo") == 1


@pytest.mark.parametrize(("search", "index"), [(HIDDEN, "repo_hidden"), (DENIED, "repo_denied")])
async def test_repos_to_forget_are_found_by_index(sql: asyncpg.Connection, search: str, index: str) -> None:
    """And so are the records of each one, of which a few have some."""
    await sql.execute(
        "insert into indexer.repo (did, bucket, version, sync_status, active, takedown, hosting_seq, buffered_events, "
        "buffered_bytes, lease, attempts, next_attempt_at, last_failure, last_error) "
        "select 'did:plc:' || n, n % 256, 1, 'desynchronized', n % 100 <> 1, false, 0, 0, 0, 0, 0, 'infinity', "
        "case when n % 100 = 0 then 'identity-gone' else 'repo-not-found' end, 'x' from generate_series(1, 20000) n"
    )
    await sql.execute(
        "insert into indexer.record (did, collection, rkey, bucket, cid, rev) "
        "select did, 'app.test', 'a', bucket, '', '3l' from indexer.repo where did like '%7'; "
        "analyze indexer.repo, indexer.record"
    )
    every = list(range(256))
    for mode in ("force_custom_plan", "force_generic_plan"):
        await sql.execute(f"set plan_cache_mode = {mode}")
        rows = await sql.fetch(f"explain (analyze, costs off) {search}", 4e9, every, 500, every)
        plan = "\n".join(row[0] for row in rows)
        assert index in plan and "record_pkey" in plan, plan  # noqa: PT018
        assert "Seq Scan" not in plan, plan
