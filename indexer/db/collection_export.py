"""Read all visible records of a collection from one snapshot, through a server-side cursor."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import NamedTuple

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
        """Yield all visible records of a collection from one snapshot, in pages and in no defined order.

        A page may take hours: the consumer may be slow, and a cluster reads all records before it sends the first page.
        """
        async with (
            self._pool.maintenance_connection() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            cursor = await connection.cursor(_EXPORT, collection)
            while page := await cursor.fetch(PAGE_SIZE):
                yield [ExportedRecord(*row) for row in page]
