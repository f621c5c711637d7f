"""A local network, a daemon on a Citus cluster, and what happens when some of them are killed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from time import monotonic
from typing import NamedTuple

import asyncpg
import httpx

from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.scenario import Scenario
from tests.background import running
from tests.citus.log_consumer import LogConsumer
from tests.citus.own_cluster import distribute_new_schema
from tests.citus_cluster import COORDINATOR, WORKERS, Cluster
from tests.daemon_forks import DaemonFork
from tests.daemon_process import daemon_environment
from tests.database_checks import assert_change_log_consistent, wait_until_equal
from tests.lost_commits import active_account, lose_commit
from tests.passed_time import EXPIRE_LEASES, EXPIRE_WAITS
from tests.waiting import until

DAEMON = "daemon"
IN_DOUBT = "are prepared and not complete on nodes of the cluster"
"""The message of `/readyz` while a prepared transaction is unresolved."""
LOST_COMMITS = 0.5
"""Probability that the relay loses a commit before a death, so that its repo needs a resync."""
ACT_SECONDS = 0.1
HELD = "nobody"
"""The name of a standby that does not exist: COMMIT and PREPARE TRANSACTION of the node wait for it."""

COORDINATOR_GROUP = "0"
"""Citus names a prepared transaction `citus_<group>_<process ID>_<number>_<connection>`, after who began it."""
_PREPARED = "select gid from pg_prepared_xacts where gid like 'citus%'"
_WAITING = "select pid, query from pg_stat_activity where wait_event = 'SyncRep'"
_RUNNING = "select transaction_number, process_id from get_all_active_transactions() where not worker_query"


class InDoubt(NamedTuple):
    """The time in which the daemon was not ready after a node with a prepared transaction was released.

    Attributes:
        seconds: All of this time.
        seconds_in_use: The part of it in which a running transaction had the number of a prepared one, because
            the coordinator counts from 1 again when it starts. Citus completes the prepared transaction only
            afterwards. If the running one waits for it, this takes until a time limit ends the running one.
    """

    seconds: float
    seconds_in_use: float


class CrashWorld:
    """The network, the cluster, the daemon and a consumer of the change log.

    Attributes:
        deaths: How often each set of victims was killed together.
        in_doubt: One for each call of `release_after_report`.
    """

    def __init__(self, cluster: Cluster, network: LocalNetwork, directory: Path, *, seed: int, steps: int) -> None:
        self.cluster = cluster
        self.network = network
        self.dsn = cluster.url_of(COORDINATOR)
        environment = daemon_environment(network, self.dsn, directory) | {"INDEXER_RESYNC_WORKERS": "2"}
        self.daemon = DaemonFork(environment, directory)
        self.consumer = LogConsumer(self.dsn)
        self.deaths = Counter[tuple[str, ...]]()
        self.in_doubt: list[InDoubt] = []
        self.random = Random(seed)
        self._scenario = Scenario(network, seed=seed)
        self._step = 0
        self._steps = steps

    def act(self, steps: int) -> None:
        """Let accounts write; sometimes the relay loses a commit."""
        for _ in range(steps):
            if self._step and self.random.random() < LOST_COMMITS / steps:
                lose_commit(active_account(self.network, self.random))
            self._scenario.perform(self._step, self._steps)
            self._step += 1

    async def wait_for_progress(self) -> None:
        """Wait until the daemon has written something that is newer than this call."""
        before = await self._cursor()

        async def beyond() -> bool:
            return await self._cursor() > before

        await until(beyond, self.daemon.log_tail)

    async def kill(self, victims: Sequence[str]) -> None:
        """Kill processes and nodes at the same time."""
        for victim in victims:
            if victim == DAEMON:
                self.daemon.kill()
            else:
                self.cluster.kill(victim)
        self.deaths[tuple(victims)] += 1

    async def restart(self, victims: Sequence[str]) -> None:
        """Start them again, the nodes first."""
        nodes = [victim for victim in victims if victim != DAEMON]
        await asyncio.gather(*(asyncio.to_thread(self.cluster.start, node) for node in nodes))
        if DAEMON in victims:
            self.daemon.start()

    async def settle(self) -> None:
        """Wait until the database is equal to the network; compare the change log with it and with the consumer."""
        self.daemon.kill()
        await self.execute(EXPIRE_LEASES)
        self.daemon.start()
        async with running(self._expire_waits()):
            await wait_until_equal(self.network, self.dsn, min_records=20)
        await until(self._nothing_is_prepared)
        await until(self.consumer.has_read_all, self.daemon.log_tail)
        await assert_change_log_consistent(self.dsn)

    async def hold_commit(self) -> None:
        """Let the coordinator keep the answer to a COMMIT that it has decided, and of which no worker knows."""
        await self._set_standby(COORDINATOR, HELD)

        async def waits() -> bool:
            self.act(1)
            await asyncio.sleep(ACT_SECONDS)
            waiting = await self.execute(_WAITING)
            names = [gid for worker in WORKERS for gid in await self._prepared(worker)]
            return any(gid.startswith(f"citus_0_{row['pid']}_") for row in waiting for gid in names)

        await until(waits, self.daemon.log_tail)

    async def hold_prepare(self, worker: str) -> None:
        """Let a worker keep the answer to PREPARE TRANSACTION, so that the coordinator does not decide."""
        await self._set_standby(worker, HELD)

        async def waits() -> bool:
            self.act(1)  # an account whose repo is on this worker has to write
            await asyncio.sleep(ACT_SECONDS)
            waiting = await self.execute(_WAITING, node=worker)
            names = await self._prepared(worker)
            return any(gid in row["query"] for row in waiting for gid in names)

        await until(waits, self.daemon.log_tail)

    async def release(self, node: str) -> None:
        await self._set_standby(node, "")

    async def release_after_report(self, node: str) -> None:
        """Release the node when `/readyz` names the prepared transaction; wait until the daemon is ready again."""
        answer = ""

        async def answers(status: int, text: str) -> bool:
            nonlocal answer
            found, answer = await self._readyz()
            return found == status and text in answer

        await until(lambda: answers(503, IN_DOUBT), lambda: (answer, self.daemon.log_tail()))
        await self.release(node)
        released_at = asked_at = monotonic()
        seconds_in_use = 0.0

        async def is_ready() -> bool:
            nonlocal asked_at, seconds_in_use
            before, asked_at = asked_at, monotonic()
            if await self._number_is_in_use():
                seconds_in_use += asked_at - before
            return await answers(200, "ok")

        await until(is_ready, lambda: (answer, self.daemon.log_tail()))
        self.in_doubt.append(InDoubt(monotonic() - released_at, seconds_in_use))

    async def execute(self, statement: str, *values: object, node: str = COORDINATOR) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self.cluster.url_of(node))
        try:
            rows: list[asyncpg.Record] = await connection.fetch(statement, *values)
            return rows
        finally:
            await connection.close()

    async def _readyz(self) -> tuple[int, str]:
        """Return the status and the text of `/readyz` of the daemon that was started last; 0 if it does not answer."""
        try:
            async with httpx.AsyncClient() as client:
                response = await client.get(f"{self.daemon.health_url()}/readyz")
        except httpx.TransportError as error:
            return 0, repr(error)
        return response.status_code, response.text

    async def _set_standby(self, node: str, name: str) -> None:
        await self.execute(f"alter system set synchronous_standby_names = '{name}'", node=node)
        await self.execute("select pg_reload_conf()", node=node)

    async def _nothing_is_prepared(self) -> bool:
        return not any([await self._prepared(worker) for worker in WORKERS])

    async def _number_is_in_use(self) -> bool:
        """Return True if a running transaction of the coordinator has the number of another one that is prepared."""
        names = [gid.split("_") for worker in WORKERS for gid in await self._prepared(worker)]
        prepared = {(int(number), int(pid)) for _, group, pid, number, _ in names if group == COORDINATOR_GROUP}
        running = {(number, pid) for number, pid in await self.execute(_RUNNING)}
        return any(number == used and pid != owner for number, pid in prepared for used, owner in running)

    async def _expire_waits(self) -> None:
        while True:
            await self.execute(EXPIRE_WAITS)
            await asyncio.sleep(1)

    async def _prepared(self, node: str) -> list[str]:
        """Return the names of the transactions that are prepared on a node."""
        return [gid for (gid,) in await self.execute(_PREPARED, node=node)]

    async def _cursor(self) -> int:
        [(seq,)] = await self.execute("select coalesce(max(seq), 0) from indexer.cursor")
        return int(seq)


@asynccontextmanager
async def crash_world(cluster: Cluster, directory: Path, *, seed: int, steps: int) -> AsyncIterator[CrashWorld]:
    """Distribute the tables, and run the daemon and the consumer during the block."""
    dsn = cluster.url_of(COORDINATOR)
    await distribute_new_schema(dsn)
    async with LocalNetwork() as network:
        world = CrashWorld(cluster, network, directory, seed=seed, steps=steps)
        async with world.daemon.supervised(), world.consumer.reading():
            yield world
