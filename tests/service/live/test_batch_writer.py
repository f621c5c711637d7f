"""The batch writer on a real database: when batches begin, cached rows, and other writers beside it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from random import Random
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.errors import RefusedWriteError
from indexer.identity import IdentityCache
from indexer.localnet.local_repo import Write
from indexer.monitoring.conditions import Conditions
from indexer.monitoring.metrics import Metrics
from indexer.reasons import FetchFailure
from indexer.service.current_scope import CurrentScope
from indexer.service.live.account_limits import AccountLimits
from indexer.service.live.batch_writer import BatchWriter, WriterSettings
from indexer.service.live.inbox import Inbox
from indexer.service.live.key_lookups import KeyLookups
from indexer.service.live.stream_position import StreamPosition
from indexer.service.new_accounts import NewAccounts
from indexer.store import DatabaseError, Store
from indexer.store.apply_batch import AppliedBatch
from indexer.sync.native_core import NativeCore
from indexer.sync.plan_batch import ReceivedMessage
from indexer.sync.plans import Batch, RepoWrite
from indexer.sync.repo_state import Repo, SyncStatus
from indexer.sync.repo_transitions import amend
from indexer.sync.shard import Shard
from indexer.sync.stored_identity import StoredIdentity
from indexer.sync.watermark import Watermark
from tests.native_module import CountingCore, native_core
from tests.sync.signing_account import POST, RELAY, STORE_ALL, SigningAccount, received_message
from tests.waiting import until

BEFORE, AFTER = "before the write", "after the write"
# The quick tests try two seeds of a random test.
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
CHANGES = "select collection, rkey from atproto.changes where did = $1 and rkey <> '' order by seq"
Disturb = Callable[[Batch], Awaitable[None]]


class ObservedStore(Store):
    """A store that notes what the writer loads and writes.

    Attributes:
        loaded: The DIDs of the loaded rows.
        batches: The batches of the started writes.
        may_write: Writes wait for it.
        disturb_before: Called before each write; may raise.
        disturb_after: Called after each write; may raise.
    """

    def __init__(self, pool: asyncpg.Pool, connections: int, dsn: str) -> None:
        super().__init__(pool, connections, dsn)
        self.loaded: list[str] = []
        self.batches: list[Batch] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.disturb_before: Disturb | None = None
        self.disturb_after: Disturb | None = None

    async def repos(self, dids: Iterable[str]) -> dict[str, Repo]:
        self.loaded.extend(dids)
        return await super().repos(list(dids))

    async def write(self, batch: Batch) -> AppliedBatch:
        self.batches.append(batch)
        await self.may_write.wait()
        if self.disturb_before:
            await self.disturb_before(batch)
        applied = await super().write(batch)
        if self.disturb_after:
            await self.disturb_after(batch)
        return applied


class NoDirectory:
    """A directory that knows nobody: all identities are stored."""

    async def resolve(self, did: str, *, known: bool) -> StoredIdentity:
        raise AssertionError(f"looked up {did}, known: {known}")


class WriterScenario:
    """Accounts, an inbox, and a batch writer that can be restarted with empty caches."""

    def __init__(self, store: ObservedStore, sql: asyncpg.Connection, batch_size: int, core: NativeCore | None) -> None:
        self.store = store
        self._core = core
        self.sql = sql
        self.metrics = Metrics()
        self.inbox = Inbox(10**9)
        self.owned = asyncio.Event()
        self.owned.set()
        self.position = StreamPosition(lambda: True)
        self.position.begin(RELAY, 0, Watermark(0))
        self._settings = WriterSettings(Shard(), batch_size=batch_size, retry_interval=0.0, idle_after=3_600.0)
        self._seq = 0

    @asynccontextmanager
    async def writer(self) -> AsyncIterator[None]:
        """Run a new writer during the block."""
        async with AsyncExitStack() as stack:
            identities = IdentityCache(NoDirectory(), self.store, self.metrics, clock=time, refresh_rate=inf)
            stack.push_async_callback(identities.close)
            keys = KeyLookups(identities, self.inbox, timeout=60.0, concurrency=4)
            stack.push_async_callback(keys.close)
            conditions = Conditions()
            limits = AccountLimits(NewAccounts(0), NewAccounts(0), self.metrics, conditions)
            scope = CurrentScope(self.store, STORE_ALL)
            writer = BatchWriter(
                self.store,
                self.inbox,
                keys,
                self.position,
                self.owned,
                self._settings,
                self.metrics,
                conditions,
                limits,
                scope,
                self._core,
            )
            running = asyncio.create_task(writer.run())
            try:
                yield
            finally:
                running.cancel()
                await asyncio.wait([running])
                assert running.cancelled(), running.exception()

    async def add(self, *accounts: SigningAccount) -> None:
        """Insert a synchronized row and the identity of each account."""
        await super(ObservedStore, self.store).write(
            Batch(tuple(RepoWrite(0, account.row()._replace(version=1)) for account in accounts))
        )
        await self.store.save_identities(
            [
                StoredIdentity(account.did, None, "https://pds.test", account.key.public.did_key(), time())
                for account in accounts
            ]
        )

    async def put(self, *messages: ReceivedMessage) -> None:
        for message in messages:
            self._seq += 1
            self.position.watermark.add(self._seq)
            await self.inbox.put(message._replace(seq=self._seq))

    async def settled(self) -> None:
        async with asyncio.timeout(60):
            await self.inbox.wait_until_settled()
        assert (self.position.watermark.position, len(self.position.watermark)) == (self._seq, 0)

    async def process(self, *messages: ReceivedMessage) -> None:
        await self.put(*messages)
        await self.settled()

    async def row(self, account: SigningAccount) -> Repo:
        return (await super(ObservedStore, self.store).repos([account.did]))[account.did]

    async def write_started(self, number: int) -> None:
        await until(lambda: len(self.store.batches) >= number)

    def outcomes(self) -> Counter[str]:
        """Return the number of settled messages by outcome."""
        counts = Counter[str]()
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "indexer_events_total":
                    counts[sample.labels["outcome"]] += int(sample.value)
        return +counts


MakeScenario = Callable[..., Awaitable[WriterScenario]]


@pytest.fixture
async def make_scenario(database: str, sql: asyncpg.Connection) -> AsyncIterator[MakeScenario]:
    """Make scenarios on one database, each with a store of its own."""
    async with AsyncExitStack() as stack:

        async def make(*, batch_size: int = 500, core: NativeCore | None = None) -> WriterScenario:
            store = await ObservedStore.open(database, connections=5)
            stack.push_async_callback(store.close)
            return WriterScenario(store, sql, batch_size, core)

        yield make


def new_post(account: SigningAccount, number: int) -> ReceivedMessage:
    return received_message("commit", account.commit_post(f"post{number:04}"))


# When batches begin.


async def test_batch_begins_at_once_and_the_next_one_takes_what_arrived_meanwhile(make_scenario: MakeScenario) -> None:
    scenario = await make_scenario()
    accounts = [SigningAccount(name) for name in ("ada", "ben", "cleo")]
    await scenario.add(*accounts)
    scenario.store.may_write.clear()
    async with scenario.writer():
        await scenario.put(new_post(accounts[0], 1))
        await scenario.write_started(1)
        await scenario.put(new_post(accounts[1], 1), new_post(accounts[2], 1))
        assert len(scenario.store.batches) == 1
        scenario.store.may_write.set()
        await scenario.settled()
    assert [len(batch.writes) for batch in scenario.store.batches] == [1, 2]


# Verification ahead.


async def test_next_batch_is_verified_while_this_one_is_written(make_scenario: MakeScenario) -> None:
    core, ada = CountingCore(), SigningAccount("ada")
    scenario = await make_scenario(batch_size=2, core=core)
    await scenario.add(ada)
    await scenario.put(*[new_post(ada, number) for number in range(5)])
    scenario.store.may_write.clear()
    async with scenario.writer():
        await until(lambda: core.asked == 4)
        assert (len(scenario.store.batches), len(scenario.inbox)) == (1, 3)
        scenario.store.may_write.set()
        await scenario.settled()
    assert core.asked == 5, "each commit is verified once"
    assert scenario.outcomes() == {"applied": 5}
    assert (await scenario.row(ada)).head == ada.head


async def test_postponed_commits_are_verified_once(make_scenario: MakeScenario) -> None:
    """A batch takes 26 commits of 200 records, and postpones the others."""
    core, ada = CountingCore(), SigningAccount("ada")
    scenario = await make_scenario(core=core)
    await scenario.add(ada)
    await scenario.put(
        *[
            received_message("commit", ada.commit(*[Write.create(f"{POST}/{number}-{n}", {}) for n in range(200)]))
            for number in range(60)
        ]
    )
    async with scenario.writer():
        await scenario.settled()
    assert [len(batch.writes[0].changes) for batch in scenario.store.batches] == [5_200, 5_200, 1_600]
    assert core.asked == 60
    assert (await scenario.row(ada)).head == ada.head


async def test_commits_of_a_failed_batch_are_verified_once(make_scenario: MakeScenario) -> None:
    core, ada = CountingCore(), SigningAccount("ada")
    scenario = await make_scenario(batch_size=2, core=core)
    await scenario.add(ada)
    await scenario.put(*[new_post(ada, number) for number in range(5)])

    async def fail_twice(_: Batch) -> None:
        if len(scenario.store.batches) <= 2:
            raise DatabaseError(FetchFailure.UNREACHABLE, "the connection is lost")

    scenario.store.disturb_before = fail_twice
    async with scenario.writer():
        await scenario.settled()
    assert len(scenario.store.batches) == 5
    assert core.asked == 5
    assert (await scenario.row(ada)).head == ada.head


async def test_results_are_dropped_when_the_shard_is_lost(make_scenario: MakeScenario) -> None:
    core, ada = CountingCore(), SigningAccount("ada")
    scenario = await make_scenario(batch_size=2, core=core)
    await scenario.add(ada)
    await scenario.put(*[new_post(ada, number) for number in range(4)])
    scenario.store.may_write.clear()
    async with scenario.writer():
        await until(lambda: core.asked == 4)
        scenario.owned.clear()
        scenario.store.may_write.set()
        await until(lambda: not len(scenario.inbox))
        scenario.owned.set()
        await scenario.settled()
    assert core.asked == 6, "the second batch was verified again"


async def test_writer_can_be_stopped_while_it_verifies_ahead(make_scenario: MakeScenario) -> None:
    core, ada = CountingCore(), SigningAccount("ada")
    scenario = await make_scenario(batch_size=2, core=core)
    await scenario.add(ada)
    await scenario.put(*[new_post(ada, number) for number in range(4)])
    scenario.store.may_write.clear()
    async with scenario.writer():
        await scenario.write_started(1)
    assert (core.asked, len(scenario.inbox)) == (4, 2)


# Cached rows.


async def test_row_that_was_written_last_is_not_loaded_again(make_scenario: MakeScenario) -> None:
    scenario, ada = await make_scenario(), SigningAccount("ada")
    await scenario.add(ada)
    async with scenario.writer():
        for number in range(3):
            await scenario.process(new_post(ada, number))
    assert scenario.store.loaded == [ada.did]
    assert (await scenario.row(ada)).head == ada.head


async def test_replay_is_decided_on_the_stored_row(make_scenario: MakeScenario) -> None:
    """The stored row was reset meanwhile, so the repeated commit extends it."""
    scenario, ada = await make_scenario(), SigningAccount("ada")
    await scenario.add(ada)
    before = await scenario.row(ada)
    commit = new_post(ada, 1)
    async with scenario.writer():
        await scenario.process(commit)
        row = await scenario.row(ada)
        reset = row._replace(version=row.version + 1, head=before.head)
        assert not (await scenario.store.write(Batch((RepoWrite(row.version, reset),)))).skipped
        await scenario.process(commit)
    assert scenario.outcomes() == {"applied": 2}
    assert (await scenario.row(ada)).head == ada.head


async def test_rows_are_loaded_again_after_the_shard_was_lost(make_scenario: MakeScenario) -> None:
    scenario, ada = await make_scenario(), SigningAccount("ada")
    await scenario.add(ada)
    async with scenario.writer():
        await scenario.process(new_post(ada, 1))
        scenario.owned.clear()
        await scenario.put(new_post(ada, 2))
        await until(lambda: not len(scenario.inbox))
        scenario.owned.set()
        await scenario.settled()
    assert scenario.store.loaded == [ada.did, ada.did]


async def test_database_error_makes_rows_load_again(make_scenario: MakeScenario) -> None:
    scenario, ada = await make_scenario(), SigningAccount("ada")
    await scenario.add(ada)
    failed: list[Batch] = []

    async def fail_once(batch: Batch) -> None:
        if not failed:
            failed.append(batch)
            raise DatabaseError(FetchFailure.UNREACHABLE, "the connection is lost after the commit")

    async with scenario.writer():
        await scenario.process(new_post(ada, 1))
        scenario.store.disturb_after = fail_once
        await scenario.process(new_post(ada, 2))
    assert (len(failed), scenario.outcomes()) == (1, {"applied": 1, "replayed": 1})
    assert scenario.store.loaded == [ada.did, ada.did]
    assert (await scenario.row(ada)).head == ada.head


class Script:
    """Random messages of one account, and random changes of its row by others."""

    def __init__(self, account: SigningAccount, seed: int) -> None:
        self.account = account
        self.random = Random(seed)
        self.number = 0
        self.sent: list[ReceivedMessage] = []
        self.heads = [account.head]

    async def run(self, scenario: WriterScenario, *, steps: int, restart: bool) -> None:
        """Make the steps; with `restart`, each one with a new writer, whose caches are empty."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(scenario.writer())
            for _ in range(steps):
                for _ in range(self.random.choice([0, 0, 1, 2])):
                    await self.change(scenario)
                if restart:
                    await stack.aclose()
                    await stack.enter_async_context(scenario.writer())
                await scenario.process(*[self.message() for _ in range(self.random.choice([1, 1, 2, 4]))])

    def message(self) -> ReceivedMessage:
        kind, account = (
            self.random.choice(["commit"] * 5 + ["repeat"] * 3 + ["sync", "account", "lost", "bad"]),
            self.account,
        )
        self.number += 1
        match kind:
            case "repeat" if self.sent:
                return self.random.choice(self.sent)
            case "sync":
                message = received_message("sync", account.sync_event())
            case "account":
                message = received_message("account", account.account_event(active=self.random.random() < 0.6))
            case "bad":
                message = received_message("commit", account.commit_post(f"bad{self.number}") | {"blocks": b"no CAR"})
            case "lost":
                account.commit_post(f"lost{self.number}")
                message = new_post(account, self.number)
            case _:
                message = new_post(account, self.number)
        self.sent.append(message)
        self.heads.append(account.head)
        return message

    async def change(self, scenario: WriterScenario) -> None:
        """Change the row as another stage or process does."""
        did = self.account.did
        match self.random.choice(["resync", "takedown", "untrack", "track", "synchronize", "amend", "reset", "reset"]):
            case "resync":
                await scenario.sql.execute("select atproto.request_resync($1)", did)
            case "takedown":
                hidden = self.random.random() < 0.5
                await scenario.sql.execute("select atproto.request_takedown($1, $2)", did, hidden)
            case "untrack":
                await scenario.sql.execute("select atproto.untrack(array[$1])", did)
            case "track":
                await scenario.sql.execute("select atproto.track(array[$1])", did)
            case "synchronize":
                await self._write(
                    scenario, sync_status=SyncStatus.SYNCHRONIZED, sync_reason=None, head=self.account.head, active=True
                )
            case "reset":  # the records do not follow, as no message tells them apart
                head = self.random.choice(self.heads)
                await self._write(
                    scenario, sync_status=SyncStatus.SYNCHRONIZED, sync_reason=None, head=head, active=True
                )
            case "amend":
                await self._write(scenario)

    async def _write(self, scenario: WriterScenario, **fields: Any) -> None:
        row = await scenario.row(self.account)
        if row.tracked:
            write = RepoWrite(row.version, amend(row, **fields))
            assert not (await super(ObservedStore, scenario.store).write(Batch((write,)))).skipped


async def summary(scenario: WriterScenario, account: SigningAccount) -> dict[str, Any]:
    """Return what is stored about the account, without what depends on its DID or on the time."""
    row = await scenario.row(account)
    queries = {
        "records": "select collection, rkey, cid, rev, value from indexer.record where did = $1 order by 1, 2",
        "changes": "select action, collection, rkey, cid, rev from atproto.changes where did = $1 order by seq",
        "dead letters": "select kind, reason from atproto.rejected where did = $1 order by id",
    }
    stored = {name: [tuple(r) for r in await scenario.sql.fetch(query, account.did)] for name, query in queries.items()}
    head = row.head and row.head[:2]
    comparable = row._replace(did="", head=None, next_attempt_at=None, synchronized_at=None, erase_at=None)
    return stored | {"row": comparable, "head": head, "outcomes": scenario.outcomes()}


@pytest.mark.parametrize("seed", SEEDS)
async def test_cached_rows_lead_to_the_same_result_as_loaded_ones(make_scenario: MakeScenario, seed: int) -> None:
    results = []
    for name, restart in (("cached", False), ("loaded", True)):
        scenario, account = await make_scenario(), SigningAccount(name)
        await scenario.add(account)
        await Script(account, seed).run(scenario, steps=12, restart=restart)
        results.append(await summary(scenario, account))
    assert results[0] == results[1]


# Failed and refused writes.


class Disturbance:
    """Disturbs writes at random: errors before and after the commit, and changes of rows by others."""

    def __init__(self, scenario: WriterScenario, accounts: list[SigningAccount], seed: int) -> None:
        self.random = Random(seed)
        self.counts = Counter[str]()
        self._scenario = scenario
        self._accounts = accounts
        self._failed = False
        scenario.store.disturb_before = self.before
        scenario.store.disturb_after = self.after

    async def before(self, batch: Batch) -> None:
        kind = self.random.choice(["nothing", "fail", "change"])
        if kind == "change":
            written = [write.repo.did for write in batch.writes]
            if written:
                self.counts["change"] += 1
                did = self.random.choice(written)
                await self._scenario.sql.execute("update indexer.repo set version = version + 1 where did = $1", did)
        elif kind == "fail":
            self._fail(BEFORE)

    async def after(self, _: Batch) -> None:
        if self.random.random() < 0.2:
            self._fail(AFTER)
        else:
            self._failed = False

    def _fail(self, when: str) -> None:
        """Fail, but not twice in a row: after five failures in a row, the writer rejects a message."""
        self._failed = not self._failed
        if self._failed:
            self.counts[when] += 1
            raise DatabaseError(FetchFailure.UNREACHABLE, when)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
async def test_disturbed_writes_lose_and_reorder_nothing(
    make_scenario: MakeScenario, seed: int, *, native: bool
) -> None:
    scenario, random = await make_scenario(batch_size=4, core=native_core() if native else None), Random(seed)
    accounts = [SigningAccount(f"account {number}") for number in range(5)]
    await scenario.add(*accounts)
    disturbance = Disturbance(scenario, accounts, seed)
    messages = [new_post(random.choice(accounts), number) for number in range(120)]
    await scenario.put(*messages)
    async with scenario.writer():
        await scenario.settled()
    assert disturbance.counts.keys() == {BEFORE, AFTER, "change"}
    assert scenario.outcomes().keys() <= {"applied", "replayed"}, "no commit was planned before an earlier one"
    for account in accounts:
        row = await scenario.row(account)
        assert (row.sync_status, row.head) == (SyncStatus.SYNCHRONIZED, account.head)
        expected = [message.event.ops[0].path for message in messages if message.did == account.did]  # type: ignore[union-attr]
        rows = await scenario.sql.fetch(CHANGES, account.did)
        assert [f"{row['collection']}/{row['rkey']}" for row in rows] == expected


async def test_refused_message_is_isolated_and_the_others_keep_their_order(make_scenario: MakeScenario) -> None:
    scenario, random = await make_scenario(batch_size=4), Random(1)
    accounts = [SigningAccount(f"account {number}") for number in range(5)]
    await scenario.add(*accounts)
    poisoned, refused = f"{POST}/poison", []

    async def refuse(batch: Batch) -> None:
        if any(change.rkey == "poison" for write in batch.writes for change in write.changes):
            refused.append(batch)
            raise RefusedWriteError("the database cannot store it")

    scenario.store.disturb_before = refuse
    bad = SigningAccount("poisoned")
    await scenario.add(bad)
    messages = [new_post(random.choice(accounts), number) for number in range(60)]
    messages.insert(20, received_message("commit", bad.commit(Write.create(poisoned, {"$type": POST}))))
    await scenario.put(*messages)
    async with scenario.writer():
        await scenario.settled()
    assert refused
    assert scenario.outcomes() == {"applied": 60, "rejected": 1}
    for account in accounts:
        row = await scenario.row(account)
        assert (row.sync_status, row.head) == (SyncStatus.SYNCHRONIZED, account.head)
    assert (await scenario.row(bad)).sync_status is SyncStatus.DESYNCHRONIZED
