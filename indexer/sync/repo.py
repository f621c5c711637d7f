"""The state of one repo, and the state machine: every change of a repo's sync status is an entry of `TRANSITIONS`.

Two statuses are independent of each other. The *sync status* says how the stored records compare with the repo on the
network. The *hosting status* is what the relay reports about the account; the local takedown is separate from it. The
reason for a desynchronization, the number of attempts, and times are fields, not statuses.

`move` is the only Python function that sets a sync status. In SQL, the claim of a resync worker,
`atproto.request_resync`, `atproto.request_record` and `indexer.stop_tracking` set it, and new rows are desynchronized.
In the database of each test, a trigger raises an error for a change that the table does not have.
"""

from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

from indexer.errors import BrokenInvariantError, UnavailableError
from indexer.reasons import Desync, FetchFailure
from indexer.sync.backoff import backoff_seconds
from indexer.sync.scope import Scope

PARKED = inf
"""Value of `Repo.next_attempt_at` for a repo that is not tried again until an event unparks it."""
DELETED = "deleted"
"""The hosting status that leads to erasure."""
TOMBSTONED = "tombstoned"
"""The hosting status of a repo whose DID is gone from its directory. No relay sends it."""
OUT_OF_SCOPE = "out-of-scope"
"""The hosting status of a repo that was untracked because the scope wants fewer repos. No relay sends it."""
HIDING_STATUSES = frozenset({"takendown", "suspended", DELETED, "deactivated", "inactive"})
"""The statuses of an account that is not active. `inactive` is the word of Bluesky's relay for no status.

Any other status is a problem of the relay itself: `throttled`, `desynchronized`, and what is not known yet
(docs/protocol.md#accounts).
"""
CHOSEN = 2**63 - 1
"""Value of `Repo.wanted_in` for a repo that a command, SQL or a request named: each scope wants it."""


def hides(status: str | None) -> bool:
    """Return True if an account that is not active is hidden, for this status or without one."""
    return status is None or status in HIDING_STATUSES


class SyncStatus(StrEnum):
    """The sync status of a repo, in the words of the specification."""

    DESYNCHRONIZED = "desynchronized"
    IN_PROGRESS = "in-progress"
    SYNCHRONIZED = "synchronized"


class Head(NamedTuple):
    """The commit of the stored records: its rev, the CID of the MST root, and the CID of the commit block."""

    rev: str
    data: bytes
    commit: bytes


class StreamPoint(NamedTuple):
    """The place of a message in the stream of a relay. It orders the reports about an account."""

    relay: str
    epoch: int  # the epoch of the relay's sequence
    seq: int
    time: float | None  # the `time` field of the message (Unix seconds); None if it is not known


class Repo(NamedTuple):
    """One row of the table `repo`, with the columns that planning needs.

    Attributes:
        version: Incremented by every write. A write applies only to the version it was planned on; 0: no row yet.
        latest_verified_rev: The newest rev of an authentic message, including ignored ones. An export older than this
            does not complete a resync.
        latest_unverified_rev: The newest rev of a message whose signature could not be checked, or of a repo list. A
            resync prefers a source whose export has reached it. It never decides which records are stored.
        active: False if upstream hides the account, for the reason in `hosting_status`.
        withheld_since: When the relay first said that it withholds the account, for the reason in `hosting_status`
            (Unix seconds); None if it does not. A withheld repo is synchronized only while its host is subscribed.
        hosting_relay: The relay that made the last report about the account with a known place in its stream: in an
            #account message, or as the answer to a request.
        hosting_epoch: The epoch of the sequence of `hosting_relay` that `hosting_seq` belongs to.
        hosting_seq: The number of that #account message, or of the last message that was stored before the request.
        hosting_time: The latest `time` of these messages (Unix seconds), at most what clocks may drift after they
            arrived; None if it is not known.
        takedown: True if the local operator hides the account.
        lease: Incremented by every claim, so that a worker can tell whether its claim still holds.
        last_failure: Why the last fetch failed; None if it did not.
        last_error: The same with details, for people.
        next_attempt_at: Unix seconds; None means immediately, `PARKED` means after an event unparks the repo.
        erase_at: Unix seconds from which the records of a deleted account may be erased.
        unproven_since: When the first undecidable commit since the last complete export was applied (Unix seconds);
            None: there is none. Such a commit may hide a change, so that the stored records may be wrong.
        from_stream: True if a message of the stream or the list of its host added the repo, and neither the repo list
            of a relay nor a command has named it since.
        scope_version: The version of the scope for which the stored records are complete.
        tracked: False if an operator untracked the repo, or if the scope wants it no more (`OUT_OF_SCOPE`). Its records
            are erased, and all its messages are ignored.
        wanted_in: The latest version of the scope that wanted the repo, or `CHOSEN`.
    """

    did: str
    version: int = 0
    sync_status: SyncStatus = SyncStatus.DESYNCHRONIZED
    sync_reason: Desync | None = Desync.NEW
    head: Head | None = None
    latest_verified_rev: str | None = None
    latest_unverified_rev: str | None = None
    active: bool = True
    hosting_status: str | None = None
    hosting_relay: str | None = None
    hosting_epoch: int = 0
    hosting_seq: int = 0
    hosting_time: float | None = None
    takedown: bool = False
    buffered_events: int = 0
    buffered_bytes: int = 0
    lease: int = 0
    attempts: int = 0
    next_attempt_at: float | None = None
    last_failure: FetchFailure | None = None
    last_error: str | None = None
    synchronized_at: float | None = None
    erase_at: float | None = None
    unproven_since: float | None = None
    from_stream: bool = False
    scope_version: int = 0
    tracked: bool = True
    wanted_in: int = 0
    withheld_since: float | None = None

    @property
    def known(self) -> bool:
        """True if the repo has a row."""
        return self.version > 0

    @property
    def visible(self) -> bool:
        """True if the public views show the repo's records."""
        return self.active and not self.takedown

    @property
    def shown_rev(self) -> str | None:
        """The rev of the stored head; None if there is none, or if the repo is hidden."""
        return self.head.rev if self.visible and self.head is not None else None

    def shows(self, rev: str) -> bool:
        """Return True if the public views show the records of this rev, or of a later one."""
        whole = self.sync_reason is None or self.sync_reason in {*NEWS, Desync.WITHHELD}
        return whole and self.shown_rev is not None and self.shown_rev >= rev

    @property
    def out_of_scope(self) -> bool:
        """True if the scope wanted the repo no more. It is tracked again as soon as the scope wants it."""
        return not self.tracked and self.hosting_status == OUT_OF_SCOPE

    @property
    def waits_as_new(self) -> bool:
        """True if its first fetch was postponed because its host added too many accounts."""
        return self.last_failure is FetchFailure.NEW_ACCOUNTS

    @property
    def counts_as_new(self) -> bool:
        """True if its first fetch is about to begin, and counts towards the limit of its host."""
        never_fetched = self.head is None and self.last_failure is None
        return never_fetched and self.from_stream and self.sync_reason in (Desync.NEW, Desync.IDENTITY)

    @property
    def newer_is_verified(self) -> bool:
        """True if an authentic message has shown a newer state than the stored one."""
        return self.head is not None and (self.latest_verified_rev or "") > self.head.rev

    @property
    def has_failed(self) -> bool:
        """True if an attempt failed or the chain broke, so that the identity may have changed: not by a newer rev."""
        return self.attempts > (self.sync_reason in NEWS)

    @property
    def waits_for_newer_export(self) -> bool:
        """True if its last export was too old, and no authentic message has shown since that the host has a newer one.

        So the first such message changes it, and only the first one.
        """
        stale = self.last_failure is FetchFailure.EXPORT_STALE
        return stale and self.head is not None and not self.newer_is_verified

    def advanced_to(self, head: Head) -> "Repo":
        """Return the next version of the row, with this head."""
        # Slices take a third of the time of `_replace`.
        row: tuple[Any, ...] = self
        return Repo._make((self.did, self.version + 1, *row[_STATUS], head, *row[_AFTER_HEAD]))

    def advances(self, before: "Repo") -> bool:
        """Return True if this row of a synchronized repo differs from the row before in nothing but the head."""
        if self.sync_status is not SyncStatus.SYNCHRONIZED or not before.known:
            return False
        # Slices compare in half the time of a copy with the same version and head.
        return self.did == before.did and self[_STATUS] == before[_STATUS] and self[_AFTER_HEAD] == before[_AFTER_HEAD]


_STATUS = slice(Repo._fields.index("version") + 1, Repo._fields.index("head"))
_AFTER_HEAD = slice(Repo._fields.index("head") + 1, None)


STABLE_SECONDS = 3_600.0
"""A repo that stayed synchronized for this long starts its back-off from the beginning."""

MAX_UNPARK_SECONDS = 600.0
"""The longest time from the event that unparks a repo to its next attempt, apart from jitter."""

_NO_BUFFER = {"buffered_events": 0, "buffered_bytes": 0}
_NO_FAILURE: dict[str, Any] = {"last_failure": None, "last_error": None}
UNPROVEN_REASONS = frozenset({Desync.REQUESTED, Desync.RECORD_MISSING, Desync.LENIENT_COMMIT})
"""Reasons under which the stored records themselves are in doubt: only a complete export settles them, not a head that
equals the network's."""

NEWS = frozenset({Desync.BEHIND, Desync.HINTED})
"""Reasons of a repo that was synchronized until a list or a hint named a newer rev."""


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
    HINTED = "hint of a newer rev"
    STATUS_UNKNOWN = "hosting status of an unlisted account is unknown"
    UNPROVEN = "an undecidable commit was applied without proof"
    VALUES_MISSING = "record values are missing a day after the resync"
    REQUESTED = "resync requested"
    REACTIVATED = "account active again"
    WITHHELD = "account withheld by the relay"
    ERASED = "records of a deleted account erased, or repo untracked"
    WIDENED = "collections added to the scope"


_D, _P, _S = SyncStatus
_APPLIED, _REPLAYED, _BUFFERED, _IGNORED, _BROKEN, _REJECTED = Outcome

# The outcome and the next status of each trigger, for a repo that is desynchronized, in progress, and synchronized.
_TABLE: dict[Trigger, tuple[tuple[Outcome, SyncStatus] | None, ...]] = {
    Trigger.EXTENDS: ((_IGNORED, _D), (_BUFFERED, _P), (_APPLIED, _S)),
    Trigger.BREAKS: ((_IGNORED, _D), (_BUFFERED, _P), (_BROKEN, _D)),
    Trigger.WHOLE: ((_APPLIED, _S), (_BUFFERED, _P), None),
    Trigger.NOT_NEWER: ((_REPLAYED, _D), (_REPLAYED, _P), (_REPLAYED, _S)),
    Trigger.INVALID: ((_REJECTED, _D), (_REJECTED, _P), (_REJECTED, _S)),
    Trigger.UNCHECKED: ((_IGNORED, _D), (_BUFFERED, _P), (_BROKEN, _D)),
    Trigger.SYNC_EQUAL: ((_IGNORED, _D), (_BUFFERED, _P), (_IGNORED, _S)),
    Trigger.SYNC_ADVANCES: ((_IGNORED, _D), (_BUFFERED, _P), (_APPLIED, _S)),
    Trigger.SYNC_DIFFERS: ((_IGNORED, _D), (_BUFFERED, _P), (_BROKEN, _D)),
    Trigger.REFUSED: ((_REJECTED, _D), (_REJECTED, _D), (_REJECTED, _D)),
    Trigger.OVERFLOWS: (None, (_BROKEN, _D), None),
    Trigger.CLAIMED: ((_APPLIED, _P), None, None),
    Trigger.COMPLETED: (None, (_APPLIED, _S), None),
    Trigger.FAILED: (None, (_BROKEN, _D), None),
    Trigger.RELEASED: (None, (_APPLIED, _D), None),
    Trigger.LEASE_EXPIRED: (None, (_BROKEN, _D), None),
    Trigger.BEHIND: (None, None, (_BROKEN, _D)),
    Trigger.HINTED: (None, None, (_BROKEN, _D)),
    Trigger.STATUS_UNKNOWN: (None, None, (_BROKEN, _D)),
    Trigger.UNPROVEN: (None, None, (_BROKEN, _D)),
    Trigger.VALUES_MISSING: (None, None, (_BROKEN, _D)),
    Trigger.REQUESTED: ((_APPLIED, _D), (_APPLIED, _D), (_APPLIED, _D)),
    Trigger.REACTIVATED: (None, (_APPLIED, _D), (_APPLIED, _D)),
    Trigger.WITHHELD: (None, None, (_APPLIED, _D)),
    Trigger.ERASED: ((_APPLIED, _D), (_APPLIED, _D), (_APPLIED, _D)),
    Trigger.WIDENED: (None, None, (_BROKEN, _D)),
}
TRANSITIONS: dict[SyncStatus, dict[Trigger, tuple[Outcome, SyncStatus]]] = {
    status: {trigger: cell for trigger, cells in _TABLE.items() if (cell := cells[index])}
    for index, status in enumerate(SyncStatus)
}
"""For each status the triggers that are possible in it, with the outcome and the next status."""


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
    kept = repo.sync_reason if repo.sync_reason in UNPROVEN_REASONS else reason
    synchronized = repo.sync_status is SyncStatus.SYNCHRONIZED
    return move(repo, trigger, sync_reason=kept, **_next_attempt(repo, now, current=synchronized), **_NO_BUFFER)


def _next_attempt(repo: Repo, now: float, *, current: bool) -> dict[str, Any]:
    """Return the fields of a repo that needs a resync; `current`: its last resync was complete."""
    since = repo.synchronized_at if current else None
    failures = max(0, repo.attempts - (repo.sync_reason in NEWS))  # a newer rev is no failure
    recent_breaks = 0 if since is not None and now - since > STABLE_SECONDS else failures
    wait = now + backoff_seconds(recent_breaks, repo.did) if recent_breaks else None
    return {"attempts": recent_breaks + 1, "next_attempt_at": wait}


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
        **_NO_FAILURE,
        **_NO_BUFFER,
        scope_version=scope_version,
    )


def track_again(repo: Repo, wanted_in: int, *, from_stream: bool) -> Repo:
    """Return the row of a repo that was out of scope, and that this version of the scope wants: it is fetched."""
    return amend(
        repo,
        tracked=True,
        active=True,
        hosting_status=None,
        withheld_since=None,
        erase_at=None,
        next_attempt_at=None,
        **_NO_FAILURE,
        from_stream=from_stream,
        wanted_in=wanted_in,
    )


def named(repo: Repo, wanted_in: int, wanted_before: int, *, from_stream: bool = False) -> Repo:
    """Return the row of a repo that a command or a repo list has named, for this version of the scope.

    It is tracked again if it was out of scope. If it was never fetched, it no longer waits as a new account of its
    host. If it was wanted only before the version `wanted_before`, it is wanted now.
    """
    if repo.out_of_scope:
        return track_again(repo, wanted_in, from_stream=from_stream)
    fields: dict[str, Any] = {}
    if repo.from_stream and repo.head is None:
        fields["from_stream"] = False
        if repo.waits_as_new:
            fields |= {"next_attempt_at": None} | _NO_FAILURE
    if repo.tracked and repo.wanted_in < wanted_before:
        fields["wanted_in"] = wanted_in
    return amend(repo, **fields)


def widen(repo: Repo) -> Repo:
    """Return the row of a repo that is fetched because collections were added. It broke nothing: no back-off."""
    return move(repo, Trigger.WIDENED, sync_reason=Desync.SCOPE_WIDENED, next_attempt_at=None)


def needs_export(repo: Repo, scope: Scope) -> bool:
    """Return True if only a complete export may end the resync: stored records are in doubt, or some may be missing."""
    in_doubt = repo.sync_reason in UNPROVEN_REASONS or repo.unproven_since is not None
    return in_doubt or repo.scope_version < scope.complete_from


def is_follow_up(repo: Repo, scope: Scope) -> bool:
    """Return True if a resync finds what a hint named: changes that the stream of a relay would have brought."""
    return repo.head is not None and repo.sync_reason is Desync.HINTED and not needs_export(repo, scope)


def hide(repo: Repo, status: str | None, erase_at: float | None = None) -> Repo:
    """Return the row of an account that is not active. Its records are erased from `erase_at` (None: they stay)."""
    return amend(repo, active=False, hosting_status=status, withheld_since=None, erase_at=erase_at)


def withhold(repo: Repo) -> Repo:
    """Return the row of a synchronized repo that its relay withholds: no message may tell when it changes.

    It is fetched when its host lists a newer rev, and like any parked repo after `INDEXER_SWEEP_INTERVAL`.
    """
    return move(repo, Trigger.WITHHELD, sync_reason=Desync.WITHHELD, next_attempt_at=PARKED)


def unpark_withheld(repo: Repo, now: float) -> Repo:
    """Return the row of a withheld repo that has changed on its host: due at once, or later if it changed recently.

    It is the same object if the repo does not wait for such a change.
    """
    waits = repo.next_attempt_at == PARKED and repo.sync_reason is Desync.WITHHELD
    return amend(repo, **_next_attempt(repo, now, current=True)) if waits else repo


def end_claim(
    repo: Repo,
    trigger: Trigger,
    next_attempt_at: float | None,
    failure: UnavailableError | None = None,
    attempts: int | None = None,
) -> Repo:
    """Return the row of a repo whose worker ends its claim. It may be claimed again from `next_attempt_at` (None: now).

    `failure` replaces the last one, and `attempts` their number.
    """
    fields: dict[str, Any] = {} if attempts is None else {"attempts": attempts}
    if failure is not None:
        fields |= {"last_failure": failure.reason, "last_error": str(failure)[:500]}
    reason = repo.sync_reason or Desync.REQUESTED
    return move(repo, trigger, sync_reason=reason, next_attempt_at=next_attempt_at, **_NO_BUFFER, **fields)


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
        **_NO_BUFFER,
    )


def untrack(repo: Repo, status: str | None, now: float) -> Repo:
    """Return the row of a repo that is not tracked any more, with this hosting status. Its records are erased."""
    return erase(repo)._replace(
        tracked=False,
        active=False,
        hosting_status=status,
        withheld_since=None,
        latest_verified_rev=None,
        latest_unverified_rev=None,
        **_NO_FAILURE,
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
