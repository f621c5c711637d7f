"""No process uses a database whose distribution is not complete, and no cluster that lacks something."""

from dataclasses import replace

import asyncpg
import pytest

from indexer.cluster.distribute import default_shards
from indexer.cluster.nodes import ClusterNode, UnsuitableClusterError, check_nodes
from indexer.db import Database
from indexer.errors import SettingsError

pytestmark = pytest.mark.slow

INCOMPLETE = "its distribution is not complete; run `indexer distribute` again"
COMPLETE_ROW = "insert into indexer.distribution (shards, finished_at) values (4, now())"
PRETEND_SHARDS = """
    create or replace function indexer.is_distributed(relation regclass) returns boolean language sql return true
"""
"""With both, a plain database counts as distributed. Statements on shards do not work in it."""


@pytest.mark.one_server("the database of a cluster has shards")
async def test_an_interrupted_distribution_must_be_completed_first(database: str, sql: asyncpg.Connection) -> None:
    """So does that of a restored backup of a cluster, also if the restore was killed when the tables were complete."""
    await sql.execute(COMPLETE_ROW)
    with pytest.raises(SettingsError, match=INCOMPLETE):
        await Database.open(database)
    await sql.execute("delete from indexer.distribution")
    await sql.execute("insert into indexer.distribution (shards) values (4)")
    await sql.execute(PRETEND_SHARDS)
    with pytest.raises(SettingsError, match=INCOMPLETE):
        await Database.open(database)
    await sql.execute("update indexer.distribution set finished_at = now()")
    await (await Database.open(database)).close()


NODE = ClusterNode(1, "node:5432", True, True, 150_020, "13.2-1", 100, 100, True)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (replace(NODE, connections=50), "node:5432 needs max_connections = 100 or more; it has 50"),
        (replace(NODE, prepared=0), "node:5432 needs max_prepared_transactions = 100 or more; it has 0"),
        (replace(NODE, citus="12.1-1"), "node:5432 has Citus 12.1-1, and the coordinator Citus 13.2-1"),
        (replace(NODE, postgres=140_011), "node:5432: the server is Postgres 14"),
        (replace(NODE, is_owner=False), "the role must own the database on node:5432"),
    ],
)
def test_what_a_node_lacks(other: ClusterNode, problem: str) -> None:
    check_nodes([NODE, NODE])
    with pytest.raises(UnsuitableClusterError) as error:
        check_nodes([NODE, other])
    assert str(error.value).startswith(problem)
    assert [default_shards(nodes) for nodes in (1, 2, 3, 5, 64, 100)] == [2, 4, 8, 16, 128, 256]
