from dataclasses import replace

import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.limits import Limits
from indexer.atproto.syntax import CollectionFilter, tid_of
from indexer.localnet.local_repo import Write
from indexer.reasons import Desync, Rejection
from indexer.sync.plan_event import key_to_verify, plan_active, plan_event
from indexer.sync.plans import NeedsKey, Plan
from indexer.sync.policy import MAX_IDENTITY_AGE, UNAVAILABLE, KeyState, PlanContext
from indexer.sync.repo_state import OUT_OF_SCOPE, PARKED, TOMBSTONED, Head, Repo, SyncStatus
from indexer.sync.repo_transitions import STABLE_SECONDS, Outcome, Trigger, desynchronize
from indexer.sync.scope import Scope, Track
from tests.sync.planning import DESYNCHRONIZED, IN_PROGRESS, LISTED, SYNCHRONIZED, plan
from tests.sync.signing_account import CONTEXT, NOW, POST, STORE_ALL, SigningAccount, decoded_event


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


def test_changes_have_the_actions_of_the_writes() -> None:
    alice = SigningAccount()
    alice.commit_post("a")
    alice.commit_post("b")
    before = alice.row()
    payload = alice.commit(
        Write.create(f"{POST}/c", {}), Write.update(f"{POST}/a", {"x": 1}), Write.delete(f"{POST}/b")
    )
    actions = {change.rkey: change.action for change in plan(before, "commit", payload, alice.key_state).changes}
    assert actions == {"a": "update", "b": "delete", "c": "create"}


def test_only_selected_collections_are_written_but_the_head_advances() -> None:
    alice = SigningAccount()
    before = alice.row()
    context = replace(CONTEXT, policy=replace(STORE_ALL, scope=Scope(collections=CollectionFilter(["com.example.*"]))))
    payload = alice.commit(Write.create(f"{POST}/a", {}), Write.create("com.example.note/a", {}))
    planned = plan(before, "commit", payload, alice.key_state, context)
    assert [change.collection for change in planned.changes] == ["com.example.note"]
    assert planned.repo.head == alice.head


def test_values_are_not_stored_if_the_policy_says_so() -> None:
    alice = SigningAccount()
    before = alice.row()
    context = replace(CONTEXT, policy=replace(STORE_ALL, store_values=False))
    change = plan(before, "commit", alice.commit_post("a"), alice.key_state, context).changes[0]
    assert change.cid is not None
    assert (change.value, change.problem, change.original) == (None, None, None)


def test_a_path_with_invalid_syntax_is_not_stored_and_does_not_break_the_chain() -> None:
    alice = SigningAccount()
    before = alice.row()
    payload = alice.commit(Write.create("not a path", {}), Write.create(f"{POST}/a", {}))
    planned = plan(before, "commit", payload, alice.key_state)
    assert planned.repo.head == alice.head
    assert [change.rkey for change in planned.changes] == ["a"]


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


@pytest.mark.parametrize("status", [DESYNCHRONIZED, IN_PROGRESS])
def test_revs_of_messages_that_extend_the_chain_are_noted_until_the_resync_ends(status: SyncStatus) -> None:
    """Otherwise an older export would complete the resync."""
    alice = SigningAccount()
    before = alice.row(status)
    payload = alice.commit()
    for kind, message in (("commit", payload), ("sync", alice.sync_event())):
        planned = plan(before, kind, message, alice.key_state)
        assert (planned.repo.head, planned.repo.latest_verified_rev) == (before.head, payload["rev"]), kind


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


@pytest.mark.parametrize("status", SyncStatus)
def test_a_forged_message_changes_nothing(status: SyncStatus) -> None:
    alice, mallory = SigningAccount(), SigningAccount("mallory")
    before = alice.row(status)
    payload = alice.commit_post("a")
    planned = plan(before, "commit", payload, mallory.key_state._replace(final=True))
    assert (planned.repo, planned.outcome, planned.why) == (before, Outcome.REJECTED, Rejection.SIGNATURE_INVALID)
    unknown = plan(Repo(alice.did), "commit", payload, mallory.key_state._replace(final=True))
    assert not unknown.repo.known


def test_an_invalid_signature_causes_one_key_refresh() -> None:
    alice, mallory = SigningAccount(), SigningAccount("mallory")
    before = alice.row()
    message = decoded_event("commit", alice.commit_post("a"))
    assert plan_event(before, message, 0, mallory.key_state, CONTEXT) == NeedsKey(alice.did, refresh=True)
    assert isinstance(plan_event(before, message, 0, mallory.key_state._replace(final=True), CONTEXT), Plan)


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


def test_a_commit_of_an_account_without_a_key_is_rejected() -> None:
    alice = SigningAccount()
    before = alice.row()
    planned = plan(before, "commit", alice.commit_post("a"), KeyState(None))
    assert (planned.repo, planned.outcome, planned.why) == (before, Outcome.REJECTED, Rejection.NO_SIGNING_KEY)


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
    for repo, reason in (
        (new, Desync.IDENTITY),
        (new._replace(sync_reason=Desync.ERASED), Desync.ERASED),
        (new._replace(latest_verified_rev=alice.head.rev), Desync.NEW),
        (new._replace(sync_status=IN_PROGRESS), Desync.NEW),
    ):
        assert plan(repo, "commit", payload, UNAVAILABLE).repo.sync_reason is reason, repo


def test_the_key_to_verify_ahead_is_the_known_one_of_the_host_of_the_stream() -> None:
    alice = SigningAccount()
    row, event = alice.row(), decoded_event("commit", alice.commit_post("a"))
    key = alice.key_state._replace(host="pds.test")
    pds, other = replace(CONTEXT, host="pds.test"), replace(CONTEXT, host="other.test")
    assert key_to_verify(row, event, key, CONTEXT) is key_to_verify(row, event, key, pds) is key.key
    assert key_to_verify(row, event, key, other) is None


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
    unchecked = plan(unknown, "commit", written, UNAVAILABLE, context)
    assert unchecked == Plan(unknown, Outcome.IGNORED), "anybody may have made the commit up"
    deleted = alice.commit(Write.delete(path))
    assert plan(unknown, "commit", deleted, None, context) == Plan(unknown, Outcome.IGNORED)


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


def test_a_commit_with_a_rev_from_the_future_is_rejected() -> None:
    alice = SigningAccount()
    payload = alice.commit_post("a") | {"rev": tid_of(int((NOW + 301) * 1_000_000))}
    before = alice.row()
    planned = plan(before, "commit", payload, alice.key_state)
    assert (planned.repo, planned.outcome, planned.why) == (before, Outcome.REJECTED, Rejection.FUTURE_REV)
    assert planned.detail == payload["rev"]


def test_since_is_not_compared_with_the_stored_rev() -> None:
    alice = SigningAccount()
    before = alice.row()
    payload = alice.commit_post("a") | {"since": "3jzfcijpj2z2a"}
    assert plan(before, "commit", payload, alice.key_state).outcome is Outcome.APPLIED


def test_commit_on_another_tree_breaks_the_chain_although_since_is_the_stored_rev() -> None:
    alice = SigningAccount()
    before = alice.row()
    alice.commit_post("missed")
    payload = alice.commit_post("a") | {"since": before.head and before.head.rev}
    planned = plan(before, "commit", payload, alice.key_state)
    assert (planned.outcome, planned.why, planned.changes) == (Outcome.DESYNCHRONIZED, Desync.CHAIN_BREAK, ())


def test_commits_of_an_inactive_account_are_ignored() -> None:
    alice = SigningAccount()
    before = alice.row(active=False)
    assert plan(before, "commit", alice.commit_post("a"), alice.key_state) == Plan(before, Outcome.IGNORED)


@pytest.mark.parametrize("kind", ["commit", "sync", "account", "identity"])
def test_an_event_unparks_a_parked_repo(kind: str) -> None:
    alice = SigningAccount()
    repo = alice.row(DESYNCHRONIZED, next_attempt_at=PARKED, attempts=2, last_error="repo-not-found")
    assert isinstance(plan_event(repo, decoded_event("commit", alice.commit_post("a")), 1_000, None, CONTEXT), NeedsKey)
    payloads = {
        "commit": alice.commit_post("b"),
        "sync": alice.sync_event(),
        "account": alice.account_event(active=True),
        "identity": alice.identity_event(),
    }
    assert plan(repo, kind, payloads[kind], alice.key_state).repo.next_attempt_at == NOW


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


@pytest.mark.parametrize("kind", ["commit", "sync", "account", "identity"])
def test_a_pds_is_accepted_only_for_accounts_that_it_hosts(kind: str) -> None:
    alice = SigningAccount()
    repo = alice.row()
    payload = {
        "commit": alice.commit_post("b"),
        "sync": alice.sync_event(),
        "account": alice.account_event(active=False, status="deactivated"),
        "identity": alice.identity_event(),
    }[kind]
    context = replace(CONTEXT, host="pds.test")
    here = alice.key_state._replace(host="pds.test")
    elsewhere = alice.key_state._replace(host="new.test")
    message = decoded_event(kind, payload)
    assert plan_event(repo, message, 100, None, context) == NeedsKey(alice.did, refresh=False)
    assert plan_event(repo, message, 100, elsewhere, context) == NeedsKey(alice.did, refresh=True)
    rejected = plan(repo, kind, payload, elsewhere._replace(final=True), context)
    assert (rejected.outcome, rejected.why, rejected.repo) == (Outcome.REJECTED, Rejection.WRONG_HOST, repo)
    assert rejected.detail == "hosted by new.test"
    assert plan(repo, kind, payload, here._replace(final=True), context).outcome is not Outcome.REJECTED
    assert plan(repo, kind, payload, elsewhere._replace(final=True), CONTEXT).outcome is not Outcome.REJECTED


def test_an_account_that_becomes_inactive_on_a_pds_may_have_moved() -> None:
    """Its former PDS sends no `#identity`, so the known identity may still name this PDS."""
    alice = SigningAccount()
    context = replace(CONTEXT, host="pds.test")
    here = alice.key_state._replace(host="pds.test")
    inactive = decoded_event("account", alice.account_event(active=False, status="deactivated"))
    active = decoded_event("account", alice.account_event(active=True))
    assert plan_event(alice.row(), inactive, 100, here, context) == NeedsKey(alice.did, refresh=True)
    assert isinstance(plan_event(alice.row(), active, 100, here, context), Plan)
    looked_up = here._replace(final=True, fetched_at=CONTEXT.now)
    assert not plan(alice.row(), "account", alice.account_event(active=False), looked_up, context).repo.active
    ignored = plan(Repo(alice.did), "account", alice.account_event(active=False), here, context)
    assert ignored.outcome is Outcome.IGNORED, "no lookup for a DID that may be made up"


@pytest.mark.parametrize("case", ["not looked up", "lookup failed", "nothing known"])
def test_a_pds_hides_no_account_while_its_identity_cannot_be_looked_up(case: str) -> None:
    """It may be the former PDS. The limits did not allow the lookup, or it failed."""
    alice = SigningAccount()
    here = alice.key_state._replace(host="pds.test", final=True, fetched_at=CONTEXT.now)
    key = {
        "not looked up": here._replace(fetched_at=CONTEXT.now - MAX_IDENTITY_AGE - 1),
        "lookup failed": here._replace(stale=True),
        "nothing known": UNAVAILABLE,
    }[case]
    context = replace(CONTEXT, host="pds.test")
    ignored = plan(alice.row(), "account", alice.account_event(active=False, status="deactivated"), key, context)
    assert ignored == Plan(alice.row(), Outcome.IGNORED, refresh_identity=True)
    assert plan(alice.row(), "account", alice.account_event(active=True), key, context).outcome is Outcome.APPLIED


def test_a_taken_down_repo_is_still_synchronized() -> None:
    alice = SigningAccount()
    before = alice.row(takedown=True)
    assert plan(before, "commit", alice.commit_post("a"), alice.key_state).outcome is Outcome.APPLIED


class TestSync:
    def test_a_sync_equal_to_the_stored_head_is_ignored(self) -> None:
        alice = SigningAccount()
        before = alice.row()
        assert plan(before, "sync", alice.sync_event(), alice.key_state) == Plan(before, Outcome.IGNORED)

    def test_a_sync_with_the_stored_data_advances_the_rev(self) -> None:
        alice = SigningAccount()
        before = alice.row()
        alice.commit()
        planned = plan(before, "sync", alice.sync_event(), alice.key_state)
        assert (planned.outcome, planned.repo.sync_status, planned.repo.head) == (
            Outcome.APPLIED,
            SYNCHRONIZED,
            alice.head,
        )
        assert plan(planned.repo, "commit", alice.commit_post("a"), alice.key_state).outcome is Outcome.APPLIED

    def test_a_sync_with_other_data_causes_a_resync(self) -> None:
        alice = SigningAccount()
        before = alice.row()
        alice.commit_post("a")
        planned = plan(before, "sync", alice.sync_event(), alice.key_state)
        assert (planned.outcome, planned.repo.sync_reason) == (Outcome.DESYNCHRONIZED, Desync.SYNC_EVENT)
        assert planned.repo.head == before.head

    def test_two_states_with_one_rev_are_an_equivocation(self) -> None:
        alice, twin = SigningAccount(), SigningAccount()
        alice.commit_post("a")
        twin.commit_post("a", "something else")
        assert alice.repo.head.rev == twin.repo.head.rev
        planned = plan(alice.row(), "sync", twin.sync_event(), alice.key_state)
        assert (planned.outcome, planned.repo.sync_reason) == (Outcome.DESYNCHRONIZED, Desync.EQUIVOCATION)

    def test_a_sync_to_the_empty_tree_needs_no_resync(self) -> None:
        alice = SigningAccount()
        planned = plan(Repo(alice.did), "sync", alice.sync_event(), alice.key_state)
        assert (planned.repo.sync_status, planned.repo.head) == (SYNCHRONIZED, alice.head)

    def test_a_message_rev_that_differs_from_the_signed_commit_is_rejected(self) -> None:
        """After an account migration, some hosts send the old commit with a new rev (docs/protocol.md#edge-cases)."""
        alice = SigningAccount()
        before = alice.row()
        payload = alice.sync_event() | {"rev": tid_of(int(NOW * 1_000_000))}
        planned = plan(before, "sync", payload, alice.key_state._replace(final=True))
        assert (planned.repo, planned.why) == (before, Rejection.ENVELOPE_MISMATCH)
        assert planned.detail == f"{alice.did} at {alice.head.rev}"


class TestFirstCommit:
    def test_a_first_commit_synchronizes_only_an_empty_repo(self) -> None:
        alice = SigningAccount()
        first = alice.first_commit()
        assert plan(alice.row(DESYNCHRONIZED, latest_verified_rev=None), "commit", first, alice.key_state).outcome is (
            Outcome.REPLAYED
        )
        fresh = Repo(alice.did, version=1)
        assert plan(fresh, "commit", first, alice.key_state).repo.sync_status is SYNCHRONIZED
        outdated = fresh._replace(latest_verified_rev=alice.repo.head.rev + "z")
        assert plan(outdated, "commit", first, alice.key_state).outcome is Outcome.IGNORED

    def test_a_first_commit_synchronizes_a_repo_whose_latest_verified_rev_is_its_own(self) -> None:
        alice = SigningAccount()
        seen = Repo(alice.did, version=1, latest_verified_rev=alice.head.rev)
        assert plan(seen, "commit", alice.first_commit(), alice.key_state).repo.sync_status is SYNCHRONIZED

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


class TestBufferAndBackOff:
    @pytest.mark.parametrize(
        "limits",
        [
            Limits(resync_buffer_events=2, resync_buffer_bytes=1_000_000),
            Limits(resync_buffer_events=1_000_000, resync_buffer_bytes=2_000),
        ],
        ids=["count", "bytes"],
    )
    def test_the_resync_buffer_is_limited_by_count_and_bytes(self, limits: Limits) -> None:
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

    def test_the_back_off_grows_until_a_repo_stays_synchronized(self) -> None:
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
