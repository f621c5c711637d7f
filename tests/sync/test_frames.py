from typing import Any, Literal

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.cid import cid_text
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.demo import dag_cbor
from indexer.demo.local_repo import Write
from indexer.errors import UpstreamError
from indexer.reasons import Rejection
from indexer.sync.events import (
    MAX_SEQ,
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
    decode_frame,
    frame_for_display,
)
from tests.sync.signing_account import POST, SigningAccount, decoded_event, encoded_frame


def malformed(data: bytes, limits: Limits = DEFAULT_LIMITS) -> MalformedEvent:
    decoded = decode_frame(data, limits)
    assert isinstance(decoded, MalformedEvent), decoded
    return decoded


def payload_of(kind: str, alice: SigningAccount) -> dict[str, Any]:
    match kind:
        case "commit":
            return alice.commit_post("a")
        case "sync":
            return alice.sync_event()
        case "identity":
            return alice.identity_event()
    return alice.account_event(active=False, status="deactivated")


def test_events_have_the_fields_of_the_lexicon() -> None:
    alice = SigningAccount()
    old = alice.commit_post("a")["ops"][0]["cid"]
    commit = alice.commit(Write.update(f"{POST}/a", {"n": 1}), Write.create(f"{POST}/b", {"n": 2}))
    update, create = commit["ops"]
    sha512 = b"\x01\x71\x13\x40" + bytes(64)
    ops = RepoOp("update", f"{POST}/a", update["cid"], old), RepoOp("create", f"{POST}/b", sha512, None)
    seq, did, cid, rev, since, prev = (commit[name] for name in ("seq", "repo", "commit", "rev", "since", "prevData"))
    expected = CommitEvent(seq, did, cid, rev, since, prev, ops, commit["blocks"], commit["time"])
    assert decoded_event("commit", commit | {"ops": [update, create | {"cid": sha512, "prev": None}]}) == expected
    identity, account, sync = alice.identity_event(), alice.account_event(active=True), alice.sync_event()
    seq, time = identity["seq"], identity["time"]
    assert decoded_event("identity", identity) == IdentityEvent(seq, alice.did, time)
    assert decoded_event("account", account) == AccountEvent(seq + 1, alice.did, active=True, status=None, time=time)
    assert decoded_event("sync", sync) == SyncEvent(seq + 2, alice.did, alice.head.rev, sync["blocks"], time)
    del identity["time"]
    assert decoded_event("identity", identity).time == ""
    hidden = decoded_event("account", alice.account_event(active=False, status="deactivated"))
    assert (hidden.active, hidden.status) == (False, "deactivated")
    first = alice.first_commit()
    for payload in (first | {"since": None, "prevData": None}, first):
        event = decoded_event("commit", payload)
        assert (event.since, event.prev_data) == (None, None)


def test_the_full_type_name_and_unknown_fields_are_accepted() -> None:
    payload = SigningAccount().commit_post("a") | {"somethingNew": [1, 2], "blobs": None}
    del payload["tooBig"], payload["rebase"]
    full = dag_cbor.encode({"op": 1, "t": "com.atproto.sync.subscribeRepos#commit", "v": 2})
    assert isinstance(decode_frame(full + dag_cbor.encode(payload), DEFAULT_LIMITS), CommitEvent)


def test_info_and_error() -> None:
    assert decoded_event("info", {"name": "OutdatedCursor"}) == InfoEvent("OutdatedCursor", "")
    assert decoded_event("info", {"name": "x", "message": "y"}) == InfoEvent("x", "y")
    for fields, expected in (
        ({"error": "x"}, StreamError("x", "")),
        ({"error": "FutureCursor", "message": "no"}, StreamError("FutureCursor", "no")),
    ):
        assert decode_frame(dag_cbor.encode({"op": -1}) + dag_cbor.encode(fields), DEFAULT_LIMITS) == expected


def test_unknown_events_have_their_short_type_and_number() -> None:
    for kind in ("handle", "migrate", "tombstone", "t" * 63):
        assert decoded_event(kind, {"seq": 7}) == UnknownEvent(f"#{kind}", 7)
    assert decoded_event("t" * 100, {"seq": 7}) == UnknownEvent("#" + "t" * 63, 7)
    other = dag_cbor.encode({"op": 5}) + dag_cbor.encode({"seq": 7})
    assert decode_frame(other, DEFAULT_LIMITS) == UnknownEvent("op", 7)
    for seq in (0, MAX_SEQ + 1, "7", True, None):
        assert decoded_event("later", {"seq": seq}) == UnknownEvent("#later", None)


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
        *[dag_cbor.encode({"op": op, "t": "#commit"}) + b"\xa0" for op in ("1", True, False)],
        dag_cbor.encode({"t": "#commit"}) + b"\xa0",
        dag_cbor.encode({"op": 1}) + b"\xa0",
        b"\x81" * 10_000,
    ],
)
def test_a_frame_without_header_and_payload_is_malformed(data: bytes) -> None:
    assert malformed(data).reason is Rejection.FRAME_MALFORMED


OP = {"action": "create", "path": "a/b", "cid": None}


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        ("commit", "seq", [..., 0, -1, "1", True, MAX_SEQ + 1]),
        ("commit", "repo", [..., "alice.test", "did:plc:x\n", 7]),
        ("commit", "commit", [..., b"short", None]),
        ("commit", "rev", [..., "3jzfcijpj2z2", 7]),
        ("commit", "prevData", ["bafy"]),
        ("commit", "blocks", [..., "text"]),
        ("commit", "ops", [..., None, OP, [7], [OP | {"path": 7}], [OP | {"action": 7}], [OP | {"cid": "bafy"}]]),
        ("account", "active", [..., 7]),
    ],
)
def test_an_invalid_or_missing_field_is_rejected(kind: str, field: str, values: list[Any]) -> None:
    good = payload_of(kind, SigningAccount())
    for value in values:
        changed = {name: other for name, other in (good | {field: value}).items() if other is not ...}
        bad = malformed(encoded_frame(kind, changed))
        assert bad.reason is Rejection.FIELD_INVALID, value
        assert bad.did == (None if field == "repo" else good.get("repo", good.get("did")))
        assert bad.seq == (None if field == "seq" else good["seq"])


def test_sizes_are_limited() -> None:
    alice = SigningAccount()
    commit, sync = alice.commit_post("a"), alice.sync_event()
    op = commit["ops"][0] | {"path": "a/" + "b" * 1_022}
    account = alice.account_event(active=False, status="s" * 128)
    longest = commit | {"ops": [op] * 200, "blocks": bytes(2_000_000), "seq": MAX_SEQ}
    longest["blobs"] = [op["cid"]] * 2_000  # older relays send them
    frame = encoded_frame("commit", longest)
    event = decode_frame(frame, Limits(frame_bytes=len(frame)))
    assert isinstance(event, CommitEvent)
    assert (event.seq, len(event.ops), len(event.blocks)) == (MAX_SEQ, 200, 2_000_000)
    assert len(decoded_event("sync", sync | {"blocks": bytes(10_000)}).blocks) == 10_000
    assert decoded_event("account", account).status == "s" * 128
    too_large = malformed(frame, Limits(frame_bytes=len(frame) - 1))
    assert (too_large.reason, too_large.detail) == (Rejection.FRAME_TOO_LARGE, f"{len(frame)} bytes")
    for kind, payload, reason, detail in (
        ("commit", longest | {"ops": [op] * 201}, Rejection.TOO_MANY_OPS, "201 ops"),
        ("commit", longest | {"blocks": bytes(2_000_001)}, Rejection.BLOCKS_TOO_LARGE, "2000001 bytes"),
        ("sync", sync | {"blocks": bytes(10_001)}, Rejection.BLOCKS_TOO_LARGE, "10001 bytes"),
        ("commit", commit | {"ops": [op | {"path": op["path"] + "b"}]}, Rejection.FIELD_INVALID, "path has 1025"),
    ):
        event = malformed(encoded_frame(kind, payload))
        assert event.reason is reason
        assert event.detail.startswith(detail)


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ("s" * 129, "s" * 128),
        (7, "invalid: 7"),
        ({"a": ["\0"]}, "invalid: {'a': ['\\x00']}"),
        ("a\0b", "a\ufffdb"),
        ("", None),
    ],
)
def test_odd_status_does_not_hide_that_an_account_is_inactive(status: Any, found: str | None) -> None:
    event = decoded_event("account", SigningAccount().account_event(active=False, status=status))
    assert (event.active, event.status) == (False, found)


@pytest.mark.parametrize("since", ["", "yesterday", 7, [None], False])
def test_odd_since_of_a_commit_is_a_rev_that_is_not_known(since: Any) -> None:
    assert decoded_event("commit", SigningAccount().commit_post("a") | {"since": since}).since == ""


def test_longest_did_belongs_to_a_shard() -> None:
    longest = "did:web:" + "a" * 2_040
    frames = [encoded_frame("identity", {"seq": 5, "did": longest + more, "time": "now"}) for more in ("", "a")]
    events = [decode_frame(frame, DEFAULT_LIMITS, lambda _: False) for frame in frames]
    assert events[0] == OtherShardEvent(5, "identity", longest, "now")
    assert events[1] == malformed(frames[1])


def test_first_message_is_number_one() -> None:
    assert decoded_event("identity", SigningAccount().identity_event() | {"seq": 1}).seq == 1


def test_number_of_items_is_limited() -> None:
    for items, reason in ((10, Rejection.FRAME_MALFORMED), (11, Rejection.FRAME_TOO_LARGE)):
        assert malformed(b"\xf6" * items, Limits(frame_items=10)).reason is reason, "items outside of containers count"
    frame = encoded_frame("later", {"seq": 7, "a": 1})
    assert decode_frame(frame, Limits(frame_items=10)) == UnknownEvent("#later", 7)
    assert malformed(frame, Limits(frame_items=9)).reason is Rejection.FRAME_TOO_LARGE


def test_malformed_event_names_what_can_be_read() -> None:
    alice = SigningAccount()
    event = malformed(encoded_frame("identity", {"seq": "7", "did": alice.did, "repo": "did:plc:other"}))
    assert event == MalformedEvent(
        Rejection.FIELD_INVALID, "seq is not a positive integer", "#identity", None, alice.did
    )
    long = dag_cbor.encode({"op": "1", "t": "#" + "t" * 100})
    assert malformed(long + dag_cbor.encode({"did": "x", "seq": 7})) == MalformedEvent(
        Rejection.FRAME_MALFORMED, "op is not an integer", "#" + "t" * 63, 7, None
    )
    assert malformed(dag_cbor.encode({"op": 1, "t": 7}) + b"\xa0").type == ""


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
def test_the_shard_of_a_message_is_that_of_the_did_that_decides(
    kind: Literal["commit", "sync", "identity", "account"],
) -> None:
    """Other fields and the long form of the type do not let two shards process a message, or none."""
    alice, other = SigningAccount(), SigningAccount("bob")
    payload = payload_of(kind, alice) | {"did" if kind == "commit" else "repo": other.did}
    expected = OtherShardEvent(payload["seq"], kind, alice.did, payload["time"])
    for name in (f"#{kind}", f"com.atproto.sync.subscribeRepos#{kind}"):
        frame = dag_cbor.encode({"op": 1, "t": name}) + dag_cbor.encode(payload)
        assert decode_frame(frame, DEFAULT_LIMITS, lambda did: did == alice.did) == decode_frame(frame, DEFAULT_LIMITS)
        assert decode_frame(frame, DEFAULT_LIMITS, lambda did: did != alice.did) == expected
    broken = encoded_frame(kind, payload | {"rev": 7, "active": 7, "blocks": 7})
    assert decode_frame(broken, DEFAULT_LIMITS, lambda _: False) == expected


def test_what_is_no_message_of_an_account_belongs_to_every_shard() -> None:
    """The end of a stream, for example, whatever else its header and payload have."""
    payload = SigningAccount().commit_post("a") | {"error": "ConsumerTooSlow"}
    for frame in (
        b"",
        encoded_frame("info", {"name": "x"}),
        encoded_frame("commit", {"seq": 1, "repo": 7}),
        encoded_frame("later", {"did": "x"}),
        *[dag_cbor.encode({"op": op, "t": "#commit"}) + dag_cbor.encode(payload) for op in (-1, 2, True, "1", None)],
    ):
        assert decode_frame(frame, DEFAULT_LIMITS, lambda _: False) == decode_frame(frame, DEFAULT_LIMITS)


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


ITEMS = {"nulls": b"\xf6", "empty lists": b"\x80", "maps": b"\xa1\x61a\x40", "deep lists": b"\x81" * 240 + b"\x00"}


@pytest.mark.parametrize("name", ITEMS)
def test_frame_with_too_many_items_is_rejected_before_it_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding 5 MB of deep lists takes two seconds. The items are in a list, or one after the other."""
    monkeypatch.setattr("indexer.sync.events.decode_pair", lambda _: pytest.fail("decoded"))
    item = ITEMS[name]
    count = (DEFAULT_LIMITS.frame_bytes - 100) // len(item)
    header = dag_cbor.encode({"op": 1, "t": "#commit"})
    for start in (header, header + b"\xa1\x63ops\x9a" + count.to_bytes(4)):
        event = malformed(start + item * count)
        assert (event.reason, event.detail) == (Rejection.FRAME_TOO_LARGE, "over 16384 items")
