from dataclasses import replace
from typing import Any

import pytest

from indexer.atproto.car import split_car
from indexer.atproto.cid import cid_of
from indexer.atproto.limits import Limits
from indexer.atproto.mst import key_height
from indexer.atproto.syntax import CollectionFilter, tid_of
from indexer.localnet.repo import Write, car
from indexer.reasons import Desync, Rejection
from indexer.sync.plan import NeedsKey, Plan
from indexer.sync.planning import (
    TOMBSTONED,
    UNAVAILABLE,
    Ground,
    Policy,
    Signer,
    desynchronize,
    plan_active,
    plan_event,
    plan_listed,
)
from indexer.sync.repo import PARKED, Head, Outcome, Repo, SyncStatus
from tests.sync.people import EVERYTHING, GROUND, NOW, POST, Person, event


def plan(repo: Repo, kind: str, payload: dict[str, Any], signer: Signer | None, ground: Ground = GROUND) -> Plan:
    made = plan_event(repo, event(kind, payload), 1_000, signer, ground)
    assert isinstance(made, Plan), made
    return made


def head_of(person: Person) -> Head:
    head = person.repo.head
    return Head(head.rev, head.data, head.cid)


def stood(person: Person, status: SyncStatus = SyncStatus.SYNCHRONIZED, **fields: Any) -> Repo:
    """The row of a repo whose head is the person's present one."""
    reason = None if status is SyncStatus.SYNCHRONIZED else Desync.CHAIN_BREAK
    return Repo(person.did, version=5, status=status, reason=reason, head=head_of(person), **fields)


IN_PROGRESS, SYNCHRONIZED, DESYNCHRONIZED = SyncStatus.IN_PROGRESS, SyncStatus.SYNCHRONIZED, SyncStatus.DESYNCHRONIZED


def test_a_chain_is_applied_commit_by_commit() -> None:
    alice = Person()
    repo = Repo(alice.did)
    made = plan(repo, "commit", alice.first(), alice.signer)
    assert (made.outcome, made.repo.status, made.repo.head) == (Outcome.APPLIED, SYNCHRONIZED, head_of(alice))
    for n in range(5):
        made = plan(made.repo, "commit", alice.post(f"p{n}"), alice.signer)
        assert (made.outcome, made.repo.head) == (Outcome.APPLIED, head_of(alice))
        change = made.changes[0]
        block = alice.repo.records[f"{POST}/p{n}"]
        assert (change.action, change.collection, change.rkey, change.cid) == ("create", POST, f"p{n}", cid_of(block))
        assert change.value == '{"text":"hello","$type":"app.bsky.feed.post"}'
    assert made.repo.version == 6


def test_actions_say_what_happened() -> None:
    alice = Person()
    alice.post("a")
    alice.post("b")
    before = stood(alice)
    payload = alice.write(Write.create(f"{POST}/c", {}), Write.update(f"{POST}/a", {"x": 1}), Write.delete(f"{POST}/b"))
    actions = {change.rkey: change.action for change in plan(before, "commit", payload, alice.signer).changes}
    assert actions == {"a": "update", "b": "delete", "c": "create"}


def test_only_chosen_collections_are_written_and_the_head_moves_all_the_same() -> None:
    alice = Person()
    before = stood(alice)
    ground = replace(GROUND, policy=replace(EVERYTHING, collections=CollectionFilter(["com.example.*"])))
    payload = alice.write(Write.create(f"{POST}/a", {}), Write.create("com.example.note/a", {}))
    made = plan(before, "commit", payload, alice.signer, ground)
    assert [change.collection for change in made.changes] == ["com.example.note"]
    assert made.repo.head == head_of(alice)


def test_values_can_be_left_out() -> None:
    alice = Person()
    before = stood(alice)
    ground = replace(GROUND, policy=replace(EVERYTHING, store_values=False))
    change = plan(before, "commit", alice.post("a"), alice.signer, ground).changes[0]
    assert change.cid is not None
    assert (change.value, change.problem, change.original) == (None, None, None)


def test_a_path_of_bad_syntax_names_no_record_and_breaks_no_chain() -> None:
    alice = Person()
    before = stood(alice)
    payload = alice.write(Write.create("not a path", {}), Write.create(f"{POST}/a", {}))
    made = plan(before, "commit", payload, alice.signer)
    assert made.repo.head == head_of(alice)
    assert [change.rkey for change in made.changes] == ["a"]


@pytest.mark.parametrize(
    ("status", "outcome", "after"),
    [
        (DESYNCHRONIZED, Outcome.IGNORED, DESYNCHRONIZED),
        (IN_PROGRESS, Outcome.BUFFERED, IN_PROGRESS),
        (SYNCHRONIZED, Outcome.DESYNCHRONIZED, DESYNCHRONIZED),
    ],
)
def test_a_missed_commit(status: SyncStatus, outcome: Outcome, after: SyncStatus) -> None:
    alice = Person()
    before = stood(alice, status)
    alice.post("missed")
    payload = alice.post("seen")
    made = plan(before, "commit", payload, alice.signer)
    assert (made.outcome, made.repo.status, made.changes) == (outcome, after, ())
    assert made.repo.seen_rev == payload["rev"], "an export older than this is not the end"
    assert made.keep is (status is IN_PROGRESS)
    if status is SYNCHRONIZED:
        assert made.why is made.repo.reason is Desync.CHAIN_BREAK
        assert made.repo.head == before.head


@pytest.mark.parametrize("status", SyncStatus)
def test_a_message_that_comes_again_changes_nothing(status: SyncStatus) -> None:
    alice = Person()
    payload = alice.post("a")
    before = stood(alice, status)
    assert plan(before, "commit", payload, alice.signer) == Plan(before, Outcome.REPLAYED)
    older = Person("alice")
    assert plan(before, "sync", older.sync(), None).outcome is Outcome.REPLAYED


@pytest.mark.parametrize("status", SyncStatus)
def test_a_forged_message_changes_nothing(status: SyncStatus) -> None:
    alice, mallory = Person(), Person("mallory")
    before = stood(alice, status)
    payload = alice.post("a")
    made = plan(before, "commit", payload, replace(mallory.signer, final=True))
    assert (made.repo, made.outcome, made.why) == (before, Outcome.REJECTED, Rejection.SIGNATURE_INVALID)
    unknown = plan(Repo(alice.did), "commit", payload, replace(mallory.signer, final=True))
    assert not unknown.repo.known


def test_a_signature_that_fails_asks_for_a_newer_key_once() -> None:
    alice, mallory = Person(), Person("mallory")
    before = stood(alice)
    message = event("commit", alice.post("a"))
    assert plan_event(before, message, 0, mallory.signer, GROUND) == NeedsKey(alice.did, refresh=True)
    assert isinstance(plan_event(before, message, 0, replace(mallory.signer, final=True), GROUND), Plan)


def test_a_key_that_is_known_to_have_changed_proves_nothing_wrong() -> None:
    """The identity is stale, and a newer one could not be had: the message may be genuine."""
    alice, mallory = Person(), Person("mallory")
    before = stood(alice)
    stale = replace(mallory.signer, final=True, stale=True)
    made = plan(before, "commit", alice.post("a"), stale)
    assert (made.outcome, made.repo.reason) == (Outcome.DESYNCHRONIZED, Desync.IDENTITY)
    right = replace(alice.signer, final=True, stale=True)
    assert plan(before, "commit", alice.post("b"), right).why is Desync.CHAIN_BREAK


def test_a_key_is_asked_for_where_it_matters() -> None:
    alice = Person()
    waiting = stood(alice, DESYNCHRONIZED)
    message = event("commit", alice.post("a"))
    assert plan_event(Repo(alice.did), message, 0, None, GROUND) == NeedsKey(alice.did, refresh=False)
    assert plan_event(stood(alice), event("commit", alice.post("b")), 0, None, GROUND) == NeedsKey(
        alice.did, refresh=False
    )
    made = plan_event(waiting, message, 0, None, GROUND)
    heard = replace(waiting, version=waiting.version + 1, heard_rev=message.rev)
    assert made == Plan(heard, Outcome.IGNORED, why=Desync.IDENTITY), "its resync will look the key up"


def test_an_account_without_a_key_can_sign_nothing() -> None:
    alice = Person()
    before = stood(alice)
    made = plan(before, "commit", alice.post("a"), Signer(None))
    assert (made.repo, made.outcome, made.why) == (before, Outcome.REJECTED, Rejection.NO_SIGNING_KEY)


@pytest.mark.parametrize(
    ("status", "outcome", "reason"),
    [
        (DESYNCHRONIZED, Outcome.IGNORED, Desync.CHAIN_BREAK),
        (IN_PROGRESS, Outcome.BUFFERED, Desync.CHAIN_BREAK),
        (SYNCHRONIZED, Outcome.DESYNCHRONIZED, Desync.IDENTITY),
    ],
)
def test_a_key_that_can_not_be_had_loses_nothing(status: SyncStatus, outcome: Outcome, reason: Desync) -> None:
    alice = Person()
    before = stood(alice, status)
    made = plan(before, "commit", alice.post("a"), UNAVAILABLE)
    assert (made.outcome, made.repo.reason) == (outcome, reason)
    assert made.repo.seen_rev is None, "nothing unproven is believed"
    assert made.repo.heard_rev == alice.repo.head.rev, "a mirror may not have it"


def test_an_unknown_repo_is_noted_when_it_is_proven() -> None:
    alice = Person()
    alice.post("before we came")
    payload = alice.post("now")
    made = plan(Repo(alice.did), "commit", payload, alice.signer)
    assert (made.outcome, made.why) == (Outcome.DESYNCHRONIZED, Desync.NEW)
    assert (made.repo.status, made.repo.reason, made.repo.seen_rev) == (DESYNCHRONIZED, Desync.NEW, payload["rev"])
    assert made.repo.next_attempt_at is None


def test_what_is_not_tracked_is_not_looked_at() -> None:
    alice = Person()
    ground = replace(GROUND, policy=replace(EVERYTHING, track_all=False))
    for kind, payload in (("commit", alice.post("a")), ("identity", alice.identity())):
        assert plan(Repo(alice.did), kind, payload, None, ground).outcome is Outcome.IGNORED
    listed = Repo(alice.did, version=1)
    assert isinstance(plan_event(listed, event("commit", alice.first()), 0, None, ground), NeedsKey)


def test_a_revision_from_the_future_poisons_nothing() -> None:
    alice = Person()
    payload = alice.post("a") | {"rev": tid_of(int((NOW + 301) * 1_000_000))}
    before = stood(alice)
    made = plan(before, "commit", payload, alice.signer)
    assert (made.repo, made.outcome, made.why) == (before, Outcome.REJECTED, Rejection.FUTURE_REV)


def test_since_alone_decides_nothing() -> None:
    alice = Person()
    before = stood(alice)
    payload = alice.post("a") | {"since": "3jzfcijpj2z2a"}
    assert plan(before, "commit", payload, alice.signer).outcome is Outcome.APPLIED


def test_commits_of_an_inactive_account_are_ignored() -> None:
    alice = Person()
    before = stood(alice, active=False)
    assert plan(before, "commit", alice.post("a"), alice.signer) == Plan(before, Outcome.IGNORED)


@pytest.mark.parametrize("what", ["commit", "sync", "account", "identity"])
def test_news_of_a_repo_that_was_given_up_on_wake_it(what: str) -> None:
    ann = Person()
    repo = stood(ann, DESYNCHRONIZED, next_attempt_at=PARKED, attempts=2, last_error="repo-not-found")
    assert isinstance(plan_event(repo, event("commit", ann.post("a")), 1_000, None, GROUND), NeedsKey)
    news = {
        "commit": ann.post("b"),
        "sync": ann.sync(),
        "account": ann.account(active=True),
        "identity": ann.identity(),
    }
    assert plan(repo, what, news[what], ann.signer).repo.next_attempt_at == NOW


def test_a_repo_that_breaks_again_and_again_waits_longer_each_time() -> None:
    """Also where the break ends a resync, and the last time that it was synchronized lies long ago."""
    repo = Repo("did:plc:x", version=1, status=SYNCHRONIZED, head=Head("a", b"", b""), synchronized_at=NOW - 90_000)
    repo = desynchronize(repo, Desync.CHAIN_BREAK, NOW, seen_rev=None)
    assert repo.next_attempt_at == NOW or repo.next_attempt_at is None
    waits = []
    for _ in range(4):
        repo = desynchronize(replace(repo, status=IN_PROGRESS), Desync.BUFFER_OVERFLOW, NOW, seen_rev=None)
        assert repo.next_attempt_at is not None
        waits.append(repo.next_attempt_at - NOW)
    assert waits == sorted(waits)
    assert waits[-1] > 4 * waits[0]


@pytest.mark.parametrize("what", ["commit", "sync", "account", "identity"])
def test_a_pds_speaks_for_the_accounts_that_it_hosts(what: str) -> None:
    ann = Person()
    repo = stood(ann)
    news = {
        "commit": ann.post("b"),
        "sync": ann.sync(),
        "account": ann.account(active=False, status="deactivated"),
        "identity": ann.identity(),
    }[what]
    ground = replace(GROUND, host="pds.test")
    here = replace(ann.signer, host="pds.test")
    elsewhere = replace(ann.signer, host="new.test")
    message = event(what, news)
    assert plan_event(repo, message, 100, None, ground) == NeedsKey(ann.did, refresh=False)
    assert plan_event(repo, message, 100, elsewhere, ground) == NeedsKey(ann.did, refresh=True)
    refused = plan(repo, what, news, replace(elsewhere, final=True), ground)
    assert (refused.outcome, refused.why, refused.repo) == (Outcome.REJECTED, Rejection.WRONG_HOST, repo)
    assert plan(repo, what, news, here, ground).outcome is not Outcome.REJECTED
    assert plan(repo, what, news, replace(elsewhere, final=True), GROUND).outcome is not Outcome.REJECTED


def test_a_local_takedown_hides_and_does_not_stop_the_sync() -> None:
    alice = Person()
    before = stood(alice, takedown=True)
    assert plan(before, "commit", alice.post("a"), alice.signer).outcome is Outcome.APPLIED


class TestSync:
    def test_ours_again(self) -> None:
        alice = Person()
        before = stood(alice)
        assert plan(before, "sync", alice.sync(), alice.signer) == Plan(before, Outcome.IGNORED)

    def test_our_data_at_a_higher_rev_advances_the_rev(self) -> None:
        alice = Person()
        before = stood(alice)
        alice.write()
        made = plan(before, "sync", alice.sync(), alice.signer)
        assert (made.outcome, made.repo.status, made.repo.head) == (Outcome.APPLIED, SYNCHRONIZED, head_of(alice))
        assert plan(made.repo, "commit", alice.post("a"), alice.signer).outcome is Outcome.APPLIED

    def test_other_data(self) -> None:
        alice = Person()
        before = stood(alice)
        alice.post("a")
        made = plan(before, "sync", alice.sync(), alice.signer)
        assert (made.outcome, made.repo.reason) == (Outcome.DESYNCHRONIZED, Desync.SYNC_EVENT)
        assert made.repo.head == before.head

    def test_two_states_at_one_rev(self) -> None:
        alice, twin = Person(), Person()
        alice.post("a")
        twin.post("a", "something else")
        assert alice.repo.head.rev == twin.repo.head.rev
        made = plan(stood(alice), "sync", twin.sync(), alice.signer)
        assert (made.outcome, made.repo.reason) == (Outcome.DESYNCHRONIZED, Desync.EQUIVOCATION)

    def test_an_empty_repo_needs_no_export(self) -> None:
        alice = Person()
        made = plan(Repo(alice.did), "sync", alice.sync(), alice.signer)
        assert (made.repo.status, made.repo.head) == (SYNCHRONIZED, head_of(alice))

    def test_the_envelope_of_a_migration_is_not_believed(self) -> None:
        """After an import, the new host sends the old commit under a new rev (spec §4.10)."""
        alice = Person()
        before = stood(alice)
        payload = alice.sync() | {"rev": tid_of(int(NOW * 1_000_000))}
        made = plan(before, "sync", payload, replace(alice.signer, final=True))
        assert (made.repo, made.why) == (before, Rejection.ENVELOPE_MISMATCH)


class TestWhole:
    def test_a_first_commit_fills_an_empty_row_only(self) -> None:
        alice = Person()
        first = alice.first()
        assert plan(stood(alice, DESYNCHRONIZED, seen_rev=None), "commit", first, alice.signer).outcome is (
            Outcome.REPLAYED
        )
        fresh = Repo(alice.did, version=1)
        assert plan(fresh, "commit", first, alice.signer).repo.status is SYNCHRONIZED
        overtaken = replace(fresh, seen_rev=alice.repo.head.rev + "z")
        assert plan(overtaken, "commit", first, alice.signer).outcome is Outcome.IGNORED

    def test_while_a_resync_runs_it_is_kept(self) -> None:
        alice = Person()
        claimed = Repo(alice.did, version=2, status=IN_PROGRESS)
        made = plan(claimed, "commit", alice.first(), alice.signer)
        assert (made.outcome, made.keep, made.repo.buffered_events) == (Outcome.BUFFERED, True, 1)


class TestBounds:
    @pytest.mark.parametrize(
        "limits",
        [Limits(kept_events=2, kept_bytes=1_000_000), Limits(kept_events=1_000_000, kept_bytes=2_000)],
        ids=["count", "bytes"],
    )
    def test_events_kept_are_bounded_by_count_and_bytes(self, limits: Limits) -> None:
        """By each alone; a message is a thousand bytes here. What is just within is kept."""
        alice = Person()
        ground = replace(GROUND, policy=replace(EVERYTHING, limits=limits))
        repo = stood(alice, IN_PROGRESS)
        for n in range(2):
            made = plan(repo, "commit", alice.post(f"p{n}"), alice.signer, ground)
            assert made.keep
            repo = made.repo
        assert (repo.buffered_events, repo.buffered_bytes) == (2, 2_000)
        made = plan(repo, "commit", alice.post("one too many"), alice.signer, ground)
        assert (made.outcome, made.repo.reason) == (Outcome.DESYNCHRONIZED, Desync.BUFFER_OVERFLOW)
        assert (made.keep, made.repo.buffered_events, made.repo.buffered_bytes) == (False, 0, 0)

    def test_a_repo_that_breaks_again_and_again_waits_longer_and_longer(self) -> None:
        alice = Person()
        repo = stood(alice, synchronized_at=NOW - 10)
        waits = []
        for _ in range(6):
            alice.post("missed" + alice.repo.head.rev)
            made = plan(repo, "commit", alice.post("seen" + alice.repo.head.rev), alice.signer)
            waits.append((made.repo.next_attempt_at or NOW) - NOW)
            repo = replace(made.repo, status=SYNCHRONIZED, head=head_of(alice), synchronized_at=NOW - 10)
        assert waits[0] == 0
        assert waits == sorted(waits)
        assert waits[-1] > 600
        settled = replace(repo, synchronized_at=NOW - 7_200)
        alice.post("missed")
        assert plan(settled, "commit", alice.post("seen"), alice.signer).repo.next_attempt_at is None


class TestAccounts:
    def test_the_latest_word_of_a_relay_holds(self) -> None:
        alice = Person()
        before = stood(alice)
        off = alice.account(active=False, status="deactivated")
        on = alice.account(active=True)
        hidden = plan(before, "account", off, None)
        assert (hidden.outcome, hidden.repo.active, hidden.repo.hosting_status) == (
            Outcome.APPLIED,
            False,
            "deactivated",
        )
        shown = plan(hidden.repo, "account", on, None)
        assert shown.repo.active
        again = plan(shown.repo, "account", off, None)
        assert again == Plan(shown.repo, Outcome.REPLAYED)

    def test_a_repo_that_comes_back_is_compared_first(self) -> None:
        alice = Person()
        hidden = stood(alice, active=False)
        made = plan(hidden, "account", alice.account(active=True), None)
        assert (made.repo.status, made.repo.reason) == (DESYNCHRONIZED, Desync.REACTIVATED)
        assert made.repo.head == hidden.head

    def test_a_repo_that_was_given_up_on_is_tried_again(self) -> None:
        alice = Person()
        parked = stood(alice, DESYNCHRONIZED, next_attempt_at=PARKED, active=False)
        assert plan(parked, "account", alice.account(active=True), None).repo.next_attempt_at == NOW
        assert plan(replace(parked, active=True), "identity", alice.identity(), None).repo.next_attempt_at == NOW

    def test_a_new_account_is_given_time_for_its_first_commit(self) -> None:
        alice = Person()
        made = plan(Repo(alice.did), "account", alice.account(active=True), None)
        assert made.repo.known
        assert made.repo.next_attempt_at is not None
        assert made.repo.next_attempt_at > NOW
        whole = plan(made.repo, "commit", alice.first(), alice.signer)
        assert whole.repo.status is SYNCHRONIZED


def test_lenient_applies_what_can_not_be_undone_but_holds_against_the_tree() -> None:

    alice = Person()
    alice.write(*(Write.create(f"{POST}/{n:03}", {"n": n}) for n in range(200)))
    before = stood(alice)
    high = max((f"{POST}/100{n}" for n in range(200)), key=lambda path: key_height(path.encode()))
    payload = alice.write(Write.create(high, {}))  # undoing it merges what lies beside it
    blocks = split_car(payload["blocks"], EVERYTHING.limits, max_bytes=10**7)[1]
    seen = set()
    for left_out in blocks.keys() - {payload["commit"]}:
        rest = {payload["commit"]: blocks[payload["commit"]]} | {c: b for c, b in blocks.items() if c != left_out}
        poor = payload | {"blocks": car(rest)}
        strict = plan(before, "commit", poor, alice.signer)
        lenient_ground = replace(GROUND, policy=Policy(CollectionFilter(), EVERYTHING.limits, lenient=True))
        lenient = plan(before, "commit", poor, alice.signer, lenient_ground)
        if strict.why is Desync.UNDECIDABLE:
            seen.add(lenient.outcome)
            if lenient.outcome is Outcome.APPLIED:
                assert lenient.repo.head == head_of(alice)
    assert Outcome.APPLIED in seen


# What a relay's list says


OURS, NEWER = tid_of(1_000), tid_of(2_000)
HELD = Repo("did:plc:x", 7, SyncStatus.SYNCHRONIZED, None, Head(OURS, cid_of(b"data"), cid_of(b"commit")))


@pytest.mark.parametrize(
    ("repo", "rev"),
    [
        (HELD, OURS),
        (HELD, tid_of(500)),
        (replace(HELD, active=False), NEWER),
        (replace(HELD, status=SyncStatus.IN_PROGRESS), NEWER),
        (replace(HELD, status=SyncStatus.DESYNCHRONIZED, reason=Desync.NEW), NEWER),
    ],
)
def test_a_list_that_says_nothing_new_changes_nothing(repo: Repo, rev: str) -> None:
    assert plan_listed(repo, rev, NOW) is repo


def test_a_newer_revision_in_a_list_is_heard_and_fetched_and_not_believed() -> None:
    after = plan_listed(HELD, NEWER, NOW)
    assert (after.status, after.reason) == (SyncStatus.DESYNCHRONIZED, Desync.BEHIND)
    assert (after.head, after.seen_rev, after.heard_rev) == (HELD.head, None, NEWER)
    assert after.version > HELD.version


@pytest.mark.parametrize("repo", [HELD, replace(HELD, active=False, hosting_status=TOMBSTONED)])
def test_a_relay_has_no_say_over_what_no_relay_hides(repo: Repo) -> None:
    assert plan_active(repo, NOW) is repo


def test_an_account_that_came_back_is_shown_and_fetched() -> None:
    after = plan_active(replace(HELD, active=False, hosting_status="deleted", erase_at=NOW + 5), NOW)
    assert (after.active, after.hosting_status, after.erase_at) == (True, None, None)
    assert (after.status, after.reason) == (SyncStatus.DESYNCHRONIZED, Desync.REACTIVATED)
    waiting = replace(HELD, active=False, status=SyncStatus.DESYNCHRONIZED, reason=Desync.NEW, next_attempt_at=PARKED)
    after = plan_active(waiting, NOW)
    assert (after.active, after.reason, after.next_attempt_at) == (True, Desync.NEW, NOW)
