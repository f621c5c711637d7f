"""Verify the commits of the next batch with the native core while the present batch is planned and written."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from indexer.core.core import CommitsBeingVerified, Core
from indexer.live.copies import Copies
from indexer.live.inbox import Inbox
from indexer.live.repo_row_cache import RepoRowCache
from indexer.sync.batch import MAX_BATCH_BYTES, PreparedCommits, ReceivedMessage, commits_to_verify, commits_within
from indexer.sync.events import CommitEvent
from indexer.sync.policy import KeyStateOf, PlanContext
from indexer.sync.repo import Repo

MIN_MESSAGES = 32
"""If fewer messages wait than this and than a full batch, their commits are verified when they are planned."""
MAX_LOOP_COST = 128 << 10
"""The event loop itself waits for the verification of commits up to this cost (see `_cost`): at most 32 of them. To let
a thread wait would delay them more."""
COMMIT_COST = 4 << 10
"""The cost of a commit besides that of its blocks and operations: above all, of its signature."""
OPERATION_COST = 128
MAX_AHEAD_BYTES = 4 << 20
"""Messages are verified ahead up to the first one with which their frames exceed this number of bytes. An ordinary
batch has half of it."""

COMMITS_AT_A_TIME = 50
"""Results that are taken before other tasks of the event loop have their turn: half a millisecond of its time."""


@dataclass(eq=False)
class VerificationAhead:
    """Verifies commits that wait in the inbox. Their messages stay there, in their order, whatever happens to a batch.

    The native core works in its own threads, without the interpreter's lock. Whether a commit will be verified depends
    on the row of its repo, which may not be known yet. A wrong guess costs the time of one verification, or the commit
    is verified later. It never changes a plan.

    `prepared` has the results for messages that are not written yet.
    """

    core: Core
    inbox: Inbox
    copies: Copies
    rows: RepoRowCache
    key_state_of: KeyStateOf
    prepared: PreparedCommits = field(init=False, default_factory=PreparedCommits)
    _collecting: asyncio.Task[None] | None = field(init=False, default=None)

    async def finish(self) -> None:
        """Wait for the results of the verification that `begin` began."""
        collecting, self._collecting = self._collecting, None
        if collecting is not None:
            await collecting

    async def prepare(
        self,
        batch: Sequence[ReceivedMessage],
        repos: Mapping[str, Repo],
        key_state_of: KeyStateOf,
        context: PlanContext,
    ) -> PreparedCommits:
        """Return the results for a batch with these rows and keys. Commits not verified ahead are verified now."""
        if not self.core.verifies_ahead:
            return self.prepared
        rest = [one for one in commits_within(batch, MAX_BATCH_BYTES) if id(one.event) not in self.prepared]
        chosen = commits_to_verify(rest, lambda did: repos.get(did) or Repo(did), key_state_of, context)
        if chosen:
            running = self.core.begin_verification(chosen, context.policy)
            if sum([_cost(event) for event, _ in chosen]) > MAX_LOOP_COST:
                await self._collect(running)
            else:
                self.prepared |= running.next_results()
        return self.prepared

    def begin(self, repos: Mapping[str, Repo], context: PlanContext, batch_size: int) -> None:
        """Begin to verify at most `batch_size` of the messages that wait in the inbox, and return at once.

        `repos` are the rows before the present batch. The guess is that none changes in a way that matters here, and
        that the commits of a repo without a row, here or in the cache, are new.
        """
        waiting = self.copies.without_copies(self.inbox.peek(batch_size * self.inbox.streams))[:batch_size]
        if not self.core.verifies_ahead or len(waiting) < min(MIN_MESSAGES, batch_size):
            return
        commits = [one for one in commits_within(waiting, MAX_AHEAD_BYTES) if id(one.event) not in self.prepared]
        cached = self.rows.rows([one.did for one in commits if one.did])

        def guessed_row(did: str) -> Repo:
            return repos.get(did) or cached.get(did) or Repo(did, version=1)

        chosen = commits_to_verify(commits, guessed_row, self.key_state_of, context)
        if chosen:
            running = self.core.begin_verification(chosen, context.policy)
            self._collecting = asyncio.create_task(self._collect(running), name="verification ahead")

    def drop(self, messages: Iterable[ReceivedMessage]) -> None:
        """Drop the results for these messages."""
        for message in messages:
            self.prepared.pop(id(message.event), None)

    def clear(self) -> None:
        """Drop all results, also those of a verification that runs."""
        if self._collecting is not None:
            self._collecting.cancel()
            self._collecting = None
        self.prepared = PreparedCommits()

    async def _collect(self, running: CommitsBeingVerified) -> None:
        """Wait for the results in a thread, and take some at a time."""
        await asyncio.to_thread(running.wait)
        while part := running.next_results(COMMITS_AT_A_TIME):
            self.prepared |= part
            await asyncio.sleep(0)


def _cost(event: CommitEvent) -> int:
    """Return the cost of verifying a commit, in bytes of blocks that take about the same time."""
    return len(event.blocks) + COMMIT_COST + OPERATION_COST * len(event.ops)
