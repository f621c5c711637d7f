"""The refresh of identities that changed: hosts that fail or are slow delay no other identity."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from time import time

import asyncpg
import pytest

from indexer.atproto.crypto import PrivateKey
from indexer.db import Database
from indexer.errors import UnavailableError
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.identity.identity_cache import IdentityCache, IdentityLifetimes
from indexer.reasons import FetchFailure
from indexer.sync.changes import Batch
from indexer.sync.identity import DueIdentity, StoredIdentity
from indexer.sync.shard import Shard
from indexer.tasks.identities import BATCH_SIZE, MAX_PER_HOST, IdentityRefresh, fair_batch
from indexer.telemetry.metrics import Metrics
from tests.db.repo_rows import did
from tests.sync.signing_account import STORE_ALL
from tests.waiting import until

pytestmark = pytest.mark.slow

KEY = PrivateKey.from_seed("k256", b"identity refresh").public.did_key()
FAILING = [f"did:web:x{number}.hostile.example.com" for number in range(105)]
HONEST_WEB = "did:web:honest.example.org"
QUICK = IdentityLifetimes(refresh_interval=0.05, changed_interval=0.05)


class Network(DidResolver):
    """Answers lookups; fails for DIDs of the hostile host, and hangs for those of the slow host."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.asked = Counter[str]()

    async def resolve(self, did: str, *, known: bool = True) -> StoredIdentity:
        assert known
        self.asked[did] += 1
        if "hostile" in did:
            raise UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "500 from its host")
        if "slow" in did:
            await asyncio.Event().wait()
        return self.identity(did)

    def identity(self, did: str) -> StoredIdentity:
        return StoredIdentity(did, None, "https://pds.test", KEY, fetched_at=time())

    async def announce(self, *dids: str) -> None:
        """Store the identities and mark them as changed, one after the other."""
        for changed in dids:
            await self.db.identities.save([self.identity(changed)])
        await self.db.write(Batch(stale_identities=frozenset(dids)))

    @asynccontextmanager
    async def refreshing(self) -> AsyncIterator[None]:
        """Refresh identities that are due, with hardly a pause between two batches."""
        identities = IdentityCache(
            self, self.db.identities, Metrics(), clock=time, refresh_rate=10_000.0, lifetimes=QUICK, max_entries=1_000
        )
        refresh = IdentityRefresh(self.db, identities, STORE_ALL.deletion_grace, Shard(), interval=0.05)
        task = asyncio.create_task(refresh.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await identities.close()


async def is_fresh(sql: asyncpg.Connection, did: str) -> bool:
    return not await sql.fetchval("select stale from indexer.identity where did = $1", did)


async def test_failing_identities_delay_no_honest_one(db: Database, sql: asyncpg.Connection) -> None:
    """More identities than a batch has fail; they were announced first and are announced again all the time."""
    network = Network(db)
    await network.announce(*FAILING)
    await network.announce(HONEST_WEB)
    await network.announce(did("honest"))
    async with network.refreshing():
        await until(partial(is_fresh, sql, HONEST_WEB), network.asked.total)
        await until(partial(is_fresh, sql, did("honest")))
        await until(lambda: len(network.asked) == len(FAILING) + 2)
        await db.write(Batch(stale_identities=frozenset(FAILING)))
        await network.announce(did("later"))
        await until(partial(is_fresh, sql, did("later")))
        assert max(network.asked.values()) == 1, "an identity was asked again within its back-off"
    failures = await sql.fetch("select distinct refresh_failures, refresh_at > now() as later from indexer.identity")
    assert sorted([(row["refresh_failures"], row["later"]) for row in failures], key=str) == [(0, None), (1, True)]


async def test_slow_hosts_delay_no_did_plc_and_no_other_host(db: Database, sql: asyncpg.Connection) -> None:
    network = Network(db)
    await network.announce(*[f"did:web:x{number}.slow.example.com" for number in range(10)])
    await network.announce(HONEST_WEB, did("honest"))
    async with network.refreshing():
        await until(partial(is_fresh, sql, did("honest")))
        await until(partial(is_fresh, sql, HONEST_WEB))


def test_a_batch_is_shared_among_hosts() -> None:
    """The one honest identity of each method is in the first batch, behind a thousand others."""
    hostile = [DueIdentity(f"did:web:x{number}.hostile.example.com", None, 0) for number in range(1_000)]
    batch = fair_batch([*hostile, DueIdentity(HONEST_WEB, None, 0)])
    assert batch[1].did == HONEST_WEB
    assert len(batch) == MAX_PER_HOST + 1
    one_pds = [DueIdentity(did(number), "https://pds.hostile.test", 0) for number in range(1_000)]
    others = [DueIdentity(did(f"honest {number}"), f"https://pds{number}.test", 0) for number in range(BATCH_SIZE)]
    batch = fair_batch([*one_pds, *others])
    assert len(batch) == BATCH_SIZE
    assert sum(identity in others for identity in batch) == BATCH_SIZE - 1
