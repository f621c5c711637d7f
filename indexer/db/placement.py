"""Read the placement of a database: plain, or distributed over the nodes of a Citus cluster."""

from collections.abc import Sequence

import asyncpg

from indexer.db.columns import Connection
from indexer.db.database_errors import unusable
from indexer.sync.shard import BUCKETS, Placement, bucket_of

MIN_DIVIDED = 10
"""The least mean number of accounts for a shard with which each shard gets a statement of its own."""

_IS_DISTRIBUTED = "select exists (select from indexer.distribution)"
_SHARDS = "select shards from indexer.distribution"
_IS_FINISHED = "select finished_at is not null from indexer.distribution"
_HAS_SHARDS = "select indexer.is_distributed('indexer.repo')"


async def load_placement(connection: Connection | asyncpg.Pool) -> Placement:
    """Return the placement. A database whose distribution has begun and is not complete counts as distributed."""
    return Placement.DISTRIBUTED if await connection.fetchval(_IS_DISTRIBUTED) else Placement.PLAIN


async def load_shards(connection: Connection | asyncpg.Pool) -> int:
    """Return the number of shards of each table when it was distributed; 1 on a plain database."""
    return await connection.fetchval(_SHARDS) or 1


def shard_of(bucket: int, shards: int) -> int:
    """Return the number of the shard, from 0, that has the bucket on a database with this number of shards."""
    return Placement.DISTRIBUTED.position(bucket) * shards // BUCKETS


def divide_by_shard(dids: Sequence[str], shards: int) -> list[list[str]]:
    """Return the DIDs of each shard that has some; all together if a shard has few of them on average."""
    if len(dids) < MIN_DIVIDED * shards or shards == 1:
        return [list(dids)]
    parts: list[list[str]] = [[] for _ in range(shards)]
    for did in dids:
        parts[shard_of(bucket_of(did), shards)].append(did)
    return [part for part in parts if part]


async def require_complete(connection: Connection | asyncpg.Pool, dsn: str) -> None:
    """Check that no distribution has begun that is not complete.

    A restored backup of a cluster has the row of a complete distribution, and tables without shards.

    Raises:
        SettingsError: The operator has to run `indexer distribute` again.
    """
    finished = await connection.fetchval(_IS_FINISHED)
    if finished is not None and not (finished and await connection.fetchval(_HAS_SHARDS)):
        raise unusable(dsn, "its distribution is not complete; run `indexer distribute` again, which continues it")
