"""The methods of the store for the scope."""

from collections.abc import Iterable, Sequence

from indexer.atproto.syntax import CollectionFilter
from indexer.db import crawl_rows, out_of_scope, scope_changes, scope_row
from indexer.db.connections import Connections
from indexer.db.crawl_progress import CrawlProgress
from indexer.db.out_of_scope import NotChosen, UntrackedPage
from indexer.db.scope_changes import NarrowedPage, RecordPosition, UnselectedRecords
from indexer.db.scope_row import CollectionProgress
from indexer.errors import BrokenInvariantError
from indexer.sync.repo import Repo
from indexer.sync.scope import Scope, Track
from indexer.sync.shard import Shard


class ScopeMethods(Connections):
    """The scope, the repos that are tracked, and the effects of changes."""

    async def scope(self) -> Scope | None:
        """Return the stored scope; None before the first daemon has stored one."""
        async with self._connection() as connection:
            return await scope_row.load(connection)

    async def begin_scope(self, first: Scope) -> Scope:
        """Store the first scope, unless there is one; return the stored one."""
        async with self._transaction() as connection:
            return await scope_row.begin(connection, first)

    async def change_scope(
        self,
        track: Track | None = None,
        collections: Sequence[str] | None = None,
        signal_collections: Sequence[str] | None = None,
    ) -> Scope:
        """Change the given parts of the scope; return the whole scope.

        Raises:
            InvalidScopeError: A pattern is invalid, or the scope would name no collection.
        """
        async with self._transaction() as connection:
            await scope_row.change(connection, track, collections, signal_collections)
            changed = await scope_row.load(connection)
        if changed is None:
            raise BrokenInvariantError("the scope was changed, and there is none")
        return changed

    async def set_collections(self, patterns: Sequence[str]) -> Scope:
        """Choose the collections to store: see `change_scope`."""
        return await self.change_scope(collections=patterns)

    async def set_signal_collections(self, patterns: Sequence[str]) -> Scope:
        """Choose the collections that cause a repo to be tracked: see `change_scope`."""
        return await self.change_scope(signal_collections=patterns)

    async def scope_progress(self) -> list[CollectionProgress]:
        """Return the progress of the backfill, by pattern. Reads the row of every repo."""
        async with self._connection() as connection:
            return await scope_row.progress(connection)

    async def track(self, dids: Iterable[str]) -> int:
        """Start tracking repos, also if they were untracked; return how many were not tracked before.

        Raises:
            InvalidScopeError: One of them is not a DID.
        """
        async with self._connection() as connection:
            return await scope_row.track(connection, dids)

    async def untrack(self, dids: Iterable[str]) -> int:
        """Stop tracking repos until `track`; return how many were tracked. A background stage erases their records.

        Raises:
            InvalidScopeError: One of them is not a DID.
        """
        async with self._connection() as connection:
            return await scope_row.untrack(connection, dids)

    async def next_collection(self, after: str) -> str | None:
        """Return the next collection of stored records after this one; None if there is none."""
        async with self._connection() as connection:
            return await scope_changes.next_collection(connection, after)

    async def delete_unselected(
        self, scope: Scope, collection: str, buckets: Sequence[int], after: RecordPosition | None, limit: int
    ) -> NarrowedPage | None:
        """Delete at most `limit` records of a collection that the scope does not select; None if the scope changed."""
        async with self._transaction() as connection:
            return await scope_changes.delete_page(connection, scope, collection, buckets, after, limit)

    async def begin_untracking(self, shard: Shard) -> CrawlProgress:
        """Return the progress of the search for repos that are out of scope, or that of a new search."""
        async with self._connection() as connection:
            return await out_of_scope.begin(connection, shard)

    async def unread_signal_lists(self, scope: Scope) -> list[str]:
        """Return the signal collections whose list has not been read since the scope changed."""
        async with self._connection() as connection:
            return await out_of_scope.unread_lists(connection, scope)

    async def untrack_page(
        self, scope: Scope, shard: Shard, progress: CrawlProgress, limit: int
    ) -> UntrackedPage | None:
        """Untrack those of the next `limit` repos that are out of scope; None if the scope has changed."""
        async with self._transaction() as connection:
            return await out_of_scope.untrack_page(connection, scope, shard, progress, limit)

    async def count_not_chosen(self, limit: int) -> NotChosen:
        """Count the tracked repos that no command has named, and at most `limit` of their records."""
        async with self._connection() as connection:
            return await out_of_scope.count_not_chosen(connection, limit)

    async def count_unselected(self, collections: CollectionFilter, limit: int) -> UnselectedRecords:
        """Count at most `limit` records of collections that are not among these."""
        async with self._connection() as connection:
            return await scope_changes.count_unselected(connection, collections, limit)

    async def incomplete_repos(self, scope: Scope, buckets: Sequence[int], after: str, limit: int) -> list[Repo]:
        """Return the next synchronized repos of active accounts after this DID that may lack records of the scope."""
        async with self._connection() as connection:
            return await scope_changes.incomplete_repos(connection, scope, buckets, after, limit)

    async def mark_complete(self, repos: Sequence[Repo], scope: Scope) -> int:
        """Note that these repos lack no records of the scope; return how many did not change meanwhile."""
        async with self._transaction() as connection:
            return await scope_changes.mark_complete(connection, repos, scope)

    async def mark_incomplete(self, dids: Sequence[str], collection: str, added_in: int, fetched_before: float) -> int:
        """Note which of these listed repos lack records of a collection that version `added_in` added; return how many.

        Those lack some that have none, and that were not fetched since `fetched_before`.
        """
        async with self._transaction() as connection:
            return await scope_changes.mark_incomplete(connection, dids, collection, added_in, fetched_before)

    async def rechecks(self, shard: Shard) -> list[CrawlProgress]:
        """Return the lists of added collections that are to be compared again."""
        async with self._connection() as connection:
            return await crawl_rows.rechecks(connection, shard)

    async def request_incomplete(self, scope: Scope, buckets: Sequence[int], max_waiting: int, now: float) -> int:
        """Desynchronize repos that may lack records, while fewer than `max_waiting` are due; return how many."""
        async with self._transaction() as connection:
            return await scope_changes.request_incomplete(connection, scope, buckets, max_waiting, now)

    async def request_listed(self, repos: Sequence[Repo], buckets: Sequence[int], max_waiting: int, now: float) -> int:
        """Desynchronize repos that lack records of the scope, while fewer than `max_waiting` are due; return how many.

        Repos that changed meanwhile stay as they are.
        """
        async with self._transaction() as connection:
            return await scope_changes.request_listed(connection, repos, buckets, max_waiting, now)
