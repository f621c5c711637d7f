from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from indexer.errors import BrokenInvariantError, UnavailableError
from indexer.reasons import Desync, FetchFailure
from indexer.sync.backoff import backoff_seconds
from indexer.sync.changes import Plan
from indexer.sync.plan import plan_event
from indexer.sync.policy import UNAVAILABLE, KeyState, PlanContext
from indexer.sync.repo import (
    MAX_UNPARK_SECONDS,
    OUT_OF_SCOPE,
    PARKED,
    TRANSITIONS,
    UNPROVEN_REASONS,
    Head,
    Outcome,
    Repo,
    SyncStatus,
    Trigger,
    desynchronize,
    end_claim,
    erase,
    move,
    needs_export,
    synchronize,
    track_again,
    transition,
    unparked,
    widen,
    withhold,
)
from indexer.sync.scope import Scope
from tests.sync.signing_account import CONTEXT, NOW, SigningAccount, decoded_event


@pytest.mark.parametrize("status", SyncStatus)
def test_events_that_cannot_be_applied_are_buffered_or_desynchronize_the_repo(status: SyncStatus) -> None:
    assert transition(status, Trigger.INVALID) == (Outcome.REJECTED, status)
    expected = {
        SyncStatus.DESYNCHRONIZED: (Outcome.IGNORED, status),
        SyncStatus.IN_PROGRESS: (Outcome.BUFFERED, status),
        SyncStatus.SYNCHRONIZED: (Outcome.DESYNCHRONIZED, SyncStatus.DESYNCHRONIZED),
    }[status]
    for trigger in (Trigger.BREAKS, Trigger.UNCHECKED, Trigger.SYNC_DIFFERS):
        assert transition(status, trigger) == expected


def test_only_a_whole_tree_or_a_completed_resync_synchronizes() -> None:
    synchronizing = {
        (status, trigger)
        for status, row in TRANSITIONS.items()
        for trigger, (_, after) in row.items()
        if after is SyncStatus.SYNCHRONIZED and status is not after
    }
    assert synchronizing == {(SyncStatus.DESYNCHRONIZED, Trigger.WHOLE), (SyncStatus.IN_PROGRESS, Trigger.COMPLETED)}


# Functions that change rows

HEAD = Head("3laaaaaaaaa22", b"data", b"commit")
SLOW = UnavailableError(FetchFailure.TIMEOUT)
ROW_FUNCTIONS: dict[Trigger, Callable[[Repo, Trigger], Repo]] = {
    Trigger.WHOLE: lambda repo, trigger: synchronize(repo, trigger, HEAD, NOW, 0),
    Trigger.BREAKS: lambda repo, trigger: desynchronize(repo, trigger, Desync.CHAIN_BREAK, NOW),
    Trigger.UNCHECKED: lambda repo, trigger: desynchronize(repo, trigger, Desync.IDENTITY, NOW),
    Trigger.SYNC_DIFFERS: lambda repo, trigger: desynchronize(repo, trigger, Desync.SYNC_EVENT, NOW),
    Trigger.REFUSED: lambda repo, trigger: desynchronize(repo, trigger, Desync.STORE_FAILED, NOW),
    Trigger.OVERFLOWS: lambda repo, trigger: desynchronize(repo, trigger, Desync.BUFFER_OVERFLOW, NOW),
    Trigger.COMPLETED: lambda repo, trigger: synchronize(repo, trigger, HEAD, NOW, 0),
    Trigger.FAILED: lambda repo, trigger: end_claim(repo, trigger, NOW, SLOW, 1),
    Trigger.RELEASED: lambda repo, trigger: end_claim(repo, trigger, None),
    Trigger.LEASE_EXPIRED: lambda repo, trigger: desynchronize(repo, trigger, Desync.LEASE_EXPIRED, NOW),
    Trigger.BEHIND: lambda repo, trigger: desynchronize(repo, trigger, Desync.BEHIND, NOW),
    Trigger.HINTED: lambda repo, trigger: desynchronize(repo, trigger, Desync.HINTED, NOW),
    Trigger.STATUS_UNKNOWN: lambda repo, trigger: desynchronize(repo, trigger, Desync.STATUS_UNKNOWN, NOW),
    Trigger.UNPROVEN: lambda repo, trigger: desynchronize(repo, trigger, Desync.LENIENT_COMMIT, NOW),
    Trigger.VALUES_MISSING: lambda repo, trigger: desynchronize(repo, trigger, Desync.RECORD_MISSING, NOW),
    Trigger.REACTIVATED: lambda repo, trigger: desynchronize(repo, trigger, Desync.REACTIVATED, NOW),
    Trigger.WITHHELD: lambda repo, _: withhold(repo),
    Trigger.ERASED: lambda repo, _: erase(repo),
    Trigger.WIDENED: lambda repo, _: widen(repo),
}
PAIRS = list(product(SyncStatus, Trigger))
POSSIBLE = [(status, trigger) for status, trigger in PAIRS if trigger in TRANSITIONS[status]]
IMPOSSIBLE = [pair for pair in PAIRS if pair not in POSSIBLE]


def row(status: SyncStatus) -> Repo:
    reason = None if status is SyncStatus.SYNCHRONIZED else Desync.NEW
    buffered = 2 if status is SyncStatus.IN_PROGRESS else 0
    return Repo(
        "did:plc:a", 3, status, reason, HEAD, synchronized_at=NOW, buffered_events=buffered, buffered_bytes=buffered
    )


@pytest.mark.parametrize(("status", "trigger"), POSSIBLE)
def test_move_follows_the_table(status: SyncStatus, trigger: Trigger) -> None:
    _, after = TRANSITIONS[status][trigger]
    assert transition(status, trigger) == TRANSITIONS[status][trigger]
    assert move(row(status), trigger) == row(status)._replace(version=4, sync_status=after)


@pytest.mark.parametrize(
    ("status", "trigger"),
    [
        (status, trigger)
        for status, trigger in POSSIBLE
        if trigger in ROW_FUNCTIONS and TRANSITIONS[status][trigger][0] in {Outcome.APPLIED, Outcome.DESYNCHRONIZED}
    ],
)
def test_the_row_functions_follow_the_table(status: SyncStatus, trigger: Trigger) -> None:
    after = ROW_FUNCTIONS[trigger](row(status), trigger)
    assert (after.version, after.sync_status) == (4, TRANSITIONS[status][trigger][1])
    assert (after.sync_reason is None) is (after.sync_status is SyncStatus.SYNCHRONIZED)
    assert (after.buffered_events, after.buffered_bytes) == (0, 0)


@pytest.mark.parametrize("reason", sorted(UNPROVEN_REASONS))
def test_doubt_about_stored_records_stays_when_the_repo_breaks_again(reason: Desync) -> None:
    doubtful = Repo("did:plc:x", version=1, sync_status=SyncStatus.IN_PROGRESS, sync_reason=reason)
    assert desynchronize(doubtful, Trigger.OVERFLOWS, Desync.BUFFER_OVERFLOW, NOW).sync_reason is reason


def test_the_mark_of_lenient_commits_stays_until_the_records_are_compared_or_erased() -> None:
    marked = row(SyncStatus.SYNCHRONIZED)._replace(unproven_since=NOW)
    waiting = desynchronize(marked, Trigger.UNPROVEN, Desync.LENIENT_COMMIT, NOW)
    claimed = move(waiting, Trigger.CLAIMED)
    failed = end_claim(claimed, Trigger.FAILED, NOW, SLOW, 1)
    unfinished = [marked, waiting, claimed, failed, end_claim(claimed, Trigger.RELEASED, None)]
    unfinished.append(desynchronize(claimed, Trigger.REACTIVATED, Desync.REACTIVATED, NOW))
    unfinished.append(desynchronize(claimed, Trigger.LEASE_EXPIRED, Desync.LEASE_EXPIRED, NOW))
    unfinished.append(desynchronize(marked, Trigger.BREAKS, Desync.CHAIN_BREAK, NOW))
    assert [(repo.unproven_since, needs_export(repo, Scope())) for repo in unfinished] == [(NOW, True)] * len(
        unfinished
    )
    finished = [synchronize(claimed, Trigger.COMPLETED, HEAD, NOW, 0), erase(marked)]
    assert [(repo.unproven_since, needs_export(repo, Scope())) for repo in finished] == [(None, False)] * len(finished)


def worn_row(status: SyncStatus, **fields: Any) -> Repo:
    """Return a row in which a function that forgets a column leaves a value behind."""
    return Repo(
        "did:plc:x", 7, status, Desync.CHAIN_BREAK, HEAD, buffered_events=2, buffered_bytes=30, attempts=3,
        next_attempt_at=NOW + 5, last_failure=FetchFailure.TIMEOUT, last_error="timeout", synchronized_at=NOW,
        erase_at=NOW + 9, unproven_since=NOW,
    )._replace(**fields)  # fmt: skip


def test_repo_that_breaks_again_waits_for_a_time_of_its_own() -> None:
    claimed = worn_row(SyncStatus.IN_PROGRESS)
    broken = desynchronize(claimed, Trigger.LEASE_EXPIRED, Desync.LEASE_EXPIRED, NOW)
    assert (broken.attempts, broken.next_attempt_at) == (4, NOW + backoff_seconds(3, claimed.did))


def test_synchronized_repo_keeps_its_attempts_and_nothing_of_its_failures() -> None:
    head = HEAD._replace(rev="3lbbbbbbbbb22")
    claimed = worn_row(SyncStatus.IN_PROGRESS, latest_unverified_rev=head.rev)
    assert synchronize(claimed, Trigger.COMPLETED, head, NOW + 1, 4) == worn_row(
        SyncStatus.SYNCHRONIZED, version=8, sync_reason=None, head=head, buffered_events=0, buffered_bytes=0,
        next_attempt_at=None, last_failure=None, last_error=None, synchronized_at=NOW + 1, unproven_since=None,
        scope_version=4,
    )  # fmt: skip


def test_erased_repo_has_no_head_and_is_parked() -> None:
    assert erase(worn_row(SyncStatus.SYNCHRONIZED)) == worn_row(
        SyncStatus.DESYNCHRONIZED, version=8, sync_reason=Desync.ERASED, head=None, buffered_events=0, buffered_bytes=0,
        attempts=0, next_attempt_at=PARKED, synchronized_at=None, unproven_since=None,
    )  # fmt: skip


def test_released_repo_waits_until_a_time_and_keeps_its_last_error_unless_there_is_another() -> None:
    claimed = worn_row(SyncStatus.IN_PROGRESS)
    released = worn_row(SyncStatus.DESYNCHRONIZED, version=8, buffered_events=0, buffered_bytes=0)
    assert end_claim(claimed, Trigger.RELEASED, None) == released._replace(next_attempt_at=None)
    busy = UnavailableError(FetchFailure.THROTTLED, "busy")
    assert end_claim(claimed, Trigger.RELEASED, NOW + 1, busy) == released._replace(
        next_attempt_at=NOW + 1, last_failure=FetchFailure.THROTTLED, last_error="throttled: busy"
    )
    assert end_claim(claimed._replace(sync_reason=None), Trigger.RELEASED, None).sync_reason is Desync.REQUESTED


def test_last_error_of_a_failure_is_cut() -> None:
    failure = UnavailableError(FetchFailure.TIMEOUT, "x" * 501)
    failed = end_claim(worn_row(SyncStatus.IN_PROGRESS), Trigger.FAILED, NOW, failure, 4)
    assert failed.last_error == str(failure)[:500]


def test_repo_that_the_scope_wants_again_is_fetched_at_once() -> None:
    untracked = worn_row(SyncStatus.DESYNCHRONIZED, tracked=False, active=False, hosting_status=OUT_OF_SCOPE)
    assert track_again(untracked, 4, from_stream=True) == worn_row(
        SyncStatus.DESYNCHRONIZED, version=8, next_attempt_at=None, last_failure=None, last_error=None, erase_at=None,
        from_stream=True, wanted_in=4,
    )  # fmt: skip


def test_repo_that_lacks_added_collections_is_fetched_at_once() -> None:
    assert widen(worn_row(SyncStatus.SYNCHRONIZED)).next_attempt_at is None


@pytest.mark.parametrize(("attempts", "excess"), [(0, 0), (2, 0), (3, 1), (4, 2), (20, 18)])
def test_parked_repo_waits_longer_after_each_further_failure(attempts: int, excess: int) -> None:
    parked = worn_row(SyncStatus.DESYNCHRONIZED, attempts=attempts, next_attempt_at=PARKED)
    wait = backoff_seconds(excess, parked.did, maximum=MAX_UNPARK_SECONDS) if excess else 0.0
    assert unparked(parked, NOW) == parked._replace(version=8, next_attempt_at=NOW + wait)
    waiting = worn_row(SyncStatus.DESYNCHRONIZED)
    assert unparked(waiting, NOW) is waiting


@pytest.mark.parametrize(("status", "trigger"), IMPOSSIBLE)
def test_an_impossible_transition_is_a_broken_invariant(status: SyncStatus, trigger: Trigger) -> None:
    for function in (move, ROW_FUNCTIONS.get(trigger, move)):
        with pytest.raises(BrokenInvariantError, match=f"no transition for a {status} repo"):
            function(row(status), trigger)


# Events


def received(trigger: Trigger, status: SyncStatus) -> tuple[Repo, Any, KeyState, PlanContext]:
    """Return the row, an event that is this trigger for it, and the other inputs of planning."""
    alice, key, context = SigningAccount(), SigningAccount().key_state, CONTEXT
    repo, kind = alice.row(status), "sync" if trigger.name.startswith("SYNC") else "commit"
    match trigger:
        case Trigger.WHOLE:
            repo, payload = repo._replace(head=None, sync_reason=Desync.NEW), alice.first_commit()
        case Trigger.NOT_NEWER:
            payload = alice.commit_post("a")
            repo = alice.row(status)
        case Trigger.BREAKS:
            alice.commit_post("missed")
            payload = alice.commit_post("a")
        case Trigger.SYNC_EQUAL:
            payload = alice.sync_event()
        case Trigger.SYNC_ADVANCES:
            alice.commit()
            payload = alice.sync_event()
        case Trigger.SYNC_DIFFERS:
            alice.commit_post("a")
            payload = alice.sync_event()
        case _:
            payload = alice.commit_post("a")
    match trigger:
        case Trigger.INVALID:
            key = SigningAccount("mallory").key_state._replace(final=True)
        case Trigger.UNCHECKED:
            key = UNAVAILABLE
        case Trigger.OVERFLOWS:
            limits = replace(CONTEXT.policy.limits, resync_buffer_events=0)
            context = replace(CONTEXT, policy=replace(CONTEXT.policy, limits=limits))
    return repo, decoded_event(kind, payload), key, context


EVENTS = set(Trigger) - ROW_FUNCTIONS.keys() - {Trigger.CLAIMED, Trigger.REQUESTED}  # those are written in SQL
EVENTS |= {Trigger.BREAKS, Trigger.WHOLE, Trigger.UNCHECKED, Trigger.SYNC_DIFFERS, Trigger.OVERFLOWS}


@pytest.mark.parametrize(
    ("status", "trigger"), [(status, trigger) for status, trigger in POSSIBLE if trigger in EVENTS]
)
def test_planned_events_follow_the_table(status: SyncStatus, trigger: Trigger) -> None:
    repo, event, key, context = received(trigger, status)
    plan = plan_event(repo, event, 1_000, key, context)
    assert isinstance(plan, Plan)
    assert (plan.outcome, plan.repo.sync_status) == TRANSITIONS[status][trigger]
