"""Read the placement of a database: plain, or distributed over the nodes of a Citus cluster."""

import asyncpg

from indexer.store.columns import Connection
from indexer.sync.shard import Placement

_IS_DISTRIBUTED = "select exists (select from indexer.distribution)"


async def load_placement(connection: Connection | asyncpg.Pool) -> Placement:
    """Return the placement. A database whose distribution has begun and is not complete counts as distributed."""
    return Placement.DISTRIBUTED if await connection.fetchval(_IS_DISTRIBUTED) else Placement.PLAIN
