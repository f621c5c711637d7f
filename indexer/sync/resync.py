"""The two ends of a resync, as plans: the export applied and the kept events drained, or a failure.

Same rules as for live events: once the export stands in the tables, each kept event is planned on it as if it
had just arrived.
"""

from collections.abc import Iterable
from dataclasses import replace

from indexer.errors import BrokenInvariantError, UnavailableError
from indexer.reasons import Desync, Rejection
from indexer.sync.backoff import backoff_seconds
from indexer.sync.batch import DEAD_LETTER_BYTES
from indexer.sync.events import CommitEvent, MalformedEvent, SyncEvent
from indexer.sync.frames import decode_frame
from indexer.sync.plan import Batch, DeadLetter, KeptEvent, NeedsKey, Plan, RecordChange, RepoWrite
from indexer.sync.planning import Ground, Signer, desynchronize, plan_event, synchronize
from indexer.sync.repo import PARKED, Finding, Head, Outcome, Repo, transition


def plan_completion(claimed: Repo, head: Head, kept: Iterable[KeptEvent], signer: Signer, ground: Ground) -> Batch:
    """The last writes of a resync whose records stand at `head`: `claimed` is the locked row.

    The repo ends synchronized, unless a kept event breaks the chain, or a state newer than all of this has
    been seen: then it waits for its next resync, at the head that was reached.
    """
    _, status = transition(claimed.status, Finding.COMPLETED)
    repo = synchronize(claimed, head, ground.now)
    changes: list[RecordChange] = []
    letters: list[DeadLetter] = []
    for event in kept:
        # Some were kept because they could not be checked: by a key newer than the one of the export, perhaps.
        plan, letter = _drain(repo, event, replace(signer, final=True, stale=True), ground)
        repo = plan.repo
        changes += plan.changes
        letters += [letter] if letter else []
        if repo.status is not status:
            repo = replace(repo, heard_rev=claimed.heard_rev)  # it may be of one behind this, which is lost
            break
    else:
        if repo.seen_rev is not None and repo.head is not None and repo.head.rev < repo.seen_rev:
            repo = desynchronize(repo, Desync.STALE_EXPORT, ground.now, seen_rev=repo.seen_rev)
    return Batch((RepoWrite(claimed.version, repo, tuple(changes)),), tuple(letters))


def _drain(repo: Repo, kept: KeptEvent, signer: Signer, ground: Ground) -> tuple[Plan, DeadLetter | None]:
    event = decode_frame(kept.frame, ground.policy.limits)
    if isinstance(event, MalformedEvent):  # by limits that were wider when it came
        return Plan(repo, Outcome.REJECTED), _letter(repo, kept, event.type, event.reason, event.detail)
    if not isinstance(event, CommitEvent | SyncEvent):
        raise BrokenInvariantError(f"{repo.did}: a frame was kept that is no commit and no #sync")
    plan = plan_event(repo, event, 0, signer, ground)
    if isinstance(plan, NeedsKey):
        raise BrokenInvariantError(f"{repo.did}: a final signer that another one is wanted for")
    if isinstance(plan.why, Rejection):
        return plan, _letter(repo, kept, event.kind, plan.why, plan.detail)
    if plan.outcome is Outcome.DESYNCHRONIZED and plan.why is Desync.CHAIN_BREAK:
        return replace(plan, repo=replace(plan.repo, reason=Desync.DRAIN_BREAK)), None
    return plan, None


def _letter(repo: Repo, kept: KeptEvent, kind: str, reason: Rejection, detail: str) -> DeadLetter:
    return DeadLetter(kept.relay, kept.seq, repo.did, kind, reason, detail, kept.frame[:DEAD_LETTER_BYTES])


def plan_failure(repo: Repo, claimed: Repo, failure: UnavailableError, now: float) -> Repo:
    """The row of a repo whose resync came to nothing: parked, or tried again later (spec §4.8).

    `claimed` is the row as the worker took it: if something has happened to the repo since, it is not given up on.
    What is the host's affair and not the repo's (`FetchFailure.spares`) costs it no attempt.
    """
    _, status = transition(repo.status, Finding.FAILED)
    attempts = repo.attempts + (not failure.reason.spares)
    wait = max(backoff_seconds(attempts, repo.did), failure.retry_after or 0.0)
    return replace(
        repo,
        version=repo.version + 1,
        status=status,
        reason=repo.reason or Desync.REQUESTED,
        attempts=attempts,
        next_attempt_at=PARKED if failure.reason.parks and repo.version == claimed.version else now + wait,
        last_error=str(failure)[:500],
        buffered_events=0,
        buffered_bytes=0,
    )


def plan_release(claimed: Repo, at: float | None = None) -> Repo:
    """The row of a repo whose resync was called off: to be claimed again at once, or from `at` on, at no cost."""
    _, status = transition(claimed.status, Finding.FAILED)
    return replace(
        claimed,
        version=claimed.version + 1,
        status=status,
        reason=claimed.reason or Desync.REQUESTED,
        next_attempt_at=at,
        buffered_events=0,
        buffered_bytes=0,
    )
