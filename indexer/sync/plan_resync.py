"""Plan the end of a resync: the export applied and the buffered events drained, or a failure.

The rules are those of live events: once the export is stored, each buffered event is planned as if it had just arrived.
"""

from collections.abc import Iterable
from dataclasses import replace

from indexer.errors import BrokenInvariantError, UnavailableError
from indexer.reasons import Desync, Rejection
from indexer.sync import repo_transitions
from indexer.sync.backoff import backoff_seconds
from indexer.sync.events import CommitEvent, MalformedEvent, SyncEvent
from indexer.sync.frames import decode_frame
from indexer.sync.plan_batch import DEAD_LETTER_BYTES
from indexer.sync.plan_event import plan_event
from indexer.sync.plans import Batch, BufferedEvent, DeadLetter, NeedsKey, Plan, RecordChange, RepoWrite
from indexer.sync.policy import KeyState, PlanContext
from indexer.sync.repo_state import PARKED, Head, Repo, SyncStatus
from indexer.sync.repo_transitions import Outcome, Trigger, desynchronize, synchronize


def plan_completion(
    locked: Repo, head: Head, buffered: Iterable[BufferedEvent], key: KeyState, context: PlanContext
) -> Batch:
    """Plan the last writes of a resync whose stored records are those of `head`; `locked` is the locked row.

    The repo ends synchronized, unless a buffered event breaks the chain or a newer rev than this is known. Then it
    waits for its next resync, at the head that was reached.
    """
    repo = synchronize(locked, Trigger.COMPLETED, head, context.now)
    changes: list[RecordChange] = []
    dead_letters: list[DeadLetter] = []
    for event in buffered:
        # An event may have been buffered because its key was unknown. Its key may be newer than the export's.
        plan, dead_letter = _drain(repo, event, replace(key, final=True, stale=True), context)
        repo = plan.repo
        changes += plan.changes
        dead_letters += [dead_letter] if dead_letter else []
        if repo.sync_status is not SyncStatus.SYNCHRONIZED:
            # The rest of the buffer is discarded, and the newest unverified rev may be of an event in it.
            repo = replace(repo, latest_unverified_rev=locked.latest_unverified_rev)
            break
    else:
        if repo.latest_verified_rev is not None and repo.head is not None and repo.head.rev < repo.latest_verified_rev:
            repo = desynchronize(repo, Trigger.BEHIND, Desync.STALE_EXPORT, context.now)
    return Batch((RepoWrite(locked.version, repo, tuple(changes)),), tuple(dead_letters))


def _drain(repo: Repo, buffered: BufferedEvent, key: KeyState, context: PlanContext) -> tuple[Plan, DeadLetter | None]:
    event = decode_frame(buffered.frame, context.policy.limits)
    if isinstance(event, MalformedEvent):  # the limits were wider when it arrived
        dead_letter = _dead_letter(repo, buffered, event.type, event.reason, event.detail)
        return Plan(repo, Outcome.REJECTED), dead_letter
    if not isinstance(event, CommitEvent | SyncEvent):
        raise BrokenInvariantError(f"{repo.did}: a buffered frame is neither a #commit nor a #sync")
    plan = plan_event(repo, event, 0, key, context)
    if isinstance(plan, NeedsKey):
        raise BrokenInvariantError(f"{repo.did}: planning asked for a key although the key is final")
    if isinstance(plan.why, Rejection):
        return plan, _dead_letter(repo, buffered, event.kind, plan.why, plan.detail)
    if plan.outcome is Outcome.DESYNCHRONIZED and plan.why is Desync.CHAIN_BREAK:
        return replace(plan, repo=replace(plan.repo, sync_reason=Desync.DRAIN_BREAK)), None
    return plan, None


def _dead_letter(repo: Repo, buffered: BufferedEvent, kind: str, reason: Rejection, detail: str) -> DeadLetter:
    frame = buffered.frame[:DEAD_LETTER_BYTES]
    return DeadLetter(buffered.relay, buffered.seq, repo.did, kind, reason, detail, frame)


def plan_failure(repo: Repo, claimed: Repo, failure: UnavailableError, now: float) -> Repo:
    """Return the row of a repo whose resync failed: parked, or with the time of the next attempt.

    `claimed` is the row as the worker claimed it: a repo that changed since then is not parked. A failure that is not
    the repo's own (`FetchFailure.counts_as_attempt` is False) does not count as an attempt (docs/protocol.md#resync).
    """
    attempts = repo.attempts + failure.reason.counts_as_attempt
    wait = max(backoff_seconds(attempts, repo.did), failure.retry_after or 0.0)
    parked = failure.reason.is_permanent and repo.version == claimed.version
    next_attempt_at = PARKED if parked else now + wait
    return repo_transitions.fail(repo, attempts=attempts, next_attempt_at=next_attempt_at, last_error=str(failure))
