"""A worker or a connection to it is lost while the coordinator answers. The nodes encrypt their connections."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from indexer.db import Database, DatabaseError
from indexer.db.database_errors import database_errors
from indexer.live.batch_writer import MAX_FAILURES
from indexer.sync.shard import bucket_of
from tests.citus.own_cluster import own_distributed_cluster
from tests.citus_cluster import COORDINATOR, WORKERS, Cluster
from tests.daemon.running_daemon import POST, post, running_daemon
from tests.database_proxy import DatabaseProxy
from tests.db.change_log_helpers import connected
from tests.waiting import until

pytestmark = [pytest.mark.proof("cluster"), pytest.mark.timeout(600)]

FIRST = WORKERS[0]
MAX_ATTEMPTS = 30
NODE_PORT_OF = """
    select nodeport from pg_dist_placement join pg_dist_node using (groupid)
    where shardid = get_shard_id_for_distribution_column('indexer.repo', $1::smallint)
"""
ENCRYPTED = """
    select count(*) from pg_stat_ssl join pg_stat_activity using (pid)
    where ssl and application_name like 'citus_internal%'
"""
LINE_ON_NODE = """
    select min(id) from generate_series(1, 100) id
    join pg_dist_placement on shardid = get_shard_id_for_distribution_column('line', id)
    join pg_dist_node using (groupid) where nodeport = $1
"""
TO_ALL_NODES = "insert into line select generate_series($1::integer, $1 + 100)"
TO_ONE_NODE = "insert into line values ($1)"
UPDATE_NODE = """
    select citus_update_node(nodeid, '127.0.0.1', $1) from pg_dist_node where nodeport <> all($2::integer[])
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"citus.node_conninfo": "sslmode=require"}
    with own_distributed_cluster(tmp_path_factory, settings) as cluster:
        asyncio.run(create_lines(cluster.url_of(COORDINATOR)))
        yield cluster


async def create_lines(dsn: str) -> None:
    async with connected(dsn) as sql:
        await sql.execute("create table line (id int)")
        await sql.execute("select create_distributed_table('line', 'id', shard_count := 4)")


async def test_messages_of_repos_on_a_lost_worker_wait_for_it_and_are_not_rejected(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the coordinator answers after each of the failures that would make a message the cause of an error."""
    dsn, answers = cluster.url_of(COORDINATOR), list[bool]()
    answers_after = Database.answers_after

    async def recorded(db: Database, error: DatabaseError) -> bool:
        answers.append(await answers_after(db, error))
        return answers[-1]

    monkeypatch.setattr(Database, "answers_after", recorded)
    async with running_daemon(dsn, tmp_path) as daemon, connected(dsn) as sql:
        accounts = [daemon.create_account(f"a{number}.test") for number in range(20)]
        await daemon.wait_until_equal()
        ports = [await sql.fetchval(NODE_PORT_OF, bucket_of(account.did)) for account in accounts]
        lost = [account for account, port in zip(accounts, ports, strict=True) if port == cluster.ports[FIRST]]
        assert 0 < len(lost) < len(accounts)
        await asyncio.to_thread(cluster.kill, FIRST)
        lost[0].create(POST, post("while the worker is gone"))
        rejected = daemon.stages.metrics.registry.get_sample_value
        await until(
            lambda: len(answers) > MAX_FAILURES or rejected("indexer_rejected_total", {"reason": "store-failed"}) == 1
        )
        await asyncio.to_thread(cluster.start, FIRST)
        await daemon.wait_until_equal()
        assert await daemon.dead_letters() == []
        assert not all(answers), "a database of which a node is gone does not answer"
        assert len(answers) > MAX_FAILURES


@pytest.mark.parametrize(("insert", "text"), [(TO_ALL_NODES, "SSL "), (TO_ONE_NODE, "could not commit transaction")])
async def test_lost_encrypted_connection_to_a_node_is_a_transient_error(
    cluster: Cluster, insert: str, text: str
) -> None:
    """Citus reports most of them as internal errors, which have only a text: another one if its first write fails."""
    proxy, errors = DatabaseProxy(cluster.url_of(FIRST)), list[str]()
    async with proxy.serve(), connected(cluster.url_of(COORDINATOR)) as sql:
        line = await sql.fetchval(LINE_ON_NODE, cluster.ports[FIRST])
        await use_address(sql, cluster, int(proxy.dsn.rpartition(":")[2].partition("/")[0]))
        try:
            while not any(error.startswith("InternalServerError") and text in error for error in errors):
                errors.append(await error_of_commit(cluster, proxy, insert, line))
                assert len(errors) < MAX_ATTEMPTS, errors
        finally:
            await use_address(sql, cluster, cluster.ports[FIRST])


async def error_of_commit(cluster: Cluster, proxy: DatabaseProxy, insert: str, line: int) -> str:
    """Insert lines, break the connection of the nodes, and commit; return the text of the transient error."""
    async with connected(cluster.url_of(COORDINATOR)) as session, connected(cluster.url_of(FIRST)) as node:
        await session.execute("begin")
        await session.execute(insert, line)
        assert await node.fetchval(ENCRYPTED) > 0
        proxy.refuse()
        proxy.open()
        with pytest.raises(DatabaseError) as raised, database_errors():
            await session.execute("commit")
    return raised.value.detail


async def use_address(sql: asyncpg.Connection, cluster: Cluster, port: int) -> None:
    """Let the coordinator reach the first worker at this port."""
    ports = [cluster.ports[node] for node in cluster.names[2:]] + [cluster.ports[COORDINATOR]]
    await sql.execute(UPDATE_NODE, port, ports)
