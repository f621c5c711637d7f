"""Daemons on several machines share one cluster. Here they are processes with a data directory of their own."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random

import asyncpg
import pytest

from indexer.cli.demo import compare
from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.local_pds import GET_REPO
from indexer.localnet.scenario import Scenario
from indexer.store import Store
from indexer.sync.shard import BUCKETS, Shard
from tests.citus.crash_world import lose_commit
from tests.citus.daemon_forks import DaemonFork, start_fork_server
from tests.citus.log_consumer import LogConsumer
from tests.daemon_process import daemon_environment
from tests.database_checks import assert_change_log_consistent
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 240
LOST_COMMITS = 4
"""One of so many steps loses a commit, so that its repo needs a resync."""
STEP_SECONDS = 0.05

_OWNERS = "select first_bucket, last_bucket from indexer.shard_owner where last_bucket < $1"


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    start_fork_server()


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    # The lease of a killed worker has to expire, and then the repo waits for its next attempt.
    monkeypatch.setattr("tests.waiting.TIMEOUT", 300.0)


class Machines:
    """Daemons of one network and one database, and a check of who owns the buckets.

    Attributes:
        owners: The number of samples by the number of positions that had an owner.
    """

    def __init__(self, network: LocalNetwork, dsn: str, directory: Path) -> None:
        self.owners = Counter[int]()
        self._network = network
        self._dsn = dsn
        self._directory = directory
        self._numbers = count()

    def daemon(self, **settings: str) -> DaemonFork:
        """Return a daemon with a data directory of its own."""
        directory = self._directory / f"machine {next(self._numbers)}"
        directory.mkdir()
        environment = daemon_environment(self._network, self._dsn, directory)
        return DaemonFork(
            environment | {f"INDEXER_{name.upper()}": value for name, value in settings.items()}, directory
        )

    async def positions(self) -> Counter[int]:
        """Return how many processes own each position."""
        connection = await asyncpg.connect(self._dsn)
        try:
            rows = await connection.fetch(_OWNERS, BUCKETS)
        finally:
            await connection.close()
        return Counter(position for first, last in rows for position in range(first, last + 1))

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Fail if a position has two owners during the block."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def wait_until_owned(self) -> None:
        """Wait until each position has an owner."""

        async def owned() -> bool:
            return len(await self.positions()) == BUCKETS

        await until(owned)

    async def _watch(self) -> None:
        while True:
            positions = await self.positions()
            assert set(positions.values()) <= {1}, f"positions with two owners: {positions}"
            self.owners[len(positions)] += 1
            await asyncio.sleep(0.02)


async def wait_until_equal(network: LocalNetwork, dsn: str, shards: int) -> None:
    """Wait until the cursor of each shard is at the last message and the database is equal to the network."""
    store = await Store.open(dsn)
    differences: list[str] = []

    async def equal() -> bool:
        nonlocal differences
        differences = (await compare(network, store)).differences
        seqs = {cursor.shard: cursor.seq for cursor in await store.cursors()}
        last = network.relay.log[-1].seq
        return not differences and all(seqs.get(Shard(index, shards)) == last for index in range(shards))

    try:
        await until(equal, lambda: differences[:5])
    finally:
        await store.close()


@asynccontextmanager
async def acting(network: LocalNetwork, scenario: Scenario) -> AsyncIterator["asyncio.Task[None]"]:
    """Let the accounts write; yield the task that ends after the last step."""
    task = asyncio.create_task(act(network, scenario))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def act(network: LocalNetwork, scenario: Scenario) -> None:
    random = Random(33)
    for step in range(STEPS):
        if step and step % LOST_COMMITS == 0:
            lose_commit(network, random, step)
        scenario.perform(step, STEPS)
        await asyncio.sleep(STEP_SECONDS)


async def test_number_of_shards_changes_while_accounts_write(database: str, tmp_path: Path) -> None:
    """Two daemons hand over to three: the new ones wait until the old ones have drained."""
    async with LocalNetwork() as network, AsyncExitStack() as stack:
        machines, consumer = Machines(network, database, tmp_path), LogConsumer(database)
        await stack.enter_async_context(consumer.reading())
        await stack.enter_async_context(machines.watched())
        scenario = Scenario(network, seed=31, accounts=16)
        before = [machines.daemon(shard=f"{index}/2") for index in range(2)]
        after = [machines.daemon(shard=f"{index}/3") for index in range(3)]
        for daemon in before:
            await stack.enter_async_context(daemon.supervised())
        task = await stack.enter_async_context(acting(network, scenario))
        await machines.wait_until_owned()
        for daemon in after:
            await stack.enter_async_context(daemon.supervised())
        await until(lambda: all("shard-lock.waiting" in daemon.log_tail() for daemon in after))
        for daemon in before:
            await daemon.stop()
        await machines.wait_until_owned()
        await task
        await wait_until_equal(network, database, shards=3)
        await until(consumer.has_read_all)
        await assert_change_log_consistent(database)
        assert len(await machines.positions()) == BUCKETS
        assert machines.owners[BUCKETS] > 0


async def test_resync_workers_join_and_leave_while_accounts_write(database: str, tmp_path: Path) -> None:
    """One worker is killed and one is stopped under load; the others take over their repos."""
    async with LocalNetwork() as network, AsyncExitStack() as stack:
        machines, consumer = Machines(network, database, tmp_path), LogConsumer(database)
        await stack.enter_async_context(consumer.reading())
        await stack.enter_async_context(machines.watched())
        scenario = Scenario(network, seed=32, accounts=16)
        for index in range(2):
            await stack.enter_async_context(machines.daemon(shard=f"{index}/2", roles="live").supervised())
        workers = [machines.daemon(roles="resync") for _ in range(4)]
        task = await stack.enter_async_context(acting(network, scenario))
        for worker in workers[:2]:
            await stack.enter_async_context(worker.supervised())
        await until(lambda: network.pdses[0].requests[GET_REPO] > 0)
        workers[0].kill()
        await stack.enter_async_context(workers[2].supervised())
        await workers[1].stop()
        await stack.enter_async_context(workers[3].supervised())
        await task
        await wait_until_equal(network, database, shards=2)
        await until(consumer.has_read_all)
        await assert_change_log_consistent(database)
        assert machines.owners[BUCKETS] > 0, "workers own no buckets, and the others own all"
