"""Plan events from the stream of a PDS, which may speak only for the accounts that it hosts."""

from dataclasses import replace

import pytest

from indexer.reasons import Rejection
from indexer.sync.changes import NeedsKey, Plan
from indexer.sync.plan import plan_event
from indexer.sync.policy import MAX_IDENTITY_AGE, UNAVAILABLE
from indexer.sync.repo import Outcome, Repo
from indexer.sync.stream import Origin
from tests.sync.signing_account import CONTEXT, RELAY, SigningAccount, decoded_event, plan


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
    context = replace(CONTEXT, origin=Origin(RELAY, host="pds.test"))
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
    context = replace(CONTEXT, origin=Origin(RELAY, host="pds.test"))
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
    context = replace(CONTEXT, origin=Origin(RELAY, host="pds.test"))
    ignored = plan(alice.row(), "account", alice.account_event(active=False, status="deactivated"), key, context)
    assert ignored == Plan(alice.row(), Outcome.IGNORED, refresh_identity=True)
    assert plan(alice.row(), "account", alice.account_event(active=True), key, context).outcome is Outcome.APPLIED
