"""Plan the effect of one event on one repo: the acceptance rules of docs/protocol.md#order-of-checks.

Cheap checks come first. Before the signature is verified, only a rate-limited key lookup causes work elsewhere.
`repo_transitions.TRANSITIONS` says what an event does to each sync status.
"""

from dataclasses import replace

from indexer.atproto.mst import EMPTY_TREE
from indexer.errors import UpstreamError
from indexer.reasons import Desync, Rejection
from indexer.sync.events import AccountEvent, CommitEvent, IdentityEvent, RepoEvent, SyncEvent
from indexer.sync.plans import NeedsKey, Plan, RecordChange
from indexer.sync.policy import KeyState, PlanContext, Policy, is_future
from indexer.sync.record_change import record_change
from indexer.sync.repo_state import DELETED, PARKED, TOMBSTONED, Head, Repo, SyncStatus
from indexer.sync.repo_transitions import (
    Outcome,
    Trigger,
    amend,
    desynchronize,
    move,
    reactivate,
    synchronize,
    transition,
    unparked,
)
from indexer.sync.verify import VerifiedCommit, verify_commit, verify_sync

FIRST_COMMIT_SECONDS = 3.0
"""Time that the resync of a new account waits for its first commit, which may contain the whole repo."""


def plan_event(repo: Repo, event: RepoEvent, size: int, key: KeyState | None, context: PlanContext) -> Plan | NeedsKey:
    """Plan one event, or return that a key is needed first.

    Args:
        repo: The current row; `Repo(did)` if there is none.
        event: The decoded event.
        size: The size of its frame in bytes.
        key: The signing key; None if it has not been looked up.
        context: What all plans of the batch share.
    """
    if not (repo.known or context.policy.track_all):
        return Plan(repo, Outcome.IGNORED)
    if context.host is not None and (elsewhere := _hosted_elsewhere(repo, key, context)):
        return elsewhere
    match event:
        case AccountEvent():
            return _plan_account(repo, event, context)
        case IdentityEvent():
            return _plan_identity(repo, context)
        case _:
            return _plan_signed(repo, event, size, key, context)


def _hosted_elsewhere(repo: Repo, key: KeyState | None, context: PlanContext) -> Plan | NeedsKey | None:
    """Reject events from a PDS about an account that it does not host, or no longer hosts."""
    if key is None:
        return NeedsKey(repo.did, refresh=False)
    if not key.available or key.host == context.host:
        return None
    if not key.final:
        return NeedsKey(repo.did, refresh=True)
    return Plan(repo, Outcome.REJECTED, why=Rejection.WRONG_HOST, detail=f"hosted by {key.host}")


def _plan_signed(
    repo: Repo, event: CommitEvent | SyncEvent, size: int, key: KeyState | None, context: PlanContext
) -> Plan | NeedsKey:
    if is_future(event.rev, context.now, context.policy.limits):
        return _plan_without_records(repo, Trigger.INVALID, size, context, why=Rejection.FUTURE_REV, detail=event.rev)
    if _is_replay(repo, event):
        return _plan_without_records(repo, Trigger.NOT_NEWER, size, context)
    if not repo.active:
        return Plan(repo, Outcome.IGNORED)
    if key is None and _worth_a_lookup(repo, event):
        return NeedsKey(repo.did, refresh=False)
    if key is None or not key.available:
        return _plan_unchecked(repo, event, size, context)
    return _plan_verified(repo, event, size, key, context)


def _plan_verified(
    repo: Repo, event: CommitEvent | SyncEvent, size: int, key: KeyState, context: PlanContext
) -> Plan | NeedsKey:
    if key.key is None:
        return _plan_without_records(repo, Trigger.INVALID, size, context, why=Rejection.NO_SIGNING_KEY)
    limits = context.policy.limits
    try:
        if isinstance(event, SyncEvent):
            return _plan_sync(repo, verify_sync(event, key.key, limits).head, size, context)
        return _plan_commit(repo, verify_commit(event, key.key, limits), size, context)
    except UpstreamError as error:
        if error.reason is Rejection.SIGNATURE_INVALID and not key.final:
            return NeedsKey(repo.did, refresh=True)
        if error.reason is Rejection.SIGNATURE_INVALID and key.stale:
            return _plan_unchecked(repo, event, size, context)
        return _plan_without_records(repo, Trigger.INVALID, size, context, why=error.reason, detail=error.detail)


def _is_replay(repo: Repo, event: CommitEvent | SyncEvent) -> bool:
    """Return True for an event at or before the stored rev.

    A #sync at the stored rev is not a replay: it may show a second signed state at the same rev.
    """
    if repo.head is None:
        return False
    return event.rev <= repo.head.rev if isinstance(event, CommitEvent) else event.rev < repo.head.rev


def _worth_a_lookup(repo: Repo, event: CommitEvent | SyncEvent) -> bool:
    """Return False for a repo that waits for its resync, which looks the key up itself.

    Exceptions: the event may unpark the repo, or contain the whole repo.
    """
    if not repo.known or repo.sync_status is not SyncStatus.DESYNCHRONIZED or repo.next_attempt_at == PARKED:
        return True
    return isinstance(event, CommitEvent) and event.since is None and repo.head is None


def _plan_commit(repo: Repo, commit: VerifiedCommit, size: int, context: PlanContext) -> Plan:
    rev = commit.head.rev
    if commit.whole and _can_synchronize_without_export(repo, rev):
        return _apply(repo, Trigger.WHOLE, commit, context)
    flaw = commit.flaw
    if repo.head is None:
        return _plan_without_records(
            repo, Trigger.BREAKS, size, context, verified_rev=rev, why=flaw or Desync.CHAIN_BREAK
        )
    if repo.head.data != commit.prev_data:
        flaw = flaw or Desync.CHAIN_BREAK
    elif flaw is Desync.UNDECIDABLE and context.policy.lenient and commit.ops_hold:
        flaw = None  # prevData is the stored data, and the operations are consistent with the new tree
    if flaw:
        return _plan_without_records(
            repo, Trigger.BREAKS, size, context, verified_rev=rev, why=flaw, detail=commit.detail
        )
    if repo.sync_status is SyncStatus.SYNCHRONIZED:
        return _apply(repo, Trigger.EXTENDS, commit, context)
    return _plan_without_records(repo, Trigger.EXTENDS, size, context, verified_rev=rev)


def _plan_sync(repo: Repo, head: Head, size: int, context: PlanContext) -> Plan:
    if head.data == EMPTY_TREE and _can_synchronize_without_export(repo, head.rev):
        return _advance(repo, Trigger.WHOLE, head, (), context)
    if repo.head is None or repo.head.data != head.data:
        why = Desync.EQUIVOCATION if repo.head and repo.head.rev == head.rev else Desync.SYNC_EVENT
        return _plan_without_records(repo, Trigger.SYNC_DIFFERS, size, context, verified_rev=head.rev, why=why)
    if repo.head.rev == head.rev:
        return _plan_without_records(repo, Trigger.SYNC_EQUAL, size, context)
    if repo.sync_status is SyncStatus.SYNCHRONIZED:
        return _advance(repo, Trigger.SYNC_ADVANCES, head, (), context)
    return _plan_without_records(repo, Trigger.SYNC_ADVANCES, size, context, verified_rev=head.rev)


def _plan_account(repo: Repo, event: AccountEvent, context: PlanContext) -> Plan:
    """Apply a relay's report about the account, unless a later one has been applied (docs/protocol.md#accounts)."""
    if repo.hosting_relay == context.relay and event.seq <= repo.hosting_seq:
        return Plan(repo, Outcome.REPLAYED)
    after = amend(
        repo,
        active=event.active,
        hosting_status=event.status,
        hosting_relay=context.relay,
        hosting_seq=event.seq,
        erase_at=_erase_at(repo, event, context),
        next_attempt_at=repo.next_attempt_at if repo.known else context.now + FIRST_COMMIT_SECONDS,
    )
    if not event.active:
        return Plan(after, Outcome.APPLIED)
    if repo.active or repo.sync_status is SyncStatus.DESYNCHRONIZED:
        return Plan(unparked(after, context.now), Outcome.APPLIED)
    return Plan(reactivate(after), Outcome.APPLIED, why=Desync.REACTIVATED)


def plan_existence(repo: Repo, now: float, policy: Policy, *, exists: bool) -> Repo:
    """Return the row after the DID disappeared from its directory or returned; the same object if nothing changes.

    A DID that disappeared is treated like a deleted account. Nothing follows for a repo without stored records: its
    DID may be too new for the directory.
    """
    if not exists and repo.active and repo.head is not None:
        return amend(repo, active=False, hosting_status=TOMBSTONED, erase_at=now + policy.deletion_grace)
    return _returned(repo, now) if exists and not repo.active and repo.hosting_status == TOMBSTONED else repo


def plan_active(repo: Repo, now: float) -> Repo:
    """Return the row of a repo that its relay reports as active; the same object if it is active or its DID is gone."""
    return repo if repo.active or repo.hosting_status == TOMBSTONED else _returned(repo, now)


def _returned(repo: Repo, now: float) -> Repo:
    after = amend(repo, active=True, hosting_status=None, erase_at=None)
    return unparked(after, now) if repo.sync_status is SyncStatus.DESYNCHRONIZED else reactivate(after)


def plan_listed(repo: Repo, rev: str, now: float) -> Repo:
    """Return the row of a repo that a host lists at `rev`: desynchronized if the stored rev is older, else the same.

    Repo lists are not signed, so the listed rev counts as unverified.
    """
    if repo.sync_status is not SyncStatus.SYNCHRONIZED or not repo.active or repo.head is None:
        return repo
    if rev <= repo.head.rev:
        return repo
    return desynchronize(replace(repo, latest_unverified_rev=rev), Trigger.BEHIND, Desync.BEHIND, now)


def _erase_at(repo: Repo, event: AccountEvent, context: PlanContext) -> float | None:
    if event.active or event.status != DELETED:
        return None
    return context.now + context.policy.deletion_grace if repo.erase_at is None else repo.erase_at


def _plan_identity(repo: Repo, context: PlanContext) -> Plan:
    if not repo.known:
        return Plan(amend(repo, next_attempt_at=context.now + FIRST_COMMIT_SECONDS), Outcome.APPLIED)
    if repo.sync_status is SyncStatus.IN_PROGRESS:
        # The new version tells `plan_failure` that the repo changed during its resync.
        return Plan(amend(repo), Outcome.APPLIED)
    return Plan(unparked(repo, context.now), Outcome.APPLIED)


def _plan_unchecked(repo: Repo, event: CommitEvent | SyncEvent, size: int, context: PlanContext) -> Plan:
    """Plan an event whose key could not be fetched: the repo needs a resync, and nothing in the event is trusted."""
    if not repo.known:
        after = amend(repo, sync_reason=Desync.IDENTITY, latest_unverified_rev=event.rev)
        return Plan(after, Outcome.DESYNCHRONIZED, why=Desync.IDENTITY)
    return _plan_without_records(repo, Trigger.UNCHECKED, size, context, unverified_rev=event.rev, why=Desync.IDENTITY)


def _plan_without_records(
    repo: Repo,
    trigger: Trigger,
    size: int,
    context: PlanContext,
    *,
    verified_rev: str | None = None,
    unverified_rev: str | None = None,
    why: Rejection | Desync | None = None,
    detail: str = "",
) -> Plan:
    """Plan a trigger that writes no records.

    `verified_rev` is the event's rev if the event is authentic, `unverified_rev` if that could not be checked.
    """
    outcome, _ = transition(repo.sync_status, trigger)
    verified = _newer(repo.latest_verified_rev, verified_rev)
    unverified = _newer(repo.latest_unverified_rev, unverified_rev)
    noted = replace(repo, latest_verified_rev=verified, latest_unverified_rev=unverified)
    if outcome is Outcome.BUFFERED:
        return _buffer(noted, size, context)
    if outcome is Outcome.DESYNCHRONIZED and isinstance(why, Desync):
        return Plan(desynchronize(noted, trigger, why, context.now), outcome, why=why, detail=detail)
    if unverified != repo.latest_unverified_rev:
        return Plan(amend(noted), outcome, why=why, detail=detail)
    if verified == repo.latest_verified_rev:
        return Plan(repo, outcome, why=why, detail=detail)
    if not repo.known:
        return Plan(amend(noted), Outcome.DESYNCHRONIZED, why=Desync.NEW)
    return Plan(amend(unparked(noted, context.now)), outcome, why=why, detail=detail)


def _newer(latest: str | None, rev: str | None) -> str | None:
    return max(latest or "", rev or "") or None


def _buffer(repo: Repo, size: int, context: PlanContext) -> Plan:
    """Add the event to the resync buffer, or desynchronize the repo if the buffer is full.

    A failed resync discards its buffer. The latest revs on the row remain.
    """
    events, total = repo.buffered_events + 1, repo.buffered_bytes + size
    limits = context.policy.limits
    if events > limits.resync_buffer_events or total > limits.resync_buffer_bytes:
        outcome, _ = transition(repo.sync_status, Trigger.OVERFLOWS)
        after = desynchronize(repo, Trigger.OVERFLOWS, Desync.BUFFER_OVERFLOW, context.now)
        return Plan(after, outcome, why=Desync.BUFFER_OVERFLOW)
    return Plan(amend(repo, buffered_events=events, buffered_bytes=total), Outcome.BUFFERED, buffer=True)


def _apply(repo: Repo, trigger: Trigger, commit: VerifiedCommit, context: PlanContext) -> Plan:
    changes = [record_change(change, commit.head.rev, context.policy) for change in commit.changes]
    return _advance(repo, trigger, commit.head, tuple([change for change in changes if change]), context)


def _advance(repo: Repo, trigger: Trigger, head: Head, changes: tuple[RecordChange, ...], context: PlanContext) -> Plan:
    outcome, _ = transition(repo.sync_status, trigger)
    if repo.sync_status is SyncStatus.SYNCHRONIZED:
        return Plan(move(repo, trigger, head=head), outcome, changes)
    return Plan(synchronize(repo, trigger, head, context.now), outcome, changes)


def _can_synchronize_without_export(repo: Repo, rev: str) -> bool:
    """Return True if the repo is empty and no newer rev is known, so that an event with the whole tree may fill it."""
    if repo.sync_status is not SyncStatus.DESYNCHRONIZED or repo.head is not None:
        return False
    return repo.latest_verified_rev is None or repo.latest_verified_rev <= rev
