"""New repos are written without a comparison, alone or in shared transactions, with the same result as with one."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.record import Problem
from indexer.db import Database
from indexer.db.resync_transaction import ResyncTransaction
from indexer.demo.local_repo import Write
from indexer.net.identity.identity_cache import CachedIdentity
from indexer.resync.apply import MAX_SIDE_BY_SIDE, Applies, NewRepo
from indexer.resync.fetch import ResyncAttempts
from indexer.resync.shares import Shares
from indexer.resync.sparse import SparseFetch
from indexer.sync.changes import Batch, RecordChange
from indexer.sync.export import RecordChunk
from indexer.sync.policy import KeyState
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import PLAIN, Layout, bucket_of
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics
from tests.db.repo_rows import did, head, put
from tests.numbered_changes import number_changes
from tests.resync.resync_world import (
    COLLECTIONS,
    NO_COLLECTION,
    PDS,
    AccountOwner,
    SimulatedHosts,
)
from tests.sync.signing_account import STORE_ALL
from tests.waiting import until

pytestmark = pytest.mark.slow

ROWS = """
    select collection, rkey, cid, rev, value::text, value_problem, original from indexer.record where did = $1
    order by collection, rkey
"""
CHANGES = "select action, collection, rkey, cid, rev, live from atproto.changes where did = $1 order by seq"
CLEAR = (
    "delete from indexer.record; delete from indexer.repo; delete from indexer.change; delete from indexer.change_batch"
)
REPO = """
    select sync_status, sync_reason, rev, data, commit, latest_verified_rev, buffered_events, attempts
    from indexer.repo where did = $1
"""


class ComparingTransaction:
    """A transaction that says that records are stored, so that everything is compared."""

    def __init__(self, transaction: Any) -> None:
        self._transaction = transaction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    async def eligible(self) -> dict[str, Repo]:
        return {}

    async def stores_records(self) -> bool:
        return True


class ComparingDatabase:
    """A database with which every resync compares the export with the stored records: the oracle."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.resyncs = self
        self.layout = db.layout

    @asynccontextmanager
    async def transaction(self, *claimed: Repo, scope_version: int) -> AsyncIterator[ComparingTransaction]:
        async with self._db.resyncs.transaction(*claimed, scope_version=scope_version) as transaction:
            yield ComparingTransaction(transaction)


async def claim(db: Database, *dids: str) -> list[Repo]:
    await db.repos.add(dids)
    return await db.resyncs.claim(len(dids), range(256), 60.0, time() + 10)


async def resync(db: Any, owner: AccountOwner, claimed: Repo, spool_directory: Path) -> str:
    identities: Any = None
    pds: Any = SimulatedHosts(owner, spool_directory)
    applies, shares = Applies(db, Metrics(), Conditions()), Shares(workers=1)
    sparse = SparseFetch(pds, "never")
    attempts = ResyncAttempts(applies, identities, pds, lambda: STORE_ALL, Metrics(), (None,), Conditions(), sparse)
    identity = CachedIdentity(owner.key.public, PDS, problem=None, fetched_at=0.0, stale=False)
    return await attempts.attempt(shares.admit(claimed, "pds.test", time()), shares, identity)


async def state(db: Database, sql: asyncpg.Connection, owner: AccountOwner) -> list[list[tuple[Any, ...]]]:
    """Return the records, the changes and the row of the account."""
    await number_changes(db, sql)
    return [[tuple(row) for row in await sql.fetch(query, owner.did)] for query in (ROWS, CHANGES, REPO)]


def account(records: int) -> AccountOwner:
    """Return an account with records of all kinds: ordinary, without a type, not a map, and with a bad path."""
    owner = AccountOwner("ada")
    writes = [Write.create(f"{COLLECTIONS[n % 3]}/{n:05}", {"$type": COLLECTIONS[0], "n": n}) for n in range(records)]
    odd = [
        Write.create(f"{COLLECTIONS[0]}/no-type", {"text": "é\U0001f389"}),
        Write.create(f"{COLLECTIONS[1]}/nul", {"$type": COLLECTIONS[1], "text": "\0"}),
        Write.create(f"{NO_COLLECTION}/a", {"n": 1}),
    ]
    for start in range(0, records, 100):
        owner.change(*writes[start : start + 100])
    owner.change(*odd)
    return owner


@pytest.mark.parametrize(("records", "chunk"), [(0, 2_000), (40, 2_000), (40, 7), (0, 1), (40, 1)])
async def test_new_repo_gets_the_same_rows_and_changes_as_by_a_comparison(
    db: Database, sql: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int, chunk: int
) -> None:
    """In chunks of 2,000, the repo is written in a shared transaction; else in one of its own."""
    monkeypatch.setattr("indexer.sync.export.CHUNK_RECORDS", chunk)
    monkeypatch.setattr("indexer.resync.apply.CHUNK_RECORDS", chunk)
    owner, steps = account(records), list[str]()
    monkeypatch.setattr("indexer.resync.apply.crash_point", steps.append)
    states = []
    for used in (db, ComparingDatabase(db)):
        [claimed] = await claim(db, owner.did)
        assert await resync(used, owner, claimed, tmp_path) == "synchronized"
        states.append(await state(db, sql, owner))
        await sql.execute(CLEAR)
    rev = states[0][2][0][2]
    assert states[0][1].pop(0) == ("snapshot", None, None, None, rev, False), "the log says that all records follow"
    assert states[0] == states[1]
    assert len(states[0][0]) == records + 2
    assert [change[0] for change in states[0][1]].count("create") == records + 2
    assert {row[5] for row in states[0][0]} >= {Problem.NUL, Problem.NO_TYPE}
    assert ("new-repos.finished" in steps) == (chunk == 2_000)


async def test_stale_records_are_compared(db: Database, sql: asyncpg.Connection, tmp_path: Path) -> None:
    """The erasure of a deleted account was interrupted, and the account became active again."""
    owner = account(5)
    [claimed] = await claim(db, owner.did)
    await sql.execute(
        "insert into indexer.record (did, collection, rkey, bucket, cid, rev, value) "
        "select $1, 'com.example.gone', n::text, indexer.bucket_of($1), '\\x00', '3laaaaaaaaa22', '{}' "
        "from generate_series(1, 3) n",
        owner.did,
    )
    assert await resync(db, owner, claimed, tmp_path) == "synchronized"
    rows, changes, _ = await state(db, sql, owner)
    assert {f"{row[0]}/{row[1]}" for row in rows} == owner.history[owner.rev].keys()
    assert [change[0] for change in changes].count("delete") == 3


def new_repo(claimed: Repo, *changes: RecordChange) -> NewRepo:
    return NewRepo(
        claimed, head("3lbbbbbbbbb22"), KeyState(None), STORE_ALL, RecordChunk(len(changes), 0, 100, changes)
    )


class StoppedDatabase:
    """A database whose shared transactions wait before they begin, until `go` is set."""

    def __init__(self, db: Database, layout: Layout = PLAIN) -> None:
        self._db = db
        self.resyncs = self
        self.layout = layout
        self.go = asyncio.Event()
        self.begun = asyncio.Event()
        self.waiting = 0
        self.groups: list[list[str]] = []

    @asynccontextmanager
    async def transaction(self, *claimed: Repo, scope_version: int) -> AsyncIterator["StoppedTransaction"]:
        self.begun.set()
        self.waiting += 1
        await self.go.wait()
        async with self._db.resyncs.transaction(*claimed, scope_version=scope_version) as transaction:
            yield StoppedTransaction(transaction, self.groups)


class StoppedTransaction:
    def __init__(self, transaction: ResyncTransaction, groups: list[list[str]]) -> None:
        self._transaction = transaction
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    async def eligible(self) -> dict[str, Repo]:
        self._groups.append([repo.did for repo in self._transaction.claimed])
        return await self._transaction.eligible()


async def statuses(db: Database, *names: object) -> list[str]:
    repos = await db.repos.load([did(name) for name in names])
    return [repos[did(name)].sync_status for name in names]


async def waiting_writes(
    stopped: StoppedDatabase, repos: Sequence[NewRepo], metrics: Metrics | None = None
) -> list["asyncio.Task[Batch | None]"]:
    """Return one running write per repo. The first transaction has begun, and the other repos wait."""
    used: Any = stopped
    applies = Applies(used, metrics or Metrics(), Conditions())
    writes = [asyncio.create_task(applies.write_shared(repo)) for repo in repos]
    await stopped.begun.wait()
    return writes


async def test_repos_that_wait_share_a_transaction(db: Database, sql: asyncpg.Connection) -> None:
    names = range(5)
    claimed = {repo.did: repo for repo in await claim(db, *[did(name) for name in names])}
    stopped, metrics = StoppedDatabase(db), Metrics()
    repos = [new_repo(claimed[did(name)], put("app.test/a"), put("app.test/b")) for name in names]
    writes = await waiting_writes(stopped, repos, metrics)
    stopped.go.set()
    batches = await asyncio.gather(*writes)
    assert [batch.writes[0].repo.did for batch in batches if batch] == [did(name) for name in names]
    assert sum(map(len, stopped.groups)) == 5
    assert len(stopped.groups) <= 2
    stage = metrics.registry.get_sample_value("indexer_batch_seconds_count", {"stage": "apply-export"})
    assert stage == len(stopped.groups), "the time of a transaction was counted for each of its repos"
    assert set(await statuses(db, *names)) == {SyncStatus.SYNCHRONIZED}
    assert await sql.fetchval("select count(*) from indexer.record") == 10


async def test_on_a_cluster_only_repos_of_one_shard_share_a_transaction(db: Database) -> None:
    """The transactions of two shards run side by side. Repos of the others wait, and share the next ones."""
    claimed = {repo.did: repo for repo in await claim(db, *map(did, range(12)))}
    layout = Layout(parts=4)
    shards = {owner: layout.part_of(bucket_of(owner)) for owner in claimed}
    assert len(set(shards.values())) > MAX_SIDE_BY_SIDE
    stopped = StoppedDatabase(db, layout)
    writes = await waiting_writes(stopped, [new_repo(repo, put("app.test/a")) for repo in claimed.values()])
    await until(lambda: stopped.waiting == MAX_SIDE_BY_SIDE)
    for _ in range(20):
        await asyncio.sleep(0)
    assert stopped.waiting == MAX_SIDE_BY_SIDE
    stopped.go.set()
    assert all(await asyncio.gather(*writes))
    assert all(len({shards[owner] for owner in group}) == 1 for group in stopped.groups)
    others = Counter(shards[group[0]] for group in stopped.groups)
    assert sorted(others.values())[: len(others) - MAX_SIDE_BY_SIDE] == [1] * (len(others) - MAX_SIDE_BY_SIDE)


@pytest.mark.parametrize("late_first", [True, False])
async def test_of_two_attempts_of_one_repo_only_the_one_that_holds_the_claim_writes(
    db: Database, sql: asyncpg.Connection, late_first: bool
) -> None:
    """The lease of an attempt has expired, and another worker has claimed the repo before both were written."""
    [first] = await claim(db, did("first"))
    [late] = await claim(db, did("new"))
    await db.resyncs.expire_leases(range(256), time() + 1_000)
    await sql.execute("update indexer.repo set next_attempt_at = now()")
    again = {repo.did: repo for repo in await db.resyncs.claim(2, range(256), 60.0, time() + 10)}
    assert again[did("new")].lease > late.lease
    attempts = [new_repo(late, put("app.test/late")), new_repo(again[did("new")], put("app.test/new"))]
    stopped = StoppedDatabase(db)
    ordered = attempts if late_first else attempts[::-1]
    writes = await waiting_writes(stopped, [new_repo(again[first.did], put("app.test/a")), *ordered])
    stopped.go.set()
    written = dict(zip(["first", *ordered], await asyncio.gather(*writes), strict=True))
    assert [len(group) for group in stopped.groups] == [1, 2]
    assert written[attempts[0]] is None
    assert written[attempts[1]] is not None
    assert await sql.fetchval("select array_agg(rkey) from indexer.record where did = $1", did("new")) == ["new"]


async def test_transaction_has_no_more_records_than_allowed(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.resync.apply.SHARED_RECORDS", 3)
    claimed = {repo.did: repo for repo in await claim(db, *map(did, range(6)))}
    stopped = StoppedDatabase(db)
    sizes = {0: 1, 1: 2, 2: 1, 3: 1, 4: 5, 5: 1}  # the fifth repo is larger than the limit
    repos = [new_repo(claimed[did(name)], *[put(f"app.test/{n}") for n in range(size)]) for name, size in sizes.items()]
    writes = await waiting_writes(stopped, repos)
    stopped.go.set()
    assert all(await asyncio.gather(*writes))
    by_did = {did(name): size for name, size in sizes.items()}
    totals = [sum(by_did[owner] for owner in group) for group in stopped.groups]
    assert all(total <= 3 or len(group) == 1 for total, group in zip(totals, stopped.groups, strict=True))
    assert sum(totals) == 11


async def test_refused_value_leaves_all_repos_of_its_transaction_to_their_own(
    db: Database, sql: asyncpg.Connection
) -> None:
    claimed = {repo.did: repo for repo in await claim(db, did("first"), did("good"), did("bad"))}
    stopped = StoppedDatabase(db)
    values = {"first": "1", "good": "2", "bad": '"\\u0000"'}
    repos = [new_repo(claimed[did(name)], put("app.test/a", value)) for name, value in values.items()]
    writes = await waiting_writes(stopped, repos)
    stopped.go.set()
    first, good, bad = await asyncio.gather(*writes)
    assert first is not None
    assert good is None
    assert bad is None
    assert await sql.fetchval("select array_agg(value) from indexer.record") == ["1"]
    applies = Applies(db, Metrics(), Conditions())
    assert await applies.write_shared(new_repo(claimed[did("good")], put("app.test/a"))) is not None
