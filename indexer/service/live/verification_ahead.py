"""Verify the commits of the next batch with the native core while the present batch is being written."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from indexer.service.live.inbox import Inbox
from indexer.service.live.repo_row_cache import RepoRowCache
from indexer.sync.native_core import NativeCore
from indexer.sync.plan_batch import MAX_BATCH_BYTES, BatchPlan, ReceivedMessage, commits_within
from indexer.sync.policy import KeyState, PlanContext
from indexer.sync.prepared_commits import PreparedCommits, commits_to_verify, verify_ahead
from indexer.sync.repo_state import Repo

MIN_COMMITS = 32
"""Fewer commits than this and than a full batch are verified when they are planned: a thread would cost more than it
gains."""
MAX_LOOP_BYTES = 64 << 10
"""Commits up to this number of bytes are verified on the event loop, in about a millisecond. To hand them to a thread
and back would delay them more, because the thread and the event loop wait for each other's interpreter lock."""
MAX_AHEAD_BYTES = 4 << 20
"""Frames of the commits that are verified ahead, in bytes. An ordinary batch has half of it."""


class VerificationAhead:
    """Verifies commits that wait in the inbox. Their messages stay there, in their order, whatever happens to a batch.

    Whether a commit will be verified depends on the row of its repo, which may not be known yet. A wrong guess costs
    the time of one verification, or the reference verifies the commit later. It never changes a plan.

    Attributes:
        prepared: The results of the verification ahead, for the next batch.
    """

    def __init__(
        self,
        core: NativeCore | None,
        inbox: Inbox,
        rows: RepoRowCache,
        key_state_of: Callable[[str], KeyState | None],
    ) -> None:
        """Do nothing if `core` is None."""
        self._core = core
        self._inbox = inbox
        self._rows = rows
        self._key_state_of = key_state_of
        self.prepared = PreparedCommits()

    async def prepare(
        self, batch: Sequence[ReceivedMessage], repos: Mapping[str, Repo], context: PlanContext
    ) -> PreparedCommits:
        """Return the results for a batch with these rows. Its commits that were not verified ahead are verified now."""
        if self._core is None:
            return self.prepared
        rest = [event for event in commits_within(batch, MAX_BATCH_BYTES) if event not in self.prepared]
        chosen = commits_to_verify(rest, lambda did: repos.get(did) or Repo(did), self._key_state_of, context)
        if sum([len(event.blocks) for event, _ in chosen]) <= MAX_LOOP_BYTES:
            return self.prepared | verify_ahead(self._core, chosen, context) if chosen else self.prepared
        return self.prepared | await asyncio.to_thread(verify_ahead, self._core, chosen, context)

    @asynccontextmanager
    async def running(self, plan: BatchPlan, context: PlanContext, batch_size: int) -> AsyncIterator[None]:
        """Verify the next `batch_size` messages in a thread during the block, and wait for the thread at its end.

        Args:
            plan: The plan of the present batch, which leaves rows. For a repo without a row, here or in the cache, the
                guess is that its commits are new.
            context: The context of the plan.
            batch_size: The size of the next batch.
        """
        self.prepared = PreparedCommits()
        if self._core is None or len(self._inbox) < min(MIN_COMMITS, batch_size):
            yield
            return
        commits = commits_within(self._inbox.peek(batch_size), MAX_AHEAD_BYTES)
        cached = self._rows.rows([event.did for event in commits])

        def guessed_row(did: str) -> Repo:
            draft = plan.drafts.get(did)
            return (draft.after if draft else cached.get(did)) or Repo(did, version=1)

        chosen = commits_to_verify(commits, guessed_row, self._key_state_of, context)
        verifying = asyncio.get_running_loop().run_in_executor(None, verify_ahead, self._core, chosen, context)
        try:
            yield
        finally:
            self.prepared = await verifying
