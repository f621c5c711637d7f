"""Check that the database answers."""

import asyncio

import asyncpg

from indexer.reasons import FetchFailure
from indexer.store.database_errors import DatabaseError, database_errors

CHECK_TIMEOUT = 5.0
"""Seconds after which a database that has not answered `select 1` counts as unavailable."""


class DatabaseCheck:
    """Executes a trivial statement on a connection of its own, so that it never waits for one of the pool."""

    def __init__(self, dsn: str, seconds: float = CHECK_TIMEOUT) -> None:
        self._dsn = dsn
        self._seconds = seconds
        self._connection: asyncpg.Connection | None = None

    async def run(self) -> str | None:
        """Return None if the database answers in time, else the error."""
        try:
            with database_errors():
                async with asyncio.timeout(self._seconds):
                    if self._connection is None:
                        self._connection = await asyncpg.connect(
                            self._dsn, server_settings={"application_name": "indexer database check"}
                        )
                    await self._connection.execute("select 1")
        except DatabaseError as error:
            self.close()
            return f"no answer for {self._seconds:g} s" if error.reason is FetchFailure.TIMEOUT else str(error)
        return None

    def close(self) -> None:
        """Close the connection without waiting for the server, which may not answer."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None
