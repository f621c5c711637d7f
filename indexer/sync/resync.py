"""Compare the stored records of a repo with an export, and plan the end of its resync: completion or failure.

The rules are those of live events: once the export is stored, each buffered event is planned as if it had just arrived.

Stored records and an export are merged in path order, which is the order of the tree: bytewise over `collection/rkey`.
It differs from the order of (collection, rkey) pairs, because `-` and `.` sort before `/`: `a.b.c/x` comes before
`a.b/x`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from indexer.errors import BrokenInvariantError, UnavailableError
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.backoff import backoff_seconds
from indexer.sync.batch import DEAD_LETTER_BYTES, MAX_BATCH_CHANGES
from indexer.sync.changes import Batch, BufferedEvent, DeadLetter, Plan, RecordChange, RepoWrite
from indexer.sync.events import CommitEvent, MalformedEvent, SyncEvent, decode_frame
from indexer.sync.plan import plan_event
from indexer.sync.policy import KeyState, PlanContext
from indexer.sync.repo import (
    NEWS,
    PARKED,
    Head,
    Outcome,
    Repo,
    SyncStatus,
    Trigger,
    desynchronize,
    end_claim,
    hide,
    synchronize,
    withhold,
)

Entry = tuple[bytes, bytes]
"""The path and the CID of a record."""


class Difference(NamedTuple):
    """A path with different CIDs: `old` is None for a create, `new` is None for a delete."""

    path: bytes
    old: bytes | None
    new: bytes | None


def without_value(cid: bytes) -> bytes:
    """Return the CID marked as "value missing". It equals no CID, so a snapshot that has the value differs."""
    return cid + b"\0"


class SnapshotDiff:
    """Merges the entries of a snapshot with the stored entries, which come in chunks. Holds one entry at a time.

    Call `compare` for each chunk in order, then `remaining` once. Exhaust each iterator before the next call.
    """

    def __init__(self, snapshot: Iterator[Entry]) -> None:
        self._snapshot = snapshot
        self._entry = next(snapshot, None)
        self._last = b""

    def compare(self, stored: Sequence[Entry]) -> Iterator[Difference]:
        """Yield the differences up to the last path of this chunk.

        Raises:
            BrokenInvariantError: The stored entries are out of order, so the merge would delete existing records.
        """
        entry = self._entry
        for path, cid in stored:
            if path <= self._last:
                raise BrokenInvariantError(f"stored paths out of order: {path!r} after {self._last!r}")
            self._last = path
            while entry is not None and entry[0] < path:
                yield Difference(entry[0], None, entry[1])
                entry = self._advance()
            if entry is None or entry[0] != path:
                yield Difference(path, cid, None)
                continue
            if entry[1] != cid:
                yield Difference(path, cid, entry[1])
            entry = self._advance()

    def remaining(self) -> Iterator[Difference]:
        """Yield the entries of the snapshot after the last stored path."""
        if self._entry is not None:
            yield Difference(self._entry[0], None, self._entry[1])
        for path, cid in self._snapshot:
            yield Difference(path, None, cid)

    def _advance(self) -> Entry | None:
        self._entry = next(self._snapshot, None)
        return self._entry


HOST_STATUSES = {
    FetchFailure.REPO_TAKENDOWN: "takendown",
    FetchFailure.REPO_SUSPENDED: "suspended",
    FetchFailure.REPO_DEACTIVATED: "deactivated",
}
"""The hosting status that an answer of the account's host means."""
SLICE_BYTES = 8 << 20
"""Frames and record changes of buffered events that are planned at a time, in bytes. A slice also ends after
`MAX_BATCH_CHANGES` changes."""

_NOT_ACTIVE_AT_RELAY = frozenset({Desync.STATUS_UNKNOWN, Desync.WITHHELD})


class Completion:
    """The last writes of a resync whose stored records are those of `head`.

    They must have been compared with a complete export if the row needs one (`repo.needs_export`).

    The repo ends synchronized, unless a buffered event breaks the chain or a newer rev than this is known. Then it
    waits for its next resync, at the head that was reached.

    While the row is locked, the live path waits for it, for all repos. So most events are planned before: `add` them,
    call `plan_slice` until it returns False, and write the changes of each slice. Then call `lock`, do the same with
    the events that have arrived meanwhile, call `end`, and write its result.

    Attributes:
        changes: The record changes of the last slice.
        stuck: True if the next event ends the chain, which is only possible after `lock`.
    """

    def __init__(self, claimed: Repo, head: Head, key: KeyState, context: PlanContext) -> None:
        """Begin with the row as the worker claimed it, and with the head of the stored records."""
        self._claimed = claimed
        self._locked: Repo | None = None
        self._scope_version = context.policy.scope.version
        self._repo = synchronize(claimed, Trigger.COMPLETED, head, context.now, self._scope_version)
        self._head = head
        self._events = deque[BufferedEvent]()
        # An event may have been buffered because its key was unknown. Its key may be newer than the export's.
        self._key = key._replace(final=True, stale=True)
        self._context = context
        self._newest_buffered = claimed.latest_unverified_rev or ""
        self._dead_letters: list[DeadLetter] = []
        self.changes: list[RecordChange] = []
        self.stuck = False

    @property
    def waiting_bytes(self) -> int:
        """The bytes of the frames that are not planned yet."""
        return sum([len(event.frame) for event in self._events])

    def add(self, buffered: Iterable[BufferedEvent]) -> None:
        """Add buffered events, in order of arrival."""
        self._events.extend(buffered)

    def lock(self, locked: Repo) -> None:
        """Continue on the locked row, at the head that was reached."""
        reached, self._locked, self.stuck = self._repo, locked, False
        head, now = reached.head or self._head, self._context.now
        completed = synchronize(locked, Trigger.COMPLETED, head, now, self._scope_version)
        self._repo = completed._replace(unproven_since=reached.unproven_since)

    def plan_slice(self) -> bool:
        """Plan the next events, up to the size of a slice; return False after the last one that can be planned."""
        self.changes, size = [], 0
        while self._events and self._repo.sync_status is SyncStatus.SYNCHRONIZED:
            event = self._events[0]
            plan, dead_letter, rev = _drain(self._repo, event, self._key, self._context)
            if plan.repo.sync_status is not SyncStatus.SYNCHRONIZED and self._locked is None:
                self.stuck = True  # its outcome depends on the locked row
                return False
            self._events.popleft()
            self._newest_buffered = max(self._newest_buffered, rev)
            self._repo = plan.repo
            self.changes += plan.changes
            self._dead_letters += [dead_letter] if dead_letter else []
            size += len(event.frame) + sum([change.size for change in plan.changes])
            if size > SLICE_BYTES or len(self.changes) > MAX_BATCH_CHANGES:
                return True
        return False

    def end(self, *, subscribed: bool = False, costly: bool = False) -> Batch:
        """Return the row of the repo and the dead letters, without the record changes.

        Args:
            subscribed: The stream of the account's host has delivered, and will deliver, what the export does not have.
                So the repo may be synchronized although a relay withholds it.
            costly: Much was fetched, or nothing could be. Then a newer rev that was true counts as a break, so that the
                next resync waits.

        Raises:
            BrokenInvariantError: The row is not locked.
        """
        locked, repo = self._locked, self._repo
        if locked is None:
            raise BrokenInvariantError(f"{repo.did}: the row is not locked")
        if repo.sync_status is SyncStatus.SYNCHRONIZED:
            told = self._claimed.latest_unverified_rev or ""  # "": a request did not say the rev
            if self._claimed.sync_reason in NEWS and told <= self._head.rev and not costly:
                repo = repo._replace(attempts=0)  # it was true, so nothing broke
            unverified_rev = locked.latest_unverified_rev or ""
            by_hint = locked.sync_reason is Desync.HINTED
            reason = Desync.HINTED if by_hint else Desync.BEHIND
            newest = self._newest_buffered if locked.sync_reason is self._claimed.sync_reason else ""
            repo = _unless_behind(repo, unverified_rev, newest, reason, self._context.now)
            if repo.withheld_since is not None and not subscribed and repo.sync_status is SyncStatus.SYNCHRONIZED:
                repo = withhold(repo)
        else:
            # The rest of the buffer is discarded, and the newest unverified rev may be of an event in it.
            repo = repo._replace(latest_unverified_rev=locked.latest_unverified_rev)
        return Batch((RepoWrite(locked, repo),), tuple(self._dead_letters))


def _unless_behind(repo: Repo, unverified_rev: str, newest_buffered: str, reason: Desync, now: float) -> Repo:
    """Return the row, desynchronized if a newer rev than its head is known.

    An unverified rev above those of all buffered events is from a hint, or from a repo list that was read during the
    resync: the stream may have missed the events in between.
    """
    rev = repo.head.rev if repo.head else ""
    if rev < (repo.latest_verified_rev or ""):
        return desynchronize(repo, Trigger.BEHIND, Desync.STALE_EXPORT, now)
    if rev < unverified_rev and newest_buffered < unverified_rev:
        behind = repo._replace(latest_unverified_rev=unverified_rev)
        return desynchronize(behind, Trigger.BEHIND, reason, now)
    return repo


def _drain(
    repo: Repo, buffered: BufferedEvent, key: KeyState, context: PlanContext
) -> tuple[Plan, DeadLetter | None, str]:
    """Return the plan of a buffered event, its dead letter if it is rejected, and its rev."""
    event = decode_frame(buffered.frame, context.policy.limits)
    if isinstance(event, MalformedEvent):  # the limits were wider when it arrived
        dead_letter = _dead_letter(repo, buffered, event.type, event.reason, event.detail)
        return Plan(repo, Outcome.REJECTED), dead_letter, ""
    if not isinstance(event, CommitEvent | SyncEvent):
        raise BrokenInvariantError(f"{repo.did}: a buffered frame is neither a #commit nor a #sync")
    # The account was active when the event was buffered. It may be hidden by now, which must not end the chain here.
    plan = plan_event(repo._replace(active=True), event, 0, key, context)
    if not isinstance(plan, Plan):
        raise BrokenInvariantError(f"{repo.did}: planning asked for more although the key is final")
    plan = plan._replace(repo=plan.repo._replace(active=repo.active))
    if isinstance(plan.why, Rejection):
        return plan, _dead_letter(repo, buffered, event.kind, plan.why, plan.detail), event.rev
    if plan.outcome is Outcome.DESYNCHRONIZED and plan.why is Desync.CHAIN_BREAK:
        return plan._replace(repo=plan.repo._replace(sync_reason=Desync.DRAIN_BREAK)), None, event.rev
    return plan, None, event.rev


def _dead_letter(repo: Repo, buffered: BufferedEvent, kind: str, reason: Rejection, detail: str) -> DeadLetter:
    frame = buffered.frame[:DEAD_LETTER_BYTES]
    return DeadLetter(buffered.relay, buffered.seq, repo.did, kind, reason, detail, frame)


def plan_failure(repo: Repo, claimed: Repo, failure: UnavailableError, now: float) -> Repo:
    """Return the row of a repo whose resync failed: parked, or with the time of the next attempt.

    `claimed` is the row as the worker claimed it: a repo that changed since then is not parked. A failure that is not
    the repo's own (`FetchFailure.counts_as_attempt` is False) does not count as an attempt (docs/protocol.md#resync).
    If its export was too old, and an authentic message has shown a newer state meanwhile, it is due at once.
    A parked repo is also hidden if its host says that the account is not active (docs/protocol.md#accounts).
    """
    attempts = repo.attempts + failure.reason.counts_as_attempt
    wait = max(backoff_seconds(attempts, repo.did), failure.retry_after or 0.0)
    if failure.reason is FetchFailure.EXPORT_STALE and repo.newer_is_verified and not claimed.newer_is_verified:
        wait = 0.0
    parked = failure.reason.is_permanent and repo.version == claimed.version
    next_attempt_at = PARKED if parked else now + wait
    after = end_claim(repo, Trigger.FAILED, next_attempt_at, failure, attempts)
    if not parked or not repo.active:
        return after
    if failure.reason in HOST_STATUSES:
        return hide(after, HOST_STATUSES[failure.reason])
    # No relay says that the account is active, and its host does not have it.
    is_gone = failure.reason is FetchFailure.REPO_NOT_FOUND and repo.sync_reason in _NOT_ACTIVE_AT_RELAY
    return hide(after, None) if is_gone else after
