"""Check that the database answers, and store the state of this process over the same connection."""

import asyncio
from collections.abc import Awaitable, Callable

import asyncpg

from indexer.db import process_reports
from indexer.db.database_errors import DatabaseError, database_errors
from indexer.db.process_reports import ProcessReport
from indexer.reasons import FetchFailure

CHECK_TIMEOUT = 5.0
"""Seconds after which a database that has not answered `select 1` counts as unavailable."""


class DatabaseCheck:
    """Executes a trivial statement on a connection of its own, so that it never waits for one of the pool."""

    def __init__(self, dsn: str, seconds: float = CHECK_TIMEOUT) -> None:
        self._dsn = dsn
        self._seconds = seconds
        self._connection: asyncpg.Connection | None = None
        self._has_saved = False

    async def run(self) -> str | None:
        """Return None if the database answers in time, else the error."""
        return await self._attempt(self._select)

    async def save(self, report: ProcessReport) -> str | None:
        """Store the state of this process, for `indexer status`. Return None if that was possible, else the error."""
        return await self._attempt(lambda: self._save(report))

    async def _select(self) -> None:
        await (await self._opened()).execute("select 1")

    async def _save(self, report: ProcessReport) -> None:
        connection = await self._opened()
        if not self._has_saved:
            await process_reports.forget_ended(connection)
            self._has_saved = True
        await process_reports.save(connection, report)

    async def _opened(self) -> asyncpg.Connection:
        if self._connection is None:
            self._connection = await asyncpg.connect(
                self._dsn, server_settings={"application_name": "indexer database check"}
            )
        return self._connection

    async def _attempt(self, statements: Callable[[], Awaitable[None]]) -> str | None:
        try:
            with database_errors():
                async with asyncio.timeout(self._seconds):
                    await statements()
        except DatabaseError as error:
            self.close()
            return f"no answer for {self._seconds:g} s" if error.reason is FetchFailure.TIMEOUT else str(error)
        return None

    def close(self) -> None:
        """Close the connection without waiting for the server, which may not answer."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None
