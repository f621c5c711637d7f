"""The results of the native core for some commits, as the planner asks for them. The native core is not needed here."""

from dataclasses import replace

import pytest

from indexer.atproto.crypto import parse_did_key
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.record import ConvertedRecord
from indexer.atproto.syntax import CollectionFilter
from indexer.demo.local_repo import Write
from indexer.errors import UpstreamError
from indexer.sync.batch import QUICK_BYTES, PreparedCommits, ReceivedMessage, commits_to_verify, is_quick
from indexer.sync.events import CommitEvent
from indexer.sync.policy import KeyState, Policy
from indexer.sync.repo import Repo
from indexer.sync.scope import Scope
from indexer.sync.stream import Origin
from indexer.sync.verify import VerifiedCommit, verify_commit
from tests.sync.signing_account import (
    CONTEXT,
    IN_PROGRESS,
    POST,
    RELAY,
    STORE_ALL,
    SigningAccount,
    decoded_event,
    received_message,
)

LIKES = replace(STORE_ALL, scope=replace(STORE_ALL.scope, collections=CollectionFilter(["app.bsky.feed.like"])))


def test_commits_that_cheaper_checks_decide_are_not_verified_ahead() -> None:
    account = SigningAccount()
    before = account.row()
    message = received_message("commit", account.commit_post("a"))
    after, did, key = account.row(), account.did, account.key_state
    for row, state, context in (
        (after, key, CONTEXT),
        (before, None, CONTEXT),
        (before, KeyState(None), CONTEXT),
        (before, key._replace(doubtful=True), CONTEXT),
        (before._replace(active=False), key, CONTEXT),
        (before._replace(tracked=False), key, CONTEXT),
        (Repo(did), key, replace(CONTEXT, refused=frozenset({did}))),
        (before, key, replace(CONTEXT, now=0.0)),
    ):
        assert commits_to_verify([message], {did: row}.__getitem__, {did: state}.get, context) == []
    of_a_host = message._replace(origin=Origin(RELAY, host="pds.test"))
    assert commits_to_verify([of_a_host], {did: before}.__getitem__, {did: key}.get, CONTEXT) == []
    for row in (before, Repo(did)):
        verified = commits_to_verify([message], {did: row}.__getitem__, {did: key}.get, CONTEXT)
        assert verified == [(message.event, account.key.public)]


def result_of_core(event: CommitEvent, account: SigningAccount, *, converted: bool = True) -> VerifiedCommit:
    """Return the verified commit as the native core does, with or without its converted records."""
    commit = verify_commit(event, account.key.public, DEFAULT_LIMITS)
    record = ConvertedRecord("{}", 1, None) if converted else None
    return commit._replace(changes=tuple([change._replace(converted=record) for change in commit.changes]))


def test_a_batch_is_quick_if_the_core_has_verified_and_converted_all_of_it() -> None:
    account, other = SigningAccount(), SigningAccount("bob")
    commit, deletion, unusual = (
        received_message("commit", payload)
        for payload in (account.commit_post("a"), account.commit(Write.delete(f"{POST}/a")), account.commit_post("n"))
    )
    hidden = received_message("account", account.account_event(active=False))
    sync = received_message("sync", account.sync_event())
    events = [message.event for message in (commit, deletion, unusual) if isinstance(message.event, CommitEvent)]
    results = [result_of_core(event, account, converted=event is not unusual.event) for event in events]
    known = PreparedCommits([(event, account.key.public) for event in events], results)

    def quick(
        *messages: ReceivedMessage,
        key: KeyState | None = account.key_state,
        policy: Policy = STORE_ALL,
        known: PreparedCommits = known,
        row: Repo = account.row(IN_PROGRESS),  # noqa: B008 - it is immutable
    ) -> bool:
        return is_quick(messages, {row.did: row}, {account.did: key}.get, policy, known)

    assert quick(commit, deletion, hidden)
    assert not quick(commit, sync), "the signature of a #sync is verified when it is planned"
    assert not quick(commit, key=None)
    assert not quick(commit, key=other.key_state), "a lookup found another key meanwhile"
    assert not quick(commit, known=PreparedCommits([(events[0], account.key.public)], [None]))
    assert not quick(commit, known=PreparedCommits())
    assert not quick(unusual), "the reference has to convert it"
    assert quick(unusual, policy=LIKES)
    assert quick(unusual, policy=replace(STORE_ALL, store_values=False))
    for scope in (Scope(removed={"did:web:a.test": frozenset()}), Scope(collections=CollectionFilter(["*"], [POST]))):
        without, many = replace(STORE_ALL, scope=scope), [commit] * (QUICK_BYTES // len(commit.frame))
        assert quick(*many, policy=without)
        assert quick(*many, commit)
        assert quick(*many, commit, policy=without, row=account.row()), "nothing is buffered"
        assert not quick(*many, commit, policy=without), "removed records may have to be taken out"


def test_result_of_the_core_is_returned_for_its_commit_and_key_only() -> None:
    account, other = SigningAccount(), SigningAccount("bob")
    first, second = (decoded_event("commit", account.commit_post(rkey)) for rkey in "ab")
    key = account.key.public
    result = verify_commit(first, key, DEFAULT_LIMITS)._replace(detail="of the core")
    known = PreparedCommits([(first, key), (second, key)], [result, None])
    for same in (key, parse_did_key(key.did_key())):
        assert known.verify(first, same, DEFAULT_LIMITS) is result
    assert known.verify(second, key, DEFAULT_LIMITS) == verify_commit(second, key, DEFAULT_LIMITS)
    assert PreparedCommits().verify(first, key, DEFAULT_LIMITS).detail == ""
    with pytest.raises(UpstreamError, match="signature-invalid"):
        known.verify(first, other.key.public, DEFAULT_LIMITS)


def test_results_of_some_commits_can_be_joined() -> None:
    account = SigningAccount()
    first, second, third = (decoded_event("commit", account.commit_post(rkey)) for rkey in "abc")
    key = account.key.public
    known = PreparedCommits([(first, key), (second, key)], [None, None])
    assert set(known) == {id(first), id(second)}
    known |= PreparedCommits([(third, key)], [None])
    assert set(known) == {id(first), id(second), id(third)}
    for number in (0, 2):
        with pytest.raises(ValueError, match="zip"):
            PreparedCommits([(first, key)], [None] * number)
