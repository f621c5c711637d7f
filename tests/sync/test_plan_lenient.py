"""Plan commits with INDEXER_INVERSION=lenient."""

from dataclasses import replace

from indexer.atproto.car import split_car
from indexer.demo.local_repo import Write, car
from indexer.reasons import Desync
from indexer.sync.repo import Outcome
from tests.sync.hidden_deletion import high_path
from tests.sync.signing_account import CONTEXT, NOW, POST, STORE_ALL, SYNCHRONIZED, SigningAccount, plan

LENIENT = replace(CONTEXT, policy=replace(STORE_ALL, lenient=True))
VICTIM, HIGH, HIGH_TOO = f"{POST}/110", high_path(f"{POST}/100-"), high_path(f"{POST}/050-")


def account_with_posts() -> SigningAccount:
    alice = SigningAccount()
    alice.commit(*(Write.create(f"{POST}/{number:03}", {"n": number}) for number in range(200)))
    return alice


def test_a_lenient_commit_is_applied_and_marks_the_repo_with_the_time_of_the_first_one() -> None:
    alice = account_with_posts()
    before, later = alice.row(), replace(LENIENT, now=NOW + 60)
    proven = plan(before, "commit", alice.commit_post("a"), alice.key_state, LENIENT)
    assert (proven.outcome, proven.repo.unproven_since) == (Outcome.APPLIED, None)
    payload = alice.commit_with_hidden_deletion(HIGH, VICTIM)
    assert plan(proven.repo, "commit", payload, alice.key_state).why is Desync.UNDECIDABLE
    planned = plan(proven.repo, "commit", payload, alice.key_state, LENIENT)
    assert (planned.outcome, planned.repo.unproven_since) == (Outcome.APPLIED, NOW)
    assert (planned.repo.sync_status, planned.repo.head) == (SYNCHRONIZED, alice.head)
    assert [(change.action, f"{POST}/{change.rkey}") for change in planned.changes] == [("create", HIGH)]
    proven = plan(planned.repo, "commit", alice.commit_post("b"), alice.key_state, later)
    again = alice.commit_with_hidden_deletion(HIGH_TOO, f"{POST}/120")
    marked = plan(proven.repo, "commit", again, alice.key_state, later)
    assert [(planned.outcome, planned.repo.unproven_since) for planned in (proven, marked)] == [
        (Outcome.APPLIED, NOW)
    ] * 2


def test_an_undecidable_commit_is_applied_only_if_the_tree_shows_its_operations() -> None:
    alice = account_with_posts()
    before, payload = alice.row(), alice.commit(Write.create(HIGH, {}))  # its inversion merges neighbouring subtrees
    blocks = split_car(payload["blocks"], STORE_ALL.limits, max_bytes=10**7)[1]
    outcomes = set()
    for left_out in blocks.keys() - {payload["commit"]}:
        remaining = {payload["commit"]: blocks[payload["commit"]]} | {c: b for c, b in blocks.items() if c != left_out}
        incomplete = payload | {"blocks": car(remaining)}
        if plan(before, "commit", incomplete, alice.key_state).why is Desync.UNDECIDABLE:
            outcomes.add(plan(before, "commit", incomplete, alice.key_state, LENIENT).outcome)
    assert outcomes == {Outcome.APPLIED, Outcome.DESYNCHRONIZED}
