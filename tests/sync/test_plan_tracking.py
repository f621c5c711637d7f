"""Plan events of unknown repos, of untracked ones, and of those that were out of scope."""

from dataclasses import replace

from indexer.atproto.syntax import CollectionFilter
from indexer.demo.local_repo import Write
from indexer.reasons import Desync
from indexer.sync.account import plan_active
from indexer.sync.changes import NeedsKey, Plan
from indexer.sync.plan import plan_event
from indexer.sync.policy import UNAVAILABLE, PlanContext
from indexer.sync.repo import OUT_OF_SCOPE, Outcome, Repo, SyncStatus
from indexer.sync.scope import Scope, Track
from tests.sync.signing_account import (
    CONTEXT,
    DESYNCHRONIZED,
    NOW,
    POST,
    STORE_ALL,
    SigningAccount,
    decoded_event,
    plan,
)

LISTED = Scope(track=Track.LISTED)


def signals(*collections: str) -> PlanContext:
    """Return a context in which commits to these collections add a repo."""
    scope = Scope(5, Track.SIGNAL, signal_collections=CollectionFilter(collections))
    return replace(CONTEXT, policy=replace(STORE_ALL, scope=scope))


def test_an_unknown_repo_is_added_by_an_authentic_commit_that_writes_a_signal() -> None:
    alice, context = SigningAccount(), signals(POST)
    unknown, path = Repo(alice.did), f"{POST}/a"
    folded = alice.commit(Write.create(path, {}), Write.delete(path))
    assert plan(unknown, "commit", folded, alice.key_state, context) == Plan(unknown, Outcome.IGNORED), "no change"
    written = alice.commit(Write.create(path, {}))
    added = plan(unknown, "commit", written, alice.key_state, context)
    assert (added.outcome, added.why, added.repo.known) == (Outcome.DESYNCHRONIZED, Desync.NEW, True)
    legacy = {name: value for name, value in written.items() if name != "prevData"}
    assert plan(unknown, "commit", legacy, alice.key_state, context).repo.known, "it may lack the signal"
    event = decoded_event("commit", written)
    assert plan_event(unknown, event, 0, None, context) == NeedsKey(alice.did, refresh=False)
    forged = SigningAccount("mallory").key_state._replace(final=True)
    for key in (UNAVAILABLE, forged):
        assert not plan(unknown, "commit", written, key, context).repo.known, "anybody may have made the commit up"


def test_other_messages_add_no_repo_and_cause_no_key_lookup() -> None:
    alice, context = SigningAccount(), signals("app.bsky.feed.like", f"{POST}.*", "a.b.c")
    alice.commit(Write.create("a.b.c/d", {}))
    for kind, payload in (
        ("commit", alice.commit_post("a")),
        ("commit", alice.commit(Write.delete("a.b.c/d"))),
        ("sync", alice.sync_event()),
        ("account", alice.account_event(active=True)),
        ("identity", alice.identity_event()),
    ):
        assert plan(Repo(alice.did), kind, payload, None, context) == Plan(Repo(alice.did), Outcome.IGNORED)


def test_an_authentic_commit_adds_an_unknown_repo() -> None:
    alice = SigningAccount()
    alice.commit_post("before")
    payload = alice.commit_post("now")
    planned = plan(Repo(alice.did), "commit", payload, alice.key_state)
    assert (planned.outcome, planned.why) == (Outcome.DESYNCHRONIZED, Desync.NEW)
    assert (planned.repo.sync_status, planned.repo.sync_reason, planned.repo.latest_verified_rev) == (
        DESYNCHRONIZED,
        Desync.NEW,
        payload["rev"],
    )
    assert planned.repo.next_attempt_at is None


def test_events_of_untracked_accounts_are_ignored() -> None:
    alice = SigningAccount()
    context = replace(CONTEXT, policy=replace(STORE_ALL, scope=LISTED))
    for kind, payload in (("commit", alice.commit_post("a")), ("identity", alice.identity_event())):
        assert plan(Repo(alice.did), kind, payload, None, context).outcome is Outcome.IGNORED
    tracked = Repo(alice.did, version=1)
    assert isinstance(plan_event(tracked, decoded_event("commit", alice.first_commit()), 0, None, context), NeedsKey)


def test_messages_of_an_untracked_repo_change_nothing() -> None:
    alice = SigningAccount()
    untracked = Repo(alice.did, version=3, tracked=False, active=False)
    active = alice.account_event(active=True)
    for kind, payload in (
        ("commit", alice.commit_post("a")),
        ("identity", alice.identity_event()),
        ("account", active),
    ):
        planned = plan(untracked, kind, payload, alice.key_state)
        assert (planned.repo, planned.outcome, planned.changes) == (untracked, Outcome.IGNORED, ())
    assert plan_active(untracked, NOW) is untracked, "a repo list does not track it again"


def out_of_scope(did: str) -> Repo:
    return Repo(did, version=3, tracked=False, active=False, hosting_status=OUT_OF_SCOPE, sync_reason=Desync.ERASED)


def test_repo_that_was_out_of_scope_is_tracked_again_by_an_authentic_signal_only() -> None:
    alice, mallory = SigningAccount(), SigningAccount("mallory")
    before = out_of_scope(alice.did)
    scope = Scope(5, Track.SIGNAL, signal_collections=CollectionFilter(["app.bsky.feed.*"]))
    context = replace(CONTEXT, policy=replace(STORE_ALL, scope=scope))
    signal = alice.commit_post("a")
    other_scope = replace(scope, signal_collections=CollectionFilter(["a.b.c"]))
    other = replace(context, policy=replace(STORE_ALL, scope=other_scope))
    message = decoded_event("commit", signal)
    assert plan_event(before, message, 0, None, context) == NeedsKey(alice.did, refresh=False)
    assert plan_event(before, message, 0, mallory.key_state, context) == NeedsKey(alice.did, refresh=True)
    malformed = signal | {"blocks": b"no CAR"}
    assert plan(before, "commit", malformed, alice.key_state, context) == Plan(before, Outcome.IGNORED)
    for kind, payload, key, of in (
        ("commit", signal, mallory.key_state._replace(final=True), context),
        ("commit", signal, alice.key_state, other),
        ("identity", alice.identity_event(), alice.key_state, context),
        ("account", alice.account_event(active=True), alice.key_state, context),
        ("commit", signal, alice.key_state, replace(context, policy=replace(STORE_ALL, scope=LISTED))),
    ):
        planned = plan(before, kind, payload, key, of)
        assert (planned.repo, planned.outcome, planned.changes) == (before, Outcome.IGNORED, ())
    planned = plan(before, "commit", signal, alice.key_state, context)
    assert (planned.outcome, planned.why, planned.changes) == (Outcome.DESYNCHRONIZED, Desync.NEW, ())
    after = planned.repo
    assert (after.version, after.tracked, after.visible, after.wanted_in) == (4, True, True, 5)
    assert (after.sync_status, after.next_attempt_at, after.hosting_status) == (SyncStatus.DESYNCHRONIZED, None, None)


def test_repo_that_was_out_of_scope_is_tracked_again_by_any_event_if_all_repos_are_wanted() -> None:
    alice = SigningAccount()
    before = out_of_scope(alice.did)
    for kind, payload in (
        ("commit", alice.commit_post("a")),
        ("identity", alice.identity_event()),
        ("account", alice.account_event(active=True)),
    ):
        assert plan(before, kind, payload, None).repo.tracked, kind
    hidden = plan(before, "account", alice.account_event(active=False), None)
    assert (hidden.repo, hidden.outcome) == (before, Outcome.IGNORED)
