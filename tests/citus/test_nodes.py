"""`indexer distribute` while nodes are killed, and a node that is added later and gets its share under load."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from indexer.cluster.distribute import distribute
from indexer.cluster.tables import DISTRIBUTED
from indexer.db.migrate import migrate
from indexer.demo.scenario import Scenario
from tests.citus.own_cluster import own_cluster
from tests.citus_cluster import COORDINATOR, WORKERS, Cluster
from tests.cli.command_line import environment_without_settings, run_indexer
from tests.daemon_process import daemon_process, log_tail
from tests.database_checks import assert_change_log_consistent, wait_until_equal
from tests.database_server import dsn_of
from tests.db.change_log_helpers import connected
from tests.db.filled_tables import contents, fill
from tests.faulty_network import FaultyNetwork

pytestmark = [pytest.mark.proof("cluster"), pytest.mark.timeout(600)]

CHANGED = ("alembic_version", "distribution", "shard_owner", "stored_setting")
"""Tables that the command itself writes."""
_COPIES = """
    select exists (
        select from pg_stat_activity where state = 'active' and query like '%create_distributed_table($1%'
            and pid <> pg_backend_pid() and xact_start < clock_timestamp() - interval '30 ms'
    )
"""
_PLACED = """
    select logicalrelid::regclass::text as name, count(*) from pg_dist_shard
    join pg_dist_placement using (shardid) join pg_dist_node using (groupid)
    where nodeport = $1 and logicalrelid::regclass::text = any($2::text[]) group by 1
"""
_REBALANCE_STATE = "select state::text from citus_rebalance_status() order by job_id desc limit 1"
_WRITTEN_LATER = """
    select sum(result::bigint) from run_command_on_placements(
        'indexer.record', format('select count(*) from %%s where indexed_at > %L', $2::timestamptz)
    ) where nodeport = $1
"""
STEPS_BEFORE, STEPS_AFTER, MAX_STEPS = 40, 60, 100_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with own_cluster(tmp_path_factory) as cluster:
        yield cluster


async def create_database(cluster: Cluster, name: str, workers: Sequence[str] = WORKERS) -> str:
    """Create a database that knows the coordinator and these workers, with the latest schema; return its DSN."""
    for node in cluster.names:
        async with connected(cluster.url_of(node)) as sql:
            await sql.execute(f"create database {name}")
    await cluster.introduce(name, workers)
    dsn = dsn_of(cluster.url_of(COORDINATOR), name)
    await migrate(dsn)
    return dsn


@pytest.mark.parametrize("node", [COORDINATOR, WORKERS[0]])
async def test_a_node_is_killed_while_rows_are_copied(cluster: Cluster, node: str) -> None:
    dsn = await create_database(cluster, f"killed_{node}")
    await fill(dsn)
    before = await contents(dsn, without=CHANGED)
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "indexer", "distribute", "--shards", "4",
        env=environment_without_settings() | {"INDEXER_DATABASE_URL": dsn},
        cwd=Path(__file__).parents[2],
        stdout=PIPE,
        stderr=PIPE,
    )  # fmt: skip
    async with connected(dsn) as sql:
        while not await sql.fetchval(_COPIES):
            assert command.returncode is None
            await asyncio.sleep(0.005)
    await asyncio.to_thread(cluster.kill, node)
    errors = (await command.communicate())[1].decode()
    assert command.returncode in {1, 2}, errors
    assert len([line for line in errors.splitlines() if line.startswith("indexer: ")]) == 1
    assert "Traceback" not in errors
    await asyncio.to_thread(cluster.start, node)
    again = await asyncio.to_thread(run_indexer, "distribute", "--json", INDEXER_DATABASE_URL=dsn)
    assert again.returncode == 0, again.stderr
    assert await contents(dsn, without=CHANGED) == before


async def test_a_daemon_indexes_while_shards_move_to_a_new_node(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.waiting.TIMEOUT", 300.0)
    dsn = await create_database(cluster, "grows", WORKERS[:1])
    await distribute(dsn, 4, lambda *_: None)
    new = cluster.ports[WORKERS[1]]
    async with FaultyNetwork() as network, daemon_process(network, dsn, tmp_path) as daemon, connected(dsn) as sql:
        scenario = Scenario(network, seed=19, accounts=16)
        for step in range(STEPS_BEFORE):
            scenario.perform(step, MAX_STEPS)
        await wait_until_equal(network, dsn, min_records=10)
        await sql.execute(f"select citus_add_node('127.0.0.1', {new})")
        await sql.execute("select indexer.grant_shards_to_readers()")
        await sql.execute("select citus_rebalance_start()")
        before = await sql.fetchval("select max(seq) from indexer.cursor")
        steps = count(STEPS_BEFORE)
        while await sql.fetchval(_REBALANCE_STATE) != "finished":
            scenario.perform(next(steps), MAX_STEPS)
            await asyncio.sleep(0.05)
        assert await sql.fetchval("select max(seq) from indexer.cursor") > before, "the daemon wrote meanwhile"
        tables = [f"indexer.{table}" for table in DISTRIBUTED]
        placed = {row["name"]: row["count"] for row in await sql.fetch(_PLACED, new, tables)}
        assert placed == dict.fromkeys(tables, 2)
        moved_at = await sql.fetchval("select clock_timestamp()")
        for _ in range(STEPS_AFTER):
            scenario.perform(next(steps), MAX_STEPS)
        await wait_until_equal(network, dsn)
        assert await sql.fetchval(_WRITTEN_LATER, new, moved_at) > 0, "the new node is written"
        assert daemon.returncode is None, log_tail(tmp_path)
    await assert_change_log_consistent(dsn)
