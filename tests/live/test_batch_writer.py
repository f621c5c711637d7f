"""The batch writer on a real database: when batches begin, verification ahead, and failed writes."""

from collections import Counter
from random import Random

import pytest

from indexer.db import DatabaseError
from indexer.reasons import FetchFailure
from indexer.sync.changes import Batch
from indexer.sync.repo import SyncStatus
from tests.live.writer_scenario import SEEDS, MakeScenario, WriterScenario, new_post
from tests.native_module import CountingCore, native_core
from tests.sync.signing_account import SigningAccount
from tests.waiting import until

BEFORE, AFTER = "before the write", "after the write"
CHANGES = "select collection, rkey from atproto.changes where did = $1 and rkey <> '' order by seq"


async def test_batch_begins_at_once_and_the_next_one_takes_what_arrived_meanwhile(make_scenario: MakeScenario) -> None:
    scenario = await make_scenario()
    accounts = [SigningAccount(name) for name in ("ada", "ben", "cleo")]
    await scenario.add(*accounts)
    scenario.db.may_write.clear()
    async with scenario.writer():
        await scenario.put(new_post(accounts[0], 1))
        await scenario.write_started(1)
        await scenario.put(new_post(accounts[1], 1), new_post(accounts[2], 1))
        assert len(scenario.db.batches) == 1
        scenario.db.may_write.set()
        await scenario.settled()
    assert [len(batch.writes) for batch in scenario.db.batches] == [1, 2]


async def test_next_batch_is_verified_while_this_one_is_written(make_scenario: MakeScenario) -> None:
    core, ada = CountingCore(), SigningAccount("ada")
    scenario = await make_scenario(batch_size=2, core=core)
    await scenario.add(ada)
    await scenario.put(*[new_post(ada, number) for number in range(5)])
    scenario.db.may_write.clear()
    async with scenario.writer():
        await until(lambda: core.asked == 4)
        assert (len(scenario.db.batches), len(scenario.inbox)) == (1, 3)
        scenario.db.may_write.set()
        await scenario.settled()
    assert core.asked == 5, "each commit is verified once"
    assert scenario.outcomes() == {"applied": 5}
    assert (await scenario.row(ada)).head == ada.head


async def test_results_are_dropped_when_the_shard_is_lost(make_scenario: MakeScenario) -> None:
    core, ada = CountingCore(), SigningAccount("ada")
    scenario = await make_scenario(batch_size=2, core=core)
    await scenario.add(ada)
    await scenario.put(*[new_post(ada, number) for number in range(4)])
    scenario.db.may_write.clear()
    async with scenario.writer():
        await until(lambda: core.asked == 4)
        scenario.owned.clear()
        scenario.db.may_write.set()
        await until(lambda: not len(scenario.inbox))
        scenario.owned.set()
        await scenario.settled()
    assert core.asked == 6, "the second batch was verified again"


class Disturbance:
    """Disturbs writes at random: errors before and after the commit, and changes of rows by others."""

    def __init__(self, scenario: WriterScenario, accounts: list[SigningAccount], seed: int) -> None:
        self.random = Random(seed)
        self.counts = Counter[str]()
        self._scenario = scenario
        self._accounts = accounts
        self._failed = False
        scenario.db.disturb_before = self.before
        scenario.db.disturb_after = self.after

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
