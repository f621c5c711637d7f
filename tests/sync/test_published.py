"""Frames that others recorded or made, under our rules."""

import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, cast

import cbrrr
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.car import split_car
from indexer.atproto.cid import cid_of, cid_text, parse_cid
from indexer.atproto.crypto import PublicKey, parse_multikey
from indexer.atproto.did_document import parse_did_document
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter
from indexer.localnet import dag_cbor
from indexer.localnet.repo import car
from indexer.reasons import Desync, Rejection
from indexer.sync.events import AccountEvent, CommitEvent, IdentityEvent, MalformedEvent
from indexer.sync.frames import decode_frame
from indexer.sync.plan import NeedsKey, Plan
from indexer.sync.planning import Ground, Policy, Signer, plan_event
from indexer.sync.repo import Head, Outcome, Repo, SyncStatus
from tests.vectors import vectors

NOW = 1_795_000_000.0  # behind every revision here
GROUND = Ground(Policy(CollectionFilter(), DEFAULT_LIMITS), "wss://bsky.network", NOW)


@cache
def recorded() -> list[bytes]:
    data = vectors("jetstream-frames/frames.bin").read_bytes()
    frames, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        frames.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return frames


@cache
def keys() -> dict[str, PublicKey]:
    documents = json.loads(vectors("jetstream-frames/did_docs.json").read_text())
    parsed = {did: parse_did_document(raw, did, allow_http=False) for did, raw in documents.items()}
    return {did: document.signing_key for did, document in parsed.items() if document.signing_key}


def before(event: CommitEvent) -> Repo:
    """The row that the commit says it follows."""
    assert event.since is not None
    assert event.prev_data is not None
    head = Head(event.since, event.prev_data, cid_of(b""))
    return Repo(event.did, version=1, status=SyncStatus.SYNCHRONIZED, reason=None, head=head)


def planned(frame: bytes, repo: Repo | None = None) -> Plan:
    event = decode_frame(frame, DEFAULT_LIMITS)
    assert isinstance(event, CommitEvent), event
    signer = Signer(keys()[event.did], final=True) if event.did in keys() else Signer(None)
    plan = plan_event(repo or before(event), event, len(frame), signer, GROUND)
    assert isinstance(plan, Plan)
    return plan


def test_all_frames_give_exactly_what_was_published_of_them() -> None:
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
    """The frame with some fields of its payload replaced."""
    header, payload = cast("Any", cbrrr.decode_multi_dag_cbor_in_violation_of_the_spec(frame, cid_ctor=bytes))
    return dag_cbor.encode(header) + dag_cbor.encode(payload | change(payload))


def other_cid(cid: bytes) -> bytes:
    return cid[:-1] + bytes([cid[-1] ^ 0xFF])


STRANGER = "did:plc:aaaaaaaaaaaaaaaaaaaaaaaa"
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
def test_every_mutation_of_every_commit_is_seen(name: str) -> None:
    change, allowed = MUTATIONS[name]
    seen = set()
    for frame in commits():
        original = decode_frame(frame, DEFAULT_LIMITS)
        assert isinstance(original, CommitEvent)
        plan = planned(changed(frame, change), before(original))
        assert plan.outcome in {Outcome.REJECTED, Outcome.DESYNCHRONIZED}
        assert plan.changes == ()
        seen.add(plan.why)
    assert seen <= allowed
    assert seen


def test_another_did_is_nobody_or_somebody_elses_signature() -> None:
    stranger = next(iter(keys()))
    for frame in commits():
        original = decode_frame(frame, DEFAULT_LIMITS)
        assert isinstance(original, CommitEvent)
        for did, reason in ((STRANGER, Rejection.NO_SIGNING_KEY), (stranger, Rejection.ENVELOPE_MISMATCH)):
            if did == original.did:
                continue
            plan = planned(changed(frame, lambda _, did=did: {"repo": did}), replace(before(original), did=did))  # type: ignore[misc]
            assert (plan.outcome, plan.why) == (Outcome.REJECTED, reason)


def test_a_byte_behind_the_end_is_malformed() -> None:
    for frame in commits():
        event = decode_frame(frame + b"\x00", DEFAULT_LIMITS)
        assert isinstance(event, MalformedEvent)
        assert event.reason is Rejection.FRAME_MALFORMED


@settings(max_examples=300)
@given(st.data())
def test_no_flipped_byte_is_applied_as_something_else(data: st.DataObject) -> None:
    """Flip any bit of any frame: refused, desynchronized, or the same changes at the same head."""
    frame = data.draw(st.sampled_from(commits()))
    at = data.draw(st.integers(0, len(frame) - 1))
    flipped = frame[:at] + bytes([frame[at] ^ 1 << data.draw(st.integers(0, 7))]) + frame[at + 1 :]
    original = decode_frame(frame, DEFAULT_LIMITS)
    event = decode_frame(flipped, DEFAULT_LIMITS)
    if not isinstance(event, CommitEvent) or not isinstance(original, CommitEvent):
        return
    signer = Signer(keys().get(event.did), final=True)
    plan = plan_event(replace(before(original), did=event.did), event, len(flipped), signer, GROUND)
    if isinstance(plan, Plan) and plan.outcome is Outcome.APPLIED:
        genuine = planned(frame)
        assert (plan.repo.head, plan.changes) == (genuine.repo.head, genuine.changes)


def test_every_dropped_block_is_missed_or_was_not_needed() -> None:
    seen = set()
    for frame in commits():
        event = decode_frame(frame, DEFAULT_LIMITS)
        assert isinstance(event, CommitEvent)
        _, blocks = split_car(event.blocks, DEFAULT_LIMITS, max_bytes=10**7)
        for dropped in blocks.keys() - {event.commit}:
            rest = {event.commit: blocks[event.commit]} | {c: b for c, b in blocks.items() if c != dropped}
            plan = planned(changed(frame, lambda _, rest=rest: {"blocks": car(rest)}))  # type: ignore[misc]
            seen.add(plan.why)
            if plan.outcome is Outcome.APPLIED:
                assert plan.repo.head == planned(frame).repo.head
    assert seen <= {None, Desync.UNDECIDABLE, Desync.RECORD_MISSING}
    assert {Desync.UNDECIDABLE, Desync.RECORD_MISSING} <= seen


def as_values(value: Any) -> Any:
    """AT Protocol JSON as plain values, links as their bytes."""
    if isinstance(value, dict):
        if value.keys() == {"$link"}:
            return parse_cid(value["$link"])
        if value.keys() == {"$bytes"}:
            return b64decode(value["$bytes"] + "==")
        return {key: as_values(item) for key, item in value.items()}
    return [as_values(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["basic", "post_lifecycle", "post_lifecycle_legacy", "account_lifecycle"])
def test_relay_scenarios(name: str) -> None:
    """No message of theirs is to be dropped; those from before Sync 1.1 are believed, but prove nothing whole."""
    scenario = json.loads(vectors(f"indigo/relay-scenarios/{name}.json").read_text())
    identity = scenario["accounts"][0]["identity"]
    signer = Signer(parse_multikey(identity["keys"]["atproto"]["publicKeyMultibase"]), final=True)
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
            repo = before(event) if follows and isinstance(event, CommitEvent) else Repo(identity["did"])
        plan: Any = plan_event(repo, event, len(frame), signer, GROUND)  # type: ignore[arg-type]
        assert not isinstance(plan, NeedsKey)
        assert plan.outcome is not Outcome.REJECTED, plan
        repo = plan.repo
        if name == "post_lifecycle":
            assert (plan.outcome, repo.status) == (Outcome.APPLIED, SyncStatus.SYNCHRONIZED)
        if isinstance(event, CommitEvent) and event.prev_data is None:
            assert repo.status is SyncStatus.DESYNCHRONIZED
            assert repo.seen_rev == event.rev
    if name == "account_lifecycle":
        assert repo is not None
        assert (repo.active, repo.hosting_status, repo.status) == (False, "deleted", SyncStatus.SYNCHRONIZED)
