"""Plan the effects of commits: the chain, the written records, replays, and first commits."""

from dataclasses import replace

import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.syntax import CollectionFilter, tid_of
from indexer.demo.local_repo import Write
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.changes import NeedsPredecessor, Plan
from indexer.sync.events import CommitEvent
from indexer.sync.plan import plan_event
from indexer.sync.policy import PlanContext
from indexer.sync.repo import Outcome, Repo, SyncStatus
from indexer.sync.scope import Scope
from tests.sync.signing_account import (
    CONTEXT,
    DESYNCHRONIZED,
    IN_PROGRESS,
    NOW,
    POST,
    STORE_ALL,
    SYNCHRONIZED,
    SigningAccount,
    decoded_event,
    plan,
)


def test_commits_of_a_chain_are_applied() -> None:
    alice = SigningAccount()
    repo = Repo(alice.did)
    planned = plan(repo, "commit", alice.first_commit(), alice.key_state)
    assert (planned.outcome, planned.repo.sync_status, planned.repo.head) == (Outcome.APPLIED, SYNCHRONIZED, alice.head)
    for n in range(5):
        planned = plan(planned.repo, "commit", alice.commit_post(f"p{n}"), alice.key_state)
        assert (planned.outcome, planned.repo.head) == (Outcome.APPLIED, alice.head)
        change = planned.changes[0]
        block = alice.repo.records[f"{POST}/p{n}"]
        assert (change.action, change.collection, change.rkey, change.cid) == ("create", POST, f"p{n}", cid_of(block))
        assert change.value == '{"text":"hello","$type":"app.bsky.feed.post"}'
    assert planned.repo.version == 6


def test_only_selected_collections_are_written_but_the_head_advances() -> None:
    alice = SigningAccount()
    before = alice.row()
    context = replace(CONTEXT, policy=replace(STORE_ALL, scope=Scope(collections=CollectionFilter(["com.example.*"]))))
    writes = [Write.create(path, {}) for path in (f"{POST}/a", "com.example.note/a", "not a path")]
    planned = plan(before, "commit", alice.commit(*writes), alice.key_state, context)
    assert [change.collection for change in planned.changes] == ["com.example.note"]
    assert planned.repo.head == alice.head


def test_a_commit_is_early_if_another_stream_may_bring_its_predecessor() -> None:
    alice = SigningAccount()
    before, missed = alice.row(), decoded_event("commit", alice.commit_post("missed"))
    after_missed, in_progress = alice.row(), alice.row(IN_PROGRESS)._replace(head=before.head)
    early = decoded_event("commit", alice.commit_post("early"))
    context = replace(CONTEXT, other_streams=True)

    def planned(repo: Repo, event: CommitEvent = early, context: PlanContext = context) -> bool:
        return isinstance(plan_event(repo, event, 0, alice.key_state, context), Plan)

    assert plan_event(before, early, 0, alice.key_state, context) == NeedsPredecessor(early.rev)
    assert planned(before, missed)
    assert planned(after_missed)
    assert planned(in_progress), "it is buffered"
    assert planned(before, context=CONTEXT)
    assert planned(before, context=replace(context, overdue=frozenset({alice.did})))
    assert planned(before, early._replace(since=None)), "nothing says that there is a predecessor"
    assert planned(before, early._replace(since=before.head and before.head.rev)), "the predecessor is stored"


@pytest.mark.parametrize(
    ("status", "outcome", "after"),
    [
        (DESYNCHRONIZED, Outcome.IGNORED, DESYNCHRONIZED),
        (IN_PROGRESS, Outcome.BUFFERED, IN_PROGRESS),
        (SYNCHRONIZED, Outcome.DESYNCHRONIZED, DESYNCHRONIZED),
    ],
)
def test_a_missed_commit_breaks_the_chain(status: SyncStatus, outcome: Outcome, after: SyncStatus) -> None:
    alice = SigningAccount()
    before = alice.row(status)
    alice.commit_post("missed")
    payload = alice.commit_post("received")
    planned = plan(before, "commit", payload, alice.key_state)
    assert (planned.outcome, planned.repo.sync_status, planned.changes) == (outcome, after, ())
    assert planned.repo.latest_verified_rev == payload["rev"], "an older export does not complete the resync"
    assert planned.buffer is (status is IN_PROGRESS)
    if status is SYNCHRONIZED:
        assert planned.why is planned.repo.sync_reason is Desync.CHAIN_BREAK
        assert planned.detail == ""
        assert planned.repo.head == before.head


def test_commit_above_the_stored_rev_makes_a_repo_due_whose_export_was_older_than_it() -> None:
    """So its host has a newer export now. If it sends an old one all the same, further commits change nothing."""
    alice = SigningAccount()
    alice.commit_post("missed")
    waiting = alice.row(
        DESYNCHRONIZED,
        attempts=7,
        next_attempt_at=NOW + 4_500.0,
        last_failure=FetchFailure.EXPORT_STALE,
        last_error=f"export-stale: 3j < {alice.head.rev}",
    )
    payload = alice.commit_post("received")
    bring_forward = plan(waiting, "commit", payload, alice.key_state)
    assert (bring_forward.outcome, bring_forward.repo.next_attempt_at) == (Outcome.IGNORED, NOW)
    failed = bring_forward.repo._replace(attempts=8, next_attempt_at=NOW + 4_500.0)
    again = plan(failed, "commit", alice.commit_post("third"), alice.key_state)
    assert again.repo.next_attempt_at == NOW + 4_500.0
    other = waiting._replace(last_failure=FetchFailure.TIMEOUT, last_error="timeout: 60 s")
    assert plan(other, "commit", payload, alice.key_state).repo.next_attempt_at == NOW + 4_500.0
    forged = payload | {"repo": alice.did, "commit": alice.commit_post("fourth")["commit"]}
    assert plan(waiting, "commit", forged, alice.key_state).repo.next_attempt_at == NOW + 4_500.0


def test_since_is_not_compared_with_the_stored_rev() -> None:
    alice = SigningAccount()
    before = alice.row()
    payload = alice.commit_post("a") | {"since": "3jzfcijpj2z2a"}
    assert plan(before, "commit", payload, alice.key_state).outcome is Outcome.APPLIED
    payload = alice.commit_post("on another tree") | {"since": before.head and before.head.rev}
    planned = plan(before, "commit", payload, alice.key_state)
    assert (planned.outcome, planned.why, planned.changes) == (Outcome.DESYNCHRONIZED, Desync.CHAIN_BREAK, ())


def test_a_plan_names_the_flaw_of_a_commit() -> None:
    alice = SigningAccount()
    before, waiting = alice.row(), Repo(alice.did, version=1)
    payload = alice.commit_post("a")
    legacy = {name: value for name, value in payload.items() if name != "prevData"}
    planned = plan(before, "commit", legacy, alice.key_state)
    assert (planned.outcome, planned.why, planned.detail) == (Outcome.DESYNCHRONIZED, Desync.LEGACY, "no prevData")
    assert plan(waiting, "commit", legacy, alice.key_state).why is Desync.LEGACY
    assert plan(waiting, "commit", payload, alice.key_state).why is Desync.CHAIN_BREAK
    stored = plan(before._replace(sync_status=DESYNCHRONIZED), "commit", legacy, alice.key_state)
    assert (stored.outcome, stored.why, stored.detail) == (Outcome.IGNORED, Desync.LEGACY, "no prevData")


@pytest.mark.parametrize("status", [DESYNCHRONIZED, IN_PROGRESS])
def test_revs_of_messages_that_extend_the_chain_are_noted_until_the_resync_ends(status: SyncStatus) -> None:
    """Otherwise an older export would complete the resync."""
    alice = SigningAccount()
    before = alice.row(status)
    payload = alice.commit()
    for kind, message in (("commit", payload), ("sync", alice.sync_event())):
        planned = plan(before, kind, message, alice.key_state)
        assert (planned.repo.head, planned.repo.latest_verified_rev) == (before.head, payload["rev"]), kind


def test_an_older_commit_does_not_replace_the_latest_verified_rev() -> None:
    alice = SigningAccount()
    payload = alice.commit_post("a")
    before = Repo(alice.did, version=1, latest_verified_rev=tid_of(int(NOW * 1_000_000)))
    planned = plan(before, "commit", payload, alice.key_state)
    assert planned == Plan(before, Outcome.IGNORED, why=Desync.CHAIN_BREAK)


@pytest.mark.parametrize("status", SyncStatus)
def test_a_replayed_message_changes_nothing(status: SyncStatus) -> None:
    alice = SigningAccount()
    payload = alice.commit_post("a")
    before = alice.row(status)
    assert plan(before, "commit", payload, alice.key_state) == Plan(before, Outcome.REPLAYED)
    older = SigningAccount("alice")
    assert plan(before, "sync", older.sync_event(), None).outcome is Outcome.REPLAYED


def test_a_commit_with_a_rev_from_the_future_is_rejected() -> None:
    alice = SigningAccount()
    payload = alice.commit_post("a") | {"rev": tid_of(int((NOW + 301) * 1_000_000))}
    before = alice.row()
    planned = plan(before, "commit", payload, alice.key_state)
    assert (planned.repo, planned.outcome, planned.why) == (before, Outcome.REJECTED, Rejection.FUTURE_REV)
    assert planned.detail == payload["rev"]


def test_commits_of_an_inactive_account_are_ignored_and_those_of_a_taken_down_repo_applied() -> None:
    alice = SigningAccount()
    inactive, taken_down, payload = alice.row(active=False), alice.row(takedown=True), alice.commit_post("a")
    assert plan(inactive, "commit", payload, alice.key_state) == Plan(inactive, Outcome.IGNORED)
    assert plan(taken_down, "commit", payload, alice.key_state).outcome is Outcome.APPLIED


class TestFirstCommit:
    def test_a_first_commit_synchronizes_only_an_empty_repo(self) -> None:
        alice = SigningAccount()
        first, rev = alice.first_commit(), alice.head.rev
        stored = alice.row(DESYNCHRONIZED, latest_verified_rev=None)
        assert plan(stored, "commit", first, alice.key_state).outcome is Outcome.REPLAYED
        fresh = Repo(alice.did, version=1)
        for repo in (fresh, fresh._replace(latest_verified_rev=rev)):
            assert plan(repo, "commit", first, alice.key_state).repo.sync_status is SYNCHRONIZED
        outdated = fresh._replace(latest_verified_rev=rev + "z")
        assert plan(outdated, "commit", first, alice.key_state).outcome is Outcome.IGNORED

    def test_the_records_of_a_first_commit_are_written(self) -> None:
        alice = SigningAccount()
        payload = alice.commit_post("a") | {"since": None}
        planned = plan(Repo(alice.did), "commit", payload, alice.key_state)
        assert (planned.repo.sync_status, planned.repo.head) == (SYNCHRONIZED, alice.head)
        assert [(change.action, change.rkey) for change in planned.changes] == [("create", "a")]

    def test_a_first_commit_is_buffered_during_a_resync(self) -> None:
        alice = SigningAccount()
        claimed = Repo(alice.did, version=2, sync_status=IN_PROGRESS)
        planned = plan(claimed, "commit", alice.first_commit(), alice.key_state)
        assert (planned.outcome, planned.buffer, planned.repo.buffered_events) == (Outcome.BUFFERED, True, 1)
