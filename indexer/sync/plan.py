"""Plan the effect of one event on one repo: the acceptance rules of docs/protocol.md#order-of-checks.

Cheap checks come first. An unproven message causes at most a rate-limited key lookup, and a resync of its repo.
`repo.TRANSITIONS` says what an event does to each sync status.
"""

from collections.abc import Mapping, Sequence

from indexer.atproto.crypto import PublicKey
from indexer.atproto.mst import EMPTY_TREE
from indexer.atproto.syntax import CollectionFilter
from indexer.errors import UpstreamError
from indexer.reasons import Desync, Rejection
from indexer.sync.account import FIRST_COMMIT_SECONDS, plan_account, plan_passed_on
from indexer.sync.changes import NeedsKey, NeedsPredecessor, Plan, RecordChange, RecordConverter, RecordKey, RepoWrite
from indexer.sync.events import AccountEvent, CommitEvent, IdentityEvent, RepoEvent, SyncEvent
from indexer.sync.policy import KeyState, PlanContext, is_future
from indexer.sync.repo import (
    PARKED,
    TOMBSTONED,
    Head,
    Outcome,
    Repo,
    SyncStatus,
    Trigger,
    amend,
    desynchronize,
    synchronize,
    track_again,
    transition,
    unpark_withheld,
    unparked,
    widen,
)
from indexer.sync.scope import Scope, Track
from indexer.sync.verify import VerifiedCommit, verify_sync


def plan_event(
    repo: Repo, event: RepoEvent, size: int, key: KeyState | None, context: PlanContext
) -> Plan | NeedsKey | NeedsPredecessor:
    """Plan one event, or return what is needed first; None for `key` means that it has not been looked up.

    `repo` is the current row, or `Repo(did)` if there is none. `size` is that of the frame in bytes.
    """
    if not repo.tracked and not (repo.out_of_scope and _may_add(event, context)):
        return Plan(repo, Outcome.IGNORED)
    if not repo.known and (repo.did in context.refused or not _may_add(event, context)):
        return Plan(repo, Outcome.IGNORED)
    if context.origin.host is not None and (elsewhere := _hosted_elsewhere(repo, event, key, context)):
        return elsewhere
    if not repo.tracked:
        return _plan_out_of_scope(repo, event, key, context)
    match event:
        case AccountEvent():
            return plan_account(repo, event, context)
        case IdentityEvent():
            return plan_identity(repo, context)
        case _:
            plan = _plan_signed(repo, event, key, context)
            if isinstance(plan, Plan) and plan.outcome is Outcome.BUFFERED:
                return _buffer(plan.repo, size, context)
            return plan


def key_to_verify(repo: Repo, event: CommitEvent, key: KeyState | None, context: PlanContext) -> PublicKey | None:
    """Return the key with which `plan_event` will verify a commit on this row.

    None if a cheaper check decides, if the key has to be looked up, or if a repo may come into the scope again. The
    result only says whether it pays to verify the commit ahead: the messages before it may change the row.
    """
    if key is None or key.key is None or not key.available or (key.doubtful and repo.head is not None):
        return None
    host = context.origin.host
    if not (repo.tracked and repo.active) or (host is not None and key.host != host):
        return None
    if not repo.known and (repo.did in context.refused or not _may_add(event, context)):
        return None
    if is_future(event.rev, context.now, context.policy.limits) or _is_replay(repo, event):
        return None
    return key.key


def _may_add(event: RepoEvent, context: PlanContext) -> bool:
    """Return True if the event may add its unknown repo. What it says about itself is not verified yet.

    On the stream of a subscribed host, it may not: such hosts list their accounts, and lists have budgets.
    """
    scope = context.policy.scope
    if context.is_beside_relays:
        return False
    if scope.signals is None:
        return scope.track is Track.ALL
    return isinstance(event, CommitEvent) and any(_writes_signal(op.path, op.cid, scope.signals) for op in event.ops)


def _plan_out_of_scope(repo: Repo, event: RepoEvent, key: KeyState | None, context: PlanContext) -> Plan | NeedsKey:
    """Track a repo again if the event would add an unknown repo: by a signal only if the commit is authentic."""
    scope, ignored = context.policy.scope, Plan(repo, Outcome.IGNORED)
    if isinstance(event, AccountEvent) and not event.active:
        return ignored
    if scope.signals is not None and isinstance(event, CommitEvent):
        if key is None:
            return NeedsKey(repo.did, refresh=False)
        if not key.available or key.key is None:
            return ignored
        try:
            if not _is_signal(context.verify(event, key.key, context.policy.limits), scope):
                return ignored
        except UpstreamError as error:
            if error.reason is Rejection.SIGNATURE_INVALID and not key.final:
                return NeedsKey(repo.did, refresh=True)
            return ignored
    return Plan(track_again(repo, scope.version, from_stream=True), Outcome.DESYNCHRONIZED, why=Desync.NEW)


def _hosted_elsewhere(
    repo: Repo, event: RepoEvent, key: KeyState | None, context: PlanContext
) -> Plan | NeedsKey | None:
    """Reject events from a PDS about an account that it does not host, or no longer hosts.

    A PDS sends no `#identity` when an account moves to another one, only that the account is not active. If the lookup
    failed, or its limits did not allow it, this message is ignored: the next reconciliation asks whether it is true.

    A subscribed host must not delay messages of other hosts' accounts by lookups of their identities.
    """
    if key is None:
        return NeedsKey(repo.did, refresh=False)
    leaves = isinstance(event, AccountEvent) and not event.active and repo.known
    is_elsewhere = key.available and key.host != context.origin.host
    if is_elsewhere and (key.final or context.is_beside_relays):
        return Plan(repo, Outcome.REJECTED, why=Rejection.WRONG_HOST, detail=f"hosted by {key.host}")
    if not key.final and (leaves or is_elsewhere):
        return NeedsKey(repo.did, refresh=True)
    if leaves and not key.is_recent(context.now):
        return Plan(repo, Outcome.IGNORED, refresh_identity=True)
    if context.is_beside_relays and not key.available and not isinstance(event, CommitEvent | SyncEvent):
        return Plan(repo, Outcome.IGNORED)
    return None


def _plan_signed(
    repo: Repo, event: CommitEvent | SyncEvent, key: KeyState | None, context: PlanContext
) -> Plan | NeedsKey | NeedsPredecessor:
    """Plan a #commit or #sync. First come the checks that need no key."""
    if is_future(event.rev, context.now, context.policy.limits):
        return _plan_without_records(repo, Trigger.INVALID, context, why=Rejection.FUTURE_REV, detail=event.rev)
    if _is_replay(repo, event):
        return _plan_without_records(repo, Trigger.NOT_NEWER, context)
    if not repo.active:
        # A commit suggests that a DID that is gone exists again. The directory is asked; the commit is not trusted.
        return Plan(repo, Outcome.IGNORED, refresh_identity=repo.hosting_status == TOMBSTONED)
    if key is None and _worth_a_lookup(repo, event):
        return NeedsKey(repo.did, refresh=False)
    if key is None:
        return _plan_unchecked(repo, event, context)
    if not key.available:
        return _plan_unchecked(_with_failed_lookup(repo), event, context)
    return _plan_with_key(repo, event, key, context)


def _plan_with_key(
    repo: Repo, event: CommitEvent | SyncEvent, key: KeyState, context: PlanContext
) -> Plan | NeedsKey | NeedsPredecessor:
    """Verify a #commit or #sync with the key, and plan it."""
    if key.doubtful and repo.head is not None:
        return _plan_unchecked(repo, event, context)
    if key.key is None:
        return _plan_without_records(repo, Trigger.INVALID, context, why=Rejection.NO_SIGNING_KEY)
    limits = context.policy.limits
    try:
        if isinstance(event, SyncEvent):
            return _plan_sync(repo, verify_sync(event, key.key, limits), context)
        commit = context.verify(event, key.key, limits)
        return (
            NeedsPredecessor(event.rev)
            if _is_early(repo, event, commit, context)
            else _plan_commit(repo, commit, context)
        )
    except UpstreamError as error:
        if error.reason is Rejection.SIGNATURE_INVALID and not key.final:
            return NeedsKey(repo.did, refresh=True)
        if error.reason is Rejection.SIGNATURE_INVALID and key.stale:
            return _plan_unchecked(repo, event, context)
        return _plan_without_records(repo, Trigger.INVALID, context, why=error.reason, detail=error.detail)


def _is_early(repo: Repo, event: CommitEvent, commit: VerifiedCommit, context: PlanContext) -> bool:
    """Return True if an authentic commit names a predecessor that is not stored, and that another stream may bring."""
    if not context.other_streams or repo.did in context.overdue or repo.sync_status is not SyncStatus.SYNCHRONIZED:
        return False
    return repo.head is not None and (event.since or "") > repo.head.rev and repo.head.data != commit.prev_data


def _is_replay(repo: Repo, event: CommitEvent | SyncEvent) -> bool:
    """Return True for an event at or before the stored rev.

    A #sync at the stored rev is not a replay: it may show a second signed state at the same rev.
    """
    if repo.head is None:
        return False
    return event.rev <= repo.head.rev if isinstance(event, CommitEvent) else event.rev < repo.head.rev


def _worth_a_lookup(repo: Repo, event: CommitEvent | SyncEvent) -> bool:
    """Return False for a repo that waits for its resync, which looks the key up itself.

    Exceptions: the event may unpark the repo, show that its host has a newer export, or contain the whole repo. Or a
    lookup for an earlier event failed, and nothing of the repo was ever verified: then it waits behind all DIDs that
    somebody made up, unless a key shows that it is real.
    """
    if not repo.known or repo.sync_status is not SyncStatus.DESYNCHRONIZED or repo.next_attempt_at == PARKED:
        return True
    if repo.waits_for_newer_export:
        return True
    if _never_verified(repo) and repo.sync_reason is Desync.IDENTITY:
        return True
    return isinstance(event, CommitEvent) and event.since is None and repo.head is None


def _never_verified(repo: Repo) -> bool:
    return repo.head is None and repo.latest_verified_rev is None


def _with_failed_lookup(repo: Repo) -> Repo:
    """Return the row with the reason `identity` instead of `new`, so that the next event tries another lookup."""
    waits = repo.known and repo.sync_status is SyncStatus.DESYNCHRONIZED and repo.sync_reason is Desync.NEW
    return amend(repo, sync_reason=Desync.IDENTITY) if waits and _never_verified(repo) else repo


def _plan_commit(repo: Repo, commit: VerifiedCommit, context: PlanContext) -> Plan:
    """Plan an authentic commit (docs/protocol.md#commits)."""
    repo, rev = plan_passed_on(repo, context.origin), commit.head.rev
    if not repo.known and not _is_signal(commit, context.policy.scope):
        return Plan(repo, Outcome.IGNORED)
    if commit.whole and _can_synchronize_without_export(repo, rev, context):
        return _apply(repo, Trigger.WHOLE, commit, context)
    flaw, lenient = _flaw(commit, context.policy.scope), False
    if repo.head is None:
        return _plan_without_records(repo, Trigger.BREAKS, context, verified_rev=rev, why=flaw or Desync.CHAIN_BREAK)
    if repo.head.data != commit.prev_data:
        flaw = flaw or Desync.CHAIN_BREAK
    elif flaw is Desync.UNDECIDABLE and context.policy.lenient and commit.ops_hold:
        flaw, lenient = None, True  # prevData is the stored data, and the operations agree with the new tree
    if flaw:
        return _plan_without_records(repo, Trigger.BREAKS, context, verified_rev=rev, why=flaw, detail=commit.detail)
    if repo.sync_status is SyncStatus.SYNCHRONIZED:
        planned = _apply(repo, Trigger.EXTENDS, commit, context)
        if not lenient:
            return planned
        # The operations may lack a change of the tree.
        since = context.now if planned.repo.unproven_since is None else planned.repo.unproven_since
        return planned._replace(repo=planned.repo._replace(unproven_since=since))
    return _plan_without_records(repo, Trigger.EXTENDS, context, verified_rev=rev)


def _flaw(commit: VerifiedCommit, scope: Scope) -> Desync | None:
    """Return the flaw of a commit. It may lack the records that are not stored: see `batch.frame_to_buffer`."""
    if commit.flaw is not Desync.RECORD_MISSING or any(
        change.new and change.block is None and scope.selects(commit.did, change.path) for change in commit.changes
    ):
        return commit.flaw
    return None


def _is_signal(commit: VerifiedCommit, scope: Scope) -> bool:
    """Return True if an authentic commit adds its unknown repo. One that cannot be applied may lack changes."""
    signals = scope.signals
    if signals is None or commit.flaw is not None:
        return True
    return any(_writes_signal(change.path, change.new, signals) for change in commit.changes)


def _writes_signal(path: bytes | str, cid: bytes | None, signals: CollectionFilter) -> bool:
    text = path.decode() if isinstance(path, bytes) else path
    return cid is not None and signals.matches(text.partition("/")[0])


def _plan_sync(repo: Repo, head: Head, context: PlanContext) -> Plan:
    """Plan an authentic #sync by its signed head (docs/protocol.md#sync-events)."""
    repo = plan_passed_on(repo, context.origin)
    if head.data == EMPTY_TREE and _can_synchronize_without_export(repo, head.rev, context):
        return _advance(repo, Trigger.WHOLE, head, (), context)
    if repo.head is None or repo.head.data != head.data:
        why = Desync.EQUIVOCATION if repo.head and repo.head.rev == head.rev else Desync.SYNC_EVENT
        return _plan_without_records(repo, Trigger.SYNC_DIFFERS, context, verified_rev=head.rev, why=why)
    if repo.head.rev == head.rev:
        return _plan_without_records(repo, Trigger.SYNC_EQUAL, context)
    if repo.sync_status is SyncStatus.SYNCHRONIZED:
        return _advance(repo, Trigger.SYNC_ADVANCES, head, (), context)
    return _plan_without_records(repo, Trigger.SYNC_ADVANCES, context, verified_rev=head.rev)


def plan_listed(
    repo: Repo, rev: str, now: float, trigger: Trigger = Trigger.BEHIND, reason: Desync = Desync.BEHIND
) -> Repo:
    """Return the row of a repo that a host lists at `rev`: desynchronized if the stored rev is older, else the same.

    Neither lists nor hints are signed, so the rev counts as unverified. During a resync it is only noted: the end of
    the resync compares it with the export. A repo that its relay withholds becomes due.
    """
    if not repo.active or (repo.head is not None and rev <= repo.head.rev):
        return repo
    listed = repo._replace(latest_unverified_rev=max(rev, repo.latest_unverified_rev or ""))
    if repo.sync_status is SyncStatus.SYNCHRONIZED:
        return desynchronize(listed, trigger, reason, now)
    listed = listed if reason is Desync.HINTED else _no_longer_hinted(listed)
    if repo.sync_status is SyncStatus.IN_PROGRESS:
        return amend(listed) if listed != repo else repo
    due = unpark_withheld(listed, now)
    return repo if due.version == repo.version else due


def _no_longer_hinted(repo: Repo) -> Repo:
    """Return the row of a repo that lacks more than a hint has named: only a complete resync may synchronize it."""
    return amend(repo, sync_reason=Desync.BEHIND) if repo.sync_reason is Desync.HINTED else repo


def plan_identity(repo: Repo, context: PlanContext) -> Plan:
    """Request a lookup of the identity, and unpark the repo: its last attempt may have failed with the old identity."""
    if not repo.known:
        after = amend(repo, next_attempt_at=context.now + FIRST_COMMIT_SECONDS)
    elif repo.sync_status is SyncStatus.IN_PROGRESS:
        after = amend(repo)  # the new version tells `plan_failure` that the repo changed during its resync
    else:
        after = unparked(repo, context.now)
    return Plan(after, Outcome.APPLIED, refresh_identity=True)


def _plan_unchecked(repo: Repo, event: CommitEvent | SyncEvent, context: PlanContext) -> Plan:
    """Plan an event whose key could not be fetched: the repo needs a resync, and nothing in the event is trusted."""
    if not repo.known and context.policy.scope.signals is not None:
        return Plan(repo, Outcome.IGNORED)  # a made-up commit may name any collection; the repo lists name real ones
    if not repo.known:
        after = amend(repo, sync_reason=Desync.IDENTITY, latest_unverified_rev=event.rev)
        return Plan(after, Outcome.DESYNCHRONIZED, why=Desync.IDENTITY)
    if repo.sync_status is SyncStatus.DESYNCHRONIZED:  # it is not buffered
        repo = _no_longer_hinted(repo)
    return _plan_without_records(repo, Trigger.UNCHECKED, context, unverified_rev=event.rev, why=Desync.IDENTITY)


def _plan_without_records(
    repo: Repo,
    trigger: Trigger,
    context: PlanContext,
    *,
    verified_rev: str | None = None,
    unverified_rev: str | None = None,
    why: Rejection | Desync | None = None,
    detail: str = "",
) -> Plan:
    """Plan a trigger that writes no records. The row of an event to buffer does not count it yet.

    `verified_rev` is the event's rev if the event is authentic, `unverified_rev` if that could not be checked.
    """
    outcome, _ = transition(repo.sync_status, trigger)
    verified = _newer(repo.latest_verified_rev, verified_rev)
    unverified = _newer(repo.latest_unverified_rev, unverified_rev)
    noted = repo._replace(latest_verified_rev=verified, latest_unverified_rev=unverified)
    if outcome is Outcome.BUFFERED:
        return Plan(noted, outcome)
    if outcome is Outcome.DESYNCHRONIZED and isinstance(why, Desync):
        after = desynchronize(noted, trigger, why, context.now)
    elif verified != repo.latest_verified_rev:
        if not repo.known:
            outcome, why, detail = Outcome.DESYNCHRONIZED, Desync.NEW, ""
        after = _tried_sooner(repo, noted, context.now)
    else:
        after = repo if noted == repo else amend(noted)
    return Plan(after, outcome, why=why, detail=detail)


def _tried_sooner(repo: Repo, noted: Repo, now: float) -> Repo:
    """Return the row of a repo of which an authentic message has shown a newer rev, which is in `noted`."""
    if not repo.known:
        return amend(noted)
    if _never_verified(repo) and repo.sync_status is SyncStatus.DESYNCHRONIZED and not repo.waits_as_new:
        return amend(noted, next_attempt_at=None)  # the DID is real: it does not wait behind DIDs that may not be
    if repo.waits_for_newer_export and noted.newer_is_verified:
        return amend(noted, next_attempt_at=now)
    return amend(unparked(noted, now))


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
    converter = RecordConverter(context.policy, repo.did, commit.head.rev, commit.size)
    changes = [converter.convert(change) for change in commit.changes]
    return _advance(repo, trigger, commit.head, tuple([change for change in changes if change]), context)


def _advance(repo: Repo, trigger: Trigger, head: Head, changes: tuple[RecordChange, ...], context: PlanContext) -> Plan:
    outcome, _ = transition(repo.sync_status, trigger)
    if repo.sync_status is SyncStatus.SYNCHRONIZED:
        return Plan(repo.advanced_to(head), outcome, changes)
    complete = synchronize(repo, trigger, head, context.now, context.policy.scope.version)
    return Plan(complete, outcome, changes)


def _can_synchronize_without_export(repo: Repo, rev: str, context: PlanContext) -> bool:
    """Return True if the repo is empty and no newer rev is known, so that an event with the whole tree may fill it.

    Only a repo that is new is certainly empty: an erasure removes the head first and the records after it, in batches,
    and any event in between may replace its reason.
    """
    is_new = repo.head is None and repo.sync_reason in (Desync.NEW, Desync.IDENTITY)
    if repo.sync_status is not SyncStatus.DESYNCHRONIZED or not is_new:
        return False
    if repo.did in context.limited or repo.withheld_since is not None:
        return False
    return repo.latest_verified_rev is None or repo.latest_verified_rev <= rev


def plan_removal(repos: Mapping[str, Repo], keys: Sequence[RecordKey], scope: Scope) -> tuple[RepoWrite, ...]:
    """Return one write per repo, none of them in progress, that deletes these records, which the scope leaves out.

    The rows get the version of the scope, so a process that has an earlier one reads it before it plans on them. A repo
    that may lack records must not get it. It is fetched, because its commits are not applied then; but not because of a
    collection, which many repos have: `ScopeNarrowing` deletes what such a process writes.
    """
    deletes: dict[str, list[RecordChange]] = {did: [] for did in repos}
    for did, collection, rkey in keys:
        deletes.setdefault(did, []).append(RecordChange("delete", collection, rkey, None))

    def after(repo: Repo) -> Repo:
        if repo.scope_version < scope.complete_from:
            by_record = any(change.collection not in scope.collections.excluded for change in deletes[repo.did])
            return widen(repo) if by_record and repo.sync_status is SyncStatus.SYNCHRONIZED else amend(repo)
        return amend(repo, scope_version=scope.version)

    return tuple([RepoWrite(repo, after(repo), tuple(deletes[did])) for did, repo in repos.items()])


def plan_narrowing(repos: Mapping[str, Repo], keys: Sequence[RecordKey]) -> tuple[RepoWrite, ...]:
    """Return one write per repo that deletes these records, which the scope does not select.

    A repo in progress is left out: its resync compares all stored records. So is one without a head: its erasure or its
    next resync does.
    """
    deletes: dict[str, list[RecordChange]] = {}
    for did, collection, rkey in keys:
        repo = repos.get(did)
        if repo is not None and repo.head is not None and repo.sync_status is not SyncStatus.IN_PROGRESS:
            deletes.setdefault(did, []).append(RecordChange("delete", collection, rkey, None))
    return tuple([RepoWrite(repos[did], amend(repos[did]), tuple(gone)) for did, gone in deletes.items()])
