"""A batch writer on a real database, whose writes a test observes, holds up and lets fail."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from time import time

import asyncpg
import pytest

from indexer.core.core import PYTHON_CORE, NativeCore
from indexer.db import Database
from indexer.db.connections import Connections
from indexer.db.repos import Repos
from indexer.db.scope import CurrentScope
from indexer.db.write import WrittenBatch
from indexer.live.account_limits import AccountLimits
from indexer.live.batch_writer import BatchWriter, WriterSettings
from indexer.live.inbox import Inbox
from indexer.live.key_lookups import KeyLookups
from indexer.live.stream_position import StreamPosition
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.identity_cache import IdentityCache
from indexer.net.new_accounts import NewAccounts
from indexer.sync.batch import ReceivedMessage, SettledMessage
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.identity import StoredIdentity
from indexer.sync.repo import Repo
from indexer.sync.shard import Shard
from indexer.sync.stream import Watermark
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics
from tests.sync.signing_account import STORE_ALL, SigningAccount, received_message
from tests.waiting import until

# The quick tests try one seed of a random test.
SEEDS = [
    0,
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4)),
    *(pytest.param(seed, marks=pytest.mark.proof("simulation")) for seed in range(4, 8)),
]
Disturb = Callable[[Batch], Awaitable[None]]


class ObservedRepos(Repos):
    """Repos that note the DIDs of the loaded rows."""

    def __init__(self, pool: Connections) -> None:
        super().__init__(pool)
        self.loaded: list[str] = []

    async def load(self, dids: Sequence[str]) -> dict[str, Repo]:
        self.loaded.extend(dids)
        return await super().load(dids)


class ObservedDatabase(Database):
    """A database that notes what the writer loads and writes.

    Attributes:
        batches: The batches of the started writes.
        may_write: Writes wait for it.
        disturb_before: Called before each write; may raise.
        disturb_after: Called after each write; may raise.
    """

    def __init__(self, pool: asyncpg.Pool, connections: int, dsn: str) -> None:
        super().__init__(pool, connections, dsn)
        self.repos = self.observed = ObservedRepos(self)
        self.batches: list[Batch] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.disturb_before: Disturb | None = None
        self.disturb_after: Disturb | None = None

    async def write(self, batch: Batch) -> WrittenBatch:
        self.batches.append(batch)
        await self.may_write.wait()
        if self.disturb_before:
            await self.disturb_before(batch)
        applied = await super().write(batch)
        if self.disturb_after:
            await self.disturb_after(batch)
        return applied


class NoDirectory(DidResolver):
    """A directory that knows nobody: all identities are stored."""

    def __init__(self) -> None:
        """Need no client."""

    async def resolve(self, did: str, *, known: bool = True) -> StoredIdentity:
        raise AssertionError(f"looked up {did}, known: {known}")


class WriterScenario:
    """Accounts, streams, an inbox, and a batch writer that can be restarted with empty caches.

    Attributes:
        compared: Relay and kind of the settled messages and of the copies, with `is_new` of the settled ones.
    """

    def __init__(
        self,
        db: ObservedDatabase,
        sql: asyncpg.Connection,
        batch_size: int,
        core: NativeCore | None,
        relays: Sequence[str],
        hold: float,
    ) -> None:
        self.db = db
        self._core = core or PYTHON_CORE
        self.sql = sql
        self.metrics = Metrics()
        self.inbox = Inbox(10**9, len(relays))
        self.owned = asyncio.Event()
        self.owned.set()
        self.positions = [StreamPosition(lambda: True) for _ in relays]
        for position, relay in zip(self.positions, relays, strict=True):
            position.begin(relay, 0, Watermark(0))
        self.position = self.positions[0]
        self._settings = WriterSettings(
            Shard(), batch_size=batch_size, retry_interval=0.0, idle_after=3_600.0, hold=hold
        )
        self._seqs = [0 for _ in relays]
        self.compared: list[tuple[str, str, bool | None]] = []

    def _compare(self, settled: Iterable[SettledMessage], copies: Iterable[ReceivedMessage]) -> None:
        self.compared += [(one.received.origin.relay, one.received.event.kind, one.is_new) for one in settled]
        self.compared += [(copy.origin.relay, copy.event.kind, None) for copy in copies]

    @asynccontextmanager
    async def writer(self) -> AsyncIterator[None]:
        """Run a new writer during the block."""
        async with AsyncExitStack() as stack:
            identities = IdentityCache(NoDirectory(), self.db.identities, self.metrics, clock=time, refresh_rate=inf)
            stack.push_async_callback(identities.close)
            keys = KeyLookups(identities, self.inbox, timeout=60.0, concurrency=4)
            stack.push_async_callback(keys.close)
            conditions = Conditions()
            limits = AccountLimits(NewAccounts(0), NewAccounts(0), conditions)
            scope = CurrentScope(self.db.scope, STORE_ALL)
            writer = BatchWriter(
                self.db,
                self.inbox,
                keys,
                self.positions,
                self.owned,
                self._settings,
                self.metrics,
                conditions,
                limits,
                scope,
                self._core,
                self._compare,
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
        await super(ObservedDatabase, self.db).write(
            Batch(tuple(RepoWrite(Repo(account.did), account.row()._replace(version=1)) for account in accounts))
        )
        await self.db.identities.save(
            [
                StoredIdentity(account.did, None, "https://pds.test", account.key.public.did_key(), time())
                for account in accounts
            ]
        )

    async def put(self, *messages: ReceivedMessage, stream: int = 0) -> None:
        position = self.positions[stream]
        for message in messages:
            self._seqs[stream] += 1
            position.watermark.add(self._seqs[stream])
            await self.inbox.put(message._replace(origin=position.origin, seq=self._seqs[stream]))

    async def settled(self) -> None:
        async with asyncio.timeout(60):
            await self.inbox.wait_until_settled()
        assert [position.watermark.position for position in self.positions] == self._seqs
        assert not any(len(position.watermark) for position in self.positions)

    async def process(self, *messages: ReceivedMessage) -> None:
        await self.put(*messages)
        await self.settled()

    async def row(self, account: SigningAccount) -> Repo:
        return (await Repos(self.db).load([account.did]))[account.did]

    async def write_started(self, number: int) -> None:
        await until(lambda: len(self.db.batches) >= number)

    def outcomes(self) -> Counter[str]:
        """Return the number of settled messages by outcome."""
        counts = Counter[str]()
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "indexer_events_total":
                    counts[sample.labels["outcome"]] += int(sample.value)
        return +counts


MakeScenario = Callable[..., Awaitable[WriterScenario]]


def new_post(account: SigningAccount, number: int) -> ReceivedMessage:
    return received_message("commit", account.commit_post(f"post{number:04}"))
