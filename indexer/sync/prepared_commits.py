"""Verify the commits of a batch ahead, in one call of the native core, and return the results when they are planned."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.sync.events import CommitEvent
from indexer.sync.native_core import NativeCore
from indexer.sync.plan_event import key_to_verify
from indexer.sync.policy import KeyState, PlanContext
from indexer.sync.repo_state import Repo
from indexer.sync.verify import VerifiedCommit, verify_commit


class _Prepared(NamedTuple):
    event: CommitEvent
    key: PublicKey
    commit: VerifiedCommit


class PreparedCommits:
    """The commits of a batch in which the native core found no flaw.

    Attributes:
        count: The number of these commits.
    """

    def __init__(self, prepared: Sequence[_Prepared]) -> None:
        self.count = len(prepared)
        # By identity, because hashing an event hashes its blocks. The events cannot go while their results are here.
        self._prepared = {id(item.event): item for item in prepared}

    def verify(self, event: CommitEvent, key: PublicKey, limits: Limits) -> VerifiedCommit:
        """Return the prepared result if there is one for this event and key, else that of `verify_commit`.

        Raises:
            UpstreamError: As `verify_commit`.
        """
        prepared = self._prepared.get(id(event))
        if prepared is not None and prepared.key == key:
            return prepared.commit
        return verify_commit(event, key, limits)


def prepare_commits(
    core: NativeCore,
    commits: Sequence[CommitEvent],
    repos: Mapping[str, Repo],
    key_state_of: Callable[[str], KeyState | None],
    context: PlanContext,
) -> PreparedCommits:
    """Verify the commits of a batch that `plan_event` will verify on the present rows.

    The arguments are those of `plan_batch`.
    """
    worthwhile = []
    for event in commits:
        repo = repos.get(event.did) or Repo(event.did)
        key = key_to_verify(repo, event, key_state_of(event.did), context)
        if key is not None:
            worthwhile.append((event, key))
    results = core.verify_commits(worthwhile, context.policy)
    return PreparedCommits(
        [_Prepared(event, key, commit) for (event, key), commit in zip(worthwhile, results, strict=True) if commit]
    )
