"""Verify the commits of the next batch with the native core while the present batch is being written."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from indexer.atproto.crypto import PublicKey
from indexer.monitoring.metrics import Metrics
from indexer.service.live.inbox import Inbox
from indexer.service.live.repo_row_cache import RepoRowCache
from indexer.sync.events import CommitEvent
from indexer.sync.native_core import NativeCore
from indexer.sync.plan_batch import MAX_BATCH_BYTES, BatchPlan, ReceivedMessage, commits_within
from indexer.sync.policy import KeyStateOf, PlanContext
from indexer.sync.prepared_commits import PreparedCommits, commits_to_verify, verify_ahead
from indexer.sync.repo_state import Repo

MIN_MESSAGES = 32
"""If fewer messages wait than this and than a full batch, their commits are verified when they are planned: a thread
would cost more than it gains."""
MAX_LOOP_COST = 128 << 10
"""Commits up to this cost (see `_cost`) are verified on the event loop: at most 32 of them. To hand them to a thread
and back would delay them more, because the thread and the event loop wait for each other's interpreter lock."""
COMMIT_COST = 4 << 10
"""The cost of a commit besides that of its blocks and operations: above all, of its signature."""
OPERATION_COST = 128
MAX_AHEAD_BYTES = 4 << 20
"""Messages are verified ahead up to the first one with which their frames exceed this number of bytes. An ordinary
batch has half of it."""


class VerificationAhead:
    """Verifies commits that wait in the inbox. Their messages stay there, in their order, whatever happens to a batch.

    Whether a commit will be verified depends on the row of its repo, which may not be known yet. A wrong guess costs
    the time of one verification, or the reference verifies the commit later. It never changes a plan.

    Attributes:
        prepared: The results for messages of the present batch that are not written yet, and for the next batch.
    """

    def __init__(
        self,
        core: NativeCore | None,
        inbox: Inbox,
        rows: RepoRowCache,
        key_state_of: KeyStateOf,
        metrics: Metrics,
    ) -> None:
        """Do nothing if `core` is None."""
        self._core = core
        self._metrics = metrics
        self._inbox = inbox
        self._rows = rows
        self._key_state_of = key_state_of
        self.prepared = PreparedCommits()

    async def prepare(
        self,
        batch: Sequence[ReceivedMessage],
        repos: Mapping[str, Repo],
        key_state_of: KeyStateOf,
        context: PlanContext,
    ) -> PreparedCommits:
        """Return the results for a batch with these rows and keys. Commits not verified ahead are verified now."""
        if self._core is None:
            return self.prepared
        rest = [event for event in commits_within(batch, MAX_BATCH_BYTES) if event not in self.prepared]
        chosen = commits_to_verify(rest, lambda did: repos.get(did) or Repo(did), key_state_of, context)
        if sum([_cost(event) for event, _ in chosen]) > MAX_LOOP_COST:
            self.prepared |= await asyncio.to_thread(verify_ahead, self._core, chosen, context)
        elif chosen:
            self.prepared |= verify_ahead(self._core, chosen, context)
        return self.prepared

    @asynccontextmanager
    async def running(self, plan: BatchPlan, context: PlanContext, batch_size: int) -> AsyncIterator[None]:
        """Verify the next `batch_size` messages in a thread while the block writes a batch; wait for the thread.

        Without an error of the block, only results for the next batch are kept.

        Args:
            plan: The plan of the present batch, which leaves rows. For a repo without a row, here or in the cache, the
                guess is that its commits are new.
            context: The context of the plan.
            batch_size: The size of the next batch. It begins with the messages that the plan postponed.
        """
        waiting = self._inbox.peek(max(0, batch_size - len(plan.postponed)))
        upcoming = [*plan.postponed, *waiting]
        verifying = None
        if self._core is not None and len(waiting) >= min(MIN_MESSAGES, batch_size):
            chosen = self._choose(upcoming, plan, context)
            verifying = asyncio.get_running_loop().run_in_executor(None, verify_ahead, self._core, chosen, context)
        written = False
        try:
            yield
            written = True
        finally:
            kept = self.prepared.of(message.event for message in upcoming) if written else self.prepared
            if verifying is not None:
                with self._metrics.stage("verify-ahead"):
                    kept |= await verifying
            self.prepared = kept

    def clear(self) -> None:
        """Drop all results."""
        self.prepared = PreparedCommits()

    def _choose(
        self, upcoming: Sequence[ReceivedMessage], plan: BatchPlan, context: PlanContext
    ) -> list[tuple[CommitEvent, PublicKey]]:
        commits = [event for event in commits_within(upcoming, MAX_AHEAD_BYTES) if event not in self.prepared]
        cached = self._rows.rows([event.did for event in commits])

        def guessed_row(did: str) -> Repo:
            draft = plan.drafts.get(did)
            return (draft.after if draft else cached.get(did)) or Repo(did, version=1)

        return commits_to_verify(commits, guessed_row, self._key_state_of, context)


def _cost(event: CommitEvent) -> int:
    """Return the cost of verifying a commit, in bytes of blocks that take about the same time."""
    return len(event.blocks) + COMMIT_COST + OPERATION_COST * len(event.ops)
