"""Read all visible records of a collection from one snapshot, through a server-side cursor."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import NamedTuple

from indexer.db.columns import Connection
from indexer.db.connections import Area
from indexer.db.consistent_read import ConsistentRead
from indexer.db.database_errors import database_errors

PAGE_SIZE = 100
"""Records in memory at a time. A record has up to a mebibyte, most have a few hundred bytes."""


class ExportedRecord(NamedTuple):
    """A row of the view `atproto.records`.

    Attributes:
        value: JSON text.
    """

    uri: str
    did: str
    collection: str
    rkey: str
    cid: str
    rev: str
    value: str | None
    value_problem: str | None
    indexed_at: datetime


_EXPORT = f"select {', '.join(ExportedRecord._fields)} from atproto.records where collection = $1"

_ESTIMATE = "explain (format json) select from indexer.record where collection = $1"


async def export_collection(connection: Connection, collection: str) -> AsyncGenerator[list[ExportedRecord]]:
    """Yield the visible records in pages, in no defined order.

    The connection must have no time limits: the consumer of the pages may be slow, and a cluster reads all records
    before it sends the first page.
    """
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        cursor = await connection.cursor(_EXPORT, collection)
        while page := await cursor.fetch(PAGE_SIZE):
            yield [ExportedRecord(*row) for row in page]


class Exports(Area):
    """Reads of whole repos and collections."""

    @asynccontextmanager
    async def consistent_read(self, did: str) -> AsyncIterator[ConsistentRead]:
        """Read a repo from a single snapshot, which is taken by the first query of the block."""
        async with self._pool.acquired() as connection:
            transaction = connection.transaction(isolation="repeatable_read", readonly=True)
            with database_errors():
                await transaction.start()
                # The block may do other work between two queries.
                await connection.execute("set local idle_in_transaction_session_timeout = 0")
            try:
                yield ConsistentRead(connection, did)
            finally:
                with database_errors():
                    await transaction.rollback()

    async def records(self, collection: str) -> AsyncGenerator[list[ExportedRecord]]:
        """Yield all visible records of a collection from one snapshot, in pages. A page may take hours."""
        async with self._pool.maintenance_connection() as connection:
            async for page in export_collection(connection, collection):
                yield page

    async def estimate_records(self, collection: str) -> int:
        """Return the planner's estimate of the number of records.

        In a distributed database, the plan shows one of the shards, which have about the same number of records.
        """
        async with self._pool.connection() as connection:
            [plan] = json.loads(await connection.fetchval(_ESTIMATE, collection))
            rows: int = plan["Plan"]["Plan Rows"]
            if (distributed := plan["Plan"].get("Distributed Query")) is None:
                return rows
            job = distributed["Job"]
            [[shard]] = job["Tasks"][0]["Remote Plan"]
            return int(job["Task Count"] * shard["Plan"]["Plan Rows"])
