"""The state machine of a repo: every change of a repo's sync status is an entry of `TRANSITIONS`.

`move` is the only Python function that sets a sync status. `tests/sync/test_repo_transitions.py` compares plans with
the table. In SQL, the claim of a resync worker, `atproto.request_resync` and `indexer.stop_tracking` set it, and new
rows are desynchronized. `tests/db/test_sync_status_writes.py` compares them with the table, and in the database of each
test, a trigger raises an error for a change that the table does not have.
"""

from enum import StrEnum
from typing import Any

from indexer.errors import BrokenInvariantError, UnavailableError
from indexer.reasons import Desync
from indexer.sync.backoff import backoff_seconds
from indexer.sync.repo_state import PARKED, Head, Repo, SyncStatus
from indexer.sync.scope import Scope

STABLE_SECONDS = 3_600.0
"""A repo that stayed synchronized for this long starts its back-off from the beginning."""

MAX_UNPARK_SECONDS = 600.0
"""The longest time from the event that unparks a repo to its next attempt, apart from jitter."""

UNPROVEN_REASONS = frozenset({Desync.REQUESTED, Desync.RECORD_MISSING, Desync.LENIENT_COMMIT})
"""Reasons under which the stored records themselves are in doubt: only a complete export settles them, not a head that
equals the network's."""


class Outcome(StrEnum):
    """The result of one received event. Every event has exactly one."""

    APPLIED = "applied"
    REPLAYED = "replayed"
    BUFFERED = "buffered"
    IGNORED = "ignored"
    DESYNCHRONIZED = "desynchronized"
    REJECTED = "rejected"


class Trigger(StrEnum):
    """An event, a step of a resync, or a request, as the state machine sees it."""

    EXTENDS = "commit that extends the chain"
    BREAKS = "authentic commit that breaks the chain or cannot be applied"
    WHOLE = "of a new repo: first commit that contains the whole tree, or #sync to the empty tree"
    NOT_NEWER = "commit at or below the stored rev, or #sync below it"
    INVALID = "message that fails verification"
    UNCHECKED = "message whose signature could not be checked"
    SYNC_EQUAL = "#sync with the stored data and rev"
    SYNC_ADVANCES = "#sync with the stored data and a higher rev"
    SYNC_DIFFERS = "#sync with other data"
    REFUSED = "message whose effects the database cannot store"
    OVERFLOWS = "event that overflows the resync buffer"
    CLAIMED = "claimed by a resync worker"
    COMPLETED = "resync completed: export applied, buffer drained"
    FAILED = "resync failed"
    RELEASED = "claim released by its worker"
    LEASE_EXPIRED = "lease of the resync worker expired"
    BEHIND = "a newer rev is known than the stored one"
    STATUS_UNKNOWN = "hosting status of an unlisted account is unknown"
    UNPROVEN = "an undecidable commit was applied without proof"
    VALUES_MISSING = "record values are missing a day after the resync"
    REQUESTED = "resync requested"
    REACTIVATED = "account active again"
    WITHHELD = "account withheld by the relay"
    ERASED = "records of a deleted account erased, or repo untracked"
    WIDENED = "collections added to the scope"


_D, _P, _S = SyncStatus.DESYNCHRONIZED, SyncStatus.IN_PROGRESS, SyncStatus.SYNCHRONIZED

TRANSITIONS: dict[SyncStatus, dict[Trigger, tuple[Outcome, SyncStatus]]] = {
    _D: {
        Trigger.EXTENDS: (Outcome.IGNORED, _D),
        Trigger.BREAKS: (Outcome.IGNORED, _D),
        Trigger.WHOLE: (Outcome.APPLIED, _S),
        Trigger.NOT_NEWER: (Outcome.REPLAYED, _D),
        Trigger.INVALID: (Outcome.REJECTED, _D),
        Trigger.UNCHECKED: (Outcome.IGNORED, _D),
        Trigger.SYNC_EQUAL: (Outcome.IGNORED, _D),
        Trigger.SYNC_ADVANCES: (Outcome.IGNORED, _D),
        Trigger.SYNC_DIFFERS: (Outcome.IGNORED, _D),
        Trigger.REFUSED: (Outcome.REJECTED, _D),
        Trigger.CLAIMED: (Outcome.APPLIED, _P),
        Trigger.REQUESTED: (Outcome.APPLIED, _D),
        Trigger.ERASED: (Outcome.APPLIED, _D),
    },
    _P: {
        Trigger.EXTENDS: (Outcome.BUFFERED, _P),
        Trigger.BREAKS: (Outcome.BUFFERED, _P),
        Trigger.WHOLE: (Outcome.BUFFERED, _P),
        Trigger.NOT_NEWER: (Outcome.REPLAYED, _P),
        Trigger.INVALID: (Outcome.REJECTED, _P),
        Trigger.UNCHECKED: (Outcome.BUFFERED, _P),
        Trigger.SYNC_EQUAL: (Outcome.BUFFERED, _P),
        Trigger.SYNC_ADVANCES: (Outcome.BUFFERED, _P),
        Trigger.SYNC_DIFFERS: (Outcome.BUFFERED, _P),
        Trigger.REFUSED: (Outcome.REJECTED, _D),
        Trigger.OVERFLOWS: (Outcome.DESYNCHRONIZED, _D),
        Trigger.COMPLETED: (Outcome.APPLIED, _S),
        Trigger.FAILED: (Outcome.DESYNCHRONIZED, _D),
        Trigger.RELEASED: (Outcome.APPLIED, _D),
        Trigger.LEASE_EXPIRED: (Outcome.DESYNCHRONIZED, _D),
        Trigger.REQUESTED: (Outcome.APPLIED, _D),
        Trigger.REACTIVATED: (Outcome.APPLIED, _D),
        Trigger.ERASED: (Outcome.APPLIED, _D),
    },
    _S: {
        Trigger.EXTENDS: (Outcome.APPLIED, _S),
        Trigger.BREAKS: (Outcome.DESYNCHRONIZED, _D),
        Trigger.NOT_NEWER: (Outcome.REPLAYED, _S),
        Trigger.INVALID: (Outcome.REJECTED, _S),
        Trigger.UNCHECKED: (Outcome.DESYNCHRONIZED, _D),
        Trigger.SYNC_EQUAL: (Outcome.IGNORED, _S),
        Trigger.SYNC_ADVANCES: (Outcome.APPLIED, _S),
        Trigger.SYNC_DIFFERS: (Outcome.DESYNCHRONIZED, _D),
        Trigger.REFUSED: (Outcome.REJECTED, _D),
        Trigger.BEHIND: (Outcome.DESYNCHRONIZED, _D),
        Trigger.STATUS_UNKNOWN: (Outcome.DESYNCHRONIZED, _D),
        Trigger.UNPROVEN: (Outcome.DESYNCHRONIZED, _D),
        Trigger.WIDENED: (Outcome.DESYNCHRONIZED, _D),
        Trigger.VALUES_MISSING: (Outcome.DESYNCHRONIZED, _D),
        Trigger.REQUESTED: (Outcome.APPLIED, _D),
        Trigger.REACTIVATED: (Outcome.APPLIED, _D),
        Trigger.WITHHELD: (Outcome.APPLIED, _D),
        Trigger.ERASED: (Outcome.APPLIED, _D),
    },
}


def transition(status: SyncStatus, trigger: Trigger) -> tuple[Outcome, SyncStatus]:
    """Return the outcome of the trigger and the next sync status.

    Raises:
        BrokenInvariantError: The trigger cannot happen in this status.
    """
    try:
        return TRANSITIONS[status][trigger]
    except KeyError:
        raise BrokenInvariantError(f"no transition for a {status} repo: {trigger}") from None


def move(repo: Repo, trigger: Trigger, **fields: Any) -> Repo:
    """Return the next version of the row, in the status that follows from `trigger`, with `fields` replaced.

    Raises:
        BrokenInvariantError: The trigger cannot happen in this status.
    """
    _, status = transition(repo.sync_status, trigger)
    return repo._replace(version=repo.version + 1, sync_status=status, **fields)


def amend(repo: Repo, **fields: Any) -> Repo:
    """Return the next version of the row with `fields` replaced, in the same sync status."""
    return repo._replace(version=repo.version + 1, **fields)


def desynchronize(repo: Repo, trigger: Trigger, reason: Desync, now: float) -> Repo:
    """Return the row of a repo that needs a resync: immediately, or later if it also broke recently."""
    since = repo.synchronized_at if repo.sync_status is SyncStatus.SYNCHRONIZED else None
    recent_breaks = 0 if since is not None and now - since > STABLE_SECONDS else repo.attempts
    return move(
        repo,
        trigger,
        sync_reason=_keep_unproven(repo, reason),
        attempts=recent_breaks + 1,
        next_attempt_at=now + backoff_seconds(recent_breaks, repo.did) if recent_breaks else None,
        buffered_events=0,
        buffered_bytes=0,
    )


def synchronize(repo: Repo, trigger: Trigger, head: Head, now: float, scope_version: int) -> Repo:
    """Return the row of a repo whose stored records are those of `head`. `attempts` stays until the repo settles.

    They must be complete for this version of the scope. If the repo needs an export (`needs_export`), they must have
    been compared with one.
    """
    return move(
        repo,
        trigger,
        sync_reason=None,
        unproven_since=None,
        head=head,
        latest_unverified_rev=None,
        synchronized_at=now,
        next_attempt_at=None,
        last_failure=None,
        last_error=None,
        buffered_events=0,
        buffered_bytes=0,
        scope_version=scope_version,
    )


def track_again(repo: Repo, scope: Scope) -> Repo:
    """Return the row of a repo that was out of scope, and that the scope wants again: it is fetched."""
    return amend(
        repo,
        tracked=True,
        active=True,
        hosting_status=None,
        withheld_since=None,
        erase_at=None,
        next_attempt_at=None,
        last_failure=None,
        last_error=None,
        from_stream=True,
        wanted_in=scope.version,
    )


def widen(repo: Repo) -> Repo:
    """Return the row of a repo that is fetched because collections were added. It broke nothing: no back-off."""
    return move(repo, Trigger.WIDENED, sync_reason=Desync.SCOPE_WIDENED, next_attempt_at=None)


def needs_export(repo: Repo, scope: Scope) -> bool:
    """Return True if only a complete export may end the resync: stored records are in doubt, or some may be missing."""
    in_doubt = repo.sync_reason in UNPROVEN_REASONS or repo.unproven_since is not None
    return in_doubt or repo.scope_version < scope.complete_from


def reactivate(repo: Repo, now: float) -> Repo:
    """Return the row of an account that became active again, desynchronized with the back-off of a break.

    Its commits were ignored while it was inactive, and an export that is being fetched may be older than they are.
    """
    return desynchronize(repo, Trigger.REACTIVATED, Desync.REACTIVATED, now)


def hide(repo: Repo, status: str | None, erase_at: float | None = None) -> Repo:
    """Return the row of an account that is not active. Its records are erased from `erase_at` (None: they stay)."""
    return amend(repo, active=False, hosting_status=status, withheld_since=None, erase_at=erase_at)


def withhold(repo: Repo) -> Repo:
    """Return the row of a synchronized repo that its relay withholds: no message tells when it changes.

    Like any parked repo, it is compared with its host after `INDEXER_SWEEP_INTERVAL`.
    """
    return move(repo, Trigger.WITHHELD, sync_reason=Desync.WITHHELD, next_attempt_at=PARKED)


def release(repo: Repo, at: float | None = None, failure: UnavailableError | None = None) -> Repo:
    """Return the row of a repo whose worker gives its claim back. It may be claimed again from `at` (None: now).

    `failure` replaces the last one.
    """
    return _end_claim(repo, Trigger.RELEASED, next_attempt_at=at, **_noted(failure))


def fail(repo: Repo, failure: UnavailableError, *, attempts: int, next_attempt_at: float) -> Repo:
    """Return the row of a repo whose resync failed."""
    return _end_claim(repo, Trigger.FAILED, attempts=attempts, next_attempt_at=next_attempt_at, **_noted(failure))


def _noted(failure: UnavailableError | None) -> dict[str, Any]:
    return {} if failure is None else {"last_failure": failure.reason, "last_error": str(failure)[:500]}


def erase(repo: Repo) -> Repo:
    """Return the row of a repo whose records are being erased: without a head, so that a reactivation fetches it."""
    return move(
        repo,
        Trigger.ERASED,
        sync_reason=Desync.ERASED,
        unproven_since=None,
        head=None,
        attempts=0,
        next_attempt_at=PARKED,
        synchronized_at=None,
        buffered_events=0,
        buffered_bytes=0,
    )


def untrack(repo: Repo, status: str, now: float) -> Repo:
    """Return the row of a repo that is not tracked any more, with this hosting status. Its records are erased."""
    return erase(repo)._replace(
        tracked=False,
        active=False,
        hosting_status=status,
        withheld_since=None,
        latest_verified_rev=None,
        latest_unverified_rev=None,
        last_failure=None,
        last_error=None,
        erase_at=now,
        scope_version=0,
        wanted_in=0,
    )


def unparked(repo: Repo, now: float) -> Repo:
    """Return the row of a parked repo that is tried again; the same object for any other repo.

    The repo is due at once after one break and one failure, and later after more of them in a row: whoever sends the
    events that unpark it must not cause a request for each of them.
    """
    if repo.next_attempt_at != PARKED:
        return repo
    excess = repo.attempts - 2
    wait = backoff_seconds(excess, repo.did, maximum=MAX_UNPARK_SECONDS) if excess > 0 else 0.0
    return amend(repo, next_attempt_at=now + wait)


def _end_claim(repo: Repo, trigger: Trigger, **fields: Any) -> Repo:
    reason = repo.sync_reason or Desync.REQUESTED
    return move(repo, trigger, sync_reason=reason, buffered_events=0, buffered_bytes=0, **fields)


def _keep_unproven(repo: Repo, reason: Desync) -> Desync:
    """Return the new reason, unless the present one puts the records in doubt. Only a complete export settles that."""
    return repo.sync_reason if repo.sync_reason in UNPROVEN_REASONS else reason
