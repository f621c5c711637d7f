"""Plan the effects of #sync."""

from indexer.atproto.syntax import tid_of
from indexer.reasons import Desync, Rejection
from indexer.sync.changes import Plan
from indexer.sync.repo import Outcome, Repo
from tests.sync.signing_account import NOW, SYNCHRONIZED, SigningAccount, plan


def test_a_sync_with_the_stored_data_is_ignored_or_advances_the_rev() -> None:
    alice = SigningAccount()
    before = alice.row()
    assert plan(before, "sync", alice.sync_event(), alice.key_state) == Plan(before, Outcome.IGNORED)
    alice.commit()
    planned = plan(before, "sync", alice.sync_event(), alice.key_state)
    assert (planned.outcome, planned.repo.head) == (Outcome.APPLIED, alice.head)
    assert planned.repo.sync_status is SYNCHRONIZED
    assert plan(planned.repo, "commit", alice.commit_post("a"), alice.key_state).outcome is Outcome.APPLIED


def test_a_sync_with_other_data_causes_a_resync() -> None:
    alice = SigningAccount()
    before = alice.row()
    alice.commit_post("a")
    planned = plan(before, "sync", alice.sync_event(), alice.key_state)
    assert (planned.outcome, planned.repo.sync_reason) == (Outcome.DESYNCHRONIZED, Desync.SYNC_EVENT)
    assert planned.repo.head == before.head


def test_two_states_with_one_rev_are_an_equivocation() -> None:
    alice, twin = SigningAccount(), SigningAccount()
    alice.commit_post("a")
    twin.commit_post("a", "something else")
    assert alice.repo.head.rev == twin.repo.head.rev
    planned = plan(alice.row(), "sync", twin.sync_event(), alice.key_state)
    assert (planned.outcome, planned.repo.sync_reason) == (Outcome.DESYNCHRONIZED, Desync.EQUIVOCATION)


def test_a_sync_to_the_empty_tree_needs_no_resync() -> None:
    alice = SigningAccount()
    planned = plan(Repo(alice.did), "sync", alice.sync_event(), alice.key_state)
    assert (planned.repo.sync_status, planned.repo.head) == (SYNCHRONIZED, alice.head)


def test_a_message_rev_that_differs_from_the_signed_commit_is_rejected() -> None:
    """After an account migration, some hosts send the old commit with a new rev (docs/protocol.md#edge-cases)."""
    alice = SigningAccount()
    before = alice.row()
    payload = alice.sync_event() | {"rev": tid_of(int(NOW * 1_000_000))}
    planned = plan(before, "sync", payload, alice.key_state._replace(final=True))
    assert (planned.repo, planned.why) == (before, Rejection.ENVELOPE_MISMATCH)
    assert planned.detail == f"{alice.did} at {alice.head.rev}"
