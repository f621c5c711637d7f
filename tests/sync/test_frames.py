from typing import Any, Literal

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.cid import cid_text
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.errors import UpstreamError
from indexer.localnet import dag_cbor
from indexer.reasons import Rejection
from indexer.sync.events import CommitEvent, ForeignEvent, InfoEvent, MalformedEvent, StreamError, UnknownEvent
from indexer.sync.frames import decode_frame, show_frame
from tests.sync.people import Person, event, frame


def refused(data: bytes, limits: Limits = DEFAULT_LIMITS) -> MalformedEvent:
    decoded = decode_frame(data, limits)
    assert isinstance(decoded, MalformedEvent), decoded
    return decoded


def test_a_commit_has_the_lexicons_fields() -> None:
    alice = Person()
    payload = alice.post("a")
    decoded = event("commit", payload)
    assert isinstance(decoded, CommitEvent)
    assert (decoded.did, decoded.rev, decoded.commit) == (alice.did, alice.repo.head.rev, alice.repo.head.cid)
    assert (decoded.since, decoded.prev_data) == (payload["since"], payload["prevData"])
    assert [(op.action, op.path) for op in decoded.ops] == [("create", "app.bsky.feed.post/a")]


def test_both_forms_of_the_type_and_unknown_fields_are_understood() -> None:
    payload = Person().post("a") | {"somethingNew": [1, 2], "blobs": None}
    del payload["tooBig"], payload["rebase"]
    full = dag_cbor.encode({"op": 1, "t": "com.atproto.sync.subscribeRepos#commit", "v": 2})
    assert isinstance(decode_frame(full + dag_cbor.encode(payload), DEFAULT_LIMITS), CommitEvent)


@pytest.mark.parametrize("kind", ["handle", "migrate", "tombstone", "future"])
def test_types_of_other_versions_are_unknown_not_wrong(kind: str) -> None:
    decoded = event(kind, {"seq": 7})
    assert isinstance(decoded, UnknownEvent)
    assert decoded.seq == 7


def test_info_and_error_frames() -> None:
    assert event("info", {"name": "OutdatedCursor"}) == InfoEvent("OutdatedCursor", "")
    error = dag_cbor.encode({"op": -1}) + dag_cbor.encode({"error": "FutureCursor", "message": "no"})
    assert decode_frame(error, DEFAULT_LIMITS) == StreamError("FutureCursor", "no")
    assert isinstance(decode_frame(dag_cbor.encode({"op": 5}) + b"\xa0", DEFAULT_LIMITS), UnknownEvent)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xa0",
        dag_cbor.encode({"op": 1, "t": "#commit"}),
        frame("commit", Person().post("a")) + b"\x00",
        frame("commit", Person().post("a"))[:-1],
        dag_cbor.encode([1]) + b"\xa0",
        dag_cbor.encode({"op": 1, "t": "#commit"}) + b"\x80",
        dag_cbor.encode({"op": "1", "t": "#commit"}) + b"\xa0",
        dag_cbor.encode({"op": True, "t": "#commit"}) + b"\xa0",
        dag_cbor.encode({"op": 1}) + b"\xa0",
        b"\x81" * 100_000,
    ],
)
def test_what_is_no_header_and_payload_is_malformed(data: bytes) -> None:
    assert refused(data).reason is Rejection.FRAME_MALFORMED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", 0),
        ("seq", -1),
        ("seq", "1"),
        ("seq", True),
        ("seq", 2**63),
        ("repo", "alice.test"),
        ("repo", "did:plc:x\n"),
        ("repo", 7),
        ("commit", b"short"),
        ("commit", None),
        ("rev", "3jzfcijpj2z2"),
        ("rev", 7),
        ("since", "yesterday"),
        ("prevData", "bafy"),
        ("ops", None),
        ("ops", {"action": "create"}),
        ("ops", [7]),
        ("ops", [{"action": "create", "path": 7, "cid": None}]),
        ("ops", [{"action": 7, "path": "a/b", "cid": None}]),
        ("ops", [{"action": "create", "path": "a/" + "b" * 2_000, "cid": None}]),
        ("ops", [{"action": "create", "path": "a/b", "cid": "bafy"}]),
        ("blocks", "text"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(field: str, value: Any) -> None:
    good = Person().post("a")
    bad = refused(frame("commit", good | {field: value}))
    assert bad.reason is Rejection.FIELD_INVALID
    assert bad.did == (None if field == "repo" else good["repo"])
    assert bad.seq == (None if field == "seq" else good["seq"])


def test_absent_fields_are_named_as_well() -> None:
    good = Person().post("a")
    for field in ("seq", "repo", "commit", "rev", "ops", "blocks"):
        missing = {name: value for name, value in good.items() if name != field}
        assert refused(frame("commit", missing)).reason is Rejection.FIELD_INVALID


def test_sizes_are_bounded_before_anything_else() -> None:
    good = Person().post("a")
    op = good["ops"][0]
    assert refused(frame("commit", good | {"ops": [op] * 201})).reason is Rejection.TOO_MANY_OPS
    assert refused(frame("commit", good | {"blocks": b"x" * 2_000_001})).reason is Rejection.BLOCKS_TOO_LARGE
    assert refused(frame("sync", Person().sync() | {"blocks": b"x" * 10_001})).reason is Rejection.BLOCKS_TOO_LARGE
    assert refused(frame("commit", good), Limits(frame_bytes=100)).reason is Rejection.FRAME_TOO_LARGE


@pytest.mark.parametrize("field", ["active", "status"])
def test_accounts(field: str) -> None:
    good = Person().account(active=False, status="deactivated")
    decoded = event("account", good)
    assert (decoded.active, decoded.status) == (False, "deactivated")
    assert refused(frame("account", good | {field: 7})).reason is Rejection.FIELD_INVALID


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=6) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from([*Person().post("a"), "did", "active", "status", "op", "t", "error"])


@given(st.binary(max_size=300))
def test_random_bytes_never_break_it(data: bytes) -> None:
    decode_frame(data, DEFAULT_LIMITS)


@given(st.sampled_from(["commit", "sync", "identity", "account", "info"]), st.dictionaries(FIELDS, VALUES), st.data())
def test_no_change_to_a_message_breaks_it(kind: str, changes: dict[str, Any], data: st.DataObject) -> None:
    payload = cbor2.dumps(Person().post("a") | Person().sync() | changes, canonical=True)
    cut = data.draw(st.integers(0, len(payload)))
    flip = data.draw(st.integers(0, len(payload) - 1))
    for body in (payload, payload[:cut], payload[:flip] + bytes([payload[flip] ^ 1]) + payload[flip + 1 :]):
        decode_frame(dag_cbor.encode({"op": 1, "t": f"#{kind}"}) + body, DEFAULT_LIMITS)


@pytest.mark.parametrize("kind", ["commit", "sync", "identity", "account"])
def test_a_message_of_another_shard_is_told_by_its_did_alone(
    kind: Literal["commit", "sync", "identity", "account"],
) -> None:
    ann = Person()
    payload = {
        "commit": ann.post("a"),
        "sync": ann.sync(),
        "identity": ann.identity(),
        "account": ann.account(active=True),
    }[kind]
    asked: list[str] = []

    def owns(did: str) -> bool:
        asked.append(did)
        return False

    broken = payload | {"rev": 7, "active": 7, "blocks": 7}
    for message in (payload, broken):
        assert decode_frame(frame(kind, message), DEFAULT_LIMITS, owns) == ForeignEvent(payload["seq"], kind, ann.did)
    assert asked == [ann.did] * 2
    assert decode_frame(frame(kind, payload), DEFAULT_LIMITS, lambda _did: True) == event(kind, payload)


def test_what_names_no_account_is_nobody_elses() -> None:
    for message in (
        frame("info", {"name": "x"}),
        frame("commit", {"seq": 1, "repo": 7}),
        b"",
        frame("later", {"did": "x"}),
    ):
        assert decode_frame(message, DEFAULT_LIMITS, lambda _did: False) == decode_frame(message, DEFAULT_LIMITS)


def test_a_message_for_people() -> None:
    """Of any size and kind, right or wrong, if it has a header and a payload."""
    alice = Person()
    payload = alice.post("a")
    shown = show_frame(frame("commit", payload))
    assert shown["header"] == {"op": 1, "t": "#commit"}
    assert shown["payload"]["ops"] == [
        {"action": "create", "path": "app.bsky.feed.post/a", "cid": {"$link": cid_text(payload["ops"][0]["cid"])}}
    ]
    assert shown["payload"]["blocks"].startswith(f"{len(payload['blocks']):,} bytes: ")
    assert show_frame(frame("later", {"seq": -1}))["payload"] == {"seq": -1}
    for broken in (b"", frame("commit", payload)[:-1], dag_cbor.encode({}) + dag_cbor.encode([])):
        with pytest.raises(UpstreamError, match="frame-malformed"):
            show_frame(broken)
