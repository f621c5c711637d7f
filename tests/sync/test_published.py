"""Published test vectors: frames from Jetstream and scenarios from indigo."""

import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.car import split_car
from indexer.atproto.cid import cid_of, cid_text, parse_cid
from indexer.atproto.crypto import PublicKey, parse_multikey
from indexer.atproto.did_document import parse_did_document
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.localnet import dag_cbor
from indexer.localnet.local_repo import car
from indexer.reasons import Desync, Rejection
from indexer.sync.events import AccountEvent, CommitEvent, IdentityEvent, MalformedEvent
from indexer.sync.frames import decode_frame
from indexer.sync.plan_event import plan_event
from indexer.sync.plans import NeedsKey, Plan
from indexer.sync.policy import KeyState, PlanContext, Policy
from indexer.sync.repo_state import Head, Repo, SyncStatus
from indexer.sync.repo_transitions import Outcome
from indexer.sync.scope import Scope
from tests.localnet import independent_decoder
from tests.profiles import scaled
from tests.vectors import vectors

NOW = 1_795_000_000.0  # later than every rev in the vectors
CONTEXT = PlanContext(Policy(Scope(), DEFAULT_LIMITS), "wss://bsky.network", NOW)


@cache
def recorded() -> list[bytes]:
    data = vectors("jetstream-frames/frames.bin").read_bytes()
    frames, offset = [], 0
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 4], "little")
        frames.append(data[offset + 4 : offset + 4 + size])
        offset += 4 + size
    return frames


@cache
def keys() -> dict[str, PublicKey]:
    documents = json.loads(vectors("jetstream-frames/did_docs.json").read_text())
    parsed = {did: parse_did_document(raw, did, allow_http=False) for did, raw in documents.items()}
    return {did: document.signing_key for did, document in parsed.items() if document.signing_key}


def row_before(event: CommitEvent) -> Repo:
    """Return a row at the state that the commit names as its predecessor."""
    assert event.since is not None
    assert event.prev_data is not None
    head = Head(event.since, event.prev_data, cid_of(b""))
    return Repo(event.did, version=1, sync_status=SyncStatus.SYNCHRONIZED, sync_reason=None, head=head)


def planned(frame: bytes, repo: Repo | None = None) -> Plan:
    event = decode_frame(frame, DEFAULT_LIMITS)
    assert isinstance(event, CommitEvent), event
    key_state = KeyState(keys()[event.did], final=True) if event.did in keys() else KeyState(None)
    plan = plan_event(repo or row_before(event), event, len(frame), key_state, CONTEXT)
    assert isinstance(plan, Plan)
    return plan


def test_recorded_frames_give_the_published_changes() -> None:
    expected = [json.loads(line) for line in vectors("jetstream-frames/expected_v1.jsonl").read_text().splitlines()]
    assert len(recorded()) == len(expected) == 75
    for frame, want in zip(recorded(), expected, strict=True):
        event = decode_frame(frame, DEFAULT_LIMITS)
        assert (event.kind, getattr(event, "did", None)) == (want["kind"], want["did"])
        match event:
            case CommitEvent():
                plan = planned(frame)
                assert plan.outcome is Outcome.APPLIED
                assert plan.repo.head is not None
                assert plan.repo.head.rev == event.rev
                assert list(as_published(plan)) == [want["commit"]]
            case IdentityEvent() | AccountEvent():
                assert event.seq == want[event.kind]["seq"]
                assert event.time == want[event.kind]["time"]
                assert getattr(event, "active", True) == want[event.kind].get("active", True)


def as_published(plan: Plan) -> Iterator[dict[str, Any]]:
    for change in plan.changes:
        published = {
            "rev": change.rev,
            "operation": change.action,
            "collection": change.collection,
            "rkey": change.rkey,
        }
        if change.cid is not None:
            assert change.value is not None
            published |= {"record": json.loads(change.value), "cid": cid_text(change.cid)}
        yield published


def commits() -> list[bytes]:
    return [frame for frame in recorded() if isinstance(decode_frame(frame, DEFAULT_LIMITS), CommitEvent)]


def changed(frame: bytes, change: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    """Return the frame with some fields of its payload replaced."""
    header, payload = independent_decoder.decode_frame(frame)
    return dag_cbor.encode(header) + dag_cbor.encode(payload | change(payload))


def other_cid(cid: bytes) -> bytes:
    return cid[:-1] + bytes([cid[-1] ^ 0xFF])


UNKNOWN_DID = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"
MUTATIONS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], set[Rejection | Desync]]] = {
    "other rev": (lambda _: {"rev": "3zzzzzzzzzzzz"}, {Rejection.ENVELOPE_MISMATCH, Rejection.FUTURE_REV}),
    "other commit": (lambda p: {"commit": other_cid(p["commit"])}, {Rejection.COMMIT_MISMATCH}),
    "other prevData": (lambda p: {"prevData": other_cid(p["prevData"])}, {Desync.INVERSION, Desync.UNDECIDABLE}),
    "dropped op": (lambda p: {"ops": p["ops"][:-1]}, {Desync.INVERSION}),
    "changed op cid": (
        lambda p: {
            "ops": [op | {"cid": other_cid(op["cid"])} if op["cid"] else op | {"path": "a.b.c/d"} for op in p["ops"]]
        },
        {Desync.OPS, Desync.INVERSION, Desync.UNDECIDABLE},
    ),
    "no prevData": (lambda _: {"prevData": None}, {Desync.LEGACY}),
    "no blocks": (lambda _: {"blocks": b""}, {Rejection.CAR_MALFORMED}),
    "cut blocks": (lambda p: {"blocks": p["blocks"][:-1]}, {Rejection.CAR_MALFORMED}),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_field_prevents_the_commit(name: str) -> None:
    change, allowed = MUTATIONS[name]
    reasons = set()
    for frame in commits():
        original = decode_frame(frame, DEFAULT_LIMITS)
        assert isinstance(original, CommitEvent)
        plan = planned(changed(frame, change), row_before(original))
        assert plan.outcome in {Outcome.REJECTED, Outcome.DESYNCHRONIZED}
        assert plan.changes == ()
        reasons.add(plan.why)
    assert reasons <= allowed
    assert reasons


def test_a_commit_with_another_did_is_rejected() -> None:
    other = next(iter(keys()))
    for frame in commits():
        original = decode_frame(frame, DEFAULT_LIMITS)
        assert isinstance(original, CommitEvent)
        for did, reason in ((UNKNOWN_DID, Rejection.NO_SIGNING_KEY), (other, Rejection.ENVELOPE_MISMATCH)):
            if did == original.did:
                continue
            plan = planned(changed(frame, lambda _, did=did: {"repo": did}), row_before(original)._replace(did=did))  # type: ignore[misc]
            assert (plan.outcome, plan.why) == (Outcome.REJECTED, reason)


def test_a_frame_with_a_trailing_byte_is_malformed() -> None:
    for frame in commits():
        event = decode_frame(frame + b"\x00", DEFAULT_LIMITS)
        assert isinstance(event, MalformedEvent)
        assert event.reason is Rejection.FRAME_MALFORMED


@settings(max_examples=scaled(300))
@given(st.data())
def test_a_flipped_bit_never_changes_what_is_applied(data: st.DataObject) -> None:
    """The commit is rejected, desynchronizes the repo, or has the same changes and head."""
    frame = data.draw(st.sampled_from(commits()))
    index = data.draw(st.integers(0, len(frame) - 1))
    flipped = frame[:index] + bytes([frame[index] ^ 1 << data.draw(st.integers(0, 7))]) + frame[index + 1 :]
    original = decode_frame(frame, DEFAULT_LIMITS)
    event = decode_frame(flipped, DEFAULT_LIMITS)
    if not isinstance(event, CommitEvent) or not isinstance(original, CommitEvent):
        return
    key_state = KeyState(keys().get(event.did), final=True)
    plan = plan_event(row_before(original)._replace(did=event.did), event, len(flipped), key_state, CONTEXT)
    if isinstance(plan, Plan) and plan.outcome is Outcome.APPLIED:
        original_plan = planned(frame)
        assert (plan.repo.head, plan.changes) == (original_plan.repo.head, original_plan.changes)


def test_a_missing_block_is_noticed_if_it_is_needed() -> None:
    reasons = set()
    for frame in commits():
        event = decode_frame(frame, DEFAULT_LIMITS)
        assert isinstance(event, CommitEvent)
        _, blocks = split_car(event.blocks, DEFAULT_LIMITS, max_bytes=10**7)
        for dropped in blocks.keys() - {event.commit}:
            remaining = {event.commit: blocks[event.commit]} | {c: b for c, b in blocks.items() if c != dropped}
            plan = planned(changed(frame, lambda _, remaining=remaining: {"blocks": car(remaining)}))  # type: ignore[misc]
            reasons.add(plan.why)
            if plan.outcome is Outcome.APPLIED:
                assert plan.repo.head == planned(frame).repo.head
    assert reasons <= {None, Desync.UNDECIDABLE, Desync.RECORD_MISSING}
    assert {Desync.UNDECIDABLE, Desync.RECORD_MISSING} <= reasons


def as_values(value: Any) -> Any:
    """Return AT Protocol JSON as Python values, with links and bytes as bytes."""
    if isinstance(value, dict):
        if value.keys() == {"$link"}:
            return parse_cid(value["$link"])
        if value.keys() == {"$bytes"}:
            return b64decode(value["$bytes"] + "==")
        return {key: as_values(item) for key, item in value.items()}
    return [as_values(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["basic", "post_lifecycle", "post_lifecycle_legacy", "account_lifecycle"])
def test_relay_scenarios(name: str) -> None:
    """No message may be rejected. Commits from before Sync 1.1 cause a resync."""
    scenario = json.loads(vectors(f"indigo/relay-scenarios/{name}.json").read_text())
    identity = scenario["accounts"][0]["identity"]
    key_state = KeyState(parse_multikey(identity["keys"]["atproto"]["publicKeyMultibase"]), final=True)
    repo: Repo | None = None
    for message in scenario["messages"]:
        assert not message["drop"]
        assert not message["invalid"]
        sent = message["frame"]
        frame = dag_cbor.encode(sent["header"]) + dag_cbor.encode(as_values(sent["body"]))
        event = decode_frame(frame, DEFAULT_LIMITS)
        assert not isinstance(event, MalformedEvent), event
        if repo is None:
            follows = isinstance(event, CommitEvent) and event.prev_data is not None
            repo = row_before(event) if follows and isinstance(event, CommitEvent) else Repo(identity["did"])
        plan: Any = plan_event(repo, event, len(frame), key_state, CONTEXT)  # type: ignore[arg-type]
        assert not isinstance(plan, NeedsKey)
        assert plan.outcome is not Outcome.REJECTED, plan
        repo = plan.repo
        if name == "post_lifecycle":
            assert (plan.outcome, repo.sync_status) == (Outcome.APPLIED, SyncStatus.SYNCHRONIZED)
        if isinstance(event, CommitEvent) and event.prev_data is None:
            assert repo.sync_status is SyncStatus.DESYNCHRONIZED
            assert repo.latest_verified_rev == event.rev
    if name == "account_lifecycle":
        assert repo is not None
        assert (repo.active, repo.hosting_status, repo.sync_status) == (False, "deleted", SyncStatus.SYNCHRONIZED)
