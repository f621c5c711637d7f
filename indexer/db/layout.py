"""How the rows of a database are divided into parts, and the size of the parts of a table."""

from dataclasses import dataclass

import asyncpg

from indexer.db.columns import Connection
from indexer.db.database_errors import unusable
from indexer.sync.shard import PLAIN, Layout

_LAYOUT = """
    select shards, indexer.hash_order() as bucket_order,
        finished_at is not null and indexer.is_distributed('indexer.repo') as complete
    from indexer.distribution
"""
_PARTS = "select buckets, pages, estimated_rows from indexer.parts_of($1::text::regclass)"


async def load_layout(connection: Connection | asyncpg.Pool, complete_in: str | None = None) -> Layout:
    """Return the layout. A database whose distribution has begun and is not complete counts as distributed.

    With `complete_in`, the DSN of the database, its distribution must be complete. A restored backup has the row of a
    complete distribution, and tables that are not distributed.

    Raises:
        SettingsError: The operator has to run `indexer distribute` again.
    """
    row = await connection.fetchrow(_LAYOUT)
    if row is None:
        return PLAIN
    if complete_in and not row["complete"]:
        reason = "its distribution is not complete; run `indexer distribute` again, which continues it"
        raise unusable(complete_in, reason)
    return Layout(tuple(row["bucket_order"]), row["shards"], commit_numbers=False)


@dataclass(frozen=True, slots=True)
class TablePart:
    """The buckets and the pages of a part of a table. One statement that names all its buckets can sample its pages.

    Attributes:
        estimated_rows: The rows per page at the last vacuum or ANALYZE, times the present pages. Before the first one,
            the rows that sessions have reported to the statistics.
    """

    buckets: list[int]
    pages: int
    estimated_rows: int


async def load_parts(connection: Connection, table: str) -> list[TablePart]:
    """Return the parts of a table of schema `indexer`, which is named with its schema."""
    return [TablePart(**row) for row in await connection.fetch(_PARTS, table)]


async def estimate_rows(connection: Connection, table: str) -> int:
    """Return an estimate of the number of rows of a table."""
    return sum(part.estimated_rows for part in await load_parts(connection, table))
