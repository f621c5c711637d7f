"""The queue of resyncs: order of claims, leases, expired and parked repos."""

import asyncio
from functools import cache, partial
from itertools import count
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.record import Problem
from indexer.db import Database
from indexer.db.resync_queue import DUE
from indexer.reasons import Desync, FetchFailure
from indexer.sync.repo import PARKED, Repo, SyncStatus
from indexer.sync.shard import BUCKETS, PLAIN, Layout, Shard, bucket_of
from tests.db.change_log_helpers import connected
from tests.db.repo_rows import buffer_event, did, head, in_progress, insert, put, synchronized, waiting_for_locks
from tests.waiting import until

ALL = range(256)


def waiting(name: object, **fields: object) -> Repo:
    return Repo(did(name), version=1)._replace(**fields)  # type: ignore[arg-type]


@cache
def name_in_bucket(bucket: int, prefix: str) -> str:
    """Return a name with the prefix whose DID is in the bucket."""
    return next(name for name in (f"{prefix} {n}" for n in count()) if bucket_of(did(name)) == bucket)


async def test_claims_prefer_repos_with_records_then_the_repo_that_was_due_first(db: Database) -> None:
    """Within a bucket, the repo that was due first comes first. Repos that have records come first in all buckets."""
    fields: dict[str, dict[str, Any]] = {
        "at once": {},
        "due": {"next_attempt_at": 99.0},
        "later": {"next_attempt_at": 101.0},
        "known, due": {"next_attempt_at": 99.5, "head": head()},
        "known, due before": {"next_attempt_at": 98.0, "head": head()},
        "known, later": {"next_attempt_at": 101.0, "head": head()},
        "parked": {"next_attempt_at": PARKED},
        "inactive": {"active": False},
    }
    repos = {name: waiting(name_in_bucket(200, name), **given) for name, given in fields.items()}
    await insert(db, *repos.values(), synchronized(name_in_bucket(200, "synchronized")))
    others = [waiting(name_in_bucket(bucket, "new")) for bucket in range(0, 200, 10)]
    await insert(db, *others)
    known = [await db.resyncs.claim(1, ALL, 10.0, 100.0) for _ in range(2)]
    assert [[repo.did for repo in claim] for claim in known] == [
        [repos[name].did] for name in ("known, due before", "known, due")
    ]
    new = [repo for _ in range(22) for repo in await db.resyncs.claim(1, ALL, 10.0, 100.0)]
    due = [repos["at once"].did, repos["due"].did]
    assert {repo.did for repo in new} == {*(repo.did for repo in others), *due}
    assert [repo.did for repo in new if bucket_of(repo.did) == 200] == due
    assert await db.resyncs.claim(1, ALL, 10.0, 100.0) == []
    claimed = next(repo for repo in new if repo.did == due[0])
    assert claimed == repos["at once"]._replace(version=2, sync_status=SyncStatus.IN_PROGRESS, lease=1)
    assert await db.repos.load([claimed.did]) == {claimed.did: claimed}


@pytest.mark.slow
async def test_on_a_cluster_a_claim_is_from_one_shard_if_that_has_enough_repos(db: Database) -> None:
    db.layout = Layout(parts=8)
    every = [waiting(name_in_bucket(bucket, prefix)) for bucket in ALL for prefix in ("one", "two")]
    await insert(db, *every)
    for _ in range(10):
        claimed = await db.resyncs.claim(5, ALL, 10.0, 100.0)
        assert len(claimed) == 5
        assert len({db.layout.part_of(bucket_of(repo.did)) for repo in claimed}) == 1
    rest = [repo for _ in range(3) for repo in await db.resyncs.claim(len(every), ALL, 10.0, 100.0)]
    assert len({repo.did for repo in rest}) == len(rest) == len(every) - 50


@pytest.mark.slow
async def test_a_claim_of_several_repos_prefers_repos_with_records(db: Database) -> None:
    known = [waiting(name_in_bucket(bucket, "known"), head=head()) for bucket in (3, 77, 250)]
    await insert(db, *known, *[waiting(n) for n in range(40)])
    claimed = await db.resyncs.claim(5, ALL, 10.0, 100.0)
    assert [repo.head is not None for repo in claimed] == [True, True, True, False, False]


@pytest.mark.slow
async def test_requested_resyncs_come_after_repos_that_broke(db: Database) -> None:
    """A request may be for all repos."""
    await insert(
        db, *[synchronized(name_in_bucket(7, f"requested {n}")) for n in range(3)], waiting(name_in_bucket(7, "new"))
    )
    assert [requested async for _, requested in db.repos.request_resyncs_of_all()] == [4]
    failed = waiting(name_in_bucket(7, "failed"), head=head(), attempts=1, next_attempt_at=time() - 1)
    await insert(db, failed, waiting(name_in_bucket(7, "broke"), head=head()))
    order = [repo.did for _ in range(6) for repo in await db.resyncs.claim(1, ALL, 10.0, time())]
    assert order[:2] == [did(name_in_bucket(7, "broke")), failed.did]
    assert order[-1] == did(name_in_bucket(7, "new"))


async def test_a_locked_row_does_not_block_a_claim(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, *[waiting(n) for n in range(10)])
    async with sql.transaction():
        await sql.execute("select atproto.request_resync($1)", did(3))
        claimed = await asyncio.wait_for(db.resyncs.claim(10, ALL, 10.0, 100.0), 30)
        assert {repo.did for repo in claimed} == {did(n) for n in range(10)} - {did(3)}
    assert [repo.did for repo in await db.resyncs.claim(10, ALL, 10.0, 100.0)] == [did(3)]


@pytest.mark.slow
async def test_a_repo_is_claimed_by_one_worker_only(db: Database, sql: asyncpg.Connection) -> None:
    """Each query returns one repo of every bucket, and no two queries begin with the same bucket."""
    await insert(db, *[waiting(name_in_bucket(bucket, "new")) for bucket in range(0, 256, 8)])
    queries = [[row["bucket"] for row in await sql.fetch(DUE, 32, list(ALL), 100.0, mask)] for mask in range(0, 256, 8)]
    assert all(sorted(buckets) == list(range(0, 256, 8)) for buckets in queries)
    assert len({buckets[0] for buckets in queries}) == 32
    claims = await asyncio.gather(*[db.resyncs.claim(2, ALL, 10.0, 100.0) for _ in range(20)])
    dids = [repo.did for claim in claims for repo in claim]
    assert sorted(dids) == sorted(set(dids))
    rest = await db.resyncs.claim(100, ALL, 10.0, 100.0)
    assert {*dids, *(repo.did for repo in rest)} == {did(name_in_bucket(n, "new")) for n in range(0, 256, 8)}


@pytest.mark.slow
async def test_a_shard_claims_repos_of_its_buckets(db: Database) -> None:
    for layout in (PLAIN, Layout(tuple(reversed(range(BUCKETS))))):
        dids = {did((layout.order[0], n)) for n in range(40)}
        await insert(db, *[Repo(name, version=1) for name in dids])
        for shard in [Shard(index, 3, layout) for index in range(3)]:
            claimed = await db.resyncs.claim(100, shard.buckets, 10.0, 100.0)
            assert {repo.did for repo in claimed} == {name for name in dids if shard.owns(name)}


async def test_an_expired_lease_ends_the_claim(db: Database, sql: asyncpg.Connection) -> None:
    claimed = await in_progress(db, 1, now=100.0, sync_reason=Desync.SYNC_EVENT)
    assert await db.resyncs.renew(did(1), claimed.lease, 60.0)
    assert not await db.resyncs.renew(did(1), claimed.lease + 1, 60.0)
    assert await db.resyncs.expire_leases(ALL, time() + 50) == 0, "a renewed lease lasts"
    assert await db.repos.load([did(1)]) == {did(1): claimed}, "it keeps the version of the row"
    await sql.execute("update indexer.repo set lease_until = to_timestamp(110)")
    buffering = await buffer_event(db, claimed)
    assert await db.resyncs.expire_leases(ALL, 109.0) == 0
    assert await db.resyncs.expire_leases(ALL, 111.0) == 1
    ended = claimed._replace(
        version=buffering.version + 1,
        sync_status=SyncStatus.DESYNCHRONIZED,
        sync_reason=Desync.LEASE_EXPIRED,
        attempts=1,
        next_attempt_at=None,
    )
    assert await db.repos.load([did(1)]) == {did(1): ended}
    assert await sql.fetchval("select count(*) from indexer.buffered_event") == 0
    assert not await db.resyncs.renew(did(1), claimed.lease, 60.0)
    async with db.resyncs.transaction(claimed) as transaction:
        assert await transaction.lock() is None
    again = await db.resyncs.claim(1, ALL, 10.0, 200.0)
    assert [repo.lease for repo in again] == [claimed.lease + 1]
    assert not await db.resyncs.renew(did(1), claimed.lease, 60.0)
    async with db.resyncs.transaction(claimed) as transaction:
        assert await transaction.lock() is None


@pytest.mark.slow
async def test_waits_and_leases_do_not_last_when_the_clock_is_set_back(db: Database) -> None:
    """They were written a day ahead. Parked repos and new accounts beyond the limit of their host keep waiting."""
    now, limited = time(), FetchFailure.NEW_ACCOUNTS
    await in_progress(db, "claimed", now=now + 86_400)
    await insert(
        db,
        waiting("ahead", next_attempt_at=now + 86_400),
        waiting(
            "ahead, with records",
            next_attempt_at=now + 86_400,
            head=head(),
            last_failure=FetchFailure.HTTP_STATUS,
            last_error="http-status: 500",
        ),
        waiting("soon", next_attempt_at=now + 60),
        waiting("parked", next_attempt_at=PARKED),
        waiting("limited", next_attempt_at=now + 86_400, last_failure=limited, last_error="new-accounts: too many"),
    )
    assert await db.resyncs.end_long_waits(ALL, 7_200.0, now) == 2
    assert await db.resyncs.end_long_waits(ALL, 7_200.0, now) == 0
    assert await db.resyncs.expire_leases(ALL, now) == 1
    claimed = await db.resyncs.claim(10, ALL, 10.0, now)
    assert {repo.did for repo in claimed} == {did("ahead"), did("ahead, with records"), did("claimed")}


@pytest.mark.slow
async def test_the_back_off_grows_with_each_expired_lease(db: Database) -> None:
    now, waits = 100.0, []
    await in_progress(db, 1, now=now)
    for _ in range(4):
        now += 11.0
        assert await db.resyncs.expire_leases(ALL, now) == 1
        waits.append(((await db.repos.load([did(1)]))[did(1)].next_attempt_at or now) - now)
        now += waits[-1]
        assert len(await db.resyncs.claim(1, ALL, 10.0, now)) == 1
    assert waits[0] == 0
    assert waits == sorted(set(waits))


@pytest.mark.slow
async def test_maintenance_skips_rows_that_changed_meanwhile(
    db: Database, database: str, sql: asyncpg.Connection
) -> None:
    """This holds for expired leases, for parked repos, and for repos that lack values."""
    claimed = await in_progress(db, "claimed", now=100.0)
    await insert(db, waiting("parked", next_attempt_at=PARKED), waiting("parked too", next_attempt_at=PARKED))
    lacking = put("app.test/a")._replace(value=None, problem=Problem.MISSING)
    await insert(db, synchronized("lacking"), changes=(lacking,))
    changed = [claimed.did, did("parked"), did("lacking")]
    before = await db.repos.load(changed)
    async with connected(database) as first, first.transaction():
        await first.execute("update indexer.repo set version = version + 1 where did = any($1)", changed)
        maintenance = [
            asyncio.create_task(coroutine)
            for coroutine in (
                db.resyncs.expire_leases(ALL, 200.0),
                db.resyncs.unpark(ALL, -1.0, time()),
                db.resyncs.request_missing_values(ALL, 0.0, 200.0),
            )
        ]
        await until(partial(waiting_for_locks, sql, len(maintenance)))
    assert await asyncio.gather(*maintenance) == [0, 1, 0]
    after = {name: repo._replace(version=repo.version + 1) for name, repo in before.items()}
    assert await db.repos.load(changed) == after
    assert await db.resyncs.expire_leases(ALL, 200.0) == 1


@pytest.mark.slow
async def test_parked_repos_are_unparked_after_a_time(db: Database) -> None:
    await insert(
        db,
        waiting(
            "parked", next_attempt_at=PARKED, last_failure=FetchFailure.REPO_NOT_FOUND, last_error="repo-not-found"
        ),
        waiting("later", next_attempt_at=time() + 60),
        waiting("inactive", next_attempt_at=PARKED, active=False),
    )
    everything = Shard().buckets
    assert await db.resyncs.unpark(everything, 3_600.0, time()) == 0
    assert await db.resyncs.unpark(everything, -1.0, time()) == 1
    rows = await db.repos.load([did(name) for name in ("parked", "later", "inactive")])
    assert {name for name in ("parked", "later", "inactive") if rows[did(name)].next_attempt_at == PARKED} == {
        "inactive"
    }
    assert rows[did("parked")].last_error == "repo-not-found"
