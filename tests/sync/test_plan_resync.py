from dataclasses import replace
from typing import Any

import pytest

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.demo.local_repo import Write
from indexer.errors import UnavailableError
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.changes import Batch, BufferedEvent, Plan, RecordChange, RepoWrite
from indexer.sync.plan import plan_event
from indexer.sync.policy import UNAVAILABLE, KeyState, PlanContext
from indexer.sync.repo import PARKED, Head, Repo, SyncStatus
from indexer.sync.resync import Completion, plan_failure
from tests.sync.hidden_deletion import high_path
from tests.sync.signing_account import CONTEXT, NOW, POST, RELAY, SigningAccount, decoded_event, encoded_frame


def claimed(account: SigningAccount, **fields: object) -> Repo:
    row = Repo(
        account.did, version=4, sync_status=SyncStatus.IN_PROGRESS, sync_reason=Desync.CHAIN_BREAK, lease=2, attempts=1
    )
    return row._replace(**fields)  # type: ignore[arg-type]


def buffered(account: SigningAccount, *payloads: dict[str, object]) -> list[BufferedEvent]:
    return [
        BufferedEvent(account.did, RELAY, seq, encoded_frame("sync" if "did" in payload else "commit", payload))
        for seq, payload in enumerate(payloads)
    ]


def plan_completion(
    before: Repo, locked: Repo, head: Head, events: list[BufferedEvent], key: KeyState, context: PlanContext
) -> Batch:
    """Return the batch of a completion, with its record changes, the same wherever the row is locked."""
    batches = [
        _plan_completion(Completion(before, head, key, context), locked, events[:number], events[number:])
        for number in range(len(events) + 1)
    ]
    [first], *others = [batch.writes for batch in batches]
    for batch, [write] in zip(batches[1:], others, strict=True):
        assert write._replace(repo=write.repo._replace(version=first.repo.version)) == first
        assert batch.dead_letters == batches[0].dead_letters
    return batches[0]


def _plan_completion(
    completion: Completion, locked: Repo, earlier: list[BufferedEvent], later: list[BufferedEvent]
) -> Batch:
    completion.add(earlier)
    changes = plan_slices(completion)
    completion.lock(locked)
    completion.add(later)
    changes += plan_slices(completion)
    batch = completion.end()
    [write] = batch.writes
    assert not write.changes
    return replace(batch, writes=(write._replace(changes=tuple(changes)),))


def plan_slices(completion: Completion) -> list[RecordChange]:
    more, changes = True, list[RecordChange]()
    while more:
        more = completion.plan_slice()
        changes += completion.changes
    return changes


def completed(account: SigningAccount, head: Head, events: list[BufferedEvent], **fields: object) -> RepoWrite:
    [write] = plan_completion(
        claimed(account), claimed(account, **fields), head, events, account.key_state, CONTEXT
    ).writes
    return write


def assert_desynchronized(write: RepoWrite, reason: Desync) -> None:
    assert (write.repo.sync_status, write.repo.sync_reason) == (SyncStatus.DESYNCHRONIZED, reason)


def planned(repo: Repo, kind: str, payload: dict[str, Any], key: KeyState | None) -> Plan:
    plan = plan_event(repo, decoded_event(kind, payload), 1_000, key, CONTEXT)
    assert isinstance(plan, Plan)
    return plan


def test_only_buffered_events_newer_than_the_export_are_applied() -> None:
    alice = SigningAccount()
    before = alice.commit_post("before")
    included = alice.commit_post("included")
    head = alice.head
    newer = [alice.commit_post("newer"), alice.commit(Write.delete(f"{POST}/before"))]
    write = completed(alice, head, buffered(alice, before, included, *newer))
    assert (write.repo.sync_status, write.repo.head, write.repo.sync_reason) == (
        SyncStatus.SYNCHRONIZED,
        alice.head,
        None,
    )
    assert [(change.action, change.rkey) for change in write.changes] == [("create", "newer"), ("delete", "before")]
    assert write.before.version == 4
    assert write.repo.buffered_events == 0


def test_a_chain_break_in_the_buffer_keeps_the_state_before_it() -> None:
    alice = SigningAccount()
    head = alice.head
    applied = alice.commit_post("applied")
    applied_head = alice.head
    alice.commit_post("missed")
    events = buffered(alice, applied, alice.commit_post("after the break"), alice.commit_post("further"))
    write = completed(alice, head, events, latest_unverified_rev=alice.repo.head.rev)
    assert_desynchronized(write, Desync.DRAIN_BREAK)
    assert write.repo.head == applied_head
    assert write.repo.latest_unverified_rev == alice.repo.head.rev, "the newest rev is in the discarded events"
    assert [change.rkey for change in write.changes] == ["applied"]


def test_a_completed_resync_clears_the_mark_of_lenient_commits() -> None:
    alice = SigningAccount()
    write = completed(alice, alice.head, [], unproven_since=NOW - 60)
    assert (write.repo.sync_status, write.repo.unproven_since) == (SyncStatus.SYNCHRONIZED, None)


def test_a_lenient_commit_in_the_buffer_marks_the_repo_again() -> None:
    alice = SigningAccount()
    alice.commit(*(Write.create(f"{POST}/{number:03}", {"n": number}) for number in range(200)))
    head = alice.head
    events = buffered(
        alice,
        alice.commit_with_hidden_deletion(high_path(f"{POST}/100-"), f"{POST}/110"),
        alice.commit_post("after it"),
    )
    context = replace(CONTEXT, policy=replace(CONTEXT.policy, lenient=True))
    repo = claimed(alice, unproven_since=NOW - 60)
    [write] = plan_completion(repo, repo, head, events, alice.key_state, context).writes
    assert (write.repo.sync_status, write.repo.head) == (SyncStatus.SYNCHRONIZED, alice.head)
    assert write.repo.unproven_since == NOW


def test_an_export_older_than_a_verified_rev_does_not_complete_the_resync() -> None:
    alice = SigningAccount()
    head = alice.head
    rev = alice.commit_post("ignored while desynchronized")["rev"]
    write = completed(alice, head, [], latest_verified_rev=rev)
    assert_desynchronized(write, Desync.STALE_EXPORT)
    newer = completed(alice, alice.head, [], latest_verified_rev=rev)
    assert newer.repo.sync_status is SyncStatus.SYNCHRONIZED


def test_an_export_older_than_a_rev_listed_meanwhile_causes_one_more_resync() -> None:
    """The stream may have missed the commit between the export and the repo list."""
    alice = SigningAccount()
    head, known = alice.head, alice.commit_post("buffered")
    listed = alice.commit_post("missed by the stream")["rev"]
    write = completed(alice, head, buffered(alice, known), latest_unverified_rev=listed)
    assert_desynchronized(write, Desync.BEHIND)
    assert write.repo.latest_unverified_rev == listed
    equal = completed(alice, alice.head, [], latest_unverified_rev=listed)
    assert equal.repo.sync_status is SyncStatus.SYNCHRONIZED, "the export is as new as the list"
    again = claimed(alice)._replace(latest_unverified_rev=listed)
    [write] = plan_completion(again, again, head, [], alice.key_state, CONTEXT).writes
    assert write.repo.sync_status is SyncStatus.SYNCHRONIZED, "the list is not signed: it causes one resync"


def test_buffered_events_with_an_unavailable_key_cause_another_resync() -> None:
    alice = SigningAccount()
    head = alice.head
    [write] = plan_completion(
        claimed(alice), claimed(alice), head, buffered(alice, alice.commit_post("a")), UNAVAILABLE, CONTEXT
    ).writes
    assert_desynchronized(write, Desync.IDENTITY)
    assert write.changes == ()


def test_a_buffered_event_signed_by_a_newer_key_is_not_rejected() -> None:
    """It was buffered because it could not be checked. That the key of the export does not verify it proves nothing."""
    alice = SigningAccount()
    head, old = alice.head, alice.key_state
    alice.key = PrivateKey.from_seed("k256", b"rotated")
    payload = alice.commit_post("signed by the new key")
    plan = planned(claimed(alice), "commit", payload, UNAVAILABLE)
    assert plan.buffer
    [write] = plan_completion(claimed(alice), plan.repo, head, buffered(alice, payload), old, CONTEXT).writes
    assert_desynchronized(write, Desync.IDENTITY)


def test_an_invalid_buffered_event_is_rejected_without_the_others() -> None:
    """It was buffered because it could not be checked."""
    alice = SigningAccount()
    head = alice.head
    damaged, good = alice.commit_post("damaged") | {"blocks": b"no CAR"}, alice.sync_event()
    plan = planned(claimed(alice), "commit", damaged, UNAVAILABLE)
    assert plan.buffer
    batch = plan_completion(claimed(alice), plan.repo, head, buffered(alice, damaged, good), alice.key_state, CONTEXT)
    [dead_letter] = batch.dead_letters
    assert (dead_letter.relay, dead_letter.seq, dead_letter.did, dead_letter.kind) == (RELAY, 0, alice.did, "commit")
    assert dead_letter.reason is Rejection.CAR_MALFORMED
    assert dead_letter.frame == encoded_frame("commit", damaged)
    [write] = batch.writes
    assert_desynchronized(write, Desync.SYNC_EVENT)


def test_a_buffered_event_above_a_lowered_limit_is_rejected_and_causes_another_resync() -> None:
    alice = SigningAccount()
    head = alice.head
    payload = alice.commit_post("buffered")
    events = [BufferedEvent(alice.did, RELAY, 7, encoded_frame("commit", payload))]
    context = replace(CONTEXT, policy=replace(CONTEXT.policy, limits=replace(DEFAULT_LIMITS, frame_bytes=100)))
    locked = claimed(alice, latest_verified_rev=payload["rev"])
    batch = plan_completion(claimed(alice), locked, head, events, alice.key_state, context)
    assert [(dead_letter.seq, dead_letter.reason) for dead_letter in batch.dead_letters] == [
        (7, Rejection.FRAME_TOO_LARGE)
    ]
    [write] = batch.writes
    assert_desynchronized(write, Desync.STALE_EXPORT)
    listed = claimed(alice, latest_unverified_rev=payload["rev"])
    [write] = plan_completion(claimed(alice), listed, head, events, alice.key_state, context).writes
    assert write.repo.sync_reason is Desync.BEHIND, "a rejected event has no rev"


def test_a_commit_buffered_before_the_account_became_inactive_is_applied() -> None:
    """It is newer than the export. Ignored, it would make the export look like a stale one."""
    alice = SigningAccount()
    head, payload = alice.head, alice.commit_post("before")
    repo = planned(claimed(alice), "commit", payload, alice.key_state).repo
    hidden = planned(repo, "account", alice.account_event(active=False, status="deactivated"), None)
    events = buffered(alice, payload)
    [write] = plan_completion(claimed(alice), hidden.repo, head, events, alice.key_state, CONTEXT).writes
    assert (write.repo.sync_status, write.repo.head) == (SyncStatus.SYNCHRONIZED, alice.head)
    assert [change.rkey for change in write.changes] == ["before"]
    assert (write.repo.active, write.repo.hosting_status) == (False, "deactivated")


def test_an_account_reactivated_during_its_resync_is_resynchronized_again() -> None:
    """Its commits were ignored while it was inactive, and the export may be older than they are."""
    alice = SigningAccount()
    repo = claimed(alice, buffered_events=1, buffered_bytes=10)
    for payload in (
        alice.account_event(active=False, status="deactivated"),
        alice.commit_post("ignored"),
        alice.account_event(active=True),
    ):
        repo = planned(repo, "commit" if "ops" in payload else "account", payload, alice.key_state).repo
    assert (repo.sync_status, repo.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.REACTIVATED)
    assert repo.buffered_events == 0
    assert repo.next_attempt_at is not None
    assert repo.next_attempt_at > CONTEXT.now, "it also broke when this resync was requested"


@pytest.mark.parametrize("reason", FetchFailure)
def test_every_failure_sets_the_last_error_and_the_next_attempt(reason: FetchFailure) -> None:
    alice = SigningAccount()
    before = claimed(alice, buffered_events=3)
    row = plan_failure(before, before, UnavailableError(reason, "detail"), NOW)
    assert (row.sync_status, row.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.CHAIN_BREAK)
    assert row.last_error == f"{reason}: detail"
    assert row.buffered_events == 0
    assert row.next_attempt_at is not None
    if reason.is_permanent:
        assert row.next_attempt_at == PARKED
    else:
        assert NOW + 45 <= row.next_attempt_at <= NOW + 150


def test_a_repo_that_changed_during_its_resync_is_not_parked() -> None:
    alice = SigningAccount()
    before = claimed(alice)
    for kind, payload in (
        ("identity", alice.identity_event()),
        ("account", alice.account_event(active=True)),
        ("commit", alice.commit_post("a")),
    ):
        changed = planned(before, kind, payload, alice.key_state).repo
        row = plan_failure(changed, before, UnavailableError(FetchFailure.REPO_NOT_FOUND), NOW)
        assert row.next_attempt_at is not None
        assert NOW < row.next_attempt_at <= NOW + 150


def test_commit_during_a_resync_whose_export_is_older_than_the_stored_rev_makes_the_repo_due() -> None:
    alice = SigningAccount()
    alice.commit_post("stored")
    before = claimed(alice, head=alice.head)
    changed = planned(before, "commit", alice.commit_post("meanwhile"), alice.key_state).repo
    for reason, current, due in (
        (FetchFailure.EXPORT_STALE, changed, True),
        (FetchFailure.EXPORT_STALE, before, False),
        (FetchFailure.TIMEOUT, changed, False),
    ):
        row = plan_failure(current, before, UnavailableError(reason), NOW)
        assert (row.next_attempt_at == NOW) is due
    assert plan_failure(changed, changed, UnavailableError(FetchFailure.EXPORT_STALE), NOW).next_attempt_at != NOW


def test_throttling_does_not_count_as_attempt_and_waits_for_retry_after() -> None:
    alice = SigningAccount()
    throttled = UnavailableError(FetchFailure.THROTTLED, "429", retry_after=900)
    row = plan_failure(claimed(alice), claimed(alice), throttled, NOW)
    assert (row.attempts, row.next_attempt_at) == (1, NOW + 900)
    failed = plan_failure(claimed(alice), claimed(alice), UnavailableError(FetchFailure.TIMEOUT), NOW)
    assert failed.attempts == 2


@pytest.mark.parametrize("limit", ["bytes", "changes"])
def test_a_slice_ends_with_the_event_that_exceeds_its_limit(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = SigningAccount()
    head = alice.head
    events = buffered(alice, *[alice.commit_post(f"{number}") for number in range(6)])
    alone = Completion(claimed(alice), head, alice.key_state, CONTEXT)
    alone.add(events[:3])
    size = sum(change.size for change in plan_slices(alone)) + sum(len(event.frame) for event in events[:3])
    name, value = ("SLICE_BYTES", size) if limit == "bytes" else ("MAX_BATCH_CHANGES", 3)
    monkeypatch.setattr(f"indexer.sync.resync.{name}", value)
    completion = Completion(claimed(alice), head, alice.key_state, CONTEXT)
    completion.add(events)
    assert completion.plan_slice()
    assert [change.rkey for change in completion.changes] == ["0", "1", "2", "3"]
    assert completion.waiting_bytes == sum(len(event.frame) for event in events[4:])
    assert [change.rkey for change in plan_slices(completion)] == ["4", "5"]
    completion.lock(claimed(alice))
    [write] = completion.end().writes
    assert (write.repo.head, write.repo.sync_status) == (alice.head, SyncStatus.SYNCHRONIZED)


def test_an_event_that_ends_the_chain_is_planned_only_after_the_row_is_locked() -> None:
    alice = SigningAccount()
    head = alice.head
    alice.commit_post("missed")
    completion = Completion(claimed(alice), head, alice.key_state, CONTEXT)
    stuck = [completion.stuck]
    completion.add(buffered(alice, alice.commit_post("after the break")))
    assert not completion.plan_slice()
    stuck.append(completion.stuck)
    assert completion.waiting_bytes > 0
    completion.lock(claimed(alice))
    stuck.append(completion.stuck)
    assert not completion.plan_slice()
    assert completion.waiting_bytes == 0
    assert stuck == [False, True, False]
    [write] = completion.end().writes
    assert write.repo.sync_reason is Desync.DRAIN_BREAK
