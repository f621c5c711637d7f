"""Read the placement of a database: plain, or distributed over the nodes of a Citus cluster."""

import asyncpg

from indexer.store.columns import Connection
from indexer.store.database_errors import unusable
from indexer.sync.shard import BUCKETS, Placement

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


async def require_complete(connection: Connection | asyncpg.Pool, dsn: str) -> None:
    """Check that no distribution has begun that is not complete.

    A restored backup of a cluster has the row of a complete distribution, and tables without shards.

    Raises:
        SettingsError: The operator has to run `indexer distribute` again.
    """
    finished = await connection.fetchval(_IS_FINISHED)
    if finished is not None and not (finished and await connection.fetchval(_HAS_SHARDS)):
        raise unusable(dsn, "its distribution is not complete; run `indexer distribute` again, which continues it")
