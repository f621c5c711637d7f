"""The scope in plans: which repos an event adds, and which records a narrower scope deletes."""

from dataclasses import replace

import pytest

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.syntax import CollectionFilter
from indexer.reasons import Desync
from indexer.sync.narrowing import plan_narrowing
from indexer.sync.plan_event import plan_event
from indexer.sync.plans import NeedsKey, Plan, RecordChange, RepoWrite
from indexer.sync.policy import UNAVAILABLE, KeyState, PlanContext
from indexer.sync.repo_state import Head, Repo, SyncStatus
from indexer.sync.repo_transitions import Outcome, amend, needs_export, widen
from indexer.sync.scope import Scope, Track, covers, filter_of
from tests.sync.signing_account import CONTEXT, POST, STORE_ALL, SigningAccount, decoded_event

HEAD = Head("3laaaaaaaaa22", b"data", b"commit")
SYNCHRONIZED = Repo("did:plc:a", 3, SyncStatus.SYNCHRONIZED, None, HEAD, attempts=2, scope_version=1)


def signal_context(*patterns: str) -> PlanContext:
    scope = Scope(5, Track.SIGNAL, signal_collections=filter_of(patterns))
    return replace(CONTEXT, policy=replace(STORE_ALL, scope=scope))


@pytest.mark.parametrize("patterns", [[POST], ["app.bsky.*"], ["com.example.a", POST]])
def test_commit_with_a_record_of_a_signal_collection_adds_its_repo(patterns: list[str]) -> None:
    alice = SigningAccount()
    alice.first_commit()
    event, context = decoded_event("commit", alice.commit_post("a")), signal_context(*patterns)
    assert isinstance(plan_event(Repo(alice.did), event, 0, None, context), NeedsKey), "nothing unverified adds a repo"
    planned = plan_event(Repo(alice.did), event, 0, alice.key_state, context)
    assert isinstance(planned, Plan)
    assert (planned.outcome, planned.repo.known, planned.repo.sync_reason) == (Outcome.DESYNCHRONIZED, True, Desync.NEW)


def test_other_messages_add_no_repo_and_cause_no_key_lookup() -> None:
    alice = SigningAccount()
    context = signal_context("app.bsky.feed.like", "app.bsky.feed.post.*")
    alice.first_commit()
    messages = {
        "commit": alice.commit_post("a"),
        "sync": alice.sync_event(),
        "account": alice.account_event(active=True),
        "identity": alice.identity_event(),
    }
    for kind, payload in messages.items():
        planned = plan_event(Repo(alice.did), decoded_event(kind, payload), 0, None, context)
        assert isinstance(planned, Plan), "no key is looked up"
        assert (planned.outcome, planned.repo.known) == (Outcome.IGNORED, False), kind


def test_deletion_of_a_signal_record_adds_no_repo() -> None:
    alice = SigningAccount()
    alice.first_commit()
    payload = alice.commit_post("a")
    payload["ops"] = [op | {"action": "delete", "cid": None} for op in payload["ops"]]
    planned = plan_event(Repo(alice.did), decoded_event("commit", payload), 0, None, signal_context(POST))
    assert isinstance(planned, Plan)
    assert planned.outcome is Outcome.IGNORED


def test_commit_that_cannot_be_verified_adds_no_repo() -> None:
    alice, other = SigningAccount(), PrivateKey.from_seed("k256", b"a key that no account has")
    alice.first_commit()
    event, context = decoded_event("commit", alice.commit_post("a")), signal_context(POST)
    for key_state in (UNAVAILABLE, KeyState(other.public, final=True)):
        planned = plan_event(Repo(alice.did), event, 0, key_state, context)
        assert isinstance(planned, Plan)
        assert not planned.repo.known


def test_widened_repo_needs_an_export_and_no_back_off() -> None:
    wide = Scope(2, collections=CollectionFilter(["a.b.c", "a.b.d"]), added_in=(0, 2))
    assert (wide.added_after(1), wide.added_after(2)) == (["a.b.d"], [])
    assert needs_export(SYNCHRONIZED, wide)
    assert not needs_export(SYNCHRONIZED._replace(scope_version=2), wide)
    assert widen(SYNCHRONIZED) == amend(
        SYNCHRONIZED, sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.SCOPE_WIDENED
    )


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ("*", "a.b.c", True),
        ("*", "a.b.*", True),
        ("a.b.c", "a.b.c", True),
        ("a.b.c", "a.b.d", False),
        ("a.b.*", "a.b.c", True),
        ("a.b.*", "a.b.c.*", True),
        ("a.b.*", "a.b.*", True),
        ("a.b.*", "a.bc.d", False),
        ("a.b.c.*", "a.b.*", False),
        ("a.b.c", "a.b.c.d", False),
        ("a.b.c", "*", False),
    ],
)
def test_pattern_covers_another_one_if_it_matches_all_its_collections(
    outer: str, inner: str, *, expected: bool
) -> None:
    assert covers(outer, inner) is expected


ALL, LISTED = Scope(), Scope(track=Track.LISTED)


def signal_scope(*patterns: str) -> Scope:
    return Scope(track=Track.SIGNAL, signal_collections=filter_of(patterns))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (ALL, ALL, False),
        (ALL, LISTED, True),
        (ALL, signal_scope("a.b.*"), True),
        (LISTED, ALL, False),
        (LISTED, LISTED, False),
        (LISTED, signal_scope("a.b.*"), False),
        (signal_scope("a.b.c"), ALL, False),
        (signal_scope("a.b.c"), LISTED, True),
        (signal_scope("a.b.c"), signal_scope("a.b.*"), False),
        (signal_scope("a.b.c", "d.e.f"), signal_scope("a.b.*"), True),
        (signal_scope("a.b.*"), signal_scope("a.b.c"), True),
        (signal_scope("a.b.c", "d.e.f"), signal_scope("d.e.f", "a.b.c", "g.h.i"), False),
    ],
)
def test_repos_may_be_out_of_a_scope_that_wants_fewer(before: Scope, after: Scope, *, expected: bool) -> None:
    assert after.may_want_fewer_repos(before) is expected


def test_scopes_choose_the_same_whatever_the_order_of_their_patterns() -> None:
    one = Scope(1, Track.SIGNAL, CollectionFilter(["a.b.c", "a.b.d"]), (1, 1), CollectionFilter(["e.f.g", "e.f.h"]))
    other = Scope(2, Track.SIGNAL, CollectionFilter(["a.b.d", "a.b.c"]), (1, 2), CollectionFilter(["e.f.h", "e.f.g"]))
    assert one.same_choice(other)
    different = [
        replace(other, track=Track.ALL),
        replace(other, collections=CollectionFilter(["a.b.d"])),
        replace(other, signal_collections=CollectionFilter(["e.f.g"])),
    ]
    assert [one.same_choice(scope) for scope in different] == [False, False, False]
    assert str(one) == "repos signal, collections a.b.c,a.b.d, signal collections e.f.g,e.f.h"
    assert str(Scope(collections=CollectionFilter(["a.b.c"]))) == "repos all, collections a.b.c"


def test_no_pattern_is_no_filter() -> None:
    assert filter_of([]) is None


def test_records_are_deleted_unless_a_resync_or_an_erasure_does_it() -> None:
    in_progress = SYNCHRONIZED._replace(did="did:plc:b", sync_status=SyncStatus.IN_PROGRESS)
    without_head = Repo("did:plc:c", 4)
    repos = {repo.did: repo for repo in (SYNCHRONIZED, in_progress, without_head)}
    keys = [(did, "a.b.c", rkey) for did in (*repos, "did:plc:unknown") for rkey in ("1", "2")]
    changes = tuple([RecordChange("delete", "a.b.c", rkey, None) for rkey in ("1", "2")])
    assert plan_narrowing(repos, keys) == (RepoWrite(3, amend(SYNCHRONIZED), changes),)
