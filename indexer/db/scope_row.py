"""The table of the scope: read it, store the first one, change it, and hold it until the end of a transaction."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from asyncpg import Record as Row
from asyncpg import exceptions

from indexer.atproto.syntax import CollectionFilter
from indexer.db.columns import Connection
from indexer.db.connections import Area
from indexer.errors import BrokenInvariantError, InvalidScopeError
from indexer.sync.scope import Scope, Track, filter_of

BATCH_SIZE = 1_000
"""Repos that one statement tracks or untracks. The live path waits for the rows of an open transaction."""

_LOAD = """
    select version, track, collections, added_in, signal_collections, repos_narrowed_in
    from indexer.scope
"""

_INSERT_FIRST = """
    insert into indexer.scope (version, track, collections, added_in, signal_collections)
    select 1, $1, s.collections, array_fill(0::bigint, array[cardinality(s.collections)]), indexer.checked_patterns($3)
    from (select indexer.checked_patterns($2) as collections) s
    on conflict (singleton) do nothing
"""

_CHANGE = "select indexer.change_scope($1, $2, $3)"
_TRACK = "select atproto.track($1)"
_UNTRACK = "select atproto.untrack($1)"
# SHARE does not conflict with itself, and a change of the scope waits for it.
_HOLD = "select version from indexer.scope for share"
_PROGRESS = "select collection, added_in, newest, repos, complete from atproto.scope_progress order by collection"


class CollectionProgress(NamedTuple):
    """The progress of the backfill of one pattern: a row of `atproto.scope_progress`.

    Attributes:
        added_in: The version of the scope that added the pattern.
        newest: True if the latest change of the scope added it.
        repos: The number of tracked repos of active accounts.
        complete: The number of those that have all records of the collection.
    """

    collection: str
    added_in: int
    newest: bool
    repos: int
    complete: int


async def load(connection: Connection) -> Scope | None:
    """Return the stored scope; None before the first daemon has stored one."""
    row = await connection.fetchrow(_LOAD)
    return None if row is None else _scope_of(row)


class StoredScope(Area):
    """The stored scope, and the repos that commands track."""

    async def load(self) -> Scope | None:
        """Return the stored scope; None before the first daemon has stored one."""
        async with self._pool.connection() as connection:
            return await load(connection)

    async def begin(self, first: Scope) -> Scope:
        """Store the first scope, unless there is one; return the stored one."""
        async with self._pool.transaction() as connection:
            patterns = list(first.collections.patterns)
            await connection.execute(_INSERT_FIRST, first.track, patterns, list(first.signal_patterns))
            stored = await load(connection)
            if stored is None:
                raise BrokenInvariantError("the scope was stored, and there is none")
            return stored

    async def change(
        self,
        track: Track | None = None,
        collections: Sequence[str] | None = None,
        signal_collections: Sequence[str] | None = None,
    ) -> Scope:
        """Change the given parts of the scope; return the whole scope.

        Raises:
            InvalidScopeError: A pattern is invalid, or the scope would name no collection.
        """
        async with self._pool.transaction() as connection:
            with _invalid_arguments():
                await connection.fetchval(_CHANGE, track, collections, signal_collections)
            changed = await load(connection)
        if changed is None:
            raise BrokenInvariantError("the scope was changed, and there is none")
        return changed

    async def set_collections(self, patterns: Sequence[str]) -> Scope:
        """Choose the collections to store: see `change`."""
        return await self.change(collections=patterns)

    async def set_signal_collections(self, patterns: Sequence[str]) -> Scope:
        """Choose the collections that cause a repo to be tracked: see `change`."""
        return await self.change(signal_collections=patterns)

    async def progress(self) -> list[CollectionProgress]:
        """Return the progress of the backfill, by pattern. Reads the row of every repo."""
        async with self._pool.connection() as connection:
            return [CollectionProgress(**row) for row in await connection.fetch(_PROGRESS)]

    async def track(self, dids: Iterable[str]) -> int:
        """Start tracking repos; return how many were not tracked.

        Raises:
            InvalidScopeError: One of them is not a DID.
        """
        async with self._pool.connection() as connection:
            with _invalid_arguments():
                return sum([await connection.fetchval(_TRACK, part) for part in _parts(dids)])

    async def untrack(self, dids: Iterable[str]) -> int:
        """Stop tracking repos until `track`; return how many were tracked. A background stage erases their records.

        Raises:
            InvalidScopeError: One of them is not a DID.
        """
        async with self._pool.connection() as connection:
            with _invalid_arguments():
                return sum([await connection.fetchval(_UNTRACK, part) for part in _parts(dids)])


async def holds(connection: Connection, version: int) -> bool:
    """Return True if the scope has this version, 0 if there is none; it cannot change before the transaction ends."""
    return (await connection.fetchval(_HOLD) or 0) == version


def _scope_of(row: Row) -> Scope:
    return Scope(
        version=row["version"],
        track=Track(row["track"]),
        collections=CollectionFilter(row["collections"]),
        added_in=tuple(row["added_in"]),
        signal_collections=filter_of(row["signal_collections"]),
        repos_narrowed_in=row["repos_narrowed_in"],
    )


def _parts(dids: Iterable[str]) -> list[list[str]]:
    ordered = sorted(set(dids))
    return [ordered[start : start + BATCH_SIZE] for start in range(0, len(ordered), BATCH_SIZE)]


@contextmanager
def _invalid_arguments() -> Iterator[None]:
    try:
        yield
    except (
        exceptions.InvalidParameterValueError,
        exceptions.ObjectNotInPrerequisiteStateError,
        exceptions.CharacterNotInRepertoireError,
    ) as error:
        raise InvalidScopeError(str(error)) from error
