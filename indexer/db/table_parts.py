"""The parts of a table: its shards in a distributed database, otherwise the table itself."""

from dataclasses import dataclass

from indexer.db.columns import Connection

_PARTS = "select buckets, pages, estimated_rows from indexer.parts_of($1::text::regclass)"


@dataclass(frozen=True, slots=True)
class TablePart:
    """A part of a table. One statement that names all its buckets can sample its pages.

    Attributes:
        buckets: The buckets whose rows are in the part.
        pages: The size in pages.
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
