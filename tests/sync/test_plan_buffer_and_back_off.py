"""Plan the limits of the resync buffer, and the time of the next resync."""

from dataclasses import replace

import pytest

from indexer.atproto.limits import Limits
from indexer.atproto.syntax import CollectionFilter
from indexer.demo.local_repo import Write
from indexer.reasons import Desync, FetchFailure
from indexer.sync.changes import NeedsKey
from indexer.sync.plan import plan_event
from indexer.sync.repo import PARKED, STABLE_SECONDS, Head, Outcome, Repo, Trigger, desynchronize
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


@pytest.mark.parametrize(
    "limits",
    [
        Limits(resync_buffer_events=2, resync_buffer_bytes=1_000_000),
        Limits(resync_buffer_events=1_000_000, resync_buffer_bytes=2_000),
    ],
    ids=["count", "bytes"],
)
def test_the_resync_buffer_is_limited_by_count_and_bytes(limits: Limits) -> None:
    """Each message counts as 1,000 bytes; two messages reach the limit exactly."""
    alice = SigningAccount()
    context = replace(CONTEXT, policy=replace(STORE_ALL, limits=limits))
    repo = alice.row(IN_PROGRESS)
    for n in range(2):
        planned = plan(repo, "commit", alice.commit_post(f"p{n}"), alice.key_state, context)
        assert planned.buffer
        repo = planned.repo
    assert (repo.buffered_events, repo.buffered_bytes) == (2, 2_000)
    planned = plan(repo, "commit", alice.commit_post("one too many"), alice.key_state, context)
    assert (planned.outcome, planned.repo.sync_reason) == (Outcome.DESYNCHRONIZED, Desync.BUFFER_OVERFLOW)
    assert planned.why is Desync.BUFFER_OVERFLOW
    assert (planned.buffer, planned.repo.buffered_events, planned.repo.buffered_bytes) == (False, 0, 0)


@pytest.mark.parametrize("redacted", [(), (POST,)], ids=["record", "collection"])
def test_message_with_a_removed_record_is_not_buffered_and_another_resync_follows(redacted: tuple[str, ...]) -> None:
    """The resync that runs may end before the message; the row notes its rev. Other messages are buffered."""
    alice = SigningAccount()
    removed = {} if redacted else {alice.did: frozenset({f"{POST}/secret".encode()})}
    scope = Scope(collections=CollectionFilter(["*"], redacted), removed=removed)
    context = replace(CONTEXT, policy=replace(STORE_ALL, scope=scope))
    repo = alice.row(IN_PROGRESS)
    planned = plan(repo, "commit", alice.commit_post("secret"), alice.key_state, context)
    assert (planned.outcome, planned.buffer, planned.changes) == (Outcome.BUFFERED, False, ())
    assert planned.repo == repo._replace(version=repo.version + 1, latest_verified_rev=alice.head.rev)
    assert planned.repo.newer_is_verified
    assert plan(planned.repo, "commit", alice.commit(Write.create("a.b.d/x", {})), alice.key_state, context).buffer
    assert plan(planned.repo, "commit", alice.commit_post("another"), alice.key_state, CONTEXT).buffer


def test_the_back_off_grows_until_a_repo_stays_synchronized() -> None:
    alice = SigningAccount()
    repo = alice.row(synchronized_at=NOW - 10)
    waits = []
    for _ in range(6):
        alice.commit_post("missed" + alice.repo.head.rev)
        planned = plan(repo, "commit", alice.commit_post("received" + alice.repo.head.rev), alice.key_state)
        waits.append((planned.repo.next_attempt_at or NOW) - NOW)
        repo = planned.repo._replace(sync_status=SYNCHRONIZED, head=alice.head, synchronized_at=NOW - 10)
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert waits[-1] > 600
    settled = repo._replace(synchronized_at=NOW - 7_200)
    alice.commit_post("missed")
    assert plan(settled, "commit", alice.commit_post("received"), alice.key_state).repo.next_attempt_at is None


@pytest.mark.parametrize(("seconds", "waits"), [(60, True), (STABLE_SECONDS - 1, True), (STABLE_SECONDS + 1, False)])
def test_repo_that_breaks_soon_after_its_last_break_waits(seconds: float, waits: bool) -> None:
    alice = SigningAccount()
    before = alice.row(attempts=1, synchronized_at=NOW - seconds)
    after = desynchronize(before, Trigger.BREAKS, Desync.CHAIN_BREAK, NOW)
    assert (after.next_attempt_at is not None and after.next_attempt_at > NOW) is waits


def test_the_back_off_grows_when_resyncs_overflow_repeatedly() -> None:
    """Even if the repo was last synchronized long ago."""
    repo = Repo(
        "did:plc:x", version=1, sync_status=SYNCHRONIZED, head=Head("a", b"", b""), synchronized_at=NOW - 90_000
    )
    repo = desynchronize(repo, Trigger.BREAKS, Desync.CHAIN_BREAK, NOW)
    assert repo.next_attempt_at == NOW or repo.next_attempt_at is None
    waits = []
    for _ in range(4):
        repo = desynchronize(repo._replace(sync_status=IN_PROGRESS), Trigger.OVERFLOWS, Desync.BUFFER_OVERFLOW, NOW)
        assert repo.next_attempt_at is not None
        waits.append(repo.next_attempt_at - NOW)
    assert waits == sorted(waits)
    assert waits[-1] > 4 * waits[0]


def test_an_event_unparks_a_parked_repo() -> None:
    alice = SigningAccount()
    repo = alice.row(
        DESYNCHRONIZED,
        next_attempt_at=PARKED,
        attempts=2,
        last_failure=FetchFailure.REPO_NOT_FOUND,
        last_error="repo-not-found",
    )
    assert isinstance(plan_event(repo, decoded_event("commit", alice.commit_post("a")), 1_000, None, CONTEXT), NeedsKey)
    for kind, payload in (
        ("commit", alice.commit_post("b")),
        ("sync", alice.sync_event()),
        ("account", alice.account_event(active=True)),
        ("identity", alice.identity_event()),
    ):
        assert plan(repo, kind, payload, alice.key_state).repo.next_attempt_at == NOW
    hidden = repo._replace(active=False)
    assert plan(hidden, "account", alice.account_event(active=True), None).repo.next_attempt_at == NOW
