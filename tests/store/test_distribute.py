"""`indexer distribute` on a real Citus cluster: where rows are afterwards, interruptions, and errors for the operator."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from indexer.errors import SettingsError
from indexer.store import Store
from indexer.store.cluster_nodes import ClusterNode, UnsuitableClusterError, check_nodes
from indexer.store.distribute import Distribution, default_shards, distribute
from indexer.store.distributed_tables import DISTRIBUTED
from indexer.store.migrate import migrate
from indexer.store.schema import metadata
from indexer.sync.shard import Placement
from tests.citus_server import CitusServer
from tests.cli.command_line import environment_without_settings, error_line, run_indexer
from tests.store.filled_tables import REPOS, UNFILLED, contents, fill
from tests.store.repo_rows import insert, put, synchronized

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHANGED = ("alembic_version", "distribution", "shard_owner", "stored_setting")
"""Tables that the command itself writes."""
PLACES = """
    select logicalrelid::regclass::text as name, shardminvalue, shardmaxvalue, nodename, nodeport
    from pg_dist_shard join pg_dist_placement using (shardid) join pg_dist_node using (groupid)
    where shardminvalue is not null order by 1, shardminvalue::int
"""
BUCKETS_OF_SHARDS = """
    select array_agg(b order by b) from generate_series(0, 255) b
    group by get_shard_id_for_distribution_column('indexer.record', b::smallint)
    order by (select min(s.shardminvalue::int) from pg_dist_shard s where s.shardid =
        get_shard_id_for_distribution_column('indexer.record', min(b)::smallint))
"""


@pytest.fixture(scope="module")
def filled(citus: CitusServer) -> Iterator[str]:
    """Return the DSN of a database on the cluster that is not distributed, with rows in all tables."""
    dsn = citus.create(migrated=False)
    citus.run(migrate(dsn))
    citus.run(fill(dsn))
    yield dsn
    citus.drop(dsn)


@pytest.fixture
def plain(citus: CitusServer, filled: str) -> Iterator[str]:
    """Return the DSN of a copy of it."""
    dsn = citus.copy(filled)
    yield dsn
    citus.drop(dsn)


async def distributed(dsn: str, shards: int | None = 4) -> Distribution:
    return await distribute(dsn, shards, lambda *_: None)


async def test_each_shard_has_neighbouring_positions(plain: str) -> None:
    steps: list[tuple[str, int, int]] = []
    result = await distribute(plain, 8, lambda *step: steps.append(step))
    assert (result.shards, result.was_complete) == (8, False)
    sql = await asyncpg.connect(plain)
    try:
        places = await sql.fetch(PLACES)
        tables = {row["name"].removeprefix("indexer.") for row in places}
        buckets = [tuple(row[0]) for row in await sql.fetch(BUCKETS_OF_SHARDS)]
    finally:
        await sql.close()
    assert tables == set(DISTRIBUTED)
    for table in tables:
        ranges = [tuple(row)[1:] for row in places if row["name"] == f"indexer.{table}"]
        assert ranges == [tuple(row)[1:] for row in places if row["name"] == "indexer.repo"]
        ports = [row[-1] for row in ranges]
        assert len(ports) == 8
        assert ports == [ports[0]] * 4 + [ports[-1]] * 4
    assert buckets == [Placement.DISTRIBUTED.buckets(range(start, start + 32)) for start in range(0, 256, 32)]
    assert [step[0] for step in steps if step[1] == 0][0] == "repo"
    assert steps[-1][1] == steps[-1][2] > 1_000_000
