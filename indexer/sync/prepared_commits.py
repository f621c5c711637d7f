"""Verify commits ahead, many in one call of the native core, and return the results when the commits are planned."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Self

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.sync.events import CommitEvent
from indexer.sync.native_core import NativeCore
from indexer.sync.plan_event import key_to_verify
from indexer.sync.policy import KeyState, KeyStateOf, PlanContext, Policy
from indexer.sync.record_change import selected_path
from indexer.sync.repo_state import Repo
from indexer.sync.verify import VerifiedCommit, verify_commit


class _Prepared(NamedTuple):
    event: CommitEvent
    key: PublicKey
    commit: VerifiedCommit | None


class PreparedCommits:
    """The results of the native core for some commits: a verified commit, or None if `verify_commit` has to decide."""

    def __init__(self, prepared: Iterable[_Prepared] = ()) -> None:
        # By identity, because hashing an event hashes its blocks. The results refer to the events, so no id is reused.
        self._prepared = {id(item.event): item for item in prepared}

    def __len__(self) -> int:
        """Return the number of commits that the native core was asked for."""
        return len(self._prepared)

    def __contains__(self, event: CommitEvent) -> bool:
        return id(event) in self._prepared

    def __ior__(self, other: "PreparedCommits") -> Self:
        """Add other results."""
        self._prepared |= other._prepared
        return self

    def drop(self, events: Iterable[object]) -> None:
        """Drop the results for these events, if there are any."""
        for event in events:
            self._prepared.pop(id(event), None)

    def has_all_of(self, event: CommitEvent, key: KeyState | None, policy: Policy) -> bool:
        """Return True if the native core accepted the commit with this key, and has converted each record to store."""
        prepared = self._prepared.get(id(event))
        if prepared is None or prepared.commit is None or key is None or key.key != prepared.key:
            return False
        for change in prepared.commit.changes if policy.store_values else ():
            if change.converted is None and change.block and selected_path(change.path, policy):
                return False
        return True

    def verify(self, event: CommitEvent, key: PublicKey, limits: Limits) -> VerifiedCommit:
        """Return the verified commit if the native core accepted it with this key, else the result of `verify_commit`.

        Raises:
            UpstreamError: As `verify_commit`.
        """
        prepared = self._prepared.get(id(event))
        if prepared is not None and prepared.commit is not None and (prepared.key is key or prepared.key == key):
            return prepared.commit
        return verify_commit(event, key, limits)


def commits_to_verify(
    commits: Iterable[CommitEvent],
    repo_of: Callable[[str], Repo],
    key_state_of: KeyStateOf,
    context: PlanContext,
) -> list[tuple[CommitEvent, PublicKey]]:
    """Return the commits that `plan_event` will verify if these are the rows of their repos, with their keys."""
    worthwhile = []
    for event in commits:
        key = key_to_verify(repo_of(event.did), event, key_state_of(event.did), context)
        if key is not None:
            worthwhile.append((event, key))
    return worthwhile


def prepared_commits(
    commits: Iterable[tuple[CommitEvent, PublicKey]], results: Iterable[VerifiedCommit | None]
) -> PreparedCommits:
    """Return these results of the native core for these commits, in the same order."""
    return PreparedCommits(
        [_Prepared(event, key, commit) for (event, key), commit in zip(commits, results, strict=True)]
    )


class CommitsBeingVerified:
    """Commits that the native core verifies while the interpreter does something else."""

    def __init__(
        self, core: NativeCore, commits: Sequence[tuple[CommitEvent, PublicKey]], context: PlanContext
    ) -> None:
        """Begin to verify them."""
        self._waiting = iter(commits)
        self._running = core.begin_verification(commits, context.policy)

    def wait(self) -> None:
        """Block until all results are there, without the interpreter's lock."""
        self._running.wait()

    def next_results(self, count: int) -> PreparedCommits:
        """Return the results of the next commits, at most `count`; none at the end. Wait for all of them."""
        results = self._running.next_results(count)
        return prepared_commits(islice(self._waiting, len(results)), results)

    def results(self) -> PreparedCommits:
        """Return all results that were not returned yet."""
        return prepared_commits(self._waiting, self._running.results())
