from dataclasses import replace

import pytest

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.errors import UnavailableError
from indexer.localnet.repo import Write
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.plan import KeptEvent, Plan, RepoWrite
from indexer.sync.planning import UNAVAILABLE, plan_event
from indexer.sync.repo import PARKED, Head, Repo, SyncStatus
from indexer.sync.resync import plan_completion, plan_failure, plan_release
from tests.sync.people import GROUND, NOW, POST, Person, event, frame

RELAY = "wss://relay.test"


def head_of(person: Person) -> Head:
    return Head(person.repo.head.rev, person.repo.head.data, person.repo.head.cid)


def claimed(person: Person, **fields: object) -> Repo:
    row = Repo(person.did, version=4, status=SyncStatus.IN_PROGRESS, reason=Desync.CHAIN_BREAK, lease=2, attempts=1)
    return replace(row, **fields)  # type: ignore[arg-type]


def kept(person: Person, *payloads: dict[str, object]) -> list[KeptEvent]:
    return [
        KeptEvent(person.did, RELAY, place, frame("sync" if "did" in payload else "commit", payload))
        for place, payload in enumerate(payloads)
    ]


def completed(person: Person, head: Head, events: list[KeptEvent], **fields: object) -> RepoWrite:
    [write] = plan_completion(claimed(person, **fields), head, events, person.signer, GROUND).writes
    return write


def test_events_behind_the_export_are_applied_and_those_in_it_are_not() -> None:
    ann = Person()
    before = ann.post("before")
    in_it = ann.post("in it")
    head = head_of(ann)
    behind = [ann.post("behind"), ann.write(Write.delete(f"{POST}/before"))]
    write = completed(ann, head, kept(ann, before, in_it, *behind))
    assert (write.repo.status, write.repo.head, write.repo.reason) == (SyncStatus.SYNCHRONIZED, head_of(ann), None)
    assert [(change.action, change.rkey) for change in write.changes] == [("create", "behind"), ("delete", "before")]
    assert write.expected == 4
    assert write.repo.buffered_events == 0


def test_a_break_among_the_kept_events_ends_at_the_last_good_state() -> None:
    ann = Person()
    head = head_of(ann)
    good = ann.post("good")
    good_head = head_of(ann)
    ann.post("never heard")
    heard = kept(ann, good, ann.post("too far"), ann.post("further"))
    write = completed(ann, head, heard, heard_rev=ann.repo.head.rev)
    assert (write.repo.status, write.repo.reason) == (SyncStatus.DESYNCHRONIZED, Desync.DRAIN_BREAK)
    assert write.repo.head == good_head
    assert write.repo.heard_rev == ann.repo.head.rev, "behind the break it is lost"
    assert [change.rkey for change in write.changes] == ["good"]


def test_an_export_older_than_what_was_seen_is_not_the_end() -> None:
    ann = Person()
    head = head_of(ann)
    seen = ann.post("ignored while desynchronized")["rev"]
    write = completed(ann, head, [], seen_rev=seen)
    assert (write.repo.status, write.repo.reason) == (SyncStatus.DESYNCHRONIZED, Desync.STALE_EXPORT)
    newer = completed(ann, head_of(ann), [], seen_rev=seen)
    assert newer.repo.status is SyncStatus.SYNCHRONIZED


def test_a_key_that_can_not_be_had_for_the_kept_events_loses_none() -> None:
    ann = Person()
    head = head_of(ann)
    [write] = plan_completion(claimed(ann), head, kept(ann, ann.post("a")), UNAVAILABLE, GROUND).writes
    assert (write.repo.status, write.repo.reason, write.changes) == (SyncStatus.DESYNCHRONIZED, Desync.IDENTITY, ())


def test_an_event_by_a_key_newer_than_the_export_is_not_dropped() -> None:
    """It was kept because it could not be checked; the key that proved the export is no proof against it."""
    ann = Person()
    head, old = head_of(ann), ann.signer
    ann.key = PrivateKey.from_seed("k256", b"rotated")
    payload = ann.post("by the new key")
    made = plan_event(claimed(ann), event("commit", payload), 1_000, UNAVAILABLE, GROUND)
    assert isinstance(made, Plan)
    assert made.keep
    [write] = plan_completion(made.repo, head, kept(ann, payload), old, GROUND).writes
    assert (write.repo.status, write.repo.reason) == (SyncStatus.DESYNCHRONIZED, Desync.IDENTITY)


def test_a_kept_event_that_turns_out_to_be_at_fault_is_refused_and_the_others_are_not() -> None:
    """It was kept because nobody could check it."""
    ann = Person()
    head = head_of(ann)
    damaged, good = ann.post("damaged") | {"blocks": b"no CAR"}, ann.sync()
    made = plan_event(claimed(ann), event("commit", damaged), 1_000, UNAVAILABLE, GROUND)
    assert isinstance(made, Plan)
    assert made.keep
    batch = plan_completion(made.repo, head, kept(ann, damaged, good), ann.signer, GROUND)
    [letter] = batch.dead_letters
    assert (letter.relay, letter.seq, letter.did, letter.kind) == (RELAY, 0, ann.did, "commit")
    assert letter.reason is Rejection.CAR_MALFORMED
    assert letter.frame == frame("commit", damaged)
    [write] = batch.writes
    assert (write.repo.status, write.repo.reason) == (SyncStatus.DESYNCHRONIZED, Desync.SYNC_EVENT)


def test_a_kept_event_over_limits_that_have_become_tighter_is_refused_and_missed() -> None:
    ann = Person()
    head = head_of(ann)
    payload = ann.post("kept")
    events = [KeptEvent(ann.did, RELAY, 7, frame("commit", payload))]
    ground = replace(GROUND, policy=replace(GROUND.policy, limits=replace(DEFAULT_LIMITS, frame_bytes=100)))
    batch = plan_completion(claimed(ann, seen_rev=payload["rev"]), head, events, ann.signer, ground)
    assert [(letter.seq, letter.reason) for letter in batch.dead_letters] == [(7, Rejection.FRAME_TOO_LARGE)]
    [write] = batch.writes
    assert (write.repo.status, write.repo.reason) == (SyncStatus.DESYNCHRONIZED, Desync.STALE_EXPORT)


def test_a_repo_that_was_away_during_its_resync_is_fetched_again() -> None:
    """What it wrote while it was inactive was ignored, and the export under way may be older."""
    ann = Person()
    repo = claimed(ann, buffered_events=1, buffered_bytes=10)
    for payload in (ann.account(active=False, status="deactivated"), ann.post("ignored"), ann.account(active=True)):
        made = plan_event(repo, event("commit" if "ops" in payload else "account", payload), 1_000, ann.signer, GROUND)
        assert isinstance(made, Plan)
        repo = made.repo
    assert (repo.status, repo.reason, repo.buffered_events) == (SyncStatus.DESYNCHRONIZED, Desync.REACTIVATED, 0)
    assert repo.next_attempt_at is None


@pytest.mark.parametrize("reason", FetchFailure)
def test_every_failure_leaves_a_reason_and_a_time(reason: FetchFailure) -> None:
    ann = Person()
    before = claimed(ann, buffered_events=3)
    row = plan_failure(before, before, UnavailableError(reason, "detail"), NOW)
    assert (row.status, row.reason) == (SyncStatus.DESYNCHRONIZED, Desync.CHAIN_BREAK)
    assert row.last_error == f"{reason}: detail"
    assert row.buffered_events == 0
    assert row.next_attempt_at is not None
    if reason.parks:
        assert row.next_attempt_at == PARKED
    else:
        assert NOW + 45 <= row.next_attempt_at <= NOW + 150


@pytest.mark.parametrize("what", ["identity", "account", "commit"])
def test_a_repo_to_which_something_happened_meanwhile_is_not_given_up_on(what: str) -> None:
    ann = Person()
    before = claimed(ann)
    news = {"identity": ann.identity(), "account": ann.account(active=True), "commit": ann.post("a")}
    made = plan_event(before, event(what, news[what]), 1_000, ann.signer, GROUND)
    assert isinstance(made, Plan)
    row = plan_failure(made.repo, before, UnavailableError(FetchFailure.REPO_NOT_FOUND), NOW)
    assert row.next_attempt_at is not None
    assert NOW < row.next_attempt_at <= NOW + 150


def test_being_throttled_costs_no_attempt_and_waits_as_told() -> None:
    ann = Person()
    throttled = UnavailableError(FetchFailure.THROTTLED, "429", retry_after=900)
    row = plan_failure(claimed(ann), claimed(ann), throttled, NOW)
    assert (row.attempts, row.next_attempt_at) == (1, NOW + 900)
    failed = plan_failure(claimed(ann), claimed(ann), UnavailableError(FetchFailure.TIMEOUT), NOW)
    assert failed.attempts == 2


def test_a_resync_that_is_called_off_is_due_at_once() -> None:
    ann = Person()
    row = plan_release(claimed(ann, last_error="before"))
    assert (row.status, row.next_attempt_at, row.attempts) == (SyncStatus.DESYNCHRONIZED, None, 1)
