"""Plan the effects of #account and #identity, of new accounts, and of repo lists."""

from dataclasses import replace
from typing import Any

import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.syntax import tid_of
from indexer.errors import UnavailableError
from indexer.reasons import Desync, FetchFailure
from indexer.sync.account import (
    FIRST_COMMIT_SECONDS,
    plan_active,
    plan_erasure_later,
    plan_existence,
    plan_hidden,
    plan_status_unknown,
)
from indexer.sync.backoff import backoff_seconds
from indexer.sync.changes import Plan
from indexer.sync.plan import plan_listed
from indexer.sync.policy import KeyState
from indexer.sync.repo import (
    OUT_OF_SCOPE,
    PARKED,
    TOMBSTONED,
    Head,
    Outcome,
    Repo,
    StreamPoint,
    SyncStatus,
    Trigger,
    move,
    synchronize,
)
from indexer.sync.resync import HOST_STATUSES, Completion, plan_failure
from indexer.sync.stream import NO_STREAM, Origin
from tests.sync.signing_account import CONTEXT, DESYNCHRONIZED, NOW, RELAY, SYNCHRONIZED, SigningAccount, plan


class TestNewAccounts:
    def test_refused_did_gets_no_row_and_no_lookup(self) -> None:
        alice = SigningAccount()
        unknown, refusing = Repo(alice.did), replace(CONTEXT, refused=frozenset({alice.did}))
        payloads = {
            "commit": alice.first_commit(),
            "account": alice.account_event(active=True),
            "identity": alice.identity_event(),
        }
        for kind, payload in payloads.items():
            assert plan(unknown, kind, payload, None, refusing) == Plan(unknown, Outcome.IGNORED)
        known = plan(unknown, "account", payloads["account"], None).repo
        assert plan(known, "commit", payloads["commit"], alice.key_state, refusing).outcome is Outcome.APPLIED

    def test_first_commit_of_a_limited_host_waits_for_the_resync(self) -> None:
        alice = SigningAccount()
        limited = replace(CONTEXT, limited=frozenset({alice.did}))
        planned = plan(Repo(alice.did), "commit", alice.first_commit(), alice.key_state, limited)
        assert (planned.outcome, planned.why) == (Outcome.DESYNCHRONIZED, Desync.NEW)
        assert (planned.repo.sync_status, planned.repo.latest_verified_rev) == (DESYNCHRONIZED, alice.head.rev)
        sync = plan(Repo(alice.did), "sync", alice.sync_event(), alice.key_state, limited)
        assert sync.repo.sync_status is DESYNCHRONIZED

    def test_verified_commit_does_not_move_a_repo_forward_that_waits_for_its_host(self) -> None:
        alice = SigningAccount()
        limited = FetchFailure.NEW_ACCOUNTS
        waiting = Repo(alice.did, version=2, next_attempt_at=NOW + 5_000, last_failure=limited, from_stream=True)
        after = plan(waiting, "commit", alice.commit_post("a"), alice.key_state).repo
        assert (after.next_attempt_at, after.latest_verified_rev) == (NOW + 5_000, alice.head.rev)
        assert not after.counts_as_new, "it was counted when it was postponed"


class TestAccounts:
    def test_the_latest_account_event_of_a_relay_counts(self) -> None:
        alice = SigningAccount()
        before = alice.row()
        deactivated = alice.account_event(active=False, status="deactivated")
        activated = alice.account_event(active=True)
        hidden = plan(before, "account", deactivated, None)
        assert (hidden.outcome, hidden.repo.active, hidden.repo.hosting_status) == (
            Outcome.APPLIED,
            False,
            "deactivated",
        )
        assert hidden.repo.erase_at is None, "only a deletion erases the records"
        assert plan(hidden.repo, "account", deactivated, None) == Plan(hidden.repo, Outcome.REPLAYED)
        shown = plan(hidden.repo, "account", activated, None)
        assert shown.repo.active
        again = plan(shown.repo, "account", deactivated, None)
        assert again == Plan(shown.repo, Outcome.REPLAYED)

    @pytest.mark.parametrize("status", ["deactivated", "deleted", None])
    def test_unknown_account_that_is_not_active_gets_no_row(self, status: str | None) -> None:
        alice = SigningAccount()
        unknown = Repo(alice.did)
        inactive = alice.account_event(active=False, status=status)
        assert plan(unknown, "account", inactive, None) == Plan(unknown, Outcome.IGNORED)
        added = plan(unknown, "account", alice.account_event(active=True), None)
        assert (added.outcome, added.repo.active, added.repo.version) == (Outcome.APPLIED, True, 1)

    def test_repeated_deletion_does_not_extend_the_grace_period(self) -> None:
        alice = SigningAccount()
        first, second = (alice.account_event(active=False, status="deleted") for _ in range(2))
        deleted = plan(alice.row(), "account", first, None).repo
        assert deleted.erase_at == NOW + CONTEXT.policy.deletion_grace
        again = plan(deleted, "account", second, None, replace(CONTEXT, now=NOW + 3_600))
        assert (again.outcome, again.repo.erase_at) == (Outcome.APPLIED, deleted.erase_at)

    def test_a_reactivated_account_is_resynchronized_at_once(self) -> None:
        alice = SigningAccount()
        hidden = alice.row(active=False, attempts=3, synchronized_at=NOW - 7_200)
        planned = plan(hidden, "account", alice.account_event(active=True), None)
        assert (planned.outcome, planned.why) == (Outcome.APPLIED, Desync.REACTIVATED)
        after = planned.repo
        assert (after.sync_status, after.sync_reason, after.head) == (DESYNCHRONIZED, Desync.REACTIVATED, hidden.head)
        assert after.next_attempt_at is None

    @pytest.mark.parametrize("host_answers", ["during", "between", "deactivated"])
    def test_flapping_account_causes_few_exports(self, host_answers: str) -> None:
        """The account is deactivated and activated once a second, for a minute.

        A free worker claims the repo whenever it is due. The export is completed before the next flap, or is still
        being fetched then, or the host answers that the repo is deactivated.
        """
        alice, attempts = SigningAccount(), 0
        repo = alice.row(synchronized_at=NOW - 7_200)
        for second in range(60):
            context = replace(CONTEXT, now=NOW + second)
            flaps = [alice.account_event(active=False, status="deactivated"), alice.account_event(active=True)]
            for flap in flaps:
                repo = plan(repo, "account", flap, None, context).repo
            if repo.sync_status is DESYNCHRONIZED and (repo.next_attempt_at or 0.0) <= context.now:
                attempts += 1
                repo = move(repo, Trigger.CLAIMED)
                if host_answers == "between":
                    repo = synchronize(repo, Trigger.COMPLETED, alice.head, context.now, 0)
                elif host_answers == "deactivated":
                    failure = UnavailableError(FetchFailure.REPO_DEACTIVATED)
                    repo = plan_failure(repo, repo, failure, context.now)
        assert 1 <= attempts <= 3
        assert repo.active

    def test_the_resync_of_a_new_account_waits_for_its_first_commit(self) -> None:
        alice = SigningAccount()
        planned = plan(Repo(alice.did), "account", alice.account_event(active=True), None)
        assert planned.repo.known
        assert planned.repo.next_attempt_at is not None
        assert planned.repo.next_attempt_at > NOW
        identity = plan(Repo(alice.did), "identity", alice.identity_event(), None)
        assert identity.repo.next_attempt_at == planned.repo.next_attempt_at == NOW + FIRST_COMMIT_SECONDS
        whole = plan(planned.repo, "commit", alice.first_commit(), alice.key_state)
        assert whole.repo.sync_status is SYNCHRONIZED

    @pytest.mark.parametrize(
        "reason", [Desync.ERASED, Desync.LEASE_EXPIRED, Desync.BUFFER_OVERFLOW, Desync.REACTIVATED, Desync.REQUESTED]
    )
    def test_a_repo_that_is_being_erased_is_not_synchronized_without_an_export(self, reason: Desync) -> None:
        """Some of its records may still be stored. Another event may have replaced the reason meanwhile."""
        alice = SigningAccount()
        erased = Repo(alice.did, version=7, sync_reason=reason, lease=1)
        whole = plan(erased, "commit", alice.first_commit(), alice.key_state)
        assert whole.repo.sync_status is DESYNCHRONIZED

    def test_sequence_numbers_are_compared_only_within_one_epoch(self) -> None:
        alice = SigningAccount()
        takedown = alice.account_event(active=False, status="takendown") | {"seq": 3}
        row = alice.row(hosting_relay=RELAY, hosting_seq=900)
        assert plan(row, "account", takedown, None).outcome is Outcome.REPLAYED
        restarted = plan(row, "account", takedown, None, replace(CONTEXT, origin=Origin(RELAY, epoch=1)))
        assert restarted.outcome is Outcome.APPLIED
        assert (restarted.repo.active, restarted.repo.hosting_epoch, restarted.repo.hosting_seq) == (False, 1, 3)


# A relay's trouble is not an account's status

TROUBLES = ["throttled", "desynchronized", "word-of-tomorrow"]


class TestWithheldAccounts:
    @pytest.mark.parametrize("status", TROUBLES)
    def test_a_relays_trouble_hides_nothing_and_the_repo_is_not_called_current(self, status: str) -> None:
        alice = SigningAccount()
        planned = plan(alice.row(), "account", alice.account_event(active=False, status=status), None)
        repo = planned.repo
        assert (planned.outcome, planned.why, repo.visible) == (Outcome.APPLIED, Desync.WITHHELD, True)
        assert (repo.hosting_status, repo.withheld_since) == (status, NOW)
        assert (repo.sync_status, repo.sync_reason) == (DESYNCHRONIZED, Desync.WITHHELD)
        assert repo.next_attempt_at == PARKED
        later = replace(CONTEXT, now=NOW + 60)
        repeated = plan(repo, "account", alice.account_event(active=False, status="throttled"), None, later).repo
        assert (repeated.hosting_status, repeated.withheld_since) == ("throttled", NOW)
        again = plan(repeated, "account", alice.account_event(active=True), None, later).repo
        assert (again.withheld_since, again.hosting_status) == (None, None)
        assert (again.sync_status, again.next_attempt_at) == (DESYNCHRONIZED, later.now), "it is compared with its host"

    def test_another_word_for_the_trouble_does_not_desynchronize_a_subscribed_repo(self) -> None:
        alice = SigningAccount()
        subscribed = alice.row(withheld_since=NOW - 9, hosting_status="throttled")
        planned = plan(subscribed, "account", alice.account_event(active=False, status="desynchronized"), None)
        assert (planned.repo.sync_status, planned.repo.withheld_since) == (SYNCHRONIZED, NOW - 9)
        assert (planned.repo.hosting_status, planned.why) == ("desynchronized", None)

    @pytest.mark.parametrize("kind", ["commit", "sync"])
    def test_authentic_message_of_another_relay_ends_the_withholding(self, kind: str) -> None:
        alice = SigningAccount()
        before = plan(alice.row(), "account", alice.account_event(active=False, status="throttled"), None).repo
        commit = alice.commit_post("a")
        event = commit if kind == "commit" else alice.sync_event()
        final, forged = [account.key_state._replace(final=True) for account in (alice, SigningAccount("mallory"))]
        others = {
            "same relay": CONTEXT.origin,
            "host": Origin("https://pds.example", 0, "pds.example"),
            "unknown": NO_STREAM,
            "other": Origin("wss://b"),
        }
        after = {
            name: plan(before, kind, event, final, replace(CONTEXT, origin=origin)).repo
            for name, origin in others.items()
        }
        assert {name: repo.withheld_since for name, repo in after.items()} == {
            "same relay": NOW,
            "host": NOW,
            "unknown": NOW,
            "other": None,
        }
        assert (after["other"].hosting_status, after["other"].next_attempt_at) == (None, NOW), "it is compared at once"
        assert plan(before, kind, event, forged, replace(CONTEXT, origin=others["other"])).repo.withheld_since == NOW

    @pytest.mark.parametrize("status", ["takendown", "suspended", "deleted", "deactivated", "inactive", None])
    def test_a_status_of_the_account_hides(self, status: str | None) -> None:
        """Bluesky's relay sends `inactive` for an account of which its host gave no status."""
        alice = SigningAccount()
        withheld = plan(alice.row(), "account", alice.account_event(active=False, status="throttled"), None).repo
        hidden = plan(withheld, "account", alice.account_event(active=False, status=status), None).repo
        assert (hidden.active, hidden.hosting_status, hidden.withheld_since) == (False, status, None)
        throttled = plan(hidden, "account", alice.account_event(active=False, status="throttled"), None).repo
        assert (throttled.active, throttled.hosting_status) == (False, status), "the relay does not say it is active"

    @pytest.mark.parametrize("status", TROUBLES)
    def test_withheld_account_is_added_and_fetched_and_is_not_called_current(self, status: str) -> None:
        alice = SigningAccount()
        added = plan(Repo(alice.did), "account", alice.account_event(active=False, status=status), None).repo
        assert (added.version, added.active, added.withheld_since) == (1, True, NOW)
        assert added.next_attempt_at == NOW + FIRST_COMMIT_SECONDS
        commit = plan(added, "commit", alice.first_commit(), alice.key_state).repo
        assert commit.sync_status is DESYNCHRONIZED
        completion = Completion(move(added, Trigger.CLAIMED), alice.head, alice.key_state, CONTEXT)
        completion.lock(move(added, Trigger.CLAIMED))
        [subscribed] = completion.end(subscribed=True).writes
        assert (subscribed.repo.sync_status, subscribed.repo.withheld_since) == (SYNCHRONIZED, NOW)
        [write] = completion.end().writes
        assert (write.repo.head, write.repo.withheld_since) == (alice.head, NOW)
        assert (write.repo.sync_status, write.repo.sync_reason) == (DESYNCHRONIZED, Desync.WITHHELD)
        assert write.repo.next_attempt_at == PARKED

    @pytest.mark.parametrize(("reason", "status"), HOST_STATUSES.items())
    def test_account_of_which_its_host_says_that_it_is_not_active_is_hidden(
        self, reason: FetchFailure, status: str
    ) -> None:
        alice = SigningAccount()
        for before in (alice.row(), alice.row(withheld_since=NOW, hosting_status="throttled")):
            claimed = move(before._replace(sync_status=DESYNCHRONIZED), Trigger.CLAIMED)
            failed = plan_failure(claimed, claimed, UnavailableError(reason), NOW)
            assert (failed.active, failed.hosting_status, failed.withheld_since) == (False, status, None)
        reported = claimed._replace(version=claimed.version + 1)
        assert plan_failure(reported, claimed, UnavailableError(reason), NOW).active, "a message arrived meanwhile"

    @pytest.mark.parametrize("why", [Desync.STATUS_UNKNOWN, Desync.WITHHELD, Desync.CHAIN_BREAK])
    def test_account_that_neither_a_relay_nor_its_host_has_is_hidden_and_not_erased(self, why: Desync) -> None:
        alice = SigningAccount()
        claimed = move(alice.row(DESYNCHRONIZED)._replace(sync_reason=why), Trigger.CLAIMED)
        failed = plan_failure(claimed, claimed, UnavailableError(FetchFailure.REPO_NOT_FOUND), NOW)
        assert (failed.active, failed.erase_at) == (why is Desync.CHAIN_BREAK, None)


PDS = "https://pds.test"
SUBSCRIBED = replace(CONTEXT, origin=Origin(PDS, host="pds.test"))


class TestReportsOfSubscribedHosts:
    """Reports on the stream of a host that is subscribed beside the relays."""

    KEY = KeyState(None, final=True, host="pds.test", fetched_at=NOW)

    def report(self, repo: Repo, **fields: Any) -> Plan:
        return plan(repo, "account", SigningAccount().account_event(**fields), self.KEY, SUBSCRIBED)

    @pytest.mark.parametrize("status", [SYNCHRONIZED, DESYNCHRONIZED])
    def test_active_account_stays_withheld_by_the_relay(self, status: SyncStatus) -> None:
        withheld = SigningAccount().row(status, withheld_since=NOW - 9, hosting_status="throttled", hosting_relay=RELAY)
        assert self.report(withheld, active=True) == Plan(withheld, Outcome.IGNORED)

    def test_parked_repo_is_tried_again_when_its_host_says_that_it_is_active(self) -> None:
        parked = SigningAccount().row(DESYNCHRONIZED, withheld_since=NOW - 9, next_attempt_at=PARKED)
        planned = self.report(parked, active=True)
        assert planned == Plan(parked._replace(version=parked.version + 1, next_attempt_at=NOW), Outcome.APPLIED)

    def test_host_hides_and_shows_an_account_that_the_relay_withholds_all_the_time(self) -> None:
        withheld = SigningAccount().row(withheld_since=NOW - 9, hosting_status="throttled", hosting_relay=RELAY)
        hidden = self.report(withheld, active=False, status="suspended")
        assert (hidden.outcome, hidden.repo.active, hidden.repo.hosting_status) == (
            Outcome.APPLIED, False, "suspended"
        )  # fmt: skip
        assert hidden.repo.withheld_since == NOW - 9
        shown = self.report(hidden.repo._replace(hosting_seq=0), active=True)
        assert (shown.repo.active, shown.repo.hosting_status, shown.why) == (True, None, Desync.REACTIVATED)
        assert (shown.repo.sync_status, shown.repo.withheld_since) == (DESYNCHRONIZED, NOW - 9)

    def test_host_shows_an_account_that_was_deactivated(self) -> None:
        """The relay that has passed this on may withhold the account by now."""
        deactivated = SigningAccount().row(active=False, hosting_status="deactivated", hosting_relay=RELAY)
        assert self.report(deactivated, active=True).repo.active

    def test_deletion_begins_the_grace_period(self) -> None:
        deleted = self.report(SigningAccount().row(), active=False, status="deleted").repo
        assert deleted.erase_at == NOW + CONTEXT.policy.deletion_grace

    @pytest.mark.parametrize("fields", [{"active": True}, {"active": False, "status": "deactivated"}])
    def test_account_that_a_relay_has_taken_down_stays_so(self, fields: dict[str, Any]) -> None:
        """Its host could otherwise lift the takedown, also in two steps."""
        taken = SigningAccount().row(active=False, hosting_status="takendown", hosting_relay=RELAY)
        assert self.report(taken, **fields) == Plan(taken, Outcome.IGNORED)

    @pytest.mark.parametrize("status", TROUBLES)
    def test_only_a_relay_withholds(self, status: str) -> None:
        row = SigningAccount().row()
        assert self.report(row, active=False, status=status) == Plan(row, Outcome.IGNORED)
        pdses = replace(SUBSCRIBED, policy=replace(CONTEXT.policy, upstream_is_pds=True))
        event = SigningAccount().account_event(active=False, status=status)
        assert plan(row, "account", event, self.KEY, pdses).repo.withheld_since == NOW

    def test_earlier_report_than_that_of_the_relay_does_not_count(self) -> None:
        """The stream of the host may lag behind that of the relay."""
        row = SigningAccount().row(hosting_relay=RELAY, hosting_seq=7, hosting_time=NOW + 60)
        assert self.report(row, active=False, status="deactivated").outcome is Outcome.REPLAYED


# DIDs that are gone

TOMBSTONE_GRACE = 500.0


def test_a_repo_whose_did_is_gone_is_hidden_and_erased_after_the_grace_period() -> None:
    gone = plan_existence(ROW, NOW, TOMBSTONE_GRACE, exists=False)
    assert gone == ROW._replace(
        version=ROW.version + 1, active=False, hosting_status=TOMBSTONED, erase_at=NOW + TOMBSTONE_GRACE
    )
    assert plan_existence(gone, NOW + 60, TOMBSTONE_GRACE, exists=False) is gone
    assert plan_erasure_later(gone, NOW + 9_000) == gone._replace(version=gone.version + 1, erase_at=NOW + 9_000)
    for repo in (ROW, ROW._replace(active=False, hosting_status="deleted"), gone._replace(active=True)):
        assert plan_erasure_later(repo, NOW + 9_000) is repo
    again = plan_existence(gone, NOW + 60, TOMBSTONE_GRACE, exists=True)
    assert (again.active, again.hosting_status, again.erase_at) == (True, None, None)
    assert (again.sync_status, again.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.REACTIVATED)


def test_whether_a_did_exists_changes_no_other_repo() -> None:
    deactivated = ROW._replace(active=False, hosting_status="deactivated")
    for repo, exists in (
        (ROW, True),
        (ROW._replace(head=None), False),
        (deactivated, True),
        (deactivated, False),
        (ROW._replace(hosting_status=TOMBSTONED), True),
    ):
        assert plan_existence(repo, NOW, TOMBSTONE_GRACE, exists=exists) is repo


@pytest.mark.parametrize("status", [TOMBSTONED, OUT_OF_SCOPE])
def test_account_that_upstream_hides_with_a_status_of_this_program_stays_hidden(status: str) -> None:
    alice = SigningAccount()
    reported = plan(alice.row(), "account", alice.account_event(active=False, status=status), None).repo
    for hidden in (reported, plan_hidden(ROW, status, NOW, TOMBSTONE_GRACE)):
        assert (hidden.active, hidden.hosting_status) == (False, None)
        assert plan_existence(hidden, NOW, TOMBSTONE_GRACE, exists=True) is hidden
        assert plan_active(hidden, NOW).active, "a reconciliation shows it when the relay says so"


# Repo lists


@pytest.mark.parametrize(
    ("status", "erase_at"), [("deleted", NOW + TOMBSTONE_GRACE), ("deactivated", None), (None, None)]
)
def test_an_account_listed_as_inactive_is_hidden(status: str | None, erase_at: float | None) -> None:
    row = ROW._replace(erase_at=7.0, hosting_status="active")
    hidden = plan_hidden(row, status, NOW, TOMBSTONE_GRACE)
    assert hidden == row._replace(version=row.version + 1, active=False, hosting_status=status, erase_at=erase_at)
    assert plan_hidden(hidden, "deactivated", NOW, TOMBSTONE_GRACE) is hidden


STORED, NEWER = tid_of(1_000), tid_of(2_000)
ROW = Repo("did:plc:x", 7, SyncStatus.SYNCHRONIZED, None, Head(STORED, cid_of(b"data"), cid_of(b"commit")))


def test_a_newer_listed_rev_causes_a_resync_and_counts_as_unverified() -> None:
    after = plan_listed(ROW, NEWER, NOW)
    assert (after.sync_status, after.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.BEHIND)
    assert (after.head, after.latest_verified_rev, after.latest_unverified_rev) == (ROW.head, None, NEWER)
    assert after.version > ROW.version
    fetching = ROW._replace(sync_status=SyncStatus.IN_PROGRESS)
    noted = plan_listed(fetching, NEWER, NOW)
    assert noted == fetching._replace(version=noted.version, latest_unverified_rev=NEWER)
    assert noted.version > fetching.version
    waiting = ROW._replace(sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.NEW)
    for repo, rev in (
        (waiting._replace(next_attempt_at=PARKED), NEWER),
        (noted, NEWER), (ROW, STORED), (ROW, tid_of(500)), (ROW._replace(active=False), NEWER), (waiting, NEWER)
    ):  # fmt: skip
        assert plan_listed(repo, rev, NOW) is repo


def test_withheld_repo_becomes_due_when_its_host_lists_a_newer_rev_and_later_if_that_repeats() -> None:
    withheld = ROW._replace(
        sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.WITHHELD, next_attempt_at=PARKED, withheld_since=1.0
    )
    due = plan_listed(withheld, NEWER, NOW)
    assert (due.sync_status, due.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.WITHHELD)
    assert (due.next_attempt_at, due.attempts, due.latest_unverified_rev) == (None, 1, NEWER)
    assert plan_listed(due, NEWER, NOW) is due, "it is due already"
    recently = plan_listed(withheld._replace(attempts=3, synchronized_at=NOW - 60), NEWER, NOW)
    assert recently.attempts == 4
    assert recently.next_attempt_at == NOW + backoff_seconds(3, ROW.did)
    settled = plan_listed(withheld._replace(attempts=3, synchronized_at=NOW - 7_200), NEWER, NOW)
    assert (settled.next_attempt_at, settled.attempts) == (None, 1)


def test_answer_that_a_repo_is_withheld_names_the_relay_that_gave_it() -> None:
    point = StreamPoint("wss://relay.example", 2, 7, NOW)
    withheld = plan_hidden(ROW, "throttled", NOW, 0.0, point)
    assert (withheld.withheld_since, withheld.hosting_status) == (NOW, "throttled")
    assert (withheld.hosting_relay, withheld.hosting_epoch, withheld.hosting_seq) == point[:3]
    assert plan_hidden(withheld, "throttled", NOW, 0.0, point) is withheld


def test_repo_of_which_no_hosting_status_is_known_is_fetched_again() -> None:
    after = plan_status_unknown(ROW, NOW)
    assert (after.sync_status, after.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.STATUS_UNKNOWN)
    assert (after.active, after.head) == (True, ROW.head)
    for repo in (after, ROW._replace(active=False), ROW._replace(sync_status=SyncStatus.IN_PROGRESS)):
        assert plan_status_unknown(repo, NOW) is repo


def test_an_account_listed_as_active_becomes_active_and_is_resynchronized() -> None:
    after = plan_active(ROW._replace(active=False, hosting_status="deleted", erase_at=NOW + 5), NOW)
    assert (after.active, after.hosting_status, after.erase_at) == (True, None, None)
    assert (after.sync_status, after.sync_reason) == (SyncStatus.DESYNCHRONIZED, Desync.REACTIVATED)
    waiting = ROW._replace(
        active=False, sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.NEW, next_attempt_at=PARKED
    )
    after = plan_active(waiting, NOW)
    assert (after.active, after.sync_reason, after.next_attempt_at) == (True, Desync.NEW, NOW)
    for repo in (ROW, ROW._replace(active=False, hosting_status=TOMBSTONED)):
        assert plan_active(repo, NOW) is repo
