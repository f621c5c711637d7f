"""Cached rows of the batch writer lead to the same result as loaded ones, whatever others change."""

from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest

from indexer.db import DatabaseError
from indexer.reasons import FetchFailure
from indexer.sync.batch import ReceivedMessage
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.repo import SyncStatus, amend
from tests.live.writer_scenario import SEEDS, MakeScenario, ObservedDatabase, WriterScenario, new_post
from tests.sync.signing_account import SigningAccount, received_message
from tests.waiting import until


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
        assert not (await scenario.db.write(Batch((RepoWrite(row, reset),)))).skipped
        await scenario.process(commit)
    assert scenario.outcomes() == {"applied": 2}
    assert (await scenario.row(ada)).head == ada.head


async def test_rows_are_loaded_again_after_the_shard_was_lost_and_not_before(make_scenario: MakeScenario) -> None:
    scenario, ada = await make_scenario(), SigningAccount("ada")
    await scenario.add(ada)
    async with scenario.writer():
        for number in range(3):
            await scenario.process(new_post(ada, number))
        assert scenario.db.observed.loaded == [ada.did]
        scenario.owned.clear()
        await scenario.put(new_post(ada, 4))
        await until(lambda: not len(scenario.inbox))
        scenario.owned.set()
        await scenario.settled()
    assert scenario.db.observed.loaded == [ada.did, ada.did]
    assert (await scenario.row(ada)).head == ada.head


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
        scenario.db.disturb_after = fail_once
        await scenario.process(new_post(ada, 2))
    assert (len(failed), scenario.outcomes()) == (1, {"applied": 1, "replayed": 1})
    assert scenario.db.observed.loaded == [ada.did, ada.did]
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
            write = RepoWrite(row, amend(row, **fields))
            assert not (await super(ObservedDatabase, scenario.db).write(Batch((write,)))).skipped


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
