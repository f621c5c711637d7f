"""Plan commits with INDEXER_INVERSION=lenient."""

from dataclasses import replace

from indexer.atproto.car import split_car
from indexer.atproto.mst import key_height
from indexer.localnet.local_repo import Write, car
from indexer.reasons import Desync
from indexer.sync.policy import Policy
from indexer.sync.repo_transitions import Outcome
from indexer.sync.scope import Scope
from tests.sync.hidden_deletion import high_path
from tests.sync.planning import SYNCHRONIZED, plan
from tests.sync.signing_account import CONTEXT, NOW, POST, STORE_ALL, SigningAccount


def test_lenient_applies_undecidable_commits_that_are_consistent_with_the_tree() -> None:
    alice = SigningAccount()
    alice.commit(*(Write.create(f"{POST}/{n:03}", {"n": n}) for n in range(200)))
    before = alice.row()
    high = max((f"{POST}/100{n}" for n in range(200)), key=lambda path: key_height(path.encode()))
    payload = alice.commit(Write.create(high, {}))  # its inversion merges the neighbouring subtrees
    blocks = split_car(payload["blocks"], STORE_ALL.limits, max_bytes=10**7)[1]
    outcomes = set()
    for left_out in blocks.keys() - {payload["commit"]}:
        remaining = {payload["commit"]: blocks[payload["commit"]]} | {c: b for c, b in blocks.items() if c != left_out}
        incomplete = payload | {"blocks": car(remaining)}
        strict = plan(before, "commit", incomplete, alice.key_state)
        lenient_context = replace(CONTEXT, policy=Policy(Scope(), STORE_ALL.limits, lenient=True))
        lenient = plan(before, "commit", incomplete, alice.key_state, lenient_context)
        if strict.why is Desync.UNDECIDABLE:
            outcomes.add(lenient.outcome)
            if lenient.outcome is Outcome.APPLIED:
                assert lenient.repo.head == alice.head
    assert Outcome.APPLIED in outcomes


LENIENT = replace(CONTEXT, policy=replace(STORE_ALL, lenient=True))
VICTIM, HIGH, HIGH_TOO = f"{POST}/110", high_path(f"{POST}/100-"), high_path(f"{POST}/050-")


def account_with_posts() -> SigningAccount:
    alice = SigningAccount()
    alice.commit(*(Write.create(f"{POST}/{number:03}", {"n": number}) for number in range(200)))
    return alice


def test_a_lenient_commit_is_applied_and_marks_the_repo() -> None:
    alice = account_with_posts()
    before = alice.row()
    payload = alice.commit_with_hidden_deletion(HIGH, VICTIM)
    assert plan(before, "commit", payload, alice.key_state).why is Desync.UNDECIDABLE
    planned = plan(before, "commit", payload, alice.key_state, LENIENT)
    assert (planned.outcome, planned.lenient) == (Outcome.APPLIED, True)
    assert (planned.repo.sync_status, planned.repo.head) == (SYNCHRONIZED, alice.head)
    assert planned.repo.unproven_since == NOW
    assert [(change.action, f"{POST}/{change.rkey}") for change in planned.changes] == [("create", HIGH)]


def test_the_mark_keeps_the_time_of_the_first_lenient_commit() -> None:
    alice = account_with_posts()
    before = alice.row()
    marked = plan(before, "commit", alice.commit_with_hidden_deletion(HIGH, VICTIM), alice.key_state, LENIENT).repo
    later = replace(LENIENT, now=NOW + 60)
    proven = plan(marked, "commit", alice.commit_post("proven"), alice.key_state, later)
    again = plan(
        proven.repo, "commit", alice.commit_with_hidden_deletion(HIGH_TOO, f"{POST}/120"), alice.key_state, later
    )
    assert [(planned.outcome, planned.lenient) for planned in (proven, again)] == [
        (Outcome.APPLIED, False),
        (Outcome.APPLIED, True),
    ]
    assert (proven.repo.unproven_since, again.repo.unproven_since) == (NOW, NOW)


def test_a_proven_commit_does_not_mark_the_repo_in_lenient_mode() -> None:
    alice = account_with_posts()
    before = alice.row()
    planned = plan(before, "commit", alice.commit_post("proven"), alice.key_state, LENIENT)
    assert (planned.outcome, planned.lenient, planned.repo.unproven_since) == (Outcome.APPLIED, False, None)
