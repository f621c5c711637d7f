"""Cut the shards of the distributed tables, so that there are more of them (`indexer.cluster.distribute`)."""

from collections.abc import Sequence
from typing import NamedTuple

from indexer.cluster.nodes import ClusterNode, UnsuitableClusterError
from indexer.db.columns import Connection
from indexer.db.distributed_tables import DISTRIBUTED, FIRST
from indexer.sync.shard import BUCKETS, HASH_ORDER

_GROUPS = f"""
    select shardid as id, shardminvalue::int as lowest, shardmaxvalue::int as highest, nodeid as node
    from pg_dist_shard join pg_dist_placement using (shardid) join pg_dist_node using (groupid)
    where logicalrelid = 'indexer.{FIRST}'::regclass and noderole = 'primary' order by shardminvalue::int
"""
_SIZES = """
    select shardminvalue::int as lowest, sum(shard_size)::bigint as size
    from pg_dist_shard join citus_shards using (shardid)
    where logicalrelid = any($1::text[]::regclass[]) group by 1
"""
_HASHES = "select bucket, worker_hash(bucket::smallint) from generate_series(0, $1 - 1) bucket order by 2"
_SPLIT = "select citus_split_shard_by_split_points($1, $2::text[], $3::int[], 'block_writes')"
_DATABASE_SIZE = """
    select sum(result::bigint)::bigint from run_command_on_all_nodes('select pg_database_size(current_database())')
    where success
"""


class ShardGroup(NamedTuple):
    """The shards of all distributed tables that have the same buckets.

    Attributes:
        id: The shard of the first table.
        lowest: The lowest hash of a bucket in it.
        highest: The highest hash.
        node: The node that has it.
    """

    id: int
    lowest: int
    highest: int
    node: int


class Cut(NamedTuple):
    """A shard group that is to be cut.

    Attributes:
        group: The shard group.
        ends: The highest hash of each part except for the last one.
        nodes: The node of each part.
        size: The bytes of the shards with their indexes.
    """

    group: ShardGroup
    ends: list[int]
    nodes: list[int]
    size: int


class WrittenBytes:
    """The bytes that were written to the database on all nodes since the first call of `count`.

    The new shards of a cut are not visible before it ends, but the size of the database includes their files.
    """

    def __init__(self) -> None:
        self._written = 0
        self._size: int | None = None

    async def count(self, connection: Connection) -> int:
        """Return the bytes that were written until now."""
        size = await connection.fetchval(_DATABASE_SIZE)
        # The size becomes smaller when Citus drops the shards of an earlier cut.
        self._written += max(0, size - (size if self._size is None else self._size))
        self._size = size
        return self._written


async def load_shard_groups(connection: Connection) -> list[ShardGroup]:
    """Return the shard groups of the database, in the order of their hashes."""
    return [ShardGroup(*row) for row in await connection.fetch(_GROUPS)]


async def plan_cuts(
    connection: Connection, groups: Sequence[ShardGroup], shards: int, nodes: Sequence[ClusterNode]
) -> list[Cut]:
    """Return the cuts after which each table has this number of shards.

    The parts of a shard stay on its node. If there is only one shard, it is divided among the nodes.

    Raises:
        UnsuitableClusterError: This version of Citus orders the buckets in another way.
    """
    if len(groups) >= shards:
        return []
    order, hashes = zip(*await connection.fetch(_HASHES, BUCKETS), strict=True)
    if order != HASH_ORDER:
        raise UnsuitableClusterError("this version of Citus orders the buckets in another way than this program")
    ends = [hashes[number * BUCKETS // shards - 1] for number in range(1, shards)]
    tables = [f"indexer.{table}" for table in DISTRIBUTED]
    sizes = {row["lowest"]: row["size"] for row in await connection.fetch(_SIZES, tables)}
    cuts = []
    for group in groups:
        inside = [end for end in ends if group.lowest <= end < group.highest]
        parts = [group.node] * (len(inside) + 1)
        if len(groups) == 1:
            parts = [nodes[number * len(nodes) // shards].id for number in range(shards)]
        if inside:
            cuts.append(Cut(group, inside, parts, sizes[group.lowest]))
    return cuts


async def cut_shards(connection: Connection, cut: Cut) -> None:
    """Cut the shards of a group in one transaction."""
    await connection.execute(_SPLIT, cut.group.id, [str(end) for end in cut.ends], cut.nodes)
