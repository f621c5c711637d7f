"""Apply a narrowed scope: delete the records, and untrack the repos, that it does not select any more."""

from dataclasses import dataclass
from time import monotonic

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.current_scope import CurrentScope
from indexer.db.periodic import run_periodically
from indexer.sync.scope import Scope
from indexer.sync.shard import Shard
from indexer.telemetry.metrics import Metrics

NARROWING_BATCH = 1_000
"""Records that one transaction deletes. The live path waits for the rows of their repos."""
SEARCH_SECONDS = 600.0
"""Pause between two searches while the scope does not change. They should find nothing."""

UNTRACKING_BATCH = 200
"""Repos that one transaction looks at. The live path waits for those that are untracked."""
RETRY_SECONDS = 600.0
"""Pause before repos are looked at again that were not complete."""
log = structlog.get_logger(__name__)


@dataclass(eq=False)
class ScopeNarrowing:
    """Looks for records out of scope at the start and after each change, and deletes them.

    It begins when this process plans nothing with an earlier scope any more. What a resync planned with an earlier one
    is not written (`ResyncTransaction.holds_scope`).

    Attributes:
        stage: Its progress. A search is work; it moves with each batch.
    """

    db: Database
    scope: CurrentScope
    shard: Shard
    metrics: Metrics
    interval: float = 1.0
    batch_size: int = NARROWING_BATCH

    def __post_init__(self) -> None:
        self._clean_version = -1
        self._clean_since = 0.0
        self.stage = StageProgress("scope narrowing")

    async def run(self) -> None:
        """Delete records forever. Only an exception that is a bug ends it."""
        await run_periodically(self.narrow, self.interval, self.stage)

    async def narrow(self) -> None:
        """Delete the records that the present scope does not select, unless a search has just found none.

        Raises:
            DatabaseError: The database is unavailable. What was deleted stays deleted.
        """
        scope, now = self.scope.scope, monotonic()
        if self._clean_version == scope.version and now - self._clean_since < SEARCH_SECONDS:
            return
        if not self.scope.only_in_use(scope.version):
            return
        deleted, complete, collection = 0, True, ""
        while (found := await self.db.scope_changes.next_collection(collection)) is not None:
            collection = found
            if not scope.collections.matches(collection):
                count, finished = await self._delete(scope, collection)
                deleted, complete = deleted + count, complete and finished
            self.stage.moved()
        if deleted:
            log.info("scope.narrowed", version=scope.version, records=deleted)
        if complete:
            self._clean_version, self._clean_since = scope.version, now

    async def _delete(self, scope: Scope, collection: str) -> tuple[int, bool]:
        """Delete the records of a collection; return how many, and False if some remain."""
        deleted, complete, after = 0, True, None
        while True:
            page = await self.db.scope_changes.delete_unselected(
                scope, collection, self.shard.buckets, after, self.batch_size
            )
            if page is None:
                return deleted, False
            self.metrics.record_changes["delete", "true"].inc(page.deleted)
            self.stage.moved()
            deleted, complete, after = deleted + page.deleted, complete and not page.skipped, page.last
            if after is None:
                return deleted, complete


@dataclass(eq=False)
class ScopeUntracking:
    """Looks for repos of a shard that are out of scope, once after each change that wants fewer repos.

    It begins when this process plans nothing with an earlier scope any more, and when the lists of the signal
    collections were read. The records of an untracked repo are deleted by `AccountErasure`. A list or a message that
    the scope wants tracks the repo again.

    Attributes:
        stage: Its progress. A search is work; it moves with each batch.
    """

    db: Database
    scope: CurrentScope
    shard: Shard
    interval: float = 1.0
    retry: float = RETRY_SECONDS
    batch_size: int = UNTRACKING_BATCH

    def __post_init__(self) -> None:
        self._done_version = 0
        self._retry_at = 0.0
        self.stage = StageProgress("scope untracking")

    async def run(self) -> None:
        """Untrack repos forever. Only an exception that is a bug ends it."""
        await run_periodically(self.step, self.interval, self.stage)

    async def step(self) -> None:
        """Untrack the repos that are out of scope, unless a search for them has ended.

        Raises:
            DatabaseError: The database is unavailable. What was untracked stays untracked.
        """
        scope = self.scope.scope
        if not scope.repos_narrowed_in or self._done_version == scope.version or monotonic() < self._retry_at:
            return
        if not self.scope.only_in_use(scope.version):
            return
        if unlisted := scope.unlisted_signals:
            log.warning("scope.not-untracked", version=scope.version, signal_collections=",".join(unlisted))
            self._done_version = scope.version
            return
        progress, untracked = await self.db.out_of_scope.begin(self.shard), 0
        if progress.finished_at is None and scope.signals and await self.db.out_of_scope.unread_lists(scope):
            return
        while progress.finished_at is None:
            page = await self.db.out_of_scope.untrack_page(scope, self.shard, progress, self.batch_size)
            if page is None:
                return
            progress, untracked = page.progress, untracked + page.untracked
            self.stage.moved()
            if progress.cursor is None and progress.finished_at is None:
                self._retry_at = monotonic() + self.retry
                break
        else:
            self._done_version = scope.version
        if untracked:
            log.info("scope.untracked", version=scope.version, repos=untracked)
