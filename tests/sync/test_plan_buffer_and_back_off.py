"""Plan the limits of the resync buffer, and the time of the next resync."""

from dataclasses import replace
from typing import Any

import orjson
import pytest

from indexer.atproto.car import car_section, split_car
from indexer.atproto.cid import cid_of
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.syntax import CollectionFilter
from indexer.demo import dag_cbor
from indexer.demo.local_repo import Write, car
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.batch import plan_batch
from indexer.sync.changes import NeedsKey, Plan
from indexer.sync.events import CommitEvent, decode_frame
from indexer.sync.plan import plan_event
from indexer.sync.policy import KeyState, Policy
from indexer.sync.repo import PARKED, STABLE_SECONDS, Head, Outcome, Repo, Trigger, desynchronize
from indexer.sync.scope import Scope
from tests.sync.hidden_deletion import high_path
from tests.sync.signing_account import (
    CONTEXT,
    DESYNCHRONIZED,
    IN_PROGRESS,
    NOW,
    POST,
    STORE_ALL,
    SYNCHRONIZED,
    SigningAccount,
    decoded_event,
    encoded_frame,
    plan,
    received_message,
)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(resync_buffer_events=2, resync_buffer_bytes=1_000_000),
        Limits(resync_buffer_events=1_000_000, resync_buffer_bytes=2_000),
    ],
    ids=["count", "bytes"],
)
def test_the_resync_buffer_is_limited_by_count_and_bytes(limits: Limits) -> None:
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


def scope_without(alice: SigningAccount, *, collection: bool) -> Scope:
    """Return a scope without the collection of posts, or without one post."""
    removed = {} if collection else {alice.did: frozenset({f"{POST}/secret".encode()})}
    return Scope(collections=CollectionFilter(["*"], [POST] if collection else ()), removed=removed)


def other_root(blocks: bytes) -> bytes:
    """Return a CAR with the same blocks and another root."""
    return car(dict(reversed(split_car(blocks, DEFAULT_LIMITS, max_bytes=len(blocks))[1].items())))


def buffered_frame(repo: Repo, payload: dict[str, Any], scope: Scope, key: KeyState) -> bytes:
    """Return the frame that is buffered for a commit."""
    context = replace(CONTEXT, policy=replace(STORE_ALL, scope=scope))
    planned = plan_batch([received_message("commit", payload)], {repo.did: repo}, lambda _: key, context)
    [write] = planned.writes
    assert write.repo.buffered_events == 1
    [event] = write.buffered
    return event.frame


def drained(frame: bytes, before: Repo, alice: SigningAccount, policy: Policy = STORE_ALL) -> Plan:
    """Return the plan of a buffered frame."""
    event: Any = decode_frame(frame, DEFAULT_LIMITS)
    planned = plan_event(before, event, 0, alice.key_state, replace(CONTEXT, policy=policy))
    assert isinstance(planned, Plan)
    return planned


@pytest.mark.parametrize("collection", [False, True], ids=["record", "collection"])
@pytest.mark.parametrize("same", [False, True], ids=["different", "same record at a path that is stored"])
def test_buffered_frame_lacks_the_content_of_removed_records_and_is_applied(*, collection: bool, same: bool) -> None:
    """Its operations are proven as those of the complete frame. The other records are stored."""
    alice, old = SigningAccount(), {"e": ["old secret content"], "l": None}
    alice.commit(Write.create(f"{POST}/secret", old))
    scope, row, before = scope_without(alice, collection=collection), alice.row(IN_PROGRESS), alice.row()
    secret = {"e": ["secret content"], "l": None}  # it looks like a tree node, as the others do
    other = secret if same else {"text": "other content"}
    payload = alice.commit(Write.update(f"{POST}/secret", secret), Write.create("a.b.d/x", other))
    for extra in (old, {"$type": POST, "e": ["older secret content"]}):  # no operation names the last one
        block = dag_cbor.encode(extra)
        payload["blocks"] += car_section(cid_of(block) + block)
    assert buffered_frame(row, payload, Scope(), alice.key_state) == encoded_frame("commit", payload)
    frame = buffered_frame(row, payload, scope, alice.key_state)
    assert frame.count(b"secret content") == same
    head, without = alice.head, alice.commit(Write.create("a.b.d/y", {}))
    assert buffered_frame(row, without, scope, alice.key_state) == encoded_frame("commit", without)
    planned = drained(frame, before, alice, replace(STORE_ALL, scope=scope))
    assert (planned.outcome, planned.repo.head) == (Outcome.APPLIED, head)
    [change] = planned.changes
    assert (change.collection, orjson.loads(change.value or "")) == ("a.b.d", other)
    assert drained(frame, before, alice).why is (None if same else Desync.RECORD_MISSING), "the record is stored again"


@pytest.mark.parametrize("lenient", [False, True])
def test_missing_block_of_a_removed_record_hides_no_other_flaw(*, lenient: bool) -> None:
    alice, path = SigningAccount(), high_path(f"{POST}/100-")
    alice.commit(*(Write.create(f"{POST}/{number:03}", {"n": number}) for number in range(200)))
    before, row = alice.row(), alice.row(IN_PROGRESS)
    payload = alice.commit_with_hidden_deletion(path, f"{POST}/110")
    scope = Scope(removed={alice.did: frozenset({path.encode()})})
    frame = buffered_frame(row, payload, scope, alice.key_state)
    policy = replace(STORE_ALL, scope=scope, lenient=lenient)
    assert drained(frame, before, alice, policy).why is Desync.UNDECIDABLE


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda p: {"blocks": p["blocks"][:-1]}, Rejection.COMMIT_MISSING),
        (lambda p: {"blocks": b"x" + p["commit"]}, Rejection.COMMIT_MISSING),
        (lambda p: {"blocks": other_root(p["blocks"])}, Rejection.COMMIT_MISSING),
        (lambda p: {"ops": [p["ops"][0] | {"cid": p["commit"]}]}, None),
        (lambda _: {"since": "not a TID", "time": "t" * 65}, None),
        (lambda _: {"ops": [{"action": "x" * 70_000, "path": f"{POST}/secret", "cid": None}]}, None),
        (lambda p: {"prevData": None, "ops": [p["ops"][0] | {"cid": b"\x01\x71\x00\x00", "prev": p["commit"]}]}, None),
    ],
)  # fmt: skip
def test_hostile_frame_is_buffered_as_a_frame_that_is_no_more_valid(change: Any, reason: Rejection | None) -> None:
    alice = SigningAccount()
    row, before = alice.row(IN_PROGRESS), alice.row()
    payload = alice.commit_post("secret", "secret content")
    payload |= change(payload)
    no_key = KeyState(None, available=False)
    frame = buffered_frame(row, payload, scope_without(alice, collection=False), no_key)
    assert b"secret content" not in frame
    event, original = decode_frame(frame, DEFAULT_LIMITS), decoded_event("commit", payload)
    assert isinstance(event, CommitEvent)
    assert event._replace(blocks=b"") == original._replace(blocks=b"")
    planned = drained(frame, before, alice)
    assert planned.outcome in {Outcome.REJECTED, Outcome.DESYNCHRONIZED}
    assert reason is None or planned.why is reason


def test_the_back_off_grows_until_a_repo_stays_synchronized() -> None:
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


def test_an_event_unparks_a_parked_repo() -> None:
    alice = SigningAccount()
    repo = alice.row(
        DESYNCHRONIZED,
        next_attempt_at=PARKED,
        attempts=2,
        last_failure=FetchFailure.REPO_NOT_FOUND,
        last_error="repo-not-found",
    )
    assert isinstance(plan_event(repo, decoded_event("commit", alice.commit_post("a")), 1_000, None, CONTEXT), NeedsKey)
    for kind, payload in (
        ("commit", alice.commit_post("b")),
        ("sync", alice.sync_event()),
        ("account", alice.account_event(active=True)),
        ("identity", alice.identity_event()),
    ):
        assert plan(repo, kind, payload, alice.key_state).repo.next_attempt_at == NOW
    hidden = repo._replace(active=False)
    assert plan(hidden, "account", alice.account_event(active=True), None).repo.next_attempt_at == NOW
