"""The reader of hints on a real database, whose writes fail, and whose rows change meanwhile."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf
from time import time
from typing import Any, cast

import asyncpg
import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter, tid_of
from indexer.concurrency.bounded_dict import BoundedDict
from indexer.db.database_errors import DatabaseError
from indexer.db.scope import CurrentScope
from indexer.live.batch_writer import WriterSettings
from indexer.live.hint_reader import OVERLAP_MICROS, HintReader
from indexer.net.identity.identity_cache import IdentityCache
from indexer.net.new_accounts import NewAccounts
from indexer.net.relay.subscription import Connection, Subscription
from indexer.reasons import FetchFailure
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.hints import JETSTREAM
from indexer.sync.identity import StoredIdentity
from indexer.sync.policy import Policy
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.scope import Scope
from indexer.sync.shard import Shard
from indexer.sync.stream import Cursor
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics
from tests.live.writer_scenario import NoDirectory, ObservedDatabase
from tests.waiting import until

LIKE = "app.bsky.feed.like"
NOW = int(time() * 1_000_000)
DIDS = [f"did:plc:{number:024}" for number in range(20)]
STORED, NEWER = tid_of(NOW - 60_000_000), tid_of(NOW - 1_000_000)


def commit(did: str, at: int = NOW, **fields: Any) -> bytes:
    commit = {"rev": NEWER, "operation": "create", "collection": LIKE, "rkey": "a"} | fields
    return json.dumps({"did": did, "time_us": at, "kind": "commit", "commit": commit}).encode()


class Frames:
    """Takes the place of a subscription, and delivers what is put into it."""

    def __init__(self) -> None:
        self.queue = asyncio.Queue[bytes]()
        self.path, self.oversized = "", set[str]()
        self.connection: Connection | None = None
        self.cursor: int | None = -1

    async def frames(self, cursor_of: Callable[[str], Awaitable[int | None]]) -> AsyncGenerator[bytes, None]:
        self.cursor = await cursor_of("wss://jetstream.test")
        self.connection = Connection("wss://jetstream.test")
        while True:
            yield await self.queue.get()

    def reconnect(self) -> None:
        """Do nothing."""


class Reading:
    """A reader, and what it asked for."""

    def __init__(self, db: ObservedDatabase, identities: IdentityCache, shard: Shard, per_hour: float) -> None:
        self.frames, self.asked, self.woken, self.metrics = Frames(), list[str](), 0, Metrics()
        self.paths = BoundedDict[str, str](3)
        policy = Policy(Scope(collections=CollectionFilter([LIKE])), DEFAULT_LIMITS)
        self.reader = HintReader(
            db, cast("Subscription", self.frames), CurrentScope(db.scope, policy), identities,
            WriterSettings(shard, batch_window=0.0, retry_interval=0.0, idle_after=0.05), self.metrics, Conditions(),
            NewAccounts(per_hour), self.paths, self._wake, self.asked.append,
        )  # fmt: skip

    def _wake(self) -> None:
        self.woken += 1

    async def read(self, *frames: bytes) -> None:
        """Let the reader handle these messages."""
        before = self.outcomes()
        for frame in frames:
            self.frames.queue.put_nowait(frame)
        await until(lambda: self.outcomes() == before + len(frames))

    def outcomes(self) -> int:
        samples = [sample for family in self.metrics.registry.collect() for sample in family.samples]
        return int(sum(sample.value for sample in samples if sample.name == "indexer_events_total"))


@pytest.fixture
async def db(database: str) -> AsyncIterator[ObservedDatabase]:
    db = await ObservedDatabase.open(database, connections=5)
    head = Head(STORED, cid_of(b"data"), cid_of(b"commit"))
    rows = [RepoWrite(Repo(did), Repo(did, 1, SyncStatus.SYNCHRONIZED, None, head)) for did in DIDS[:10]]
    await super(ObservedDatabase, db).write(Batch(tuple(rows)))
    await db.identities.save([StoredIdentity(did, None, "https://pds.test", None, time()) for did in DIDS[:10]])
    yield db
    await db.close()


@asynccontextmanager
async def reading(db: ObservedDatabase, shard: Shard | None = None, per_hour: float = 0) -> AsyncIterator[Reading]:
    """Run a reader during the block, once it has a connection."""
    identities = IdentityCache(NoDirectory(), db.identities, Metrics(), clock=time, refresh_rate=inf)
    one = Reading(db, identities, shard or Shard(), per_hour)
    running = asyncio.create_task(one.reader.run())
    try:
        await until(lambda: one.frames.connection is not None)
        yield one
    finally:
        running.cancel()
        await asyncio.wait([running])
        await identities.close()
        assert running.cancelled(), running.exception()


async def hinted(sql: asyncpg.Connection) -> list[str]:
    return [did for (did,) in await sql.fetch("select did from indexer.repo where sync_reason = 'hinted' order by did")]


async def cursors(db: ObservedDatabase) -> list[tuple[str, str, int]]:
    return sorted((cursor.relay, cursor.shard, cursor.seq) for cursor in await db.gaps.cursors())


def raising(times: int) -> Callable[[Batch], Awaitable[None]]:
    """Return a function that lets so many writes fail."""
    left = [True] * times

    async def disturb(_batch: Batch) -> None:
        if left:
            left.pop()
            raise DatabaseError(FetchFailure.UNREACHABLE, "gone")

    return disturb


async def test_batch_that_fails_is_written_again_whether_it_was_committed_or_not(
    db: ObservedDatabase, sql: asyncpg.Connection
) -> None:
    async with reading(db) as one:
        db.disturb_before = raising(2)
        await one.read(commit(DIDS[0]), commit(DIDS[1], NOW + 1))
        db.disturb_before, db.disturb_after = None, raising(1)
        await one.read(commit(DIDS[2], NOW + 2))
        assert await hinted(sql) == DIDS[:3]
        assert await cursors(db) == [(JETSTREAM, "0/1", NOW + 2)]
        assert (one.reader.stage.last_error, one.paths[DIDS[2]]) == (None, f"{LIKE}/a")
        assert one.woken > 0


async def test_row_that_changes_meanwhile_is_planned_again_and_the_cursor_waits_for_it(
    db: ObservedDatabase, sql: asyncpg.Connection
) -> None:
    async def change(_batch: Batch) -> None:
        db.disturb_before = None
        await sql.execute("update indexer.repo set version = version + 1, attempts = 1 where did = $1", DIDS[0])

    stored: list[object] = []

    async def note(_batch: Batch) -> None:
        stored.append(await cursors(db))

    async with reading(db) as one:
        db.disturb_before, db.disturb_after = change, note
        await one.read(commit(DIDS[0]), commit(DIDS[1]))
        assert await hinted(sql) == DIDS[:2]
        assert await sql.fetchval("select attempts from indexer.repo where did = $1", DIDS[0]) == 2
    assert stored == [[], [(JETSTREAM, "0/1", NOW)]]


async def test_each_shard_follows_its_own_hints_and_has_a_cursor(db: ObservedDatabase, sql: asyncpg.Connection) -> None:
    halves = [Shard(number, 2) for number in range(2)]
    frames = [commit(did) for did in DIDS[:10]]
    owned = [[did for did in DIDS[:10] if half.owns(did)] for half in halves]
    assert all(owned)
    for number, half in enumerate(halves):
        async with reading(db, half) as one:
            await one.read(*frames)
        assert await hinted(sql) == sorted(did for dids in owned[: number + 1] for did in dids)
    assert await cursors(db) == [(JETSTREAM, "0/2", NOW), (JETSTREAM, "1/2", NOW)]
    async with reading(db) as one:
        assert one.frames.cursor == NOW - OVERLAP_MICROS, "also after a change of the number of shards"


async def test_hosts_and_directories_are_asked_again(db: ObservedDatabase, sql: asyncpg.Connection) -> None:
    def event(did: str, kind: str, **fields: object) -> bytes:
        return json.dumps({"did": did, "kind": kind, kind: fields}).encode()

    async with reading(db) as one:
        await one.reader.identities.preload(DIDS[2:4])
        await one.read(
            commit(DIDS[0], rev="not a rev"), event(DIDS[1], "account", active=False, status="deleted"),
            event(DIDS[2], "account", active=True), event(DIDS[3], "identity"), b"{", commit(DIDS[0], rev=None),
        )  # fmt: skip
        assert (sorted(one.asked), list(one.paths)) == (DIDS[:2], [])
        assert await hinted(sql) == []
        stale = await sql.fetch("select did from indexer.identity where stale")
        assert [did for (did,) in stale] == [DIDS[3]]
        in_memory = [one.reader.identities.peek(did) for did in DIDS[2:4]]
        assert [identity is None for identity in in_memory] == [False, True], "looked up before its next use"
        assert await cursors(db) == [(JETSTREAM, "0/1", NOW)]


async def test_hints_add_only_so_many_accounts(db: ObservedDatabase, sql: asyncpg.Connection) -> None:
    async with reading(db, per_hour=4) as one:
        await one.read(*[commit(did) for did in DIDS[10:]], *[commit(did) for did in DIDS[10:]], commit(DIDS[0]))
        rows = await sql.fetch("select did from indexer.repo where from_stream order by did")
        assert [did for (did,) in rows] == DIDS[10:14]
        assert await hinted(sql) == DIDS[:1]
        assert list(one.paths) == [*DIDS[12:14], DIDS[0]], "of the newest hints"


@pytest.mark.parametrize(
    ("stored", "oversized", "expected"),
    [(NOW, False, NOW - OVERLAP_MICROS), (None, False, None), (NOW, True, None), (5, False, 1), (0, False, None)],
    ids=["usual", "none", "after a message that is too large", "ancient", "without a position"],
)
async def test_connection_begins_before_the_cursor(
    db: ObservedDatabase, stored: int | None, oversized: bool, expected: int | None
) -> None:
    if stored is not None:
        await super(ObservedDatabase, db).write(Batch(cursors=(Cursor(JETSTREAM, "0/1", stored),)))
    async with reading(db) as one:
        if oversized:
            one.frames.oversized.add("relay")
        assert await one.reader.begin_connection("relay") == expected
        assert await one.reader.begin_connection("relay") == (expected if not oversized else NOW - OVERLAP_MICROS)


async def test_cursor_in_the_future_counts_as_now_and_silence_as_no_lag(db: ObservedDatabase) -> None:
    await super(ObservedDatabase, db).write(Batch(cursors=(Cursor(JETSTREAM, "0/1", 2 * NOW),)))
    async with reading(db) as one:
        assert one.frames.cursor is not None
        assert one.frames.cursor <= time() * 1_000_000 - OVERLAP_MICROS
        await one.read(commit(DIDS[0], NOW - 3_600_000_000))
        await until(lambda: one.reader.position.lag is not None and one.reader.position.lag < 1)


async def test_rows_of_a_later_scope_are_planned_with_it(db: ObservedDatabase, sql: asyncpg.Connection) -> None:
    await db.scope.begin(Scope(collections=CollectionFilter(["app.bsky.feed.post"])))
    await sql.execute("update indexer.repo set scope_version = 1")
    async with reading(db) as one:
        await one.read(commit(DIDS[0]))
        assert await hinted(sql) == []
