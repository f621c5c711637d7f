"""A batch whose commits the native core has verified before is planned as if it were not there."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from indexer.atproto.crypto import parse_did_key
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter
from indexer.errors import UpstreamError
from indexer.localnet.local_repo import Write
from indexer.reasons import Rejection
from indexer.sync.events import CommitEvent
from indexer.sync.frames import decode_frame
from indexer.sync.native_core import NativeCore
from indexer.sync.plan_batch import MAX_BATCH_BYTES, BatchPlan, ReceivedMessage, commits_within, is_quick, plan_batch
from indexer.sync.policy import KeyState, PlanContext, Policy
from indexer.sync.prepared_commits import CommitsBeingVerified, PreparedCommits, commits_to_verify, prepared_commits
from indexer.sync.repo_state import Repo
from indexer.sync.verify import verify_commit
from tests.native_module import CountingCore, native_core
from tests.profiles import scaled
from tests.sync import test_plan_batch, test_published
from tests.sync.signing_account import CONTEXT, POST, STORE_ALL, SigningAccount, decoded_event, received_message


def prepared(
    batch: Sequence[ReceivedMessage],
    rows: Mapping[str, Repo],
    keys: Mapping[str, KeyState],
    context: PlanContext,
    core: NativeCore | None = None,
) -> PreparedCommits:
    """Return what the native core says about the commits of a batch that will be verified."""
    commits = commits_within(batch, MAX_BATCH_BYTES)
    chosen = commits_to_verify(commits, lambda did: rows.get(did) or Repo(did), keys.get, context)
    return CommitsBeingVerified(core or native_core(), chosen, context).results()


def plan_with_core(
    batch: Sequence[ReceivedMessage], rows: Mapping[str, Repo], keys: Mapping[str, KeyState], context: PlanContext
) -> BatchPlan:
    return plan_batch(batch, rows, keys.get, context, prepared(batch, rows, keys, context))


def planned_alike(batch: list[ReceivedMessage], rows: dict[str, Repo], keys: dict[str, KeyState]) -> None:
    with_core = plan_with_core(batch, rows, keys, CONTEXT)
    assert with_core == plan_batch(batch, rows, keys.get, CONTEXT)


@settings(max_examples=scaled(100))
@given(test_plan_batch.STEPS)
def test_a_batch_is_planned_alike_with_and_without_the_core(steps: list[tuple[str, str]]) -> None:
    batch, accounts = test_plan_batch.messages(steps)
    keys = {account.did: account.key_state for account in accounts.values()}
    planned_alike(batch, {}, keys)
    planned_alike(batch, {account.did: account.row() for account in accounts.values()}, keys)
    planned_alike(batch, {}, {did: state._replace(stale=True) for did, state in keys.items()})
    planned_alike(batch, {}, dict(list(keys.items())[:1]))


def test_the_published_commits_are_planned_alike_as_one_batch() -> None:
    batch: list[ReceivedMessage] = []
    rows: dict[str, Repo] = {}
    for seq, frame in enumerate(test_published.commits(), start=1):
        event = decode_frame(frame, DEFAULT_LIMITS)
        assert isinstance(event, CommitEvent)
        batch.append(ReceivedMessage(seq, frame, event))
        rows.setdefault(event.did, test_published.row_before(event))
    keys = {did: KeyState(key, final=True) for did, key in test_published.keys().items()}
    context = test_published.CONTEXT
    planned = plan_with_core(batch, rows, keys, context)
    assert planned == plan_batch(batch, rows, keys.get, context)
    assert sum(len(write.changes) for write in planned.writes) > 50


@pytest.fixture
def counting_core() -> CountingCore:
    return CountingCore()


def test_commits_that_cheaper_checks_decide_are_not_verified_ahead(counting_core: CountingCore) -> None:
    account = SigningAccount()
    message = received_message("commit", account.commit_post("a"))
    after, did = account.row(), account.did
    before = replace_head(after, rev="2222222222222")
    known = {did: account.key_state}
    for rows, keys, context in (
        ({did: after}, known, CONTEXT),
        ({did: before}, {}, CONTEXT),
        ({did: before}, {did: KeyState(None)}, CONTEXT),
        ({did: before}, {did: account.key_state._replace(doubtful=True)}, CONTEXT),
        ({did: before._replace(active=False)}, known, CONTEXT),
        ({did: before._replace(tracked=False)}, known, CONTEXT),
        ({}, known, replace(CONTEXT, refused=frozenset({did}))),
        ({did: before}, known, replace(CONTEXT, host="pds.test")),
        ({did: before}, known, replace(CONTEXT, now=0.0)),
    ):
        prepared([message], rows, keys, context, counting_core)
    assert counting_core.asked == 0
    prepared([message], {did: before}, known, CONTEXT, counting_core)
    prepared([message], {}, known, CONTEXT, counting_core)
    assert counting_core.asked == 2


def replace_head(row: Repo, rev: str) -> Repo:
    assert row.head is not None
    return row._replace(head=row.head._replace(rev=rev))


def quick(messages: list[ReceivedMessage], keys: dict[str, KeyState], policy: Policy = STORE_ALL) -> bool:
    """Return True if the batch is quick after the native core has verified its commits with this policy."""
    context = replace(CONTEXT, policy=policy)
    return is_quick(messages, keys.get, policy, prepared(messages, {}, keys, context))


def test_a_batch_is_quick_if_the_core_has_verified_and_converted_all_of_it() -> None:
    account, other = SigningAccount(), SigningAccount("bob")
    keys = {account.did: account.key_state}
    commit = received_message("commit", account.commit_post("a"))
    deletion = received_message("commit", account.commit(Write.delete(f"{POST}/a")))
    number = received_message("commit", account.commit(Write.create(f"{POST}/n", {"$type": POST, "n": 1 << 63})))
    hidden = received_message("account", account.account_event(active=False))
    sync = received_message("sync", account.sync_event())
    likes = replace(STORE_ALL, scope=replace(STORE_ALL.scope, collections=CollectionFilter(["app.bsky.feed.like"])))
    assert quick([commit, deletion, hidden], keys)
    assert not quick([commit, sync], keys), "the signature of a #sync is verified when it is planned"
    assert not quick([commit, deletion], {}), "the signing key is not known"
    assert not quick([commit], {account.did: other.key_state}), "the reference has to reject it"
    assert not quick([number], keys), "the reference has to convert it"
    assert quick([number], keys, likes)
    assert quick([number], keys, replace(STORE_ALL, store_values=False))
    assert not quick([commit], keys, replace(STORE_ALL, links=True))


def test_a_batch_is_not_quick_after_a_key_or_the_scope_changed() -> None:
    account, other = SigningAccount(), SigningAccount("bob")
    message, keys = received_message("commit", account.commit_post("a")), {account.did: account.key_state}
    likes = replace(STORE_ALL, scope=replace(STORE_ALL.scope, collections=CollectionFilter(["app.bsky.feed.like"])))
    narrow = replace(CONTEXT, policy=likes)
    verified = prepared([message], {}, keys, narrow)
    assert is_quick([message], keys.get, likes, verified)
    assert not is_quick([message], keys.get, STORE_ALL, verified)
    assert not is_quick([message], {account.did: other.key_state}.get, likes, verified)


def test_commits_that_the_core_was_not_asked_for_are_verified_when_they_are_planned() -> None:
    account = SigningAccount()
    good = received_message("commit", account.first_commit())
    bad = received_message("commit", account.commit_post("a") | {"blocks": b"no CAR"})
    later = received_message("commit", account.commit_post("b"))
    keys = {account.did: account.key_state._replace(final=True)}
    some = prepared([good, bad], {}, keys, CONTEXT)
    assert len(some) == 2
    plan = plan_batch([good, bad, later], {}, keys.get, CONTEXT, some)
    assert plan == plan_batch([good, bad, later], {}, keys.get, CONTEXT)


def test_a_result_of_another_key_is_not_used() -> None:
    """The key changes between verifying and planning, because a lookup ended meanwhile."""
    account, other = SigningAccount(), SigningAccount("bob")
    message = received_message("commit", account.first_commit())
    verified = prepared([message], {}, {account.did: account.key_state}, CONTEXT)
    assert len(verified) == 1
    changed = {account.did: other.key_state._replace(final=True)}
    plan = plan_batch([message], {}, changed.get, CONTEXT, verified)
    assert [settled.why for settled in plan.settled] == [Rejection.SIGNATURE_INVALID]


def test_result_of_the_core_is_returned_for_its_commit_and_key_only() -> None:
    account, other = SigningAccount(), SigningAccount("bob")
    first, second = (decoded_event("commit", account.commit_post(rkey)) for rkey in "ab")
    key = account.key.public
    result = verify_commit(first, key, DEFAULT_LIMITS)._replace(detail="of the core")
    known = prepared_commits([(first, key), (second, key)], [result, None])
    for same in (key, parse_did_key(key.did_key())):
        assert known.verify(first, same, DEFAULT_LIMITS) is result
    assert known.verify(second, key, DEFAULT_LIMITS) == verify_commit(second, key, DEFAULT_LIMITS)
    assert PreparedCommits().verify(first, key, DEFAULT_LIMITS).detail == ""
    with pytest.raises(UpstreamError, match="signature-invalid"):
        known.verify(first, other.key.public, DEFAULT_LIMITS)


def test_results_of_some_commits_can_be_dropped_and_joined() -> None:
    account = SigningAccount()
    first, second, third = (decoded_event("commit", account.commit_post(rkey)) for rkey in "abc")
    key = account.key.public
    known = prepared_commits([(first, key), (second, key)], [None, None])
    assert (first in known, second in known, third in known, len(known)) == (True, True, False, 2)
    known.drop([first, third, "no commit"])
    assert (first in known, second in known, third in known, len(known)) == (False, True, False, 1)
    known |= prepared_commits([(third, key)], [None])
    assert (first in known, second in known, third in known, len(known)) == (False, True, True, 2)


def test_results_of_commits_being_verified_are_returned_in_parts() -> None:
    account = SigningAccount()
    events = [decoded_event("commit", account.commit_post(rkey)) for rkey in "abc"]
    key = account.key.public
    running = CommitsBeingVerified(native_core(), [(event, key) for event in events], CONTEXT)
    for part in (events[:2], events[2:], []):
        results = running.next_results(2)
        assert [event for event in events if event in results] == part
        assert all(results.has_all_of(event, account.key_state, STORE_ALL) for event in part)
        assert [results.verify(event, key, DEFAULT_LIMITS).head.rev for event in part] == [event.rev for event in part]


@pytest.mark.parametrize("number", [0, 2])
def test_another_number_of_results_than_of_commits_is_an_error(number: int) -> None:
    account = SigningAccount()
    event = decoded_event("commit", account.commit_post("a"))
    with pytest.raises(ValueError, match="zip"):
        prepared_commits([(event, account.key.public)], [None] * number)
