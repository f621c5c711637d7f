"""The methods of the store for lexicons and their typed views."""

from asyncio import sleep
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import asyncpg

from indexer.atproto.lexicon import Lexicon
from indexer.db import lexicon_indexes, lexicon_rows
from indexer.db.columns import Connection
from indexer.db.connections import Connections
from indexer.db.database_errors import DatabaseError
from indexer.db.lexicon_indexes import BuildProgress, LexiconIndex
from indexer.db.lexicon_rows import AddedLexicon, StoredLexicon
from indexer.reasons import FetchFailure

T = TypeVar("T")
LEXICON_PAUSE = 1.0
"""Seconds between these attempts, in which other queries on the views proceed."""


class LexiconMethods(Connections):
    """Lexicons, their typed views, and indexes on these.

    Attributes:
        lexicon_attempts: Attempts to change typed views while queries use them. Each waits for at most two seconds.
    """

    lexicon_attempts = 5

    async def lexicons(self) -> dict[str, StoredLexicon]:
        """Return all stored lexicons by NSID."""
        async with self._connection() as connection:
            return await lexicon_rows.load_lexicons(connection)

    async def add_lexicons(self, given: Mapping[str, tuple[Lexicon, str]]) -> list[AddedLexicon]:
        """Store lexicons (with their sources, by NSID), and create or update the views that depend on them.

        Raises:
            ViewInUseError: A view has to be dropped, and objects of users depend on it.
        """
        return await self._change_views(lambda connection: lexicon_rows.add_lexicons(connection, given))

    async def remove_lexicons(self, nsids: Sequence[str]) -> None:
        """Remove lexicons with their views, and lexicons that only these refer to.

        Raises:
            ViewInUseError: Objects of users depend on a view.
        """
        await self._change_views(lambda connection: lexicon_rows.remove_lexicons(connection, nsids))

    async def lexicon_indexes(self) -> list[LexiconIndex]:
        """Return all indexes on columns of typed views."""
        async with self._connection() as connection:
            return await lexicon_indexes.load_indexes(connection)

    async def build_lexicon_index(self, nsid: str, columns: Sequence[str]) -> LexiconIndex | None:
        """Build an index on columns of the view of a stored lexicon; return None if there is one already.

        Raises:
            UnknownColumnError: There is no such column, or no index can contain these columns.
        """
        async with self._index_connection() as connection:
            return await lexicon_indexes.build_index(connection, nsid, columns)

    async def lexicon_build_progress(self) -> BuildProgress | None:
        """Return the progress of the index that is being built now; None if none is."""
        async with self._connection() as connection:
            return await lexicon_indexes.load_build_progress(connection)

    async def drop_outdated_lexicon_indexes(self) -> list[LexiconIndex]:
        """Drop indexes whose lexicon was removed or whose columns have changed; return them."""
        async with self._index_connection() as connection:
            return await lexicon_indexes.drop_outdated_indexes(connection)

    @asynccontextmanager
    async def _index_connection(self) -> AsyncIterator[asyncpg.Connection]:
        """Open a connection that builds and drops indexes; no other process does so at the same time."""
        async with self._maintenance_connection() as holder:
            await lexicon_indexes.lock_builds(holder)
            async with self._maintenance_connection() as connection:
                yield connection

    async def _change_views(self, change: Callable[[Connection], Awaitable[T]]) -> T:
        """Run `change` in a transaction, again if queries use the views. It waits briefly, so no query waits long."""
        for attempt in range(1, self.lexicon_attempts + 1):
            try:
                async with self._transaction() as connection:
                    return await change(connection)
            except DatabaseError as error:
                if not isinstance(error.__cause__, asyncpg.LockNotAvailableError | asyncpg.DeadlockDetectedError):
                    raise
                if attempt == self.lexicon_attempts:
                    text = "open transactions use a typed view that has to change; end them, or try again later"
                    raise DatabaseError(FetchFailure.TIMEOUT, text) from error
            await sleep(LEXICON_PAUSE)
        raise AssertionError
