"""Plan the effect of reports about an account: its hosting status, and whether its DID exists.

A relay reports the status in an `#account` message or as the answer to a request. The directory says whether the DID
exists (docs/protocol.md#accounts).
"""

from indexer.reasons import Desync
from indexer.sync.changes import Plan
from indexer.sync.events import AccountEvent, event_seconds
from indexer.sync.policy import PlanContext
from indexer.sync.repo import (
    DELETED,
    OUT_OF_SCOPE,
    TOMBSTONED,
    Outcome,
    Repo,
    StreamPoint,
    SyncStatus,
    Trigger,
    amend,
    desynchronize,
    hide,
    hides,
    unparked,
    withhold,
)
from indexer.sync.stream import NO_STREAM, Origin

FIRST_COMMIT_SECONDS = 3.0
"""Time that the resync of a new account waits for its first commit, which may contain the whole repo."""
_OWN_STATUSES = frozenset({OUT_OF_SCOPE, TOMBSTONED})


def plan_account(repo: Repo, event: AccountEvent, context: PlanContext) -> Plan:
    """Apply a relay's report about the account, unless a later one has been applied (docs/protocol.md#accounts)."""
    point = StreamPoint(context.origin.relay, context.origin.epoch, event.seq, event_seconds(event.time))
    if _is_outdated(repo, point, compare_times=not context.policy.upstream_is_pds):
        return Plan(repo, Outcome.REPLAYED)
    status, is_hidden = _reported(event.status), not event.active and hides(_reported(event.status))
    if not repo.known and is_hidden:
        return Plan(repo, Outcome.IGNORED)  # nothing is stored; a message adds the repo when it is active again
    placed = _with_place(repo, point, context.now + context.policy.limits.clock_drift_seconds)
    if not repo.known:
        placed = placed._replace(next_attempt_at=context.now + FIRST_COMMIT_SECONDS)
    elif context.is_beside_relays:
        return _plan_host_report(repo, placed, event, context)
    if is_hidden:
        return Plan(hide(placed, status, _erase_at(repo, event, context)), Outcome.APPLIED)
    if not event.active:
        after = _withheld(placed, status, context.now)
        broken = None if after.sync_status is repo.sync_status else Desync.WITHHELD
        return Plan(after if after is not placed else amend(placed), Outcome.APPLIED, why=broken)
    after = _active_again(placed, status, context.now)
    broken = None if after.sync_status is repo.sync_status else Desync.REACTIVATED
    return Plan(after, Outcome.APPLIED, why=broken)


def _plan_host_report(repo: Repo, placed: Repo, event: AccountEvent, context: PlanContext) -> Plan:
    """Apply a report on the stream of a subscribed host, which says nothing about what relays do.

    So it does not change whether a relay withholds the account, or has taken it down.
    """
    status, is_own = _reported(event.status), repo.hosting_relay == context.origin.relay
    hidden_by_relay = not (repo.active or is_own or repo.hosting_status == "deactivated")
    if hidden_by_relay or not (event.active or hides(status)):
        return Plan(repo, Outcome.IGNORED)
    if event.active and repo.active:
        after = unparked(repo, context.now)
        return Plan(after, Outcome.IGNORED if after is repo else Outcome.APPLIED)
    if event.active:
        after = _active_again(placed, status, context.now)
    else:
        after = hide(placed, status, _erase_at(repo, event, context))
    why = None if after.sync_status is repo.sync_status else Desync.REACTIVATED
    return Plan(after._replace(withheld_since=repo.withheld_since), Outcome.APPLIED, why=why)


def plan_existence(repo: Repo, now: float, deletion_grace: float, *, exists: bool) -> Repo:
    """Return the row after it is certain that the DID is gone, or exists; the same object if nothing changes.

    A DID that is gone is treated like a deleted account. Nothing follows for a repo without stored records: its
    DID may be too new for the directory.
    """
    if not exists and repo.active and repo.head is not None:
        return hide(repo, TOMBSTONED, now + deletion_grace)
    return _active_again(repo, None, now) if exists and not repo.active and repo.hosting_status == TOMBSTONED else repo


def plan_erasure_later(repo: Repo, at: float) -> Repo:
    """Return the row of a repo whose DID is gone, to be erased at `at`; the same object if that changed meanwhile."""
    return repo if repo.active or repo.hosting_status != TOMBSTONED else amend(repo, erase_at=at)


def plan_active(repo: Repo, now: float, point: StreamPoint | None = None) -> Repo:
    """Return the row of a repo that is reported as active; the same object if it was neither hidden nor withheld.

    The report is as new as `point`: the last message of the relay's stream that was stored before the request. None: it
    is not known, and the place of the last report stays.
    """
    hidden_by_relay = not repo.active and repo.hosting_status != TOMBSTONED and repo.tracked
    is_withheld = repo.active and repo.withheld_since is not None
    return _active_again(_with_place(repo, point, now), None, now) if hidden_by_relay or is_withheld else repo


def plan_hidden(
    repo: Repo, status: str | None, now: float, deletion_grace: float, point: StreamPoint | None = None
) -> Repo:
    """Return the row of a repo that is reported as inactive; the same object if it is hidden already, or withheld.

    A status that does not hide only says that the relay withholds the repo. The report is as new as `point`, as in
    `plan_active`.
    """
    if not hides(_reported(status)):
        after = _withheld(repo, status, now)
        return repo if after is repo else _with_place(after, point, now)
    if not repo.active:
        return repo
    erase_at = now + deletion_grace if status == DELETED else None
    return hide(_with_place(repo, point, now), _reported(status), erase_at)


def plan_passed_on(repo: Repo, origin: Origin) -> Repo:
    """Return the row of a repo of which this stream has brought an authentic message: another relay does not matter.

    It is the same object unless another relay than that of the stream withholds the repo. The stream of a host says
    nothing about relays, nor does a buffered message, whose stream is not known.
    """
    is_of_relay = origin != NO_STREAM and origin.host is None
    if repo.withheld_since is None or not is_of_relay or repo.hosting_relay in (None, origin.relay):
        return repo
    return amend(repo, hosting_status=None, withheld_since=None)


def plan_status_unknown(repo: Repo, now: float) -> Repo:
    """Return the row of a repo that a relay neither lists nor tells the hosting status of: desynchronized.

    It is the same object if the repo is hidden, or not synchronized anyway: then its host is asked.
    """
    if not repo.active or repo.sync_status is not SyncStatus.SYNCHRONIZED:
        return repo
    return desynchronize(repo, Trigger.STATUS_UNKNOWN, Desync.STATUS_UNKNOWN, now)


def _is_outdated(repo: Repo, point: StreamPoint, *, compare_times: bool) -> bool:
    """Return True if the report at `point` or a later one was applied before.

    Within one epoch of a relay, the numbers decide. Otherwise, the times do; with equal times, the report counts. On
    the streams of PDSes, times are not compared: if an account moves, the clock of its new PDS may be slow.
    """
    if _is_same_epoch(repo, point):
        return point.seq <= repo.hosting_seq
    if not compare_times or point.time is None or repo.hosting_time is None:
        return False
    return point.time < repo.hosting_time


def _is_same_epoch(repo: Repo, point: StreamPoint) -> bool:
    return (repo.hosting_relay, repo.hosting_epoch) == (point.relay, point.epoch)


def _with_place(repo: Repo, point: StreamPoint | None, latest: float) -> Repo:
    """Return the row with `point` as the place of the last report; the same row for None, or if it has a later one.

    The latest time is kept. A time after `latest` counts as `latest`: otherwise, one wrong time would have all later
    messages of other relays ignored.
    """
    if point is None or (_is_same_epoch(repo, point) and point.seq < repo.hosting_seq):
        return repo
    times = [] if point.time is None else [min(point.time, latest)]
    if repo.hosting_time is not None:
        times.append(repo.hosting_time)
    at = max(times, default=None)
    return repo._replace(hosting_relay=point.relay, hosting_epoch=point.epoch, hosting_seq=point.seq, hosting_time=at)


def _reported(status: str | None) -> str | None:
    """Return the hosting status that upstream reports; None for one that only this program may give.

    Otherwise an account that its PDS hides with the status `tombstoned` would be shown as soon as its DID is looked up.
    """
    return None if status in _OWN_STATUSES else status


def _withheld(repo: Repo, status: str | None, now: float) -> Repo:
    """Return the row of a repo that its relay withholds; the same object if that is known, or if it stays hidden.

    A problem of the relay says nothing about an account that is hidden for a reason of its own.
    """
    if not repo.tracked or not repo.active or (repo.withheld_since is not None and repo.hosting_status == status):
        return repo
    if repo.withheld_since is not None:
        return amend(repo, hosting_status=status)
    after = amend(repo, hosting_status=status, withheld_since=now)
    return withhold(after) if after.sync_status is SyncStatus.SYNCHRONIZED else after


def _active_again(repo: Repo, status: str | None, now: float) -> Repo:
    """Return the row of an account that is active. Its records are no longer to be erased.

    If it was hidden or withheld, its commits were ignored, and an export that is being fetched may be older than they
    are. So it is desynchronized, with the back-off of a break.
    """
    after = amend(repo, active=True, hosting_status=status, withheld_since=None, erase_at=None)
    if repo.sync_status is SyncStatus.DESYNCHRONIZED or (repo.active and repo.withheld_since is None):
        return unparked(after, now)
    return desynchronize(after, Trigger.REACTIVATED, Desync.REACTIVATED, now)


def _erase_at(repo: Repo, event: AccountEvent, context: PlanContext) -> float | None:
    """Return when to erase the records: the end of the grace period of a deletion; None for any other status.

    A repeated deletion does not extend the grace period.
    """
    if event.status != DELETED:
        return None
    return context.now + context.policy.deletion_grace if repo.erase_at is None else repo.erase_at
