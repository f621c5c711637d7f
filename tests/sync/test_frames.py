from typing import Any, Literal

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.cid import cid_text
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.errors import UpstreamError
from indexer.localnet import dag_cbor
from indexer.localnet.local_repo import Write
from indexer.reasons import Rejection
from indexer.sync.events import (
    AccountEvent,
    CommitEvent,
    IdentityEvent,
    InfoEvent,
    MalformedEvent,
    OtherShardEvent,
    RepoOp,
    StreamError,
    SyncEvent,
    UnknownEvent,
)
from indexer.sync.frames import MAX_SEQ, decode_frame, frame_for_display
from tests.sync.signing_account import POST, SigningAccount, decoded_event, encoded_frame


def malformed(data: bytes, limits: Limits = DEFAULT_LIMITS) -> MalformedEvent:
    decoded = decode_frame(data, limits)
    assert isinstance(decoded, MalformedEvent), decoded
    return decoded


def test_a_commit_has_the_fields_of_the_lexicon() -> None:
    alice = SigningAccount()
    payload = alice.commit_post("a")
    decoded = decoded_event("commit", payload)
    assert isinstance(decoded, CommitEvent)
    assert (decoded.did, decoded.rev, decoded.commit) == (alice.did, alice.repo.head.rev, alice.repo.head.cid)
    assert (decoded.since, decoded.prev_data) == (payload["since"], payload["prevData"])
    assert [(op.action, op.path) for op in decoded.ops] == [("create", "app.bsky.feed.post/a")]
    assert (decoded.seq, decoded.blocks, decoded.time) == (payload["seq"], payload["blocks"], payload["time"])


def test_the_full_type_name_and_unknown_fields_are_accepted() -> None:
    payload = SigningAccount().commit_post("a") | {"somethingNew": [1, 2], "blobs": None}
    del payload["tooBig"], payload["rebase"]
    full = dag_cbor.encode({"op": 1, "t": "com.atproto.sync.subscribeRepos#commit", "v": 2})
    assert isinstance(decode_frame(full + dag_cbor.encode(payload), DEFAULT_LIMITS), CommitEvent)


@pytest.mark.parametrize("kind", ["handle", "migrate", "tombstone", "future"])
def test_a_type_of_another_protocol_version_is_unknown(kind: str) -> None:
    decoded = decoded_event(kind, {"seq": 7})
    assert isinstance(decoded, UnknownEvent)
    assert decoded.seq == 7


def test_info_error_and_unknown_operations() -> None:
    assert decoded_event("info", {"name": "OutdatedCursor"}) == InfoEvent("OutdatedCursor", "")
    assert decoded_event("info", {"name": "x", "message": "y"}) == InfoEvent("x", "y")
    assert decode_frame(dag_cbor.encode({"op": -1}) + dag_cbor.encode({"error": "x"}), DEFAULT_LIMITS) == (
        StreamError("x", "")
    )
    error = dag_cbor.encode({"op": -1}) + dag_cbor.encode({"error": "FutureCursor", "message": "no"})
    assert decode_frame(error, DEFAULT_LIMITS) == StreamError("FutureCursor", "no")
    assert isinstance(decode_frame(dag_cbor.encode({"op": 5}) + b"\xa0", DEFAULT_LIMITS), UnknownEvent)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xa0",
        dag_cbor.encode({"op": 1, "t": "#commit"}),
        encoded_frame("commit", SigningAccount().commit_post("a")) + b"\x00",
        encoded_frame("commit", SigningAccount().commit_post("a"))[:-1],
        dag_cbor.encode([1]) + b"\xa0",
        dag_cbor.encode({"op": 1, "t": "#commit"}) + b"\x80",
        dag_cbor.encode({"op": "1", "t": "#commit"}) + b"\xa0",
        dag_cbor.encode({"op": True, "t": "#commit"}) + b"\xa0",
        dag_cbor.encode({"op": False, "t": "#commit"}) + b"\xa0",
        dag_cbor.encode({"t": "#commit"}) + b"\xa0",
        dag_cbor.encode({"op": 1}) + b"\xa0",
        b"\x81" * 10_000,
    ],
)
def test_a_frame_without_header_and_payload_is_malformed(data: bytes) -> None:
    assert malformed(data).reason is Rejection.FRAME_MALFORMED


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
def test_an_invalid_field_is_rejected(field: str, value: Any) -> None:
    good = SigningAccount().commit_post("a")
    bad = malformed(encoded_frame("commit", good | {field: value}))
    assert bad.reason is Rejection.FIELD_INVALID
    assert bad.did == (None if field == "repo" else good["repo"])
    assert bad.seq == (None if field == "seq" else good["seq"])


def test_a_missing_field_is_rejected() -> None:
    good = SigningAccount().commit_post("a")
    for field in ("seq", "repo", "commit", "rev", "ops", "blocks"):
        missing = {name: value for name, value in good.items() if name != field}
        assert malformed(encoded_frame("commit", missing)).reason is Rejection.FIELD_INVALID


def test_sizes_are_limited() -> None:
    good = SigningAccount().commit_post("a")
    op = good["ops"][0]
    assert malformed(encoded_frame("commit", good | {"ops": [op] * 201})).reason is Rejection.TOO_MANY_OPS
    assert malformed(encoded_frame("commit", good | {"blocks": b"x" * 2_000_001})).reason is Rejection.BLOCKS_TOO_LARGE
    assert (
        malformed(encoded_frame("sync", SigningAccount().sync_event() | {"blocks": b"x" * 10_001})).reason
        is Rejection.BLOCKS_TOO_LARGE
    )
    large = malformed(encoded_frame("commit", good), Limits(frame_bytes=100))
    assert (large.reason, large.detail) == (
        Rejection.FRAME_TOO_LARGE,
        f"{len(encoded_frame('commit', good))} bytes",
    )


def test_largest_values_are_accepted() -> None:
    alice = SigningAccount()
    commit = alice.commit_post("a")
    op = commit["ops"][0] | {"path": "a/" + "b" * 1_022}
    longest = commit | {"ops": [op] * 200, "blocks": bytes(2_000_000), "seq": MAX_SEQ}
    frame = encoded_frame("commit", longest)
    event = decode_frame(frame, Limits(frame_bytes=len(frame)))
    assert isinstance(event, CommitEvent)
    assert (event.seq, len(event.ops), len(event.blocks)) == (MAX_SEQ, 200, 2_000_000)
    assert malformed(encoded_frame("commit", commit | {"ops": [op | {"path": op["path"] + "b"}]})).detail == (
        "path has 1025 characters"
    )
    sync = decoded_event("sync", alice.sync_event() | {"blocks": bytes(10_000)})
    assert len(sync.blocks) == 10_000
    account = alice.account_event(active=False, status="s" * 128)
    assert decoded_event("account", account).status == "s" * 128
    assert malformed(encoded_frame("account", account | {"status": "s" * 129})).detail == (
        "status is not a string of at most 128 characters"
    )


def test_longest_did_belongs_to_a_shard() -> None:
    longest = "did:web:" + "a" * 2_040
    frames = [encoded_frame("identity", {"seq": 5, "did": longest + more, "time": "now"}) for more in ("", "a")]
    events = [decode_frame(frame, DEFAULT_LIMITS, lambda _: False) for frame in frames]
    assert events[0] == OtherShardEvent(5, "identity", longest, "now")
    assert events[1] == malformed(frames[1])


def test_first_message_is_number_one() -> None:
    assert decoded_event("identity", SigningAccount().identity_event() | {"seq": 1}).seq == 1


@pytest.mark.parametrize(("items", "reason"), [(10, Rejection.FRAME_MALFORMED), (11, Rejection.FRAME_TOO_LARGE)])
def test_items_outside_of_containers_count(items: int, reason: Rejection) -> None:
    assert malformed(b"\xf6" * items, Limits(frame_items=10)).reason is reason


def test_frame_with_the_maximum_of_items_is_decoded() -> None:
    frame = encoded_frame("later", {"seq": 7, "a": 1})
    assert decode_frame(frame, Limits(frame_items=10)) == UnknownEvent("#later", 7)
    assert malformed(frame, Limits(frame_items=9)).reason is Rejection.FRAME_TOO_LARGE


def test_first_commit_has_no_commit_before_it() -> None:
    first = SigningAccount().first_commit()
    for payload in (first | {"since": None, "prevData": None}, first):
        event = decoded_event("commit", payload)
        assert (event.since, event.prev_data) == (None, None)


def test_operations_have_the_cids_of_their_records() -> None:
    alice = SigningAccount()
    old = alice.commit_post("a")["ops"][0]["cid"]
    payload = alice.commit(Write.update(f"{POST}/a", {"n": 1}), Write.create(f"{POST}/b", {"n": 2}))
    update, create = payload["ops"]
    sha512 = b"\x01\x71\x13\x40" + bytes(64)
    event = decoded_event("commit", payload | {"ops": [update, create | {"cid": sha512, "prev": None}]})
    assert list(event.ops) == [
        RepoOp("update", f"{POST}/a", update["cid"], old),
        RepoOp("create", f"{POST}/b", sha512, None),
    ]


def test_events_of_accounts_have_the_fields_of_the_lexicon() -> None:
    alice = SigningAccount()
    identity, account, sync = alice.identity_event(), alice.account_event(active=True), alice.sync_event()
    seq, time = identity["seq"], identity["time"]
    assert decoded_event("identity", identity) == IdentityEvent(seq, alice.did, time)
    assert decoded_event("account", account) == AccountEvent(seq + 1, alice.did, active=True, status=None, time=time)
    assert decoded_event("sync", sync) == SyncEvent(seq + 2, alice.did, alice.head.rev, sync["blocks"], time)
    del identity["time"]
    assert decoded_event("identity", identity).time == ""


def test_malformed_event_names_what_can_be_read() -> None:
    alice = SigningAccount()
    event = malformed(encoded_frame("identity", {"seq": 7, "did": alice.did, "repo": "did:plc:other"} | {"seq": "7"}))
    assert event == MalformedEvent(
        Rejection.FIELD_INVALID, "seq is not a positive integer", "#identity", None, alice.did
    )
    long = dag_cbor.encode({"op": "1", "t": "#" + "t" * 100})
    assert malformed(long + dag_cbor.encode({"did": "x", "seq": 7})) == MalformedEvent(
        Rejection.FRAME_MALFORMED, "op is not an integer", "#" + "t" * 63, 7, None
    )
    assert malformed(dag_cbor.encode({"op": 1, "t": 7}) + b"\xa0").type == ""


def test_unknown_events_have_their_short_type_and_number() -> None:
    header = dag_cbor.encode({"op": 1, "t": "#" + "t" * 100})
    assert decode_frame(header + dag_cbor.encode({"seq": 7}), DEFAULT_LIMITS) == UnknownEvent("#" + "t" * 63, 7)
    assert decode_frame(dag_cbor.encode({"op": 5}) + dag_cbor.encode({"seq": 7}), DEFAULT_LIMITS) == (
        UnknownEvent("op", 7)
    )
    for seq in (0, MAX_SEQ + 1, "7", True, None):
        assert decoded_event("later", {"seq": seq}) == UnknownEvent("#later", None)


@pytest.mark.parametrize("field", ["active", "status"])
def test_an_account_event_has_its_status(field: str) -> None:
    good = SigningAccount().account_event(active=False, status="deactivated")
    decoded = decoded_event("account", good)
    assert (decoded.active, decoded.status) == (False, "deactivated")
    assert malformed(encoded_frame("account", good | {field: 7})).reason is Rejection.FIELD_INVALID


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=6) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from([*SigningAccount().commit_post("a"), "did", "active", "status", "op", "t", "error"])


@given(st.binary(max_size=300))
def test_decoding_random_bytes_never_raises(data: bytes) -> None:
    decode_frame(data, DEFAULT_LIMITS)


@given(st.sampled_from(["commit", "sync", "identity", "account", "info"]), st.dictionaries(FIELDS, VALUES), st.data())
def test_decoding_a_changed_message_never_raises(kind: str, changes: dict[str, Any], data: st.DataObject) -> None:
    payload = cbor2.dumps(SigningAccount().commit_post("a") | SigningAccount().sync_event() | changes, canonical=True)
    cut = data.draw(st.integers(0, len(payload)))
    flip = data.draw(st.integers(0, len(payload) - 1))
    for body in (payload, payload[:cut], payload[:flip] + bytes([payload[flip] ^ 1]) + payload[flip + 1 :]):
        decode_frame(dag_cbor.encode({"op": 1, "t": f"#{kind}"}) + body, DEFAULT_LIMITS)


@pytest.mark.parametrize("kind", ["commit", "sync", "identity", "account"])
def test_a_message_of_another_shard_is_recognized_by_its_did(
    kind: Literal["commit", "sync", "identity", "account"],
) -> None:
    alice = SigningAccount()
    payload = {
        "commit": alice.commit_post("a"),
        "sync": alice.sync_event(),
        "identity": alice.identity_event(),
        "account": alice.account_event(active=True),
    }[kind]
    asked: list[str] = []

    def owns(did: str) -> bool:
        asked.append(did)
        return False

    broken = payload | {"rev": 7, "active": 7, "blocks": 7}
    for message in (payload, broken):
        assert decode_frame(encoded_frame(kind, message), DEFAULT_LIMITS, owns) == OtherShardEvent(
            payload["seq"], kind, alice.did, payload["time"]
        )
    assert asked == [alice.did] * 2
    assert decode_frame(encoded_frame(kind, payload), DEFAULT_LIMITS, lambda _did: True) == decoded_event(kind, payload)


@pytest.mark.parametrize("kind", ["commit", "sync", "identity", "account"])
def test_the_shard_of_a_message_is_that_of_the_did_that_decides_in_either_form_of_its_type(
    kind: Literal["commit", "sync", "identity", "account"],
) -> None:
    """Other fields and the long form of the type do not let two shards process a message, or none."""
    alice, other = SigningAccount(), SigningAccount()
    event = {
        "commit": alice.commit_post("a") | {"did": other.did},
        "sync": alice.sync_event() | {"repo": other.did},
        "identity": alice.identity_event() | {"repo": 5},
        "account": alice.account_event(active=False) | {"repo": other.did},
    }[kind]
    for name in (f"#{kind}", f"com.atproto.sync.subscribeRepos#{kind}"):
        frame = dag_cbor.encode({"op": 1, "t": name}) + dag_cbor.encode(event)
        decoded = decode_frame(frame, DEFAULT_LIMITS)
        assert decode_frame(frame, DEFAULT_LIMITS, lambda did: did == alice.did) == decoded
        assert decode_frame(frame, DEFAULT_LIMITS, lambda did: did != alice.did) == OtherShardEvent(
            event["seq"], kind, alice.did, event["time"]
        )


def test_a_message_without_an_account_belongs_to_every_shard() -> None:
    for message in (
        encoded_frame("info", {"name": "x"}),
        encoded_frame("commit", {"seq": 1, "repo": 7}),
        b"",
        encoded_frame("later", {"did": "x"}),
    ):
        assert decode_frame(message, DEFAULT_LIMITS, lambda _did: False) == decode_frame(message, DEFAULT_LIMITS)


@pytest.mark.parametrize("op", [-1, 2, True, "1", None])
def test_a_frame_that_is_no_message_belongs_to_every_shard(op: object) -> None:
    """The end of a stream, for example, whatever else its header and payload have."""
    payload = SigningAccount().commit_post("a") | {"error": "ConsumerTooSlow"}
    frame = dag_cbor.encode({"op": op, "t": "#commit"}) + dag_cbor.encode(payload)
    assert decode_frame(frame, DEFAULT_LIMITS, lambda _did: False) == decode_frame(frame, DEFAULT_LIMITS)


def test_any_header_and_payload_can_be_displayed() -> None:
    alice = SigningAccount()
    payload = alice.commit_post("a")
    shown = frame_for_display(encoded_frame("commit", payload))
    assert shown["header"] == {"op": 1, "t": "#commit"}
    assert shown["payload"]["ops"] == [
        {"action": "create", "path": "app.bsky.feed.post/a", "cid": {"$link": cid_text(payload["ops"][0]["cid"])}}
    ]
    assert shown["payload"]["blocks"].startswith(f"{len(payload['blocks']):,} bytes: ")
    assert frame_for_display(encoded_frame("later", {"seq": -1}))["payload"] == {"seq": -1}
    for broken in (b"", encoded_frame("commit", payload)[:-1], dag_cbor.encode({}) + dag_cbor.encode([])):
        with pytest.raises(UpstreamError, match="frame-malformed"):
            frame_for_display(broken)


@pytest.mark.parametrize(("length", "kept"), [(64, 64), (65, 0), (4_000_000, 0)])
def test_time_of_a_message_is_at_most_64_characters_long(length: int, kept: int) -> None:
    payload = SigningAccount().commit_post("a") | {"time": "2" * length}
    event, other = (
        decoded_event("commit", payload),
        decode_frame(encoded_frame("commit", payload), DEFAULT_LIMITS, lambda _: False),
    )
    assert isinstance(event, CommitEvent)
    assert isinstance(other, OtherShardEvent)
    assert (len(event.time), len(other.time)) == (kept, kept)


HEADER = dag_cbor.encode({"op": 1, "t": "#commit"})
ITEMS = {
    "nulls": b"\xf6",
    "empty byte strings": b"\x40",
    "empty lists": b"\x80",
    "empty maps": b"\xa0",
    "texts": b"\x61a",
    "maps": b"\xa1\x61a\x40",
    "deep lists": b"\x81" * 240 + b"\x00",
    "deep maps": b"\xa1\x61a" * 240 + b"\x00",
    "numbers": b"\x1b" + b"\xff" * 8,
}


def filled(item: bytes, count: int, *, payload: bool) -> bytes:
    """Return a frame with this item so many times, in a list or one after the other."""
    if not payload:
        return HEADER + item * count
    return HEADER + b"\xa1\x63ops\x9a" + count.to_bytes(4) + item * count


@pytest.mark.parametrize("payload", [True, False], ids=["list", "objects"])
@pytest.mark.parametrize("name", ITEMS)
def test_frame_with_too_many_items_is_rejected_before_it_is_decoded(
    name: str, monkeypatch: pytest.MonkeyPatch, *, payload: bool
) -> None:
    """Decoding 5 MB of deep lists takes two seconds."""
    monkeypatch.setattr("indexer.sync.frames.decode_pair", lambda _: pytest.fail("decoded"))
    frame = filled(ITEMS[name], (DEFAULT_LIMITS.frame_bytes - 100) // len(ITEMS[name]), payload=payload)
    event = decode_frame(frame, DEFAULT_LIMITS)
    assert isinstance(event, MalformedEvent)
    assert (event.reason, event.detail) == (Rejection.FRAME_TOO_LARGE, "over 16384 items")


def test_longest_commit_is_decoded() -> None:
    """200 operations with all fields, and the lists of older relays."""
    link = SigningAccount().repo.head.cid
    op = {"action": "update", "path": "a.b.c/" + "x" * 500, "cid": link, "prev": link}
    payload = SigningAccount().commit_post("x") | {"ops": [op] * 200, "blobs": [link] * 2_000}
    assert isinstance(decode_frame(encoded_frame("commit", payload), DEFAULT_LIMITS), CommitEvent)
