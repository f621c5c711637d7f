"""The methods of the store for reports, reads and exports."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

from indexer.db import collection_export, report_queries, status_queries
from indexer.db.collection_export import ExportedRecord
from indexer.db.connections import Connections
from indexer.db.consistent_read import ConsistentRead
from indexer.db.database_errors import database_errors
from indexer.db.report_queries import Counts
from indexer.db.status_queries import DeliveryState


class ReportMethods(Connections):
    """Reports, reads and exports."""

    async def counts(self, since: float = inf) -> Counts:
        """Return the numbers of the status report, with `ended` since the Unix time `since`."""
        async with self._connection() as connection:
            return await report_queries.counts(connection, since)

    async def delivery_state(self) -> DeliveryState:
        """Return dead letters by reason and the consumers of the change log, for the status page."""
        async with self._transaction() as connection:
            return await status_queries.load_delivery_state(connection)

    async def account_state(self, account: str) -> dict[str, Any] | None:
        """Return the state of a DID or of a verified handle, for the status page; None if it is unknown."""
        async with self._transaction() as connection:
            return await status_queries.load_account(connection, account)

    async def repo_report(self, did: str) -> dict[str, Any] | None:
        """Return everything that is stored about a repo, by column; None if the repo is unknown."""
        async with self._connection() as connection:
            return await report_queries.repo_report(connection, did)

    async def has_records(self, collection: str) -> bool:
        """Return True if a record of the collection is stored."""
        async with self._connection() as connection:
            return await report_queries.has_records(connection, collection)

    async def record(self, did: str, collection: str, rkey: str) -> dict[str, Any] | None:
        """Return the row of `atproto.records` with its value decoded; None if there is none."""
        async with self._connection() as connection:
            return await report_queries.record(connection, did, collection, rkey)

    async def visible_repos(self) -> dict[str, tuple[str, str | None]]:
        """Return sync status and sync reason of each visible repo, by DID."""
        async with self._connection() as connection:
            return await report_queries.visible_repos(connection)

    async def visible_records(self, did: str) -> dict[str, bytes]:
        """Return the CID of each record of a visible repo, by path."""
        async with self._connection() as connection:
            return await report_queries.visible_records(connection, did)

    async def sample_synchronized(self, count: int) -> list[str]:
        """Return the DIDs of at most `count` active synchronized repos, chosen at random.

        It may return fewer; see `indexer.db.report_queries.sample_synchronized`.
        """
        async with self._connection() as connection:
            return await report_queries.sample_synchronized(connection, count)

    @asynccontextmanager
    async def consistent_read(self, did: str) -> AsyncIterator[ConsistentRead]:
        """Read a repo from a single snapshot, which is taken by the first query of the block."""
        async with self._acquired() as connection:
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

    async def export_collection(self, collection: str) -> AsyncGenerator[list[ExportedRecord]]:
        """Yield all visible records of a collection from one snapshot, in pages. A page may take hours."""
        async with self._maintenance_connection() as connection:
            async for page in collection_export.export_collection(connection, collection):
                yield page

    async def estimate_records(self, collection: str) -> int:
        """Return an estimate of the number of records of a collection."""
        async with self._connection() as connection:
            return await collection_export.estimate_records(connection, collection)
