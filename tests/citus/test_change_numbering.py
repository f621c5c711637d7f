"""Changes of a distributed database get their numbers when every node shows their effects, whatever is killed.

The tests stop and kill nodes, so they have a cluster of their own.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import asyncpg
import pytest

from indexer.cluster.numbering import ChangeNumbering, numbering_session
from indexer.db import Database
from indexer.db.change_log import log_changes
from indexer.db.change_log_reads import CHANNEL
from indexer.db.change_log_segments import TrimPlan, trim
from indexer.sync.shard import bucket_of
from indexer.telemetry.conditions import CLUSTER_NODE_UNAVAILABLE, TRANSACTIONS_IN_DOUBT, Conditions
from tests.background import running
from tests.citus.own_cluster import own_distributed_cluster
from tests.citus_cluster import COORDINATOR, WORKERS, Cluster
from tests.db.change_log_helpers import after, change, connected, log, rkeys
from tests.db.repo_rows import did, insert, synchronized
from tests.waiting import until

pytestmark = pytest.mark.proof("cluster")

NODE_OF = """
    select groupid from pg_dist_placement
    where shardid = get_shard_id_for_distribution_column('indexer.repo', $1::smallint)
"""
WRITE = "update indexer.repo set version = version + 1 where did = $1 and bucket = $2 returning version"
VERSION = "select version from indexer.repo where did = $1 and bucket = $2"
PREPARED = "select count(*) from pg_prepared_xacts"
WAITING_FOR_STANDBY = "select count(*) from pg_stat_activity where wait_event = 'SyncRep' and pid = $1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run a cluster with a distributed database."""
    with own_distributed_cluster(tmp_path_factory) as cluster:
        yield cluster


@pytest.fixture
async def database(cluster: Cluster) -> AsyncIterator[str]:
    yield cluster.url_of(COORDINATOR)
    for node in cluster.names:  # a test that failed may have stopped them
        await release_commits(cluster, node)


async def create_repos(db: Database, sql: asyncpg.Connection, count: int = 1) -> list[str]:
    """Insert `count` repos on each worker, each with a counter (`version`); return their names, by worker.

    Each has a bucket of its own. What the log says about them is numbered.
    """
    found: dict[int, dict[int, str]] = defaultdict(dict)
    while min(len(found[1]), len(found[2])) < count:
        name = random.randbytes(8).hex()
        bucket = bucket_of(did(name))
        found[await sql.fetchval(NODE_OF, bucket)][bucket] = name
    names = [name for node in (1, 2) for name in list(found[node].values())[:count]]
    await insert(db, *(synchronized(name) for name in names))
    await number_once(db)
    return names


async def write(connection: asyncpg.Connection, *names: str) -> None:
    """Add one to the counter of each repo, and log the new number, in one transaction with savepoints."""
    async with connection.transaction():
        for name in names:
            async with connection.transaction():
                version = await connection.fetchval(WRITE, did(name), bucket_of(did(name)))
                await log_changes(connection, [change(name, version)])


async def version_of(sql: asyncpg.Connection, name: str) -> int:
    version: int = await sql.fetchval(VERSION, did(name), bucket_of(did(name)))
    return version


async def stop_commits(cluster: Cluster, node: str) -> None:
    """Let each commit on the node wait after it is stored and before it is visible: for a standby that never comes."""
    await _set_standby(cluster, node, "nobody")


async def release_commits(cluster: Cluster, node: str) -> None:
    await _set_standby(cluster, node, "")


async def _set_standby(cluster: Cluster, node: str, name: str) -> None:
    async with connected(cluster.url_of(node)) as connection:
        await connection.execute(f"alter system set synchronous_standby_names = '{name}'")
        await connection.execute("select pg_reload_conf()")

    async def is_set() -> bool:
        async with connected(cluster.url_of(node)) as connection:
            return bool(await connection.fetchval("show synchronous_standby_names") == name)

    await until(is_set)


async def count(cluster: Cluster, node: str, query: str, *arguments: object) -> int:
    async with connected(cluster.url_of(node)) as connection:
        number: int = await connection.fetchval(query, *arguments)
        return number


async def is_prepared(cluster: Cluster) -> bool:
    return await count(cluster, WORKERS[0], PREPARED) == 1


async def has_no_prepared(cluster: Cluster) -> bool:
    return not any([await count(cluster, worker, PREPARED) for worker in WORKERS])


async def waits_for_standby(cluster: Cluster, session: asyncpg.Connection) -> bool:
    return await count(cluster, COORDINATOR, WAITING_FOR_STANDBY, session.get_server_pid()) == 1


async def has_unnumbered(sql: asyncpg.Connection, number: int) -> bool:
    return bool(await sql.fetchval("select count(*) from indexer.unnumbered_batch") == number)


async def has_changes(sql: asyncpg.Connection, seq: int, number: int) -> bool:
    return len(await after(sql, seq)) >= number


@asynccontextmanager
async def numbering(db: Database, conditions: Conditions | None = None) -> AsyncIterator[None]:
    """Run the stage that numbers changes during the block, as a daemon does."""
    async with running(ChangeNumbering(db, conditions or Conditions()).run()):
        yield


async def number_once(db: Database) -> None:
    async with numbering_session(db) as session:
        assert await ChangeNumbering(db, Conditions()).number(session) == []


async def latest(sql: asyncpg.Connection) -> int:
    seq: int = await sql.fetchval("select atproto.latest_seq()")
    return seq


async def test_changes_have_no_number_before_a_process_numbers_them(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    seq = await latest(sql)
    await log(sql, change(1), change(2))
    assert await after(sql, seq) == []
    assert await sql.fetchval("select count(*) from atproto.changes where seq is null") == 0
    async with connected(database) as listening:
        notified = asyncio.Event()
        await listening.add_listener(CHANNEL, lambda *_: notified.set())
        await number_once(db)
        await asyncio.wait_for(notified.wait(), 30)
    assert [row["seq"] for row in await after(sql, seq)] == [seq + 1, seq + 2]


async def test_batches_are_numbered_in_the_order_of_their_commits(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    [name, _], seq = await create_repos(db, sql), await latest(sql)
    async with connected(database) as resync, resync.transaction():
        await log_changes(resync, [change(name, 0)])  # its batch is the first one, as that of a resync
        await write(sql, name)
        await resync.fetchval(WRITE, did(name), bucket_of(did(name)))
    await number_once(db)
    assert rkeys(await after(sql, seq)) == ["2", "0"]


async def test_last_changes_are_numbered_as_far_as_they_can_be_within_a_second(
    cluster: Cluster, database: str, db: Database, sql: asyncpg.Connection
) -> None:
    [name, other], seq = await create_repos(db, sql), await latest(sql)
    last = ChangeNumbering(db, Conditions())
    for number in range(1_003):  # more than one call numbers
        await log(sql, change("backlog", number))
    await last.finish()
    assert await latest(sql) == seq + 1_003
    async with connected(database) as writer, connected(database) as another_writer:
        commit = await start_commit(cluster, writer, name)
        await stop_commits(cluster, WORKERS[0])
        await release_commits(cluster, COORDINATOR)
        await write(another_writer, other)
        await last.finish()
        assert [row["did"] for row in await after(sql, seq + 1_003)] == [did(other)], "worker 1 has not completed it"
        await release_commits(cluster, WORKERS[0])
        await commit
    await last.finish()
    assert await latest(sql) == seq + 1_005


async def test_segment_is_not_truncated_before_its_changes_have_numbers(db: Database, sql: asyncpg.Connection) -> None:
    await log(sql, change("numbered"))
    await number_once(db)
    seq, segment = await latest(sql), await sql.fetchval("select current_segment from indexer.change_log")
    await log(sql, change("unnumbered"))
    plan = TrimPlan((), (segment,), (segment + 1) % 8)
    assert (await trim(sql, plan)).truncate == ()
    await number_once(db)
    assert len(await after(sql, seq)) == 1
    assert (await trim(sql, plan)).truncate == (segment,), "nothing else retained it"


async def start_commit(cluster: Cluster, writer: asyncpg.Connection, *names: str) -> asyncio.Task[None]:
    """Begin to write repos, also of worker 1; return when that is prepared there, and stored but not visible here."""
    await stop_commits(cluster, COORDINATOR)
    commit = asyncio.create_task(write(writer, *names))
    await until(lambda: is_prepared(cluster))
    await until(lambda: waits_for_standby(cluster, writer))
    return commit


@pytest.mark.parametrize("phase", ["before", "during"])
async def test_number_appears_after_the_effect_although_a_worker_is_killed_between_the_phases(
    cluster: Cluster, database: str, db: Database, sql: asyncpg.Connection, phase: str
) -> None:
    """Kill worker 1 before it gets COMMIT PREPARED, and while it executes that."""
    [name, other], seq, conditions = await create_repos(db, sql), await latest(sql), Conditions()
    async with numbering(db, conditions), connected(database) as writer:
        commit = await start_commit(cluster, writer, name)
        if phase == "before":
            await asyncio.to_thread(cluster.kill, WORKERS[0])
            await release_commits(cluster, COORDINATOR)
        else:
            await stop_commits(cluster, WORKERS[0])
            await release_commits(cluster, COORDINATOR)
            await until(lambda: has_unnumbered(sql, 1))
            assert await version_of(sql, name) == 1, "the coordinator has committed, and worker 1 does not show it"
            await until(lambda: conditions.is_active(TRANSACTIONS_IN_DOUBT))
            await asyncio.to_thread(cluster.kill, WORKERS[0])
        await commit  # the coordinator has committed
        await until(lambda: conditions.is_active(CLUSTER_NODE_UNAVAILABLE, f"127.0.0.1:{cluster.ports[WORKERS[0]]}"))
        async with connected(database) as another_writer:
            await write(another_writer, other)
            await until(lambda: has_changes(sql, seq, 1))
        assert [row["did"] for row in await after(sql, seq)] == [did(other)], "what wrote only worker 2 does not wait"
        await asyncio.to_thread(cluster.start, WORKERS[0])
        await release_commits(cluster, WORKERS[0])
        async with connected(database) as reader:
            await until(lambda: has_changes(sql, seq, 2))
            assert await version_of(reader, name) == 2
        await until(lambda: not conditions.active(), conditions.active)


async def test_later_change_of_a_repo_waits_for_a_transaction_that_is_complete_only_on_its_node(
    cluster: Cluster, database: str, db: Database, sql: asyncpg.Connection
) -> None:
    [name, other, on_worker_2, _], seq = await create_repos(db, sql, 2), await latest(sql)
    async with connected(database) as writer, connected(database) as another_writer:
        commit = await start_commit(cluster, writer, name, on_worker_2)
        await stop_commits(cluster, WORKERS[1])
        await release_commits(cluster, COORDINATOR)
        await write(another_writer, name)  # it waits for the lock of the first one on worker 1
        await write(another_writer, other)
        assert not commit.done(), "worker 2 has not completed it"
        await number_once(db)
        assert [row["did"] for row in await after(sql, seq)] == [did(other)]
        await release_commits(cluster, WORKERS[1])
        await commit
    async with numbering(db):
        await until(lambda: has_changes(sql, seq, 4))
    changes = [(row["did"], row["rkey"]) for row in await after(sql, seq)]
    assert changes == [(did(other), "2"), (did(name), "2"), (did(on_worker_2), "2"), (did(name), "3")]


async def test_number_appears_after_the_effect_although_the_coordinator_is_killed_between_the_phases(
    cluster: Cluster, database: str, db: Database, sql: asyncpg.Connection
) -> None:
    [name, _], seq = await create_repos(db, sql), await latest(sql)
    async with numbering(db), connected(database) as writer:
        commit = await start_commit(cluster, writer, name)
        await asyncio.to_thread(cluster.kill, COORDINATOR)
        with pytest.raises((asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError)):
            await commit
        await asyncio.to_thread(cluster.start, COORDINATOR)
        await release_commits(cluster, COORDINATOR)
        async with connected(database) as reader:
            await until(lambda: has_changes(reader, seq, 1))
            assert await version_of(reader, name) == 2
            assert len(await after(reader, seq)) == 1


async def test_number_appears_although_the_process_is_killed_during_its_commit(
    cluster: Cluster, database: str, db: Database, sql: asyncpg.Connection
) -> None:
    [name, _], seq = await create_repos(db, sql), await latest(sql)
    async with numbering(db):
        async with connected(database) as writer:
            commit = await start_commit(cluster, writer, name)
        with suppress(asyncpg.InterfaceError, asyncpg.PostgresConnectionError):
            await commit
        await release_commits(cluster, COORDINATOR)
        await until(lambda: has_changes(sql, seq, 1))
        assert await version_of(sql, name) == 2


KILLS = (WORKERS[:1], WORKERS[1:], (COORDINATOR,), WORKERS, (COORDINATOR, WORKERS[0]))
"""The nodes that are killed together."""
GONE = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)


class Traffic:
    """Processes that write repos and follow the change log, through all failures.

    Attributes:
        commits: How many commits have succeeded.
        received: The changes that the consumer has received: DID and number.
    """

    def __init__(self, dsn: str, names: list[str], seq: int) -> None:
        self._dsn = dsn
        self._names = names
        self._seq = seq
        self.commits = 0
        self.received: list[tuple[str, int]] = []

    async def write(self, chance: random.Random) -> None:
        """Write one or two repos at a time; roll some back."""
        while True:
            with suppress(*GONE):
                async with connected(self._dsn) as connection:
                    while True:
                        names = sorted(chance.sample(self._names, chance.choice([1, 1, 2])))
                        if chance.random() < 0.1:
                            await self._roll_back(connection, names)
                        else:
                            await write(connection, *names)
                            self.commits += 1
            await asyncio.sleep(0.1)

    async def _roll_back(self, connection: asyncpg.Connection, names: list[str]) -> None:
        transaction = connection.transaction()
        await transaction.start()
        await write(connection, *names)
        await transaction.rollback()

    async def follow(self) -> None:
        """Receive changes, and check that the snapshot that shows a number shows its effect."""
        while True:
            with suppress(*GONE):
                async with connected(self._dsn) as connection:
                    while True:
                        await self._receive(connection)
                        await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)

    async def _receive(self, connection: asyncpg.Connection) -> None:
        async with connection.transaction(isolation="repeatable_read"):
            rows = await after(connection, self._seq)
            newest = {row["did"]: int(row["rkey"]) for row in rows}
            shown = {name: await version_of(connection, name) for name in self._names if did(name) in newest}
        for name, version in shown.items():
            assert version >= newest[did(name)], "the effect is visible"
        self.received += [(row["did"], int(row["rkey"])) for row in rows]
        self._seq = max([self._seq, *(row["seq"] for row in rows)])


async def test_no_number_is_early_late_or_out_of_order_while_nodes_are_killed(
    cluster: Cluster, database: str, db: Database, sql: asyncpg.Connection
) -> None:
    names, seq = await create_repos(db, sql, 3), await latest(sql)
    traffic, seed = Traffic(database, names, seq), random.randrange(1 << 32)
    async with numbering(db), numbering(db), running(traffic.follow()):
        async with running(*(traffic.write(random.Random(seed + number)) for number in range(3))):
            for nodes in KILLS:
                await more_commits(traffic)
                await asyncio.to_thread(cluster.kill_and_start, nodes)
            await more_commits(traffic)
        async with connected(database) as reader:
            await until(lambda: has_unnumbered(reader, 0))
            await until(lambda: has_no_prepared(cluster))
            rows = await after(reader, seq, 1_000_000)
            await until(lambda: len(traffic.received) >= len(rows))
            versions = {did(name): await version_of(reader, name) for name in names}
    assert traffic.received == [(row["did"], int(row["rkey"])) for row in rows], f"no late number (seed {seed})"
    for repo, version in versions.items():
        logged = [number for changed, number in traffic.received if changed == repo]
        assert logged == list(range(2, version + 1)), f"complete and in order (seed {seed})"


async def more_commits(traffic: Traffic, count: int = 20) -> None:
    commits = traffic.commits
    await until(lambda: traffic.commits >= commits + count)
