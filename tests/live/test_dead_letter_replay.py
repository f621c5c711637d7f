"""Replay of dead letters: each outcome, keys that are available now, and concurrent writes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.syntax import CollectionFilter
from indexer.db import Database
from indexer.db.write import WrittenBatch
from indexer.demo.local_repo import Write
from indexer.errors import UnavailableError
from indexer.live.dead_letter_replay import MAX_ATTEMPTS, UNKNOWN, UNTRIED, DeadLetterReplay, ReplayResult
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.identity_cache import IdentityCache, IdentityLifetimes
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.batch import DEAD_LETTER_BYTES
from indexer.sync.changes import Batch, DeadLetter, RepoWrite
from indexer.sync.identity import StoredIdentity
from indexer.sync.policy import Policy
from indexer.sync.repo import Head, Outcome, Repo, SyncStatus
from indexer.sync.scope import Scope
from indexer.sync.shard import Shard
from indexer.telemetry.metrics import Metrics
from tests.db.change_log_helpers import connected
from tests.db.repo_rows import waiting_for_locks
from tests.faulty_network import error_frame
from tests.resync.resync_world import COLLECTIONS, AccountOwner
from tests.sync.signing_account import STORE_ALL, encoded_frame
from tests.waiting import until

pytestmark = pytest.mark.slow

RELAY = "wss://relay.test"
PATH = f"{COLLECTIONS[0]}/new"
RECORD = {"$type": COLLECTIONS[0]}


class FakeDirectory(DidResolver):
    """A directory with the owner's identity; raises `error` if it is set. `lookups` lists the requested DIDs."""

    def __init__(self, owner: AccountOwner) -> None:
        self.key: str | None = owner.key.public.did_key()
        self.pds = "https://pds.test"
        self.error: UnavailableError | None = None
        self.lookups: list[str] = []

    async def resolve(self, did: str, *, known: bool = True) -> StoredIdentity:  # noqa: ARG002
        self.lookups.append(did)
        if self.error is not None:
            raise self.error
        return StoredIdentity(did, None, self.pds, self.key, time(), problem=None if self.key else "no key")


class ReplayScenario:
    """An account, its directory and a database, in which dead letters are replayed."""

    def __init__(self, db: Database, sql: asyncpg.Connection) -> None:
        self.db = db
        self.sql = sql
        self.owner = AccountOwner("ada")
        self.directory = FakeDirectory(self.owner)

    @asynccontextmanager
    async def new_process(self, policy: Policy = STORE_ALL) -> AsyncIterator[DeadLetterReplay]:
        """Replay as a new process does, with an empty identity cache."""
        lifetimes = IdentityLifetimes(missing_max_age=0.0, changed_interval=0.05)
        identities = IdentityCache(
            self.directory, self.db.identities, Metrics(), clock=time, refresh_rate=inf, lifetimes=lifetimes
        )
        try:
            yield DeadLetterReplay(self.db, identities, policy, key_timeout=5.0)
        finally:
            await identities.close()

    async def replay(self, dead_letter_id: int, policy: Policy = STORE_ALL) -> ReplayResult:
        async with self.new_process(policy) as dead_letters:
            return await dead_letters.replay(dead_letter_id)

    async def synchronized(self, **fields: Any) -> Repo:
        """Insert the owner's row at the present head of the repo."""
        head = self.owner.repo.head
        repo = Repo(self.owner.did, 1, SyncStatus.SYNCHRONIZED, None, Head(head.rev, head.data, head.cid))
        repo = repo._replace(**fields)
        assert not (await self.db.write(Batch((RepoWrite(Repo(repo.did), repo),)))).skipped
        return repo

    async def in_progress(self) -> Repo:
        """Insert the owner's row, claimed by a resync worker."""
        await self.synchronized(sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.REQUESTED)
        [claimed] = await self.db.resyncs.claim(1, range(256), 60.0, time())
        return claimed

    async def reject_event(self, kind: str, payload: dict[str, Any], **fields: Any) -> int:
        return await self.insert_dead_letter(encoded_frame(kind, payload), kind=kind, **fields)

    async def insert_dead_letter(self, message: bytes, **fields: Any) -> int:
        values = {"seq": 1, "did": self.owner.did, "kind": "", "reason": Rejection.SIGNATURE_INVALID, "detail": ""}
        await self.db.write(Batch(dead_letters=(DeadLetter(RELAY, frame=message, **values | fields),)))  # type: ignore[arg-type]
        dead_letter_id: int = await self.sql.fetchval("select max(id) from indexer.dead_letter")
        return dead_letter_id

    async def repo(self) -> Repo:
        return (await self.db.repos.load([self.owner.did]))[self.owner.did]

    async def remaining(self) -> list[tuple[int, str]]:
        """Return the ID and reason of each dead letter."""
        return [tuple(row) for row in await self.sql.fetch("select id, reason from indexer.dead_letter order by id")]

    async def records(self) -> set[str]:
        rows = await self.sql.fetch("select collection || '/' || rkey from indexer.record")
        return {path for (path,) in rows}


@pytest.fixture
def scenario(db: Database, sql: asyncpg.Connection) -> ReplayScenario:
    return ReplayScenario(db, sql)


async def test_record_of_a_collection_that_was_added_during_the_replay_is_stored(scenario: ReplayScenario) -> None:
    """The repo is complete for the later scope, so nothing would fetch what an earlier one omits."""
    db = scenario.db
    first = await db.scope.begin(Scope(collections=CollectionFilter([COLLECTIONS[1]])))
    async with scenario.new_process(replace(STORE_ALL, scope=first)) as dead_letters:
        later = await db.scope.change(collections=COLLECTIONS[:2])
        await scenario.synchronized(scope_version=later.version)
        dead_letter_id = await scenario.reject_event("commit", scenario.owner.commit(Write.create(PATH, RECORD)))
        assert await dead_letters.replay(dead_letter_id) == ReplayResult(dead_letter_id, Outcome.APPLIED)
    assert await scenario.records() == {PATH}


async def test_commit_that_extends_the_chain_is_applied(scenario: ReplayScenario) -> None:
    await scenario.synchronized()
    dead_letter_id = await scenario.reject_event("commit", scenario.owner.commit(Write.create(PATH, RECORD)))
    assert await scenario.replay(dead_letter_id) == ReplayResult(dead_letter_id, Outcome.APPLIED)
    repo = await scenario.repo()
    assert repo.head is not None
    assert (repo.head.rev, repo.sync_status) == (scenario.owner.rev, SyncStatus.SYNCHRONIZED)
    assert await scenario.records() == {PATH}
    assert await scenario.remaining() == []
    assert await scenario.sql.fetchval("select count(*) from indexer.cursor") == 0
    assert [row["action"] for row in await scenario.sql.fetch("select action from atproto.changes")][-1] == "create"


async def test_commit_during_a_resync_is_buffered(scenario: ReplayScenario) -> None:
    claimed = await scenario.in_progress()
    message = encoded_frame("commit", scenario.owner.commit(Write.create(PATH, RECORD)))
    dead_letter_id = await scenario.insert_dead_letter(message)
    assert await scenario.replay(dead_letter_id) == ReplayResult(dead_letter_id, Outcome.BUFFERED)
    async with scenario.db.resyncs.transaction(claimed) as transaction:
        locked = await transaction.lock()
        assert locked is not None
        assert (locked.buffered_events, locked.buffered_bytes) == (1, len(message))
        [buffered] = await transaction.buffered()
    assert (buffered.relay, buffered.frame) == (RELAY, message)
    assert await scenario.remaining() == []


@pytest.mark.parametrize(
    "message",
    [encoded_frame("later", {}), encoded_frame("info", {"name": "x"}), error_frame("x", "y")],
    ids=["later", "info", "error"],
)
async def test_message_about_no_repo_is_ignored(scenario: ReplayScenario, message: bytes) -> None:
    dead_letter_id = await scenario.insert_dead_letter(message, did=None)
    assert await scenario.replay(dead_letter_id) == ReplayResult(dead_letter_id, Outcome.IGNORED)
    assert await scenario.remaining() == []


async def test_commit_is_applied_once_the_directory_has_its_key(scenario: ReplayScenario) -> None:
    await scenario.synchronized()
    scenario.owner.swap_key()
    dead_letter_id = await scenario.reject_event("commit", scenario.owner.commit(Write.create(PATH, RECORD)))
    result = await scenario.replay(dead_letter_id)
    assert (result.outcome, result.reason) == (Outcome.REJECTED, Rejection.SIGNATURE_INVALID)

    scenario.directory.key = None
    result = await scenario.replay(dead_letter_id)
    assert (result.reason, result.previous_reason) == (Rejection.NO_SIGNING_KEY, Rejection.SIGNATURE_INVALID)
    assert await scenario.remaining() == [(dead_letter_id, "no-signing-key")]

    scenario.directory.key = scenario.owner.key.public.did_key()
    assert await scenario.replay(dead_letter_id) == ReplayResult(dead_letter_id, Outcome.APPLIED)
    assert len(scenario.directory.lookups) == 4, "the first lookup is repeated, as a directory may be outdated"
    assert await scenario.remaining() == []


@pytest.mark.parametrize(("known", "claimed"), [("nothing", False), ("a key", True), ("a key that has changed", False)])
async def test_without_a_directory_the_dead_letter_stays_untried(
    scenario: ReplayScenario, known: str, claimed: bool
) -> None:
    """The live path would desynchronize the repo instead, because it would lose the message."""
    before = await (scenario.in_progress() if claimed else scenario.synchronized())
    if known != "nothing":
        old = StoredIdentity(scenario.owner.did, None, "https://pds.test", scenario.directory.key, time())
        await scenario.db.identities.save([replace(old, stale=known != "a key")])
    scenario.owner.swap_key()
    dead_letter_id = await scenario.reject_event("commit", scenario.owner.commit(Write.create(PATH, RECORD)))
    scenario.directory.error = UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "502")
    result = await scenario.replay(dead_letter_id)
    assert result.outcome == UNTRIED
    assert result.detail.startswith("identity-unavailable: ")
    assert (await scenario.repo(), await scenario.remaining()) == (before, [(dead_letter_id, "signature-invalid")])
    assert await scenario.sql.fetchval("select count(*) from indexer.buffered_event") == 0


async def test_incomplete_frame_is_not_replayed(scenario: ReplayScenario) -> None:
    dead_letter_id = await scenario.insert_dead_letter(bytes(DEAD_LETTER_BYTES), reason=Rejection.SIGNATURE_INVALID)
    result = await scenario.replay(dead_letter_id)
    assert result.outcome == UNTRIED
    assert "incomplete" in result.detail
    assert await scenario.remaining() == [(dead_letter_id, Rejection.SIGNATURE_INVALID)]
    assert scenario.directory.lookups == []


async def test_changed_identity_is_due_for_a_lookup(scenario: ReplayScenario) -> None:
    """The cache of a running daemon does not know that the identity changed. Its periodic refresh finds it."""
    await scenario.synchronized()
    async with scenario.new_process() as dead_letters:
        dead_letter_id = await scenario.reject_event("commit", scenario.owner.commit(Write.create(PATH, RECORD)))
        assert (await dead_letters.replay(dead_letter_id)).outcome is Outcome.APPLIED
    scenario.directory.key = AccountOwner("bob").key.public.did_key()
    dead_letter_id = await scenario.reject_event(
        "identity", scenario.owner.identity_event(), reason=Rejection.FIELD_INVALID
    )
    assert await scenario.replay(dead_letter_id) == ReplayResult(dead_letter_id, Outcome.APPLIED)
    assert (await scenario.db.identities.load([scenario.owner.did]))[scenario.owner.did].stale
    due = await scenario.db.identities.due(Shard().buckets, 10, time() + 60, web=False)
    assert [identity.did for identity in due] == [scenario.owner.did]


async def test_pds_stream_is_accepted_only_for_accounts_that_it_hosts(scenario: ReplayScenario) -> None:
    await scenario.synchronized()
    dead_letter_id = await scenario.reject_event(
        "commit", scenario.owner.commit(Write.create(PATH, RECORD)), reason=Rejection.WRONG_HOST
    )
    pdses = replace(STORE_ALL, upstream_is_pds=True)
    assert (await scenario.replay(dead_letter_id, pdses)).reason is Rejection.WRONG_HOST
    scenario.directory.pds = RELAY.replace("wss", "https")
    assert await scenario.replay(dead_letter_id, pdses) == ReplayResult(dead_letter_id, Outcome.APPLIED)


async def test_message_of_a_subscribed_host_is_accepted_only_for_accounts_that_it_hosts(
    scenario: ReplayScenario,
) -> None:
    await scenario.synchronized()
    dead_letter_id = await scenario.reject_event(
        "commit", scenario.owner.commit(Write.create(PATH, RECORD)), reason=Rejection.WRONG_HOST
    )
    await scenario.sql.execute("update indexer.dead_letter set relay = 'https://liar.test'")
    assert (await scenario.replay(dead_letter_id)).reason is Rejection.WRONG_HOST


class ConcurrentlyChangedDatabase(Database):
    """Calls `change` before each of the first `times` attempts to resolve a dead letter."""

    times = 0
    change: Callable[[], Awaitable[object]]

    async def write(self, batch: Batch) -> WrittenBatch:
        if self.times and batch.resolved is not None:
            self.times -= 1
            await self.change()
        return await super().write(batch)


@pytest.fixture
async def changed_database(scenario: ReplayScenario, database: str) -> AsyncIterator[ConcurrentlyChangedDatabase]:
    db = await ConcurrentlyChangedDatabase.open(database, connections=2)
    db.change = lambda: scenario.db.repos.update(
        scenario.owner.did, lambda repo: repo._replace(version=repo.version + 1)
    )
    scenario.db = db
    yield db
    await db.close()


async def test_replay_is_retried_if_the_repo_changes_meanwhile_and_gives_up_at_last(
    scenario: ReplayScenario, changed_database: ConcurrentlyChangedDatabase
) -> None:
    before = await scenario.synchronized()
    dead_letter_id = await scenario.reject_event("commit", scenario.owner.commit(Write.create(PATH, RECORD)))
    changed_database.times = MAX_ATTEMPTS + 1
    result = await scenario.replay(dead_letter_id)
    assert (result.outcome, changed_database.times) == (UNTRIED, 1)
    assert "changed during" in result.detail
    assert await scenario.repo() == before._replace(version=before.version + MAX_ATTEMPTS)
    assert (await scenario.records(), await scenario.remaining()) == (set(), [(dead_letter_id, "signature-invalid")])
    changed_database.times = MAX_ATTEMPTS - 1
    assert await scenario.replay(dead_letter_id) == ReplayResult(dead_letter_id, Outcome.APPLIED)
    assert (await scenario.records(), await scenario.remaining()) == ({PATH}, [])


async def test_commit_applied_meanwhile_is_not_applied_twice(
    scenario: ReplayScenario, changed_database: ConcurrentlyChangedDatabase
) -> None:
    """The relay sent the commit again, and it was applied."""
    await scenario.synchronized()
    commit = scenario.owner.commit(Write.create(PATH, RECORD))
    first, again = encoded_frame("commit", commit), encoded_frame("commit", commit | {"seq": commit["seq"] + 1})
    dead_letter_id, same = await scenario.insert_dead_letter(first), await scenario.insert_dead_letter(again)
    changed_database.change, changed_database.times = lambda: scenario.replay(same), 1
    assert await scenario.replay(dead_letter_id) == ReplayResult(dead_letter_id, Outcome.REPLAYED)
    assert (await scenario.records(), await scenario.remaining()) == ({PATH}, [])
    assert await scenario.sql.fetchval("select count(*) from atproto.changes where action = 'create'") == 1


@pytest.mark.parametrize("kind", ["commit", "later"])
async def test_concurrent_replays_resolve_a_dead_letter_once(
    scenario: ReplayScenario, database: str, kind: str
) -> None:
    """The second replay waits for the first one and then finds no dead letter, also if the first changed no repo."""
    await scenario.in_progress()
    dead_letter_id = await scenario.reject_event(kind, scenario.owner.commit(Write.create(PATH, RECORD)))
    await scenario.db.identities.save([await scenario.directory.resolve(scenario.owner.did)])
    async with scenario.sql.transaction():
        await scenario.sql.execute("select from indexer.dead_letter for update")
        replays = asyncio.gather(scenario.replay(dead_letter_id), scenario.replay(dead_letter_id))
        async with connected(database) as observer:
            await until(lambda: waiting_for_locks(observer, 2))
    first, second = sorted(await replays, key=lambda result: result.outcome == UNKNOWN)
    assert first.outcome is (Outcome.BUFFERED if kind == "commit" else Outcome.IGNORED)
    assert second == ReplayResult(dead_letter_id, UNKNOWN)
    repo = await scenario.repo()
    assert repo.buffered_events == (kind == "commit")
    assert await scenario.sql.fetchval("select count(*) from indexer.buffered_event") == (kind == "commit")


async def test_message_is_replayed_as_one_of_the_relay_that_sent_it(scenario: ReplayScenario) -> None:
    """For example, one that was buffered, and rejected when it was drained."""
    await scenario.synchronized()
    message = encoded_frame("account", scenario.owner.account_event(active=False))
    letter = DeadLetter("wss://other.test", 7, scenario.owner.did, "account", Rejection.FIELD_INVALID, "", message)
    await scenario.db.write(Batch(dead_letters=(letter,)))
    assert (await scenario.replay(1)).outcome is Outcome.APPLIED
    assert (await scenario.repo()).hosting_relay == "wss://other.test"
