"""Published test vectors: frames from Jetstream and scenarios from indigo."""

import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import pytest

from indexer.atproto.cid import cid_text, parse_cid
from indexer.atproto.crypto import parse_multikey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.demo import dag_cbor
from indexer.sync.changes import NeedsKey, Plan
from indexer.sync.events import AccountEvent, CommitEvent, IdentityEvent, MalformedEvent, decode_frame
from indexer.sync.plan import plan_event
from indexer.sync.policy import KeyState
from indexer.sync.repo import Outcome, Repo, SyncStatus
from tests.sync.published_frames import CONTEXT, keys, recorded, row_before
from tests.vectors import vectors

vectors()  # without them, the module is skipped


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
        names = {"operation": change.action, "collection": change.collection, "rkey": change.rkey}
        if change.cid is None:
            yield names | {"rev": change.rev}
        else:
            assert change.value is not None
            yield names | {"rev": change.rev, "record": json.loads(change.value), "cid": cid_text(change.cid)}


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
