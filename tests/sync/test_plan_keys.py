"""Plan commits by the state of the signing key: forged, stale, unavailable, or to be looked up."""

from dataclasses import replace

import pytest

from indexer.reasons import Desync, Rejection
from indexer.sync.changes import NeedsKey, Plan
from indexer.sync.plan import key_to_verify, plan_event
from indexer.sync.policy import UNAVAILABLE, KeyState
from indexer.sync.repo import TOMBSTONED, Outcome, Repo, SyncStatus
from indexer.sync.stream import Origin
from tests.sync.signing_account import (
    CONTEXT,
    DESYNCHRONIZED,
    IN_PROGRESS,
    NOW,
    RELAY,
    SYNCHRONIZED,
    SigningAccount,
    decoded_event,
    plan,
)


@pytest.mark.parametrize("status", SyncStatus)
def test_a_forged_message_changes_nothing(status: SyncStatus) -> None:
    alice, mallory = SigningAccount(), SigningAccount("mallory")
    before = alice.row(status)
    payload = alice.commit_post("a")
    planned = plan(before, "commit", payload, mallory.key_state._replace(final=True))
    assert (planned.repo, planned.outcome, planned.why) == (before, Outcome.REJECTED, Rejection.SIGNATURE_INVALID)
    unknown = plan(Repo(alice.did), "commit", payload, mallory.key_state._replace(final=True))
    assert not unknown.repo.known
    message, needed = decoded_event("commit", payload), NeedsKey(alice.did, refresh=True)
    assert plan_event(before, message, 0, mallory.key_state, CONTEXT) == needed, "one refresh of the key"
    planned = plan(before, "commit", payload, KeyState(None))
    assert (planned.repo, planned.outcome, planned.why) == (before, Outcome.REJECTED, Rejection.NO_SIGNING_KEY)


def test_a_signature_that_a_stale_key_does_not_verify_is_not_rejected() -> None:
    """The identity is stale and could not be refreshed, so the message may be authentic."""
    alice, mallory = SigningAccount(), SigningAccount("mallory")
    before = alice.row()
    stale = mallory.key_state._replace(final=True, stale=True)
    planned = plan(before, "commit", alice.commit_post("a"), stale)
    assert (planned.outcome, planned.repo.sync_reason) == (Outcome.DESYNCHRONIZED, Desync.IDENTITY)
    right = alice.key_state._replace(final=True, stale=True)
    assert plan(before, "commit", alice.commit_post("b"), right).why is Desync.CHAIN_BREAK


def test_no_key_is_looked_up_for_a_repo_that_waits_for_its_resync() -> None:
    alice = SigningAccount()
    waiting = alice.row(DESYNCHRONIZED)
    message = decoded_event("commit", alice.commit_post("a"))
    assert plan_event(Repo(alice.did), message, 0, None, CONTEXT) == NeedsKey(alice.did, refresh=False)
    assert plan_event(alice.row(), decoded_event("commit", alice.commit_post("b")), 0, None, CONTEXT) == NeedsKey(
        alice.did, refresh=False
    )
    planned = plan_event(waiting, message, 0, None, CONTEXT)
    expected = waiting._replace(version=waiting.version + 1, latest_unverified_rev=message.rev)
    assert planned == Plan(expected, Outcome.IGNORED, why=Desync.IDENTITY), "the resync will look up the key"
    hinted = plan_event(waiting._replace(sync_reason=Desync.HINTED), message, 0, None, CONTEXT)
    assert isinstance(hinted, Plan)
    assert hinted.repo.sync_reason is Desync.BEHIND, "the stream does not bring this commit again"


@pytest.mark.parametrize(
    ("status", "outcome", "reason"),
    [
        (DESYNCHRONIZED, Outcome.IGNORED, Desync.CHAIN_BREAK),
        (IN_PROGRESS, Outcome.BUFFERED, Desync.CHAIN_BREAK),
        (SYNCHRONIZED, Outcome.DESYNCHRONIZED, Desync.IDENTITY),
    ],
)
def test_an_event_with_an_unavailable_key_causes_a_resync(status: SyncStatus, outcome: Outcome, reason: Desync) -> None:
    alice = SigningAccount()
    before = alice.row(status)
    planned = plan(before, "commit", alice.commit_post("a"), UNAVAILABLE)
    assert (planned.outcome, planned.repo.sync_reason) == (outcome, reason)
    assert planned.repo.latest_verified_rev is None, "the rev is not verified"
    assert planned.repo.latest_unverified_rev == alice.repo.head.rev, "an export from a mirror may be older"


def test_a_commit_of_a_denied_did_is_unchecked_if_records_are_stored() -> None:
    """Without stored records, the DID has never proved anything, and the commit adds no row."""
    alice, key = SigningAccount(), KeyState(None, doubtful=True)
    planned = plan(alice.row(SyncStatus.SYNCHRONIZED), "commit", alice.commit_post("a"), key)
    assert (planned.outcome, planned.why, planned.changes) == (Outcome.DESYNCHRONIZED, Desync.IDENTITY, ())
    planned = plan(Repo(alice.did), "commit", alice.commit_post("b"), key)
    assert (planned.outcome, planned.why, planned.repo) == (Outcome.REJECTED, Rejection.NO_SIGNING_KEY, Repo(alice.did))


def test_a_commit_of_a_gone_did_is_ignored_and_refreshes_its_identity() -> None:
    alice = SigningAccount()
    row, commit = alice.row(SyncStatus.SYNCHRONIZED), alice.commit_post("a")
    for status, refreshed in ((TOMBSTONED, True), ("deactivated", False)):
        hidden = row._replace(active=False, hosting_status=status)
        planned = plan(hidden, "commit", commit, None)
        assert (planned.outcome, planned.repo, planned.refresh_identity) == (Outcome.IGNORED, hidden, refreshed)


def test_a_repo_whose_lookup_failed_is_looked_up_again_with_its_next_commit() -> None:
    """Its first proof moves it to the front of the queue, before all DIDs that somebody made up."""
    alice = SigningAccount()
    announced = Repo(alice.did, version=1, next_attempt_at=NOW + 3_000)
    first = plan(announced, "commit", alice.commit_post("a"), UNAVAILABLE)
    assert (first.outcome, first.repo.sync_reason) == (Outcome.IGNORED, Desync.IDENTITY)
    later = alice.commit_post("b")
    needed = plan_event(first.repo, decoded_event("commit", later), 100, None, CONTEXT)
    assert needed == NeedsKey(alice.did, refresh=False)
    proved = plan(first.repo, "commit", later, KeyState(alice.key.public))
    assert (proved.outcome, proved.why, proved.detail) == (Outcome.IGNORED, Desync.CHAIN_BREAK, "")
    assert proved.repo.latest_verified_rev == alice.repo.head.rev
    assert proved.repo.next_attempt_at is None, "due at once"


def test_an_unknown_repo_whose_lookup_fails_is_added_with_an_unverified_rev() -> None:
    alice = SigningAccount()
    payload = alice.commit_post("a")
    planned = plan(Repo(alice.did), "commit", payload, UNAVAILABLE)
    assert planned == Plan(
        Repo(alice.did, version=1, sync_reason=Desync.IDENTITY, latest_unverified_rev=payload["rev"]),
        Outcome.DESYNCHRONIZED,
        why=Desync.IDENTITY,
    )


def test_a_commit_causes_a_lookup_only_if_it_may_help_a_repo_that_waits() -> None:
    alice = SigningAccount()
    first, later = decoded_event("commit", alice.first_commit()), decoded_event("commit", alice.commit_post("a"))
    sync = decoded_event("sync", alice.sync_event())
    new = Repo(alice.did, version=1)
    verified = new._replace(sync_reason=Desync.IDENTITY, latest_verified_rev=alice.head.rev)
    needed = NeedsKey(alice.did, refresh=False)
    assert plan_event(new, first, 0, None, CONTEXT) == needed
    stored, again = alice.row(DESYNCHRONIZED), decoded_event("commit", alice.commit_post("b") | {"since": None})
    for repo, event in ((new, later), (new, sync), (verified, later), (stored, again)):
        assert plan_event(repo, event, 0, None, CONTEXT) != needed, (repo, event)


def test_a_failed_lookup_changes_the_reason_of_a_new_repo_only() -> None:
    """In particular, a repo that is being erased keeps the reason that prevents records without an export."""
    alice = SigningAccount()
    payload = alice.commit_post("a")
    new = Repo(alice.did, version=1)
    newer = payload["rev"]
    for repo, reason in (
        (new, Desync.IDENTITY),
        (new._replace(latest_unverified_rev=newer), Desync.IDENTITY),
        (new._replace(sync_reason=Desync.ERASED), Desync.ERASED),
        (new._replace(latest_verified_rev=alice.head.rev), Desync.NEW),
        (new._replace(sync_status=IN_PROGRESS), Desync.NEW),
    ):
        planned = plan(repo, "commit", payload, UNAVAILABLE).repo
        assert planned.sync_reason is reason, repo
        assert planned == repo or planned.version > repo.version, repo


def test_the_key_to_verify_ahead_is_the_known_one_of_the_host_of_the_stream() -> None:
    alice = SigningAccount()
    row, event = alice.row(), decoded_event("commit", alice.commit_post("a"))
    key = alice.key_state._replace(host="pds.test")
    pds, other = (
        replace(CONTEXT, origin=Origin(RELAY, host="pds.test")),
        replace(CONTEXT, origin=Origin(RELAY, host="other.test")),
    )
    assert key_to_verify(row, event, key, CONTEXT) is key_to_verify(row, event, key, pds) is key.key
    assert key_to_verify(row, event, key, other) is None
