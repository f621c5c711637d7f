"""Plan events from the stream of a PDS, which may speak only for the accounts that it hosts."""

from dataclasses import replace
from typing import Any

import pytest

from indexer.reasons import Desync, Rejection
from indexer.sync.changes import NeedsKey, Plan
from indexer.sync.plan import plan_event
from indexer.sync.policy import MAX_IDENTITY_AGE, UNAVAILABLE
from indexer.sync.repo import OUT_OF_SCOPE, Outcome, Repo
from indexer.sync.stream import Origin
from tests.sync.signing_account import CONTEXT, RELAY, SYNCHRONIZED, SigningAccount, decoded_event, plan

SUBSCRIBED = replace(CONTEXT, origin=Origin("https://pds.test", host="pds.test"))
"""Of the stream of a host that is read beside those of the relays."""
UPSTREAM = replace(CONTEXT, origin=Origin(RELAY, host="pds.test"), policy=replace(CONTEXT.policy, upstream_is_pds=True))


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
    here = alice.key_state._replace(host="pds.test")
    elsewhere = alice.key_state._replace(host="new.test")
    message = decoded_event(kind, payload)
    assert plan_event(repo, message, 100, None, UPSTREAM) == NeedsKey(alice.did, refresh=False)
    assert plan_event(repo, message, 100, elsewhere, UPSTREAM) == NeedsKey(alice.did, refresh=True)
    rejected = plan(repo, kind, payload, elsewhere._replace(final=True), UPSTREAM)
    assert (rejected.outcome, rejected.why, rejected.repo) == (Outcome.REJECTED, Rejection.WRONG_HOST, repo)
    assert rejected.detail == "hosted by new.test"
    assert plan(repo, kind, payload, here._replace(final=True), UPSTREAM).outcome is not Outcome.REJECTED
    assert plan(repo, kind, payload, elsewhere._replace(final=True), CONTEXT).outcome is not Outcome.REJECTED


def test_an_account_that_becomes_inactive_on_a_pds_may_have_moved() -> None:
    """Its former PDS sends no `#identity`, so the known identity may still name this PDS."""
    alice = SigningAccount()
    here = alice.key_state._replace(host="pds.test")
    inactive = decoded_event("account", alice.account_event(active=False, status="deactivated"))
    active = decoded_event("account", alice.account_event(active=True))
    assert plan_event(alice.row(), inactive, 100, here, UPSTREAM) == NeedsKey(alice.did, refresh=True)
    assert isinstance(plan_event(alice.row(), active, 100, here, UPSTREAM), Plan)
    looked_up = here._replace(final=True, fetched_at=CONTEXT.now)
    assert not plan(alice.row(), "account", alice.account_event(active=False), looked_up, UPSTREAM).repo.active
    ignored = plan(Repo(alice.did), "account", alice.account_event(active=False), here, UPSTREAM)
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
    ignored = plan(alice.row(), "account", alice.account_event(active=False, status="deactivated"), key, UPSTREAM)
    assert ignored == Plan(alice.row(), Outcome.IGNORED, refresh_identity=True)
    assert plan(alice.row(), "account", alice.account_event(active=True), key, UPSTREAM).outcome is Outcome.APPLIED


def messages(alice: SigningAccount) -> dict[str, dict[str, Any]]:
    return {
        "commit": alice.commit_post("c"),
        "sync": alice.sync_event(),
        "account": alice.account_event(active=True),
        "identity": alice.identity_event(),
    }


def test_subscribed_host_causes_no_lookup_for_accounts_of_others_and_adds_none() -> None:
    """Their messages on the streams of relays would wait for the lookup. Lists of hosts add accounts, with budgets."""
    alice = SigningAccount()
    row, elsewhere = alice.row(), alice.key_state._replace(host="other.test")
    for kind, payload in messages(alice).items():
        rejected = plan(row, kind, payload, elsewhere, SUBSCRIBED)
        assert (rejected.outcome, rejected.why, rejected.repo) == (Outcome.REJECTED, Rejection.WRONG_HOST, row)
        unknown = Repo(alice.did)
        assert plan(unknown, kind, payload, None, SUBSCRIBED) == Plan(unknown, Outcome.IGNORED)
        untracked = alice.row(tracked=False, active=False, hosting_status=OUT_OF_SCOPE)
        assert plan(untracked, kind, payload, None, SUBSCRIBED) == Plan(untracked, Outcome.IGNORED)


def test_subscribed_host_says_nothing_about_an_account_whose_host_is_unknown() -> None:
    """Only that it is to be fetched: its key may have been unavailable for a moment."""
    alice = SigningAccount()
    hidden = alice.row(active=False, hosting_status="deactivated")
    for kind, payload in messages(alice).items():
        assert plan(hidden, kind, payload, UNAVAILABLE, SUBSCRIBED) == Plan(hidden, Outcome.IGNORED)
    planned = plan(alice.row(withheld_since=5.0), "commit", alice.commit_post("d"), UNAVAILABLE, SUBSCRIBED)
    assert planned.why is Desync.IDENTITY


def test_commits_of_a_subscribed_host_are_applied() -> None:
    alice = SigningAccount()
    row, here = alice.row(withheld_since=5.0), alice.key_state._replace(host="pds.test")
    applied = plan(row, "commit", alice.commit_post("e"), here, SUBSCRIBED)
    assert (applied.outcome, applied.repo.sync_status, applied.repo.withheld_since) == (
        Outcome.APPLIED, SYNCHRONIZED, 5.0
    )  # fmt: skip
