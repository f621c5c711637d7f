"""`indexer distribute` while nodes are killed, and a node that is added later and gets its share under load."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import asyncpg
import pytest

from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.scenario import Scenario
from indexer.store import DatabaseError, Store
from indexer.store.distribute import distribute
from indexer.store.distributed_tables import DISTRIBUTED
from indexer.store.migrate import migrate
from indexer.sync.plans import Batch, RepoWrite
from tests.citus.own_cluster import own_cluster
from tests.citus_cluster import COORDINATOR, WORKERS, Cluster
from tests.cli.command_line import environment_without_settings, run_indexer
from tests.daemon_process import daemon_process, log_tail
from tests.database_checks import assert_change_log_consistent, wait_until_equal
from tests.database_server import dsn_of
from tests.store.filled_tables import contents, fill
from tests.store.repo_rows import put, synchronized

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
WRITERS = 4
REPOS = 40
"""Repos that each writer changes again and again while shards move."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with own_cluster(tmp_path_factory) as cluster:
        yield cluster


async def create_database(cluster: Cluster, name: str, workers: tuple[str, ...] = WORKERS) -> str:
    """Create a database that knows the coordinator and these workers; return its DSN."""
    for node in cluster.names:
        await _execute(cluster.url_of(node), f"create database {name}")
        await _execute(dsn_of(cluster.url_of(node), name), "create extension citus")
    dsn = dsn_of(cluster.url_of(COORDINATOR), name)
    await _execute(dsn, f"select citus_set_coordinator_host('127.0.0.1', {cluster.ports[COORDINATOR]})")
    for worker in workers:
        await _execute(dsn, f"select citus_add_node('127.0.0.1', {cluster.ports[worker]})")
    return dsn


async def _execute(dsn: str, statement: str) -> None:
    async with _connected(dsn) as connection:
        await connection.execute(statement)


@asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        connection.terminate()


@pytest.mark.parametrize("node", [COORDINATOR, WORKERS[0]])
async def test_a_node_is_killed_while_rows_are_copied(cluster: Cluster, node: str) -> None:
    dsn = await create_database(cluster, f"killed_{node}")
    await migrate(dsn)
    await fill(dsn)
    before = await contents(dsn, without=CHANGED)
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "indexer", "distribute", "--shards", "4",
        env=environment_without_settings() | {"INDEXER_DATABASE_URL": dsn},
        cwd=Path(__file__).parents[2],
        stdout=PIPE,
        stderr=PIPE,
    )  # fmt: skip
    async with _connected(dsn) as sql:
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


async def test_a_node_that_is_added_later_is_used(cluster: Cluster) -> None:
    dsn = await create_database(cluster, "grows", WORKERS[:1])
    await migrate(dsn)
    assert (await distribute(dsn, 4, lambda *_: None)).shards == 4
    store = await Store.open(dsn, connections=WRITERS + 1)
    moved = asyncio.Event()
    try:
        writers = [asyncio.create_task(_write_until(store, number, moved)) for number in range(WRITERS)]
        async with _connected(dsn) as sql:
            new = cluster.ports[WORKERS[1]]
            await sql.execute(f"select citus_add_node('127.0.0.1', {new})")
            await sql.execute("select citus_rebalance_start()")
            await sql.execute("select citus_rebalance_wait()", timeout=500)
            moved.set()
            last = [await writer for writer in writers]
            tables = [f"indexer.{table}" for table in DISTRIBUTED]
            assert {row["name"]: row["count"] for row in await sql.fetch(_PLACED, new, tables)} == dict.fromkeys(
                tables, 2
            )
            state = await sql.fetchval("select state from citus_rebalance_status() order by job_id desc limit 1")
            assert state == "finished"
            logged = await sql.fetchval("select count(*) from indexer.change")
        assert sum(map(sum, last)) + WRITERS * REPOS == logged  # one more for each new repo
        for number, versions in enumerate(last):
            assert min(versions) > 1
            stored = await store.repos([_did(number, repo) for repo in range(REPOS)])
            assert [stored[_did(number, repo)].version for repo in range(REPOS)] == versions
    finally:
        moved.set()
        await asyncio.gather(*writers, return_exceptions=True)
        await store.close()


async def test_a_daemon_indexes_while_shards_move_to_a_new_node(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.waiting.TIMEOUT", 300.0)
    dsn = await create_database(cluster, "grows_with_daemon", WORKERS[:1])
    await migrate(dsn)
    await distribute(dsn, 4, lambda *_: None)
    new = cluster.ports[WORKERS[1]]
    async with LocalNetwork() as network, daemon_process(network, dsn, tmp_path) as daemon, _connected(dsn) as sql:
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


async def _write_until(store: Store, number: int, stop: asyncio.Event) -> list[int]:
    """Write repos with one record each, round after round, until `stop`; return the last version of each.

    A write that fails is repeated, as the daemon does: it took effect or not.
    """
    versions = [0] * REPOS
    while not stop.is_set() or min(versions) < 2:
        for repo in range(REPOS):
            await _write(store, number, repo, versions[repo])
            versions[repo] += 1
    return versions


async def _write(store: Store, number: int, repo: int, version: int) -> None:
    row = synchronized((number, repo), version=version + 1)
    change = put("app.test/a", f'{{"n": {version}}}', "update" if version else "create")
    while await _stored_version(store, row.did) == version:
        with suppress(DatabaseError):
            assert not (await store.write(Batch((RepoWrite(version, row, (change,)),)))).skipped
            return


async def _stored_version(store: Store, did: str) -> int:
    while True:
        with suppress(DatabaseError):
            row = (await store.repos([did])).get(did)
            return row.version if row else 0


def _did(number: int, repo: int) -> str:
    return synchronized((number, repo)).did
