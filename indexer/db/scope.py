"""The stored scope: read and change it, hold it until the end of a transaction, and follow its changes."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import NamedTuple

import structlog
from asyncpg import exceptions

from indexer.atproto.syntax import CollectionFilter
from indexer.concurrency.stage_progress import StageProgress
from indexer.db.columns import Connection
from indexer.db.connections import Area
from indexer.db.periodic import run_periodically
from indexer.errors import BrokenInvariantError, InvalidScopeError
from indexer.sync.policy import Policy
from indexer.sync.repo import Repo
from indexer.sync.scope import Scope, Track, filter_of

log = structlog.get_logger(__name__)

BATCH_SIZE = 1_000
"""Repos that one statement tracks or untracks. The live path waits for the rows of an open transaction."""

_LOAD = """
    select version, track, collections, added_in, signal_collections, repos_narrowed_in, chosen_in
    from indexer.scope
"""

# A redaction is permanent, whatever follows it.
_REMOVED_SINCE = """
    select target, action = 'show' and not exists (
        select from indexer.removal r where r.target = v.target and r.action = 'redact'
    ) from indexer.removal v where version > $1 order by id
"""
_REMOVED_OF = """
    select exists (
        select from unnest($2::text[]) d(did), indexer.removal v
        where v.version > $1 and v.target >= 'at://' || d.did || '/' and v.target < 'at://' || d.did || '0'
    )
"""
_INSERT_FIRST = """
    insert into indexer.scope (version, chosen_in, track, collections, added_in, signal_collections)
    select 1, 1, $1, s.collections, array_fill(0::bigint, array[cardinality(s.collections)]),
        indexer.checked_patterns($3)
    from (select indexer.checked_patterns($2) as collections) s
    on conflict (singleton) do nothing
"""

_CHANGE = "select indexer.change_scope($1, $2, $3)"
# SHARE does not conflict with itself, and a change of the scope waits for it.
_HOLD = "select version, chosen_in from indexer.scope for share"
_PROGRESS = "select collection, added_in, newest, repos, complete from atproto.scope_progress order by collection"


class CollectionProgress(NamedTuple):
    """The progress of the backfill of one pattern: a row of the view `atproto.scope_progress`, which describes it."""

    collection: str
    added_in: int
    newest: bool
    repos: int
    complete: int


async def load(connection: Connection, known: Scope = Scope()) -> Scope | None:  # noqa: B008 - it is immutable
    """Return the stored scope, or `known` if it has the same version; None before the first daemon has stored one."""
    row = await connection.fetchrow(_LOAD)
    if row is None or row["version"] == known.version:
        return known if row else None
    if row["version"] < known.version:
        known = Scope()  # a backup was restored
    redacted, changed = set(known.collections.excluded), dict[str, set[bytes]]()
    for target, shown in await connection.fetch(_REMOVED_SINCE, known.version):
        did, _, path = target.removeprefix("at://").partition("/")
        if path:
            if did not in changed:
                changed[did] = set(known.removed.get(did, ()))
            (changed[did].discard if shown else changed[did].add)(path.encode())
        else:
            redacted.add(target)
    return Scope(
        row["version"],
        Track(row["track"]),
        CollectionFilter(row["collections"], redacted),
        tuple(row["added_in"]),
        filter_of(row["signal_collections"]),
        row["repos_narrowed_in"],
        row["chosen_in"],
        {did: frozenset(paths) for did, paths in {**known.removed, **changed}.items() if paths},
    )


async def _load_existing(connection: Connection) -> Scope:
    scope = await load(connection)
    if scope is None:
        raise BrokenInvariantError("the scope was stored, and there is none")
    return scope


async def _insert_first(connection: Connection, first: Scope) -> None:
    patterns = list(first.collections.patterns)
    await connection.execute(_INSERT_FIRST, first.track, patterns, list(first.signal_patterns))


async def holds(connection: Connection, version: int, dids: Sequence[str] = ()) -> bool:
    """Return True if the scope has this version, 0 if there is none; it cannot change before the transaction ends.

    A later version counts as this one if they only differ in which records of other repos than these are removed.
    """
    present, chosen_in = await connection.fetchrow(_HOLD) or (0, 0)
    if present <= version or chosen_in > version:
        return bool(present == version)
    return not dids or not await connection.fetchval(_REMOVED_OF, version, dids)


class StoredScope(Area):
    """The stored scope, and the repos that commands track."""

    async def load(self, known: Scope = Scope()) -> Scope | None:  # noqa: B008 - it is immutable
        """Return the stored scope, or `known` if it has the same version; None before the first daemon stored one."""
        async with self._pool.connection() as connection:
            return await load(connection, known)

    async def begin(self, first: Scope) -> Scope:
        """Store the first scope, unless there is one; return the stored one."""
        async with self._pool.transaction() as connection:
            await _insert_first(connection, first)
            return await _load_existing(connection)

    async def change(
        self,
        track: Track | None = None,
        collections: Sequence[str] | None = None,
        signal_collections: Sequence[str] | None = None,
        first: Scope | None = None,
    ) -> Scope:
        """Change the given parts of the scope, or of the `first` one if none is stored; return the whole scope.

        Raises:
            InvalidScopeError: A pattern is invalid, or the scope would name no collection.
        """
        async with self._pool.transaction() as connection:
            if first is not None:
                await _insert_first(connection, first)
            with invalid_arguments():
                await connection.fetchval(_CHANGE, track, collections, signal_collections)
            return await _load_existing(connection)

    async def progress(self) -> list[CollectionProgress]:
        """Return the progress of the backfill, by pattern. Reads the row of every repo."""
        return [CollectionProgress(**row) for row in await self._fetch(_PROGRESS)]

    async def track(self, dids: Iterable[str]) -> int:
        """Start tracking repos; return how many were not tracked.

        Raises:
            InvalidScopeError: One of them is not a DID.
        """
        return await self._call("select atproto.track($1)", dids)

    async def untrack(self, dids: Iterable[str]) -> int:
        """Stop tracking repos until `track`; return how many were tracked. A background stage erases their records.

        Raises:
            InvalidScopeError: One of them is not a DID.
        """
        return await self._call("select atproto.untrack($1)", dids)

    async def _call(self, statement: str, dids: Iterable[str]) -> int:
        ordered = sorted(set(dids))
        parts = [ordered[start : start + BATCH_SIZE] for start in range(0, len(ordered), BATCH_SIZE)]
        with invalid_arguments():
            return sum([await self._fetchval(statement, part) for part in parts])


@dataclass(eq=False)
class CurrentScope:
    """The policy of this process, with the scope as it was last read.

    Attributes:
        stage: Its progress. To read the scope is work.
        policy: The policy, at first with the scope of the settings, for a database without one. A change replaces the
            object, so that a plan that has begun keeps the one it began with.
        chosen: The settings name a scope.
        changed_at: When this process took the present choice of repos and collections (monotonic seconds).
    """

    stored: StoredScope
    policy: Policy
    poll: float = 1.0
    chosen: bool = True

    def __post_init__(self) -> None:
        self._first = self.policy.scope
        self._reading = asyncio.Lock()  # otherwise, what was read earlier could replace a later version
        self._in_use = Counter[int]()
        self.stage = StageProgress("scope")
        self.changed_at = monotonic()

    @property
    def scope(self) -> Scope:
        """The present scope."""
        return self.policy.scope

    async def begin(self) -> None:
        """Read the scope, or store the one of the settings if there is none."""
        stored = await self.stored.begin(self._first)
        if self.chosen and not stored.same_choice(self._first):
            log.warning("scope.settings-ignored", settings=str(self._first), stored=str(stored))
        self._take(stored)

    async def run(self) -> None:
        """Read the scope again and again. Only an exception that is a bug ends it."""
        await run_periodically(self.refresh, self.poll, self.stage, wait_first=True)

    async def refresh(self) -> None:
        """Read the scope."""
        async with self._reading:
            stored = await self.stored.load(self.scope)
            if stored is not None and stored.version != self.scope.version:
                log.info("scope.changed", version=stored.version, before=str(self.scope), now=str(stored))
                self._take(stored)

    def is_behind(self, repos: Iterable[Repo]) -> bool:
        """Return True if one of the repos is complete for a later scope: then this one must be read again."""
        version = self.scope.version
        return any(repo.scope_version > version for repo in repos)

    @contextmanager
    def in_use(self) -> Iterator[Policy]:
        """Plan and write with the yielded policy during the block."""
        policy = self.policy
        self._in_use[policy.scope.version] += 1
        try:
            yield policy
        finally:
            self._in_use[policy.scope.version] -= 1

    def only_in_use(self, version: int) -> bool:
        """Return True if this process writes nothing that it planned with another version of the scope."""
        return all(used == version or not count for used, count in self._in_use.items())

    def _take(self, scope: Scope) -> None:
        if scope.chosen_in != self.scope.chosen_in:
            self.changed_at = monotonic()
        self.policy = replace(self.policy, scope=scope)
        self._in_use = +self._in_use


@contextmanager
def invalid_arguments() -> Iterator[None]:
    """Raise InvalidScopeError for arguments that a function in SQL refuses."""
    try:
        yield
    except (
        exceptions.InvalidParameterValueError,
        exceptions.ObjectNotInPrerequisiteStateError,
        exceptions.CharacterNotInRepertoireError,
    ) as error:
        raise InvalidScopeError(str(error)) from error
