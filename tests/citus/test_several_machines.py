"""Daemons on several machines share one cluster, whose nodes are killed. Here the machines are directories."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from time import monotonic

import asyncpg
import pytest

from indexer.cli.demo import compare
from indexer.db import Database
from indexer.demo.scenario import Scenario
from indexer.sync.shard import BUCKETS
from tests.background import running
from tests.citus.own_cluster import own_distributed_cluster
from tests.citus_cluster import COORDINATOR, WORKERS, Cluster
from tests.daemon_forks import DaemonFork, start_fork_server
from tests.daemon_process import daemon_environment
from tests.database_checks import assert_change_log_consistent, fetch
from tests.faulty_network import FaultyNetwork
from tests.lost_commits import active_account, lose_commit
from tests.passed_time import EXPIRE_LEASES, EXPIRE_WAITS
from tests.waiting import until

pytestmark = [pytest.mark.proof("cluster"), pytest.mark.timeout(600)]

STEPS = 240
LOST_COMMITS = 4
"""One of so many steps loses a commit, so that its repo needs a resync."""
STEP_SECONDS = 0.05
MAX_UNOWNED_SECONDS = 10.0
"""Seconds for which a position may have no owner when daemons hand over. Seen: 1.2, beside other programs."""

SEQ = "select coalesce(max(seq), 0) from indexer.cursor"
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
        unowned_seconds: The longest time for which a position had no owner between two owners.
        daemons: All daemons that were created.
    """

    def __init__(self, network: FaultyNetwork, dsn: str, directory: Path) -> None:
        self.owners = Counter[int]()
        self.unowned_seconds = 0.0
        self.daemons: list[DaemonFork] = []
        self._network = network
        self._dsn = dsn
        self._directory = directory
        self._numbers = count()

    def daemon(self, **settings: str) -> DaemonFork:
        """Return a daemon with a data directory of its own."""
        directory = self._directory / f"machine {next(self._numbers)}"
        directory.mkdir()
        environment = daemon_environment(self._network, self._dsn, directory)
        environment |= {f"INDEXER_{name.upper()}": value for name, value in settings.items()}
        self.daemons.append(DaemonFork(environment, directory))
        return self.daemons[-1]

    def log_tails(self) -> str:
        """Return the ends of the logs of all daemons."""
        return "\n".join(f"{daemon.log}:\n{daemon.log_tail()}" for daemon in self.daemons)

    async def until(self, condition: Callable[[], Awaitable[bool] | bool]) -> None:
        """Wait until the condition holds; fail with the ends of all logs."""
        await until(condition, self.log_tails)

    async def positions(self) -> Counter[int]:
        """Return how many processes own each position."""
        rows = await fetch(self._dsn, _OWNERS, BUCKETS)
        return Counter(position for first, last in rows for position in range(first, last + 1))

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Fail if a position has two owners during the block."""
        async with running(self._watch()):
            yield

    async def wait_until_owned(self) -> None:
        """Wait until each position has an owner."""

        async def owned() -> bool:
            return len(await self.positions()) == BUCKETS

        await self.until(owned)

    async def _watch(self) -> None:
        owned_at: dict[int, float] = {}
        while True:
            now, positions = monotonic(), await self.positions()
            assert set(positions.values()) <= {1}, f"positions with two owners: {positions}"
            self.owners[len(positions)] += 1
            self.unowned_seconds = max([self.unowned_seconds, *(now - owned_at.get(p, now) for p in positions)])
            owned_at |= dict.fromkeys(positions, now)
            await asyncio.sleep(0.02)


def has_logged(daemon: DaemonFork, event: str) -> bool:
    """Return True if a process of the daemon has logged this event."""
    return daemon.log.exists() and f'"{event}"' in daemon.log.read_text()


async def wait_until_equal(machines: Machines, network: FaultyNetwork, dsn: str, shards: int) -> None:
    """Wait until the cursor of each shard is at the last message and the database is equal to the network."""
    connection, db = await asyncpg.connect(dsn), await Database.open(dsn)
    await connection.execute(EXPIRE_LEASES)  # also of the workers that were killed
    differences: list[str] = []

    async def equal() -> bool:
        nonlocal differences
        await connection.execute(EXPIRE_WAITS)
        differences = await compare(network, db)
        seqs = {cursor.shard: cursor.seq for cursor in await db.gaps.cursors()}
        last = network.relay.log[-1].seq
        return not differences and all(seqs.get(f"{index}/{shards}") == last for index in range(shards))

    try:
        await until(equal, lambda: (differences[:5], machines.log_tails()))
    finally:
        await db.close()
        await connection.close()


async def act(network: FaultyNetwork, scenario: Scenario, enough: asyncio.Event) -> None:
    """Let the accounts write all steps of the scenario, and then go on until there was enough load."""
    random = Random(33)
    for step in count():
        if step >= STEPS and enough.is_set():
            return
        if step and step % LOST_COMMITS == 0:
            lose_commit(active_account(network, random))
        if step < STEPS:
            scenario.perform(step, STEPS)
        await asyncio.sleep(STEP_SECONDS)


async def test_number_of_shards_changes_while_accounts_write(
    database: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Two daemons hand over to three: the new ones wait until the old ones have drained."""
    async with FaultyNetwork() as network, AsyncExitStack() as stack:
        machines = Machines(network, database, tmp_path)
        await stack.enter_async_context(machines.watched())
        scenario = Scenario(network, seed=31, accounts=16)
        before = [machines.daemon(shard=f"{index}/2") for index in range(2)]
        after = [machines.daemon(shard=f"{index}/3") for index in range(3)]
        for daemon in before:
            await stack.enter_async_context(daemon.supervised())
        enough = asyncio.Event()
        [load] = await stack.enter_async_context(running(act(network, scenario, enough)))
        await machines.wait_until_owned()
        for daemon in after:
            await stack.enter_async_context(daemon.supervised())
        await machines.until(lambda: all(has_logged(daemon, "shard-lock.waiting") for daemon in after))
        assert not any(has_logged(daemon, "shard-lock.acquired") for daemon in after), "the buckets have owners"
        for daemon in before:
            await daemon.stop()
            assert has_logged(daemon, "daemon.draining")
        await machines.wait_until_owned()
        enough.set()
        await load
        await wait_until_equal(machines, network, database, shards=3)
        await assert_change_log_consistent(database)
        assert len(await machines.positions()) == BUCKETS
        assert machines.owners[BUCKETS] > 0
        record_property("seconds without an owner", round(machines.unowned_seconds, 1))
        assert 0 < machines.unowned_seconds < MAX_UNOWNED_SECONDS


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run a cluster that belongs to this test, with a distributed database."""
    with own_distributed_cluster(tmp_path_factory) as cluster:
        yield cluster


KILLS = (WORKERS[:1], (COORDINATOR,), WORKERS, (COORDINATOR, WORKERS[0]))
"""The nodes that are killed together."""


async def test_nodes_are_killed_while_accounts_write(cluster: Cluster, tmp_path: Path) -> None:
    """A daemon and a machine with the other roles go on as soon as the nodes answer again, and nothing is lost."""
    dsn = cluster.url_of(COORDINATOR)
    async with FaultyNetwork() as network, AsyncExitStack() as stack:
        machines, enough = Machines(network, dsn, tmp_path), asyncio.Event()
        for settings in ({"roles": "live"}, {"roles": "resync"}):
            await stack.enter_async_context(machines.daemon(**settings).supervised())
        load = act(network, Scenario(network, seed=32, accounts=16), enough)
        [writing] = await stack.enter_async_context(running(load))
        for nodes in KILLS:
            [(before,)] = await fetch(dsn, SEQ)

            async def goes_on(before: int = before) -> bool:
                return bool((await fetch(dsn, SEQ))[0][0] > before)

            await machines.until(goes_on)
            await asyncio.to_thread(cluster.kill_and_start, nodes)
        enough.set()
        await writing
        await wait_until_equal(machines, network, dsn, shards=1)
        await assert_change_log_consistent(dsn)
