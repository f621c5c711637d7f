"""From one event and the repo's row to a `Plan`: the protocol's rules of acceptance (spec §4.2, §4.3, §4.9).

The order of the checks is cheap first, and nothing that causes work elsewhere comes before authentication.
What a repo's status makes of a finding stands in `repo.TRANSITIONS` and nowhere else.
"""

from dataclasses import dataclass, replace
from typing import Any

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.mst import EMPTY_TREE
from indexer.atproto.record import Problem, decode_record
from indexer.atproto.syntax import CollectionFilter, split_path, tid_micros
from indexer.errors import UpstreamError
from indexer.reasons import Desync, Rejection
from indexer.sync.backoff import backoff_seconds
from indexer.sync.events import AccountEvent, CommitEvent, IdentityEvent, RepoEvent, SyncEvent
from indexer.sync.plan import Action, NeedsKey, Plan, RecordChange
from indexer.sync.repo import PARKED, Finding, Head, Outcome, Repo, SyncStatus, transition
from indexer.sync.verify import VerifiedChange, VerifiedCommit, verify_commit, verify_sync

SETTLED_SECONDS = 3_600.0  # a repo that stayed synchronized this long starts its back-off afresh
DELETED = "deleted"  # the hosting status that ends in erasure
TOMBSTONED = "tombstoned"  # no relay's word: what a directory says
# Our own copy may be wrong or incomplete, so it proves nothing that its head is the network's: only an export does.
DOUBTS = frozenset({Desync.REQUESTED, Desync.RECORD_MISSING})
FIRST_COMMIT_SECONDS = 3.0  # a new account's first commit, which may be its whole repo, follows this soon


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose, as far as planning asks for it."""

    collections: CollectionFilter
    limits: Limits
    store_values: bool = True
    lenient: bool = False
    track_all: bool = True
    deletion_grace: float = 604_800.0  # seconds


@dataclass(frozen=True, slots=True)
class Ground:
    """What all plans of a batch stand on: the policy, the relay that the events came from, Unix seconds.

    `host` is given if the stream is a PDS's own and not a relay's: it speaks for the accounts that it hosts.
    """

    policy: Policy
    relay: str
    now: float
    host: str | None = None


@dataclass(frozen=True, slots=True)
class Signer:
    """What is known of a repo's signing key.

    `key` is None if the identity definitely has none, or, with `available` false, if it could not be had. `host` is the
    network location of the account's PDS. `final` says that no fresher look-up is to be had for this event, `stale`
    that the identity is known to have changed since: then a signature that this key doesn't verify proves nothing.
    """

    key: PublicKey | None
    available: bool = True
    final: bool = False
    stale: bool = False
    host: str | None = None


UNAVAILABLE = Signer(None, available=False, final=True)


def plan_event(repo: Repo, event: RepoEvent, size: int, signer: Signer | None, ground: Ground) -> Plan | NeedsKey:
    """The plan for one event whose frame has `size` bytes, or the need for a key first.

    `repo` is the row as it stands (`Repo(did)` where there is none); `signer` is None as long as nobody has
    looked the key up.
    """
    if not (repo.known or ground.policy.track_all):
        return Plan(repo, Outcome.IGNORED)
    if ground.host is not None and (elsewhere := _hosted_elsewhere(repo, signer, ground)):
        return elsewhere
    match event:
        case AccountEvent():
            return _plan_account(repo, event, ground)
        case IdentityEvent():
            return _plan_identity(repo, ground)
        case _:
            return _plan_signed(repo, event, size, signer, ground)


def _hosted_elsewhere(repo: Repo, signer: Signer | None, ground: Ground) -> Plan | NeedsKey | None:
    """What a PDS says of an account that it doesn't host, any more perhaps, is refused (spec §4.2)."""
    if signer is None:
        return NeedsKey(repo.did, refresh=False)
    if not signer.available or signer.host == ground.host:
        return None
    if not signer.final:
        return NeedsKey(repo.did, refresh=True)
    return Plan(repo, Outcome.REJECTED, why=Rejection.WRONG_HOST, detail=f"hosted by {signer.host}")


def _plan_signed(
    repo: Repo, event: CommitEvent | SyncEvent, size: int, signer: Signer | None, ground: Ground
) -> Plan | NeedsKey:
    if is_future(event.rev, ground.now, ground.policy.limits):
        return _settle(repo, Finding.AT_FAULT, size, ground, why=Rejection.FUTURE_REV, detail=event.rev)
    if _replayed(repo, event):
        return _settle(repo, Finding.NOT_NEWER, size, ground)
    if not repo.active:
        return Plan(repo, Outcome.IGNORED)
    if signer is None and _worth_a_look_up(repo, event):
        return NeedsKey(repo.did, refresh=False)
    if signer is None or not signer.available:
        return _plan_unchecked(repo, event, size, ground)
    return _plan_proven(repo, event, size, signer, ground)


def _plan_proven(
    repo: Repo, event: CommitEvent | SyncEvent, size: int, signer: Signer, ground: Ground
) -> Plan | NeedsKey:
    if signer.key is None:
        return _settle(repo, Finding.AT_FAULT, size, ground, why=Rejection.NO_SIGNING_KEY)
    limits = ground.policy.limits
    try:
        if isinstance(event, SyncEvent):
            return _plan_sync(repo, verify_sync(event, signer.key, limits).head, size, ground)
        return _plan_commit(repo, verify_commit(event, signer.key, limits), size, ground)
    except UpstreamError as error:
        if error.reason is Rejection.SIGNATURE_INVALID and not signer.final:
            return NeedsKey(repo.did, refresh=True)
        if error.reason is Rejection.SIGNATURE_INVALID and signer.stale:
            return _plan_unchecked(repo, event, size, ground)
        return _settle(repo, Finding.AT_FAULT, size, ground, why=error.reason, detail=error.detail)


def is_future(rev: str, now: float, limits: Limits) -> bool:
    """Whether a revision lies so far ahead of `now` (Unix seconds) that every commit to come would seem old."""
    return tid_micros(rev) > (now + limits.clock_drift_seconds) * 1_000_000


def _replayed(repo: Repo, event: CommitEvent | SyncEvent) -> bool:
    """A #sync at our own rev goes on, so that a second signed state at one rev is seen."""
    if repo.head is None:
        return False
    return event.rev <= repo.head.rev if isinstance(event, CommitEvent) else event.rev < repo.head.rev


def _worth_a_look_up(repo: Repo, event: CommitEvent | SyncEvent) -> bool:
    """A repo that waits for its resync gets its key then, unless this message may wake it or make it whole."""
    if not repo.known or repo.status is not SyncStatus.DESYNCHRONIZED or repo.next_attempt_at == PARKED:
        return True
    return isinstance(event, CommitEvent) and event.since is None and repo.head is None


def _plan_commit(repo: Repo, commit: VerifiedCommit, size: int, ground: Ground) -> Plan:
    rev = commit.head.rev
    if commit.whole and _fillable(repo, rev):
        return _apply(repo, Finding.WHOLE, commit, ground)
    flaw = commit.flaw
    if repo.head is None:
        return _settle(repo, Finding.BREAKS, size, ground, rev=rev, why=flaw or Desync.CHAIN_BREAK)
    if repo.head.data != commit.prev_data:
        flaw = flaw or Desync.CHAIN_BREAK
    elif flaw is Desync.UNDECIDABLE and ground.policy.lenient and commit.ops_hold:
        flaw = None  # prevData is our head, and the operations hold against the new tree
    if flaw:
        return _settle(repo, Finding.BREAKS, size, ground, rev=rev, why=flaw, detail=commit.detail)
    if repo.status is SyncStatus.SYNCHRONIZED:
        return _apply(repo, Finding.EXTENDS, commit, ground)
    return _settle(repo, Finding.EXTENDS, size, ground, rev=rev)


def _plan_sync(repo: Repo, head: Head, size: int, ground: Ground) -> Plan:
    if head.data == EMPTY_TREE and _fillable(repo, head.rev):
        return _complete(repo, Finding.WHOLE, head, (), ground)
    if repo.head is None or repo.head.data != head.data:
        why = Desync.EQUIVOCATION if repo.head and repo.head.rev == head.rev else Desync.SYNC_EVENT
        return _settle(repo, Finding.SYNC_OTHER, size, ground, rev=head.rev, why=why)
    if repo.head.rev == head.rev:
        return _settle(repo, Finding.SYNC_EQUAL, size, ground)
    if repo.status is SyncStatus.SYNCHRONIZED:
        return _complete(repo, Finding.SYNC_ADVANCES, head, (), ground)
    return _settle(repo, Finding.SYNC_ADVANCES, size, ground, rev=head.rev)


def _plan_account(repo: Repo, event: AccountEvent, ground: Ground) -> Plan:
    """Hosting status: the relay's word, the latest by its sequence (spec §4.9)."""
    if repo.hosting_relay == ground.relay and event.seq <= repo.hosting_seq:
        return Plan(repo, Outcome.REPLAYED)
    after = _changed(
        repo,
        active=event.active,
        hosting_status=event.status,
        hosting_relay=ground.relay,
        hosting_seq=event.seq,
        erase_at=_erase_at(repo, event, ground),
        next_attempt_at=repo.next_attempt_at if repo.known else ground.now + FIRST_COMMIT_SECONDS,
    )
    if not event.active:
        return Plan(after, Outcome.APPLIED)
    if repo.active or repo.status is SyncStatus.DESYNCHRONIZED:
        return Plan(woken(after, ground.now), Outcome.APPLIED)
    return Plan(_reactivated(after), Outcome.APPLIED, why=Desync.REACTIVATED)


def plan_existence(repo: Repo, now: float, policy: Policy, *, exists: bool) -> Repo:
    """The row of a repo whose DID is gone from its directory, or there again; the very same if nothing follows.

    Like an account that was deleted (spec §4.9). A DID of which we hold nothing may just be too new for a directory.
    """
    if not exists and repo.active and repo.head is not None:
        return _changed(repo, active=False, hosting_status=TOMBSTONED, erase_at=now + policy.deletion_grace)
    return _returned(repo, now) if exists and not repo.active and repo.hosting_status == TOMBSTONED else repo


def plan_active(repo: Repo, now: float) -> Repo:
    """The row of a repo that its relay says is active; the very same if it is, or no relay's word hides it."""
    return repo if repo.active or repo.hosting_status == TOMBSTONED else _returned(repo, now)


def _returned(repo: Repo, now: float) -> Repo:
    after = _changed(repo, active=True, hosting_status=None, erase_at=None)
    return woken(after, now) if repo.status is SyncStatus.DESYNCHRONIZED else _reactivated(after)


def plan_listed(repo: Repo, rev: str, now: float) -> Repo:
    """The row of a repo that a host lists at `rev`: to be fetched if that is newer than what we hold, else the very
    same. Nobody has signed a list.
    """
    if repo.status is not SyncStatus.SYNCHRONIZED or not repo.active or repo.head is None or rev <= repo.head.rev:
        return repo
    return desynchronize(replace(repo, heard_rev=rev), Desync.BEHIND, now, seen_rev=repo.seen_rev)


def _reactivated(repo: Repo) -> Repo:
    """Commits were ignored meanwhile, and an export under way may be older than they are."""
    _, status = transition(repo.status, Finding.REACTIVATED)
    return _changed(repo, status=status, reason=_why(repo, Desync.REACTIVATED), buffered_events=0, buffered_bytes=0)


def _erase_at(repo: Repo, event: AccountEvent, ground: Ground) -> float | None:
    if event.active or event.status != DELETED:
        return None
    return ground.now + ground.policy.deletion_grace if repo.erase_at is None else repo.erase_at


def _plan_identity(repo: Repo, ground: Ground) -> Plan:
    if not repo.known:
        return Plan(_changed(repo, next_attempt_at=ground.now + FIRST_COMMIT_SECONDS), Outcome.APPLIED)
    if repo.status is SyncStatus.IN_PROGRESS:
        return Plan(_changed(repo), Outcome.APPLIED)  # so that `plan_failure` sees that something happened
    return Plan(woken(repo, ground.now), Outcome.APPLIED)


def _plan_unchecked(repo: Repo, event: CommitEvent | SyncEvent, size: int, ground: Ground) -> Plan:
    """The key could not be had: nothing is lost, nothing is believed (spec §9-36)."""
    if not repo.known:
        after = _changed(repo, reason=Desync.IDENTITY, heard_rev=event.rev)
        return Plan(after, Outcome.DESYNCHRONIZED, why=Desync.IDENTITY)
    return _settle(repo, Finding.UNCHECKED, size, ground, heard=event.rev, why=Desync.IDENTITY)


def _settle(
    repo: Repo,
    finding: Finding,
    size: int,
    ground: Ground,
    *,
    rev: str | None = None,
    heard: str | None = None,
    why: Rejection | Desync | None = None,
    detail: str = "",
) -> Plan:
    """The plan for a finding that writes no records. The event's revision is `rev` if it is authentic, and `heard` if
    nobody knows.
    """
    outcome, _ = transition(repo.status, finding)
    seen, heard = _newer(repo.seen_rev, rev), _newer(repo.heard_rev, heard)
    if outcome is Outcome.BUFFERED:
        return _keep(replace(repo, seen_rev=seen, heard_rev=heard), size, ground)
    if outcome is Outcome.DESYNCHRONIZED and isinstance(why, Desync):
        after = desynchronize(replace(repo, heard_rev=heard), why, ground.now, seen_rev=seen)
        return Plan(after, outcome, why=why, detail=detail)
    if heard != repo.heard_rev:
        return Plan(_changed(repo, heard_rev=heard), outcome, why=why, detail=detail)
    if seen == repo.seen_rev:
        return Plan(repo, outcome, why=why, detail=detail)
    if not repo.known:
        return Plan(_changed(repo, seen_rev=seen), Outcome.DESYNCHRONIZED, why=Desync.NEW)
    return Plan(_changed(woken(repo, ground.now), seen_rev=seen), outcome, why=why, detail=detail)


def _newer(mark: str | None, rev: str | None) -> str | None:
    return max(mark or "", rev or "") or None


def _keep(repo: Repo, size: int, ground: Ground) -> Plan:
    """What is kept is lost if the resync comes to nothing: the marks on the row stay."""
    events, total = repo.buffered_events + 1, repo.buffered_bytes + size
    if events > ground.policy.limits.kept_events or total > ground.policy.limits.kept_bytes:
        outcome, _ = transition(repo.status, Finding.FAILED)
        after = desynchronize(repo, Desync.BUFFER_OVERFLOW, ground.now, seen_rev=repo.seen_rev)
        return Plan(after, outcome, why=Desync.BUFFER_OVERFLOW)
    after = _changed(repo, buffered_events=events, buffered_bytes=total)
    return Plan(after, Outcome.BUFFERED, keep=True)


def _apply(repo: Repo, finding: Finding, commit: VerifiedCommit, ground: Ground) -> Plan:
    changes = [record_change(change, commit.head.rev, ground.policy) for change in commit.changes]
    return _complete(repo, finding, commit.head, tuple([change for change in changes if change]), ground)


def _complete(repo: Repo, finding: Finding, head: Head, changes: tuple[RecordChange, ...], ground: Ground) -> Plan:
    outcome, _ = transition(repo.status, finding)
    if repo.status is SyncStatus.SYNCHRONIZED:
        return Plan(_changed(repo, head=head), outcome, changes)
    return Plan(synchronize(repo, head, ground.now), outcome, changes)


def _fillable(repo: Repo, rev: str) -> bool:
    """Whether a message that shows the whole tree at `rev` may fill the repo: it is empty, nothing newer was seen."""
    if repo.status is not SyncStatus.DESYNCHRONIZED or repo.head is not None:
        return False
    return repo.seen_rev is None or repo.seen_rev <= rev


def chosen(path: bytes, policy: Policy) -> tuple[str, str] | None:
    """Collection and record key; None for a path outside the chosen collections or the syntax.

    A path of bad syntax in a signed tree still takes part in every proof; it only names no record (spec §3.2).
    """
    try:
        collection, rkey = split_path(path.decode())
    except (UpstreamError, UnicodeDecodeError):
        return None
    return (collection, rkey) if policy.collections.matches(collection) else None


def record_change(change: VerifiedChange, rev: str, policy: Policy) -> RecordChange | None:
    """A verified change as it is written; None for a path that is not `chosen`."""
    names = chosen(change.path, policy)
    if names is None:
        return None
    collection, rkey = names
    if change.new is None:
        return RecordChange("delete", collection, rkey, rev)
    action: Action = "create" if change.old is None else "update"
    if not policy.store_values:
        return RecordChange(action, collection, rkey, rev, change.new)
    if change.block is None:
        return RecordChange(action, collection, rkey, rev, change.new, problem=Problem.MISSING)
    value = decode_record(change.block, collection, policy.limits)
    return RecordChange(action, collection, rkey, rev, change.new, value.json, value.problem, value.original)


def desynchronize(repo: Repo, reason: Desync, now: float, *, seen_rev: str | None) -> Repo:
    """The row of a repo that has to be fetched again: at once, or later if it broke not long ago as well."""
    since = repo.synchronized_at if repo.status is SyncStatus.SYNCHRONIZED else None
    breaks = 0 if since is not None and now - since > SETTLED_SECONDS else repo.attempts
    return _changed(
        repo,
        status=SyncStatus.DESYNCHRONIZED,
        reason=_why(repo, reason),
        seen_rev=seen_rev,
        attempts=breaks + 1,
        next_attempt_at=now + backoff_seconds(breaks, repo.did) if breaks else None,
        buffered_events=0,
        buffered_bytes=0,
    )


def _why(repo: Repo, reason: Desync) -> Desync:
    """The reason from now on: a doubt lasts until it is settled, whatever ends a resync before."""
    return repo.reason if repo.reason in DOUBTS else reason


def synchronize(repo: Repo, head: Head, now: float) -> Repo:
    """The row of a repo whose records stand at `head`. Attempts stay until the repo has settled."""
    return _changed(
        repo,
        status=SyncStatus.SYNCHRONIZED,
        reason=None,
        head=head,
        heard_rev=None,
        synchronized_at=now,
        next_attempt_at=None,
        last_error=None,
        buffered_events=0,
        buffered_bytes=0,
    )


def erase(repo: Repo) -> Repo:
    """The row of a repo whose records are to be erased: it holds nothing, so that it is fetched if it comes back."""
    _, status = transition(repo.status, Finding.ERASED)
    return _changed(
        repo,
        status=status,
        reason=Desync.ERASED,
        head=None,
        attempts=0,
        next_attempt_at=PARKED,
        synchronized_at=None,
        buffered_events=0,
        buffered_bytes=0,
    )


def woken(repo: Repo, now: float) -> Repo:
    """The row of a repo that was given up on, to be tried again; the very same for any other."""
    return _changed(repo, next_attempt_at=now) if repo.next_attempt_at == PARKED else repo


def _changed(repo: Repo, **fields: Any) -> Repo:
    return replace(repo, version=repo.version + 1, **fields)
