"""One account whose resyncs run step by step, with its hosts, its directory and the live path.

The account remembers its records at each rev. After each step, those in the database are compared with them.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from copy import copy
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction
from pathlib import Path
from random import Random
from time import time
from typing import Any

import asyncpg
import orjson

from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter, tid_of
from indexer.core.spool import Spool
from indexer.db import Database, DatabaseError
from indexer.demo.local_repo import LocalChange, LocalRepo, Write
from indexer.errors import UnavailableError, UpstreamError
from indexer.net.http.http_client import Response
from indexer.net.identity.identity_cache import CachedIdentity
from indexer.net.pds.pds_client import ExportDownload
from indexer.net.pds.xrpc import XrpcError
from indexer.reasons import FetchFailure
from indexer.resync.apply import Applies
from indexer.resync.fetch import ResyncAttempts
from indexer.resync.queue import ClaimLostError
from indexer.resync.shares import PostponedError, Shares
from indexer.resync.sparse import SparseChoice, SparseFetch
from indexer.sync.batch import ReceivedMessage, SettledMessage, plan_batch
from indexer.sync.changes import Batch
from indexer.sync.events import AccountEvent, CommitEvent, SyncEvent
from indexer.sync.policy import UNAVAILABLE, KeyState, PlanContext, Policy
from indexer.sync.repo import Outcome, Repo, SyncStatus, Trigger, end_claim
from indexer.sync.resync import plan_failure
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics
from tests.sync.signing_account import STORE_ALL, SigningAccount, received_message

MIRROR, PDS = "https://relay.test", "https://pds.test"
COLLECTIONS = ("com.example.a", "com.example.note", "com.example.note.draft")
NO_COLLECTION = "com.example.no-name"  # takes part in every tree, and names no records
LATER = 1e7  # seconds from now: every back-off is over by then, but parked repos stay parked
EXPIRED = -LATER - 1  # a lease from then that has expired by now

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

Step = Callable[[str], Awaitable[None]]


async def no_step(_name: str) -> None: ...


class AccountOwner(SigningAccount):
    """An account that remembers its repo at each rev, and the records of the selected collections."""

    def __init__(self, name: str, selected: CollectionFilter = STORE_ALL.scope.collections) -> None:
        super().__init__(name)
        self.published = self.key  # the key in the directory
        self.active = True
        self.history: dict[str, dict[str, str]] = {}
        self.versions: list[LocalRepo] = []
        self._selected = selected
        self._numbers = 0
        self._remember()

    @property
    def rev(self) -> str:
        return self.repo.head.rev

    def change(self, *writes: Write) -> LocalChange:
        change = self.repo.write(writes, self.key, self.next_rev())
        self._remember()
        return change

    def commit(self, *writes: Write) -> dict[str, Any]:
        return self.commit_payload(self.change(*writes))

    def some_writes(self, random: Random) -> list[Write]:
        """Return valid writes, which may name a path more than once."""
        present, writes = set(self.repo.records), []
        for _ in range(random.choice([1, 1, 2, 5])):
            path = f"{random.choice([*COLLECTIONS, NO_COLLECTION])}/{random.randint(0, 5)}"
            if path not in present:
                writes.append(Write.create(path, self._record()))
            elif random.random() < 0.5:
                writes.append(Write.update(path, self._record()))
            else:
                writes.append(Write.delete(path))
            present ^= {path} if writes[-1].action != "update" else set()
        return writes

    def swap_key(self) -> None:
        self._numbers += 1
        self.key = self.published = PrivateKey.from_seed("k256", f"{self.did} {self._numbers}".encode())

    def _record(self) -> dict[str, Any]:
        self._numbers += 1
        return {"$type": COLLECTIONS[0], "number": self._numbers}

    def _remember(self) -> None:
        self.history[self.rev] = {
            path: cid_text(cid_of(block))
            for path, block in self.repo.records.items()
            if not path.startswith(NO_COLLECTION) and self._selected.matches(path.partition("/")[0])
        }
        self.versions.append(copy(self.repo))

    def next_rev(self) -> str:
        self.ticks += 1
        return tid_of(int((time() - 3_600) * 1_000_000) + self.ticks)


class SimulatedHosts:
    """The PDSes of the account, and a mirror.

    Attributes:
        missing: The number of commits that a host lacks, or why it does not answer; by default, it lacks none.
        requests: The requests, as kind and host.
        paths: The paths whose proofs were requested.
        blocks: The number of blocks that were sent by CID.
    """

    def __init__(self, owner: AccountOwner, directory: Path, step: Step = no_step) -> None:
        self.missing: dict[str, int | FetchFailure] = {}
        self.requests: list[tuple[str, str]] = []
        self.paths: list[str] = []
        self.blocks = 0
        self._owner = owner
        self._directory = directory
        self._step = step

    async def fetch_latest_commit(self, _did: str, host: str) -> tuple[bytes, str]:
        await self._step("ask for the latest commit")
        head = self._version("head", host).head
        await self._step("latest commit answered")
        return head.cid, head.rev

    @asynccontextmanager
    async def open_export(self, _did: str, host: str) -> AsyncIterator[ExportDownload]:
        await self._step("ask for the export")
        export = b"".join(self._version("export", host).export())
        await self._step("export requested")
        with closing(Spool(self._directory, DEFAULT_LIMITS)) as spool:
            yield ExportDownload(spool, self._chunks(export), AsyncExitStack())

    async def fetch_record_proof(self, _did: str, path: str, host: str) -> Response:
        await self._step("ask for a record")
        self.paths.append(path)
        proof = self._version("record", host).record_proof(path)
        await self._step("record fetched")
        return Response(200, {}, proof)

    async def fetch_blocks(self, _did: str, cids: Sequence[bytes], host: str, _max_bytes: int) -> dict[bytes, bytes]:
        await self._step("ask for blocks")
        blocks = self._version("blocks", host).blocks()
        await self._step("blocks fetched")
        if not blocks.keys() >= set(cids):
            raise XrpcError(FetchFailure.HTTP_STATUS, "Could not find cids", definite=True)
        self.blocks += len(cids)
        return {cid: blocks[cid] for cid in cids}

    async def _chunks(self, export: bytes) -> AsyncIterator[bytes]:
        yield export
        await self._step("export fetched")

    def _version(self, kind: str, host: str) -> LocalRepo:
        self.requests.append((kind, host))
        missing = self.missing.get(host, 0) if self._owner.active else FetchFailure.REPO_DEACTIVATED
        if isinstance(missing, FetchFailure):
            raise UnavailableError(missing)
        return self._owner.versions[max(-1 - missing, -len(self._owner.versions))]


class SimulatedDirectory:
    """The identity of the account: in the cache, or in the directory while that is `up`.

    Attributes:
        pds: The PDS in the directory.
        refreshes: False if the limits of the cache allow no lookup of a cached identity.
    """

    def __init__(self, owner: AccountOwner, step: Step = no_step) -> None:
        self.cached: CachedIdentity | None = None
        self.up = True
        self.pds = PDS
        self.refreshes = True
        self._owner = owner
        self._step = step

    def identity(self, pds: str, fetched_at: float) -> CachedIdentity:
        return CachedIdentity(self._owner.published.public, pds, problem=None, fetched_at=fetched_at, stale=False)

    def fetch(self) -> CachedIdentity:
        if not self.up:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE)
        self.cached = self.identity(self.pds, time())
        return self.cached

    async def lookup(self, _did: str, *, refresh: bool = False, **_: object) -> CachedIdentity:
        await self._step("look up the key")
        return self.cached if self.cached and not (refresh and self.refreshes) else self.fetch()


class LivePath:
    """Plans and writes messages in their order, as the batch writer does.

    `newest` is the newest rev of a message that arrived while the account was active, verified or not.
    """

    def __init__(self, db: Database, owner: AccountOwner, directory: SimulatedDirectory, policy: Policy) -> None:
        self._db = db
        self._owner = owner
        self._directory = directory
        self._policy = policy
        self._lock = asyncio.Lock()
        self.newest = ""
        self.outcomes = Counter[Outcome]()

    async def deliver(self, messages: Sequence[ReceivedMessage]) -> None:
        """Deliver in one batch, and in another one those that wait for a key."""
        async with self._lock:
            answer: KeyState | None = None
            while messages:
                cached = self._directory.cached
                key_state = answer or (KeyState(cached.key) if cached else None)
                repos = await self._db.repos.load([self._owner.did])
                context = PlanContext(self._policy, time())
                plan = plan_batch(messages, repos, lambda _did, key_state=key_state: key_state, context)  # type: ignore[misc]
                stale = frozenset(plan.stale_identities)
                try:
                    moved = (await self._db.write(Batch(plan.writes, tuple(plan.dead_letters), stale))).skipped
                except DatabaseError:  # a deadlock with a worker that has not noticed that its claim is lost
                    continue
                if moved:
                    continue
                self._note(plan.settled, repos)
                if stale:
                    self._directory.cached = None
                messages = plan.waiting
                if plan.needed_keys:
                    answer = KeyState(self._directory.fetch().key, final=True) if self._directory.up else UNAVAILABLE

    def _note(self, settled: Sequence[SettledMessage], repos: Mapping[str, Repo]) -> None:
        active = repos.get(self._owner.did, Repo(self._owner.did)).active
        for item in settled:
            self.outcomes[item.outcome] += 1
            match item.received.event:
                case AccountEvent() as event if item.outcome is Outcome.APPLIED:
                    active = event.active
                case CommitEvent() | SyncEvent() as event if active and item.outcome is not Outcome.REJECTED:
                    self.newest = max(self.newest, event.rev)


class SteppedDatabase:
    """A database that calls `step` between every two operations of a resync."""

    def __init__(self, db: Database, step: Step) -> None:
        self._db = db
        self._step = step
        self.resyncs = self
        self.entries = db.resyncs.entries
        self.layout = db.layout

    @asynccontextmanager
    async def transaction(self, *claimed: Repo, scope_version: int) -> AsyncIterator["SteppedTransaction"]:
        await self._step("begin")
        async with self._db.resyncs.transaction(*claimed, scope_version=scope_version) as writes:
            yield SteppedTransaction(writes, self._step)
            await self._step("commit")
        await self._step("committed")


class SteppedTransaction:
    """A transaction with a step before and after each call of a method."""

    def __init__(self, transaction: Any, step: Step) -> None:
        self._transaction = transaction
        self._step = step

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._transaction, name)
        if isasyncgenfunction(method):
            return partial(self._iterate, name, method)
        return partial(self._call, name, method) if iscoroutinefunction(method) else method

    async def _call(self, name: str, method: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
        await self._step(name)
        result = await method(*arguments, **options)
        await self._step(f"{name} done")
        return result

    async def _iterate(self, name: str, method: Callable[[], AsyncIterator[Any]]) -> AsyncIterator[Any]:
        await self._step(name)
        async for chunk in method():
            yield chunk
            await self._step(f"{name} done")


class ResyncWorld:
    """The account, its hosts and directory, the live path, and workers.

    Attributes:
        at: What happens at a step, once, by the name of the step.
        steps: How often each step was made.
        event_rate: The probability that anything happens at a step; `random` decides what.
        is_checked: False while the records in the database are wrong on purpose.
        results: How often each result of an attempt was.
    """

    def __init__(
        self,
        db: Database,
        sql: asyncpg.Connection,
        directory: Path,
        name: str = "ada",
        policy: Policy = STORE_ALL,
        event_rate: float = 0.0,
        sparse: SparseChoice = "always",
    ) -> None:
        self._sql = sql
        self._query_lock = asyncio.Lock()
        self.db = db
        self.policy = policy
        self.random = Random(name)
        self.event_rate = event_rate
        self.is_checked = True
        self.owner = AccountOwner(name, policy.scope.collections)
        self.hosts = SimulatedHosts(self.owner, directory, self.step)
        hosts: Any = self.hosts
        self.sparse = SparseFetch(hosts, sparse)
        self.directory = SimulatedDirectory(self.owner, self.step)
        self.live = LivePath(db, self.owner, self.directory, policy)
        self.at: dict[str, Callable[[], Awaitable[object]]] = {}
        self.steps = Counter[str]()
        self.results = Counter[str]()
        self.story: list[str] = []
        self._max_mirror_lag = self.random.choice([0, 3])
        self._delayed: list[ReceivedMessage] = []
        self._relay_stalled = False
        self._blocked: list[asyncio.Task[Any]] = []
        self._highest_rev = ""
        self._actions: dict[Callable[[], Awaitable[None]], int] = {
            self._write: 10,
            self._lose_commits: 2,
            self._send_sync: 2,
            self._rotate_key: 2,
            self._deactivate: 1,
            self._reactivate: 2,
            self._deactivate_briefly: 3,
            self._toggle: 3,
            self._request_resync: 2,
            self._take_over: 2,
        }

    async def query(self, statement: str, *values: Any) -> list[asyncpg.Record]:
        async with self._query_lock:
            rows: list[asyncpg.Record] = await self._sql.fetch(statement, *values)
            return rows

    async def row(self) -> Repo:
        return (await self.db.repos.load([self.owner.did]))[self.owner.did]

    async def has_all_records(self) -> bool:
        """Return True if the stored paths are those of the account."""
        [(_, _, records)] = await self.query(_STATE, self.owner.did)
        return bool(orjson.loads(records).keys() == self.owner.history[self.owner.rev].keys())

    async def attempt(self) -> bool:
        """Claim the repo and resync it, as a new process does; return False if it was not due."""
        claims = await self.claim()
        for claimed in claims:
            await self._resync(claimed)
        return bool(claims)

    async def claim(self) -> list[Repo]:
        return await self.db.resyncs.claim(1, range(256), EXPIRED, time() + LATER)

    async def _resync(self, claimed: Repo) -> None:
        await self.step("claimed")
        stepped: Any = SteppedDatabase(self.db, self.step)
        identities: Any = self.directory
        hosts: Any = self.hosts
        policy, sources = lambda: self.policy, (MIRROR, None)
        applies, shares = Applies(stepped, Metrics(), Conditions()), Shares(workers=1)
        attempts = ResyncAttempts(applies, identities, hosts, policy, Metrics(), sources, Conditions(), self.sparse)
        try:
            known = await self.directory.lookup(claimed.did, refresh=claimed.has_failed)
            resync = shares.admit(claimed, "pds.test", time())
            resync.subscribed = await self.db.subscribed_hosts.find(claimed.did, PDS)
            result = await attempts.attempt(resync, shares, known)
            self.results[result] += 1
        except PostponedError as postponed:
            self.results[postponed.result] += 1
            await self._update_claimed(claimed, lambda repo: end_claim(repo, Trigger.RELEASED, None))
        except (ClaimLostError, DatabaseError):
            self.results["lost"] += 1
        except UpstreamError as error:
            await self._fail(claimed, UnavailableError(FetchFailure.EXPORT_REJECTED, str(error)))
        except UnavailableError as error:
            await self._fail(claimed, error)

    async def _fail(self, claimed: Repo, failure: UnavailableError) -> None:
        self.results[failure.reason] += 1
        await self._update_claimed(claimed, lambda repo: plan_failure(repo, claimed, failure, time()))

    async def _update_claimed(self, claimed: Repo, change: Callable[[Repo], Repo]) -> None:
        """Write the end of an attempt as the worker pool does."""

        def changed(repo: Repo) -> Repo:
            held = repo.lease == claimed.lease and repo.sync_status is SyncStatus.IN_PROGRESS
            return change(repo) if held else repo

        await self.step("failed")
        await self.db.repos.update(claimed.did, changed)
        await self.step("failure written")

    async def begin(self) -> None:
        """Add the repo: by its first commit, or by a request."""
        if self.random.random() < 0.5:
            await self.live.deliver([received_message("commit", self.owner.first_commit())])
        else:
            await self.db.repos.add([self.owner.did])
        for _ in range(self.random.randint(0, 4)):
            self.owner.change(*self.owner.some_writes(self.random))

    async def step(self, name: str) -> None:
        """Let happen what happens at this step, and perhaps something else. Then check the database."""
        self.steps[name] += 1
        if action := self.at.pop(name, None):
            await action()
        if self.event_rate:
            self.hosts.missing[MIRROR] = self.random.randint(0, self._max_mirror_lag)
        if self.random.random() < self.event_rate:
            [random_action] = self.random.choices(list(self._actions), list(self._actions.values()))
            self.story.append(f"{name}: {random_action.__name__}")
            await random_action()
        await self.check()

    async def check(self) -> None:
        """Check that the records are those of the row's rev, and that the rev never falls.

        A synchronized repo is at the newest rev of the live path or above.
        """
        newest, highest = self.live.newest, self._highest_rev
        for status, rev, records in await self.query(_STATE, self.owner.did) if self.is_checked else ():
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
        self.hosts.missing.clear()
        self.directory.up = True
        self.owner.active = True
        await self.db.resyncs.expire_leases(range(256), time())
        await self.live.deliver(
            [
                *self._delayed,
                received_message("account", self.owner.account_event(active=True)),
                received_message("identity", self.owner.identity_event()),
                received_message("commit", self.owner.commit()),
            ]
        )
        for _ in range(10):
            if not await self.attempt():
                break
        [(status, rev, _)] = await self.query(_STATE, self.owner.did)
        assert (status, rev) == ("synchronized", self.owner.rev), (self.results, self.story)
        await self.check()
        await self.check_changes()
        assert await self.query("select seq from indexer.buffered_event where did = $1", self.owner.did) == []

    async def deliver_commit(self) -> None:
        """Deliver a commit on the live path."""
        await self.live.deliver([received_message("commit", self.owner.commit(*self.owner.some_writes(self.random)))])

    async def _write(self) -> None:
        writes = self.owner.some_writes(self.random) if self.random.random() < 0.9 else ()
        await self._send("commit", self.owner.commit(*writes))

    async def _lose_commits(self) -> None:
        self.owner.change(*self.owner.some_writes(self.random))
        await self._write()

    async def _send_sync(self) -> None:
        await self._send("sync", self.owner.sync_event())

    async def _rotate_key(self) -> None:
        """Rotate the key, perhaps without a message."""
        self.owner.swap_key()
        if self.random.random() < 0.5:
            self.owner.change()
            await self._send("identity", self.owner.identity_event())
            await self._send_sync()

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

    async def _toggle(self) -> None:
        """Let the relay or the directory fail, or recover."""
        if self.random.random() < 0.7:
            self._relay_stalled = not self._relay_stalled
        else:
            self.directory.up = not self.directory.up or self.random.random() < 0.5

    async def _request_resync(self) -> None:
        await self._run_unless_blocked(self.db.repos.request_resyncs([self.owner.did]))

    async def _take_over(self) -> None:
        """Let another worker take over during a resync, and perhaps do nothing with its claim."""

        async def resync_again() -> None:
            if await self.db.resyncs.expire_leases(range(256), time()):
                await (self.claim if self.random.random() < 0.3 else self.attempt)()

        await self._run_unless_blocked(resync_again())

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

    async def _run_unless_blocked(self, action: Coroutine[Any, Any, object]) -> None:
        """Run to the end, unless a lock blocks it until after this step: then leave it to `finish_blocked`."""
        task = asyncio.create_task(action)
        while not task.done():
            await asyncio.wait({task}, timeout=0.02)
            if not task.done() and (await self.query(_WAITING))[0][0]:
                self._blocked.append(task)
                return
        task.result()
