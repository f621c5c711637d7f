"""Untrack the repos that the scope does not want any more, in small batches."""

from time import monotonic

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Store
from indexer.db.current_scope import CurrentScope
from indexer.db.periodic import run_periodically
from indexer.sync.shard import Shard

BATCH_SIZE = 200
"""Repos that one transaction looks at. The live path waits for those that are untracked."""
RETRY_SECONDS = 600.0
"""Pause before repos are looked at again that were not complete."""

log = structlog.get_logger(__name__)


class ScopeUntracking:
    """Looks for repos of a shard that are out of scope, once after each change that wants fewer repos.

    It begins when this process plans nothing with an earlier scope any more, and when the lists of the signal
    collections were read. The records of an untracked repo are deleted by `AccountErasure`. A list or a message that
    the scope wants tracks the repo again.

    Attributes:
        stage: Its progress. A search is work; it moves with each batch.
    """

    def __init__(
        self,
        store: Store,
        scope: CurrentScope,
        shard: Shard,
        *,
        interval: float = 1.0,
        retry: float = RETRY_SECONDS,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        self._store = store
        self._scope = scope
        self._shard = shard
        self._interval = interval
        self._retry = retry
        self._batch_size = batch_size
        self._done_version = 0
        self._retry_at = 0.0
        self.stage = StageProgress("scope untracking")

    async def run(self) -> None:
        """Untrack repos forever. Only an exception that is a bug ends it."""
        await run_periodically(self.step, self._interval, self.stage)

    async def step(self) -> None:
        """Untrack the repos that are out of scope, unless a search for them has ended.

        Raises:
            DatabaseError: The database is unavailable. What was untracked stays untracked.
        """
        scope = self._scope.scope
        if not scope.repos_narrowed_in or self._done_version == scope.version or monotonic() < self._retry_at:
            return
        if not self._scope.only_in_use(scope.version):
            return
        if unlisted := scope.unlisted_signals:
            log.warning("scope.not-untracked", version=scope.version, signal_collections=",".join(unlisted))
            self._done_version = scope.version
            return
        progress, untracked = await self._store.begin_untracking(self._shard), 0
        if progress.finished_at is None and scope.signals and await self._store.unread_signal_lists(scope):
            return
        while progress.finished_at is None:
            page = await self._store.untrack_page(scope, self._shard, progress, self._batch_size)
            if page is None:
                return
            progress, untracked = page.progress, untracked + page.untracked
            self.stage.moved()
            if progress.cursor is None and progress.finished_at is None:
                self._retry_at = monotonic() + self._retry
                break
        else:
            self._done_version = scope.version
        if untracked:
            log.info("scope.untracked", version=scope.version, repos=untracked)
