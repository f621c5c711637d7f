"""The events of a Jetstream: what is read in them, and what each hint does to the row of its repo."""

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter, tid_of
from indexer.reasons import Desync
from indexer.sync.backoff import backoff_seconds
from indexer.sync.hints import (
    MAX_MESSAGE_BYTES,
    MAX_PATTERNS,
    Hint,
    HintPlan,
    decode_hint,
    plan_hint,
    wanted_patterns,
)
from indexer.sync.plan import plan_listed
from indexer.sync.policy import KeyState, PlanContext, Policy
from indexer.sync.repo import (
    OUT_OF_SCOPE,
    PARKED,
    TOMBSTONED,
    Head,
    Outcome,
    Repo,
    SyncStatus,
    Trigger,
    desynchronize,
    is_follow_up,
    move,
)
from indexer.sync.resync import Completion
from indexer.sync.scope import Scope, Track
from tests.sync.signing_account import NOW

DID = "did:plc:2ymvfzen4bco76un5puu4rz2"
LIKE, POST = "app.bsky.feed.like", "app.bsky.feed.post"
MICROS = int(NOW * 1_000_000)
STORED, NEWER, NEWEST = (tid_of(MICROS - seconds * 1_000_000) for seconds in (60, 30, 10))
FUTURE = tid_of(MICROS + 3_600_000_000)
HEAD = Head(STORED, cid_of(b"data"), cid_of(b"commit"))
ROW = Repo(DID, 7, SyncStatus.SYNCHRONIZED, None, HEAD, synchronized_at=NOW)
WAITING = ROW._replace(sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.HINTED)
FETCHED = ROW._replace(sync_status=SyncStatus.IN_PROGRESS, sync_reason=Desync.HINTED)
COMMIT = {"rev": NEWER, "operation": "create", "collection": LIKE, "rkey": "a", "record": {"$type": LIKE}, "cid": "x"}
HINT = Hint("commit", DID, MICROS, NEWER, LIKE, f"{LIKE}/a", writes=True)


def context(**scope: Any) -> PlanContext:
    return PlanContext(Policy(Scope(5, **({"collections": CollectionFilter([LIKE])} | scope)), DEFAULT_LIMITS), NOW)


def message(kind: str = "commit", did: object = DID, time_us: object = MICROS, **fields: Any) -> bytes:
    return json.dumps({"did": did, "time_us": time_us, "kind": kind, **fields}, separators=(",", ":")).encode()


def plan(repo: Repo, hint: Hint = HINT, **scope: Any) -> HintPlan:
    return plan_hint(repo, hint, context(**scope))


def test_events_of_each_kind_are_read() -> None:
    assert decode_hint(message(commit=COMMIT)) == HINT
    assert decode_hint(message(commit=COMMIT | {"operation": "update"})) == HINT
    assert decode_hint(message(commit=COMMIT | {"operation": "delete"})) == HINT._replace(writes=False)
    assert decode_hint(message("identity", identity={})) == Hint("identity", DID, MICROS)
    inactive = message("account", account={"active": False, "status": "deactivated"})
    assert decode_hint(inactive) == Hint("account", DID, MICROS, active=False, status="deactivated")
    assert decode_hint(message("account", account={"active": True})) == Hint("account", DID, MICROS)


@pytest.mark.parametrize("odd", [None, 7, "", "x" * 3_000, [], {}, "../", "\0", True, -1, 2**80, -1.5], ids=repr)
@pytest.mark.parametrize("name", ["rev", "collection", "rkey", "operation"])
def test_odd_field_of_a_commit_hides_neither_the_did_nor_the_other_fields(name: str, odd: object) -> None:
    hint = decode_hint(message(commit=COMMIT | {name: odd}))
    changed: dict[str, Any] = {"rev": {"rev": ""}, "rkey": {"path": ""}, "operation": {"writes": False}}
    assert hint == HINT._replace(**changed.get(name, {"collection": "", "path": ""}))
    without = {other: value for other, value in COMMIT.items() if other != name}
    assert decode_hint(message(commit=without)) == hint


@pytest.mark.parametrize("odd", [None, "1", 0, -1, 2**63, 1.5, True, []], ids=repr)
def test_odd_time_counts_as_none_and_odd_parts_as_missing(odd: object) -> None:
    assert decode_hint(message(time_us=odd, commit=COMMIT)) == HINT._replace(time=0)
    assert decode_hint(message(commit=odd)) == Hint("commit", DID, MICROS)
    assert decode_hint(message("account", account=odd)) == Hint("account", DID, MICROS)


def test_messages_without_a_did_or_of_other_kinds_are_no_hints() -> None:
    unusable: list[bytes] = [
        *(message(did=did, commit=COMMIT) for did in (None, 7, "", "did:plc", "x" + DID, "did:web:" + "a" * 2_048)),
        *(message(kind, commit=COMMIT) for kind in ("", "sync", "Commit")),
        *(b"", b"null", b"[]", b'"did:plc:a"', b"7", b"\xff\xfe", b"<html>", b'{"kind":"commit"}'),
    ]
    assert [decode_hint(one) for one in unusable] == [None] * len(unusable)


@pytest.mark.parametrize("record", [b"[" * 500_000, b"[]," * 1_500_000, b'"\\ud800"', b"9" * 5_000_000, b"{"], ids=len)
def test_message_that_cannot_be_parsed_is_a_hint_without_a_rev_and_takes_little_memory(record: bytes) -> None:
    sent = message(commit=COMMIT).replace(b'{"$type":"app.bsky.feed.like"}', record)
    assert record in sent
    tracemalloc.start()
    try:
        assert decode_hint(sent) == Hint("commit", DID)
        assert tracemalloc.get_traced_memory()[1] < 20 * MAX_MESSAGE_BYTES
    finally:
        tracemalloc.stop()
    assert decode_hint(b'{"x":"' + b"y" * 5_000 + sent[1:]) is None, "it is not searched without a bound"


def test_newer_rev_lets_the_repo_be_fetched() -> None:
    after = plan(ROW)
    assert (after.outcome, after.ask, after.refresh_identity) == (Outcome.DESYNCHRONIZED, False, False)
    repo = after.repo
    assert (repo.sync_status, repo.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.HINTED)
    assert (repo.next_attempt_at, repo.attempts, repo.version) == (None, 1, 8)
    assert (repo.head, repo.latest_verified_rev, repo.latest_unverified_rev) == (ROW.head, None, NEWER)
    again = plan(ROW._replace(attempts=3)).repo
    assert again.next_attempt_at == NOW + backoff_seconds(3, DID), "unless false hints came before"


@pytest.mark.parametrize("row", [ROW, WAITING, FETCHED], ids=lambda row: row.sync_status)
def test_rev_that_is_stored_changes_nothing(row: Repo) -> None:
    for rev in (STORED, tid_of(1_000), "2222222222222"):
        assert plan(row, HINT._replace(rev=rev)) == HintPlan(row, Outcome.REPLAYED)


@pytest.mark.parametrize("row", [ROW, WAITING, FETCHED], ids=lambda row: row.sync_status)
@pytest.mark.parametrize("rev", ["", FUTURE, "7777777777777", "jzzzzzzzzzzzz"])
def test_rev_that_cannot_be_used_is_a_reason_to_ask_the_host(row: Repo, rev: str) -> None:
    assert plan(row, HINT._replace(rev=rev)) == HintPlan(row, Outcome.REJECTED, ask=True)


def test_repo_that_waits_or_is_fetched_notes_the_newest_rev() -> None:
    for row in (WAITING, FETCHED, WAITING._replace(head=None, sync_reason=Desync.NEW)):
        noted = plan(row)
        assert noted == HintPlan(row._replace(version=8, latest_unverified_rev=NEWER), Outcome.APPLIED)
        assert plan(noted.repo).repo is noted.repo
        assert plan(noted.repo, HINT._replace(rev=NEWEST)).repo.latest_unverified_rev == NEWEST
        newest = row._replace(latest_unverified_rev=NEWEST)
        assert plan(newest).repo is newest


def test_parked_repo_is_tried_again_within_the_usual_limits() -> None:
    parked = WAITING._replace(next_attempt_at=PARKED, attempts=2)
    assert plan(parked).repo == parked._replace(version=8, latest_unverified_rev=NEWER, next_attempt_at=NOW)
    later = plan(parked._replace(attempts=4)).repo.next_attempt_at
    assert later == NOW + backoff_seconds(2, DID, maximum=600.0)
    identity = plan(parked, Hint("identity", DID))
    assert identity == HintPlan(parked._replace(version=8, next_attempt_at=NOW), Outcome.APPLIED, refresh_identity=True)
    assert plan(ROW, Hint("identity", DID)) == HintPlan(ROW, Outcome.APPLIED, refresh_identity=True)


def test_commit_to_another_collection_is_no_hint_but_one_without_a_collection_is() -> None:
    assert plan(ROW, HINT._replace(collection=POST)) == HintPlan(ROW)
    assert plan(ROW, HINT._replace(collection="", path="")).outcome is Outcome.DESYNCHRONIZED


def test_report_about_an_account_is_a_reason_to_ask_its_host_if_it_differs() -> None:
    hidden = ROW._replace(active=False, hosting_status="deactivated")
    active = Hint("account", DID)
    deactivated = active._replace(active=False, status="deactivated")
    for row, hint, asks in (
        (ROW, active, False), (ROW, deactivated, True), (ROW, deactivated._replace(status=None), True),
        (ROW, deactivated._replace(status="throttled"), False), (hidden, active, True), (hidden, deactivated, False),
        (hidden, deactivated._replace(status="deleted"), True),
    ):  # fmt: skip
        assert plan(row, hint) == HintPlan(row, Outcome.APPLIED if asks else Outcome.REPLAYED, ask=asks)


def test_commit_of_an_account_that_is_not_active_is_a_reason_to_ask() -> None:
    hidden = ROW._replace(active=False, hosting_status="suspended")
    assert plan(hidden) == HintPlan(hidden, ask=True)
    gone = ROW._replace(active=False, hosting_status=TOMBSTONED)
    assert plan(gone) == HintPlan(gone, refresh_identity=True)


UNKNOWN = Repo(DID, from_stream=True, wanted_in=5)
SIGNAL: dict[str, Any] = {"track": Track.SIGNAL, "signal_collections": CollectionFilter([POST])}
OTHERS = (Hint("identity", DID), Hint("account", DID), HINT, Hint("commit", DID, rev=NEWER))


def test_unknown_repo_is_added_if_all_are_tracked_or_a_signal_is_written() -> None:
    signal = HINT._replace(collection=POST)
    for hint in OTHERS:
        assert plan(UNKNOWN, hint) == HintPlan(UNKNOWN._replace(version=1), Outcome.DESYNCHRONIZED)
        assert plan(UNKNOWN, hint, **SIGNAL) == HintPlan(UNKNOWN)
        assert plan(UNKNOWN, hint, track=Track.LISTED) == HintPlan(UNKNOWN)
    assert plan(UNKNOWN, signal, **SIGNAL).outcome is Outcome.DESYNCHRONIZED
    assert plan(UNKNOWN, signal._replace(writes=False), **SIGNAL) == HintPlan(UNKNOWN)
    assert plan(UNKNOWN, Hint("account", DID, active=False)) == HintPlan(UNKNOWN)


def test_repo_out_of_scope_is_tracked_again_and_an_untracked_one_is_not() -> None:
    untracked = ROW._replace(tracked=False, active=False, sync_status=SyncStatus.DESYNCHRONIZED, wanted_in=2)
    out = untracked._replace(hosting_status=OUT_OF_SCOPE)
    again = plan(out, HINT._replace(collection=POST), **SIGNAL)
    assert (again.outcome, again.repo.tracked, again.repo.active) == (Outcome.DESYNCHRONIZED, True, True)
    assert (again.repo.wanted_in, again.repo.from_stream) == (5, True)
    assert plan(out, **SIGNAL) == HintPlan(out)
    for hint in (HINT, *OTHERS):
        assert plan(untracked, hint) == HintPlan(untracked)


def test_filter_has_the_chosen_and_the_signal_collections() -> None:
    scope = context(**SIGNAL).policy.scope
    assert wanted_patterns(scope) == (LIKE, POST)
    assert wanted_patterns(replace(scope, track=Track.ALL)) == (LIKE,)
    many = [f"com.example.n{number}" for number in range(MAX_PATTERNS)]
    assert wanted_patterns(replace(scope, track=Track.ALL, collections=CollectionFilter(many))) == tuple(many)
    assert wanted_patterns(replace(scope, collections=CollectionFilter(many))) == (), "too many: no filter"
    assert wanted_patterns(Scope()) == ()


# The end of a resync


def completed(claimed: Repo, rev: str, noted: str | None = None) -> Repo:
    """Return the row after a resync has reached a rev, and a hint has noted another one meanwhile."""
    locked = claimed if noted is None else plan(claimed, HINT._replace(rev=noted)).repo
    completion = Completion(claimed, HEAD._replace(rev=rev), KeyState(None), context())
    completion.lock(locked)
    [write] = completion.end().writes
    return write.repo


@pytest.mark.parametrize("reason", [Desync.HINTED, Desync.BEHIND])
def test_true_hint_costs_no_back_off_and_a_false_one_does(reason: Desync) -> None:
    hinted = plan(ROW._replace(attempts=2)).repo._replace(sync_reason=reason)
    claimed = move(hinted, Trigger.CLAIMED)
    assert claimed.attempts == 3
    for rev in (NEWER, NEWEST):
        assert (completed(claimed, rev).sync_status, completed(claimed, rev).attempts) == (SyncStatus.SYNCHRONIZED, 0)
    false = completed(claimed, STORED)
    assert (false.sync_status, false.attempts, false.latest_unverified_rev) == (SyncStatus.SYNCHRONIZED, 3, None)
    other = completed(claimed._replace(sync_reason=Desync.CHAIN_BREAK), NEWER)
    assert other.attempts == 3


def test_hint_that_came_during_the_resync_is_followed_at_once() -> None:
    claimed = move(plan(ROW).repo, Trigger.CLAIMED)
    behind = completed(claimed, NEWER, noted=NEWEST)
    assert (behind.sync_status, behind.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.HINTED)
    assert (behind.next_attempt_at, behind.latest_unverified_rev) == (None, NEWEST)
    assert completed(claimed, NEWEST, noted=NEWEST).sync_status is SyncStatus.SYNCHRONIZED


def test_repo_of_which_a_list_tells_during_a_failed_request_is_fetched() -> None:
    """The list may have closed a gap, so the stream alone does not bring the repo to this rev."""
    claimed = move(plan(ROW, HINT._replace(rev=NEWEST)).repo, Trigger.CLAIMED)
    assert completed(claimed, STORED).sync_status is SyncStatus.SYNCHRONIZED
    listed = plan_listed(claimed, NEWER, NOW)
    completion = Completion(claimed, HEAD._replace(rev=STORED), KeyState(None), context())
    completion.lock(listed)
    [write] = completion.end(costly=True).writes
    assert (write.repo.sync_status, write.repo.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.BEHIND)
    assert write.repo.latest_unverified_rev == NEWEST
    waiting = plan(ROW, HINT._replace(rev=NEWEST)).repo
    assert plan_listed(waiting, NEWER, NOW).sync_reason is Desync.BEHIND
    assert not is_follow_up(move(plan_listed(waiting, NEWER, NOW), Trigger.CLAIMED), Scope())


def test_killed_resync_of_a_hinted_repo_starts_again_at_once_the_first_time() -> None:
    repo = plan(ROW).repo
    for waits in (False, True):
        repo = desynchronize(move(repo, Trigger.CLAIMED), Trigger.LEASE_EXPIRED, Desync.LEASE_EXPIRED, NOW)
        assert (repo.next_attempt_at is not None) is waits
