"""The native core decodes frames to the events of the reference, and decodes all ordinary commits."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.cbor import count_items
from indexer.atproto.cid import RAW, cid_of
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.core.core import PYTHON_CORE
from indexer.demo import dag_cbor
from indexer.demo.local_repo import Write
from indexer.sync.events import MAX_SEQ, CommitEvent, Event, MalformedEvent, OtherShardEvent, RepoOp, decode_frame
from indexer.sync.shard import BUCKETS, PLAIN, Layout, Shard
from tests.native_module import CountingCore, native_module, shared_core
from tests.profiles import scaled
from tests.sync import published_frames
from tests.sync.signing_account import POST, SigningAccount, encoded_frame

native_module()  # without it, the module is skipped

HEADER = dag_cbor.encode({"t": "#commit", "op": 1})
ALL = Shard()
NO_LIMIT = 1 << 40
LINK = cbor2.CBORTag(42, b"\0" + cid_of(b""))


@cache
def decoder(limits: Limits, shard: Shard) -> Callable[[bytes], CommitEvent | OtherShardEvent | None]:
    return shared_core().commit_decoder(limits, shard)


def decoded(frame: bytes, limits: Limits = DEFAULT_LIMITS, shard: Shard = ALL) -> bool:
    """Return True if the native core decodes the frame, after comparing the event with that of the reference."""
    event = decoder(limits, shard)(frame)
    if event is None:
        return False
    assert repr(event) == repr(reference(frame, limits, shard))  # equal tuples may have other classes
    return True


def reference(frame: bytes, limits: Limits = DEFAULT_LIMITS, shard: Shard = ALL) -> Event:
    return decode_frame(frame, limits, None if shard.count == 1 else shard.owns)


@cache
def usual_payload() -> dict[str, Any]:
    """Return the payload of a commit with each action, and with other bytes as blocks."""
    account = SigningAccount()
    account.commit_post("a")
    account.commit_post("b")
    writes = Write.create(f"{POST}/c", {}), Write.update(f"{POST}/b", {}), Write.delete(f"{POST}/a")
    return account.commit(*writes) | {"blocks": b"blocks"}


def frame_with(**fields: Any) -> bytes:
    """Return the frame of the usual payload with other fields, without those that are `...`."""
    fields = {name: value for name, value in (usual_payload() | fields).items() if value is not ...}
    return HEADER + cbor2.dumps(linked(fields), canonical=True)


def linked(value: Any) -> Any:
    """Return a value with links for all byte strings that are a CID of a DAG-CBOR block."""
    match value:
        case bytes() if value[:4] == cid_of(b"")[:4]:
            return cbor2.CBORTag(42, b"\0" + value)
        case list():
            return [linked(item) for item in value]
        case dict():
            return {name: linked(item) for name, item in value.items()}
        case _:
            return value


def op_with(**fields: Any) -> bytes:
    return frame_with(ops=[{"action": "create", "path": f"{POST}/a", "cid": cid_of(b"")} | fields])


def test_published_commits_are_decoded() -> None:
    frames = published_frames.recorded()
    assert [decoded(frame) for frame in frames] == [isinstance(reference(frame), CommitEvent) for frame in frames]
    assert sum(map(decoded, frames)) == 73


def event_of(frame: bytes) -> CommitEvent:
    event = reference(frame)
    assert isinstance(event, CommitEvent)
    return event


@settings(max_examples=scaled(300))
@given(st.data())
def test_frames_with_changed_bytes_agree_with_the_reference(data: st.DataObject) -> None:
    frame = bytearray(frame_with())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(frame) - 1))
        end = start + data.draw(st.sampled_from([0, 1, 1, 1, 2, 8]))
        byte = frame[start]
        frame[start:end] = data.draw(
            st.sampled_from([bytes([byte ^ 1]), bytes([byte ^ 0x20]), b"", b"\xf6", b"\x18", b"\x40", b"\x60", b"\x80"])
            | st.binary(max_size=3)
        )
    decoded(bytes(frame))


def test_every_flipped_bit_and_every_cut_agrees_with_the_reference() -> None:
    frame = frame_with()
    kept = 0
    for index in range(len(frame)):
        for bit in range(8):
            changed = bytearray(frame)
            changed[index] ^= 1 << bit
            kept += decoded(bytes(changed))
        assert not decoded(frame[:index])
    assert kept > len(frame)  # bits of hashes, texts and numbers
    assert not decoded(frame + b"\0")


EXACT: dict[str, Callable[[bytes], int]] = {
    "frame_bytes": len,
    "frame_items": lambda frame: count_items(frame, NO_LIMIT, NO_LIMIT, objects=2)[0],
    "commit_blocks_bytes": lambda frame: len(event_of(frame).blocks),
    "commit_ops": lambda frame: len(event_of(frame).ops),
}


@pytest.mark.parametrize("name", EXACT)
def test_limits_are_exact(name: str) -> None:
    frame = frame_with()
    at_limit = EXACT[name](frame)
    assert decoded(frame, replace(DEFAULT_LIMITS, **{name: at_limit}))
    below = replace(DEFAULT_LIMITS, **{name: at_limit - 1})
    assert isinstance(reference(frame, below), MalformedEvent)
    assert not decoded(frame, below)


RAW_LINK = cbor2.CBORTag(42, b"\0" + RAW + bytes(32))
SHORT_LINK = cbor2.CBORTag(42, b"\0\x01\x71\x00\x00")
ORDINARY: dict[str, list[Any]] = {
    "seq": [1, MAX_SEQ],
    "repo": ["did:web:" + "a" * 2_040],
    "time": ["2" * 64],
    "since": [None, ...],
    "prevData": [None, ...],
    "commit": [RAW_LINK],
    "ops": [[]],
    "blocks": [b""],
    "unknown": [[{"a": [None, True, -5, "é", LINK, b"\x01"]}]],
}
OTHERS: dict[str, list[Any]] = {
    "seq": [MAX_SEQ + 1, 0, -1],
    "repo": ["did:web:" + "a" * 2_041],
    "time": ["2" * 65, ...],
    "since": ["", 7],
    "commit": [bytes(36)],
    "ops": [[{}]],
    "blocks": [LINK],
    "unknown": [1.5, SHORT_LINK, cbor2.CBORTag(43, b"")],
}


def test_ordinary_commits_are_decoded_and_others_are_left_to_the_reference() -> None:
    for table, ordinary in ((ORDINARY, True), (OTHERS, False)):
        for name, values in table.items():
            for value in values:
                assert decoded(frame_with(**{name: value})) is ordinary, (name, value)
    for fields in (
        {"path": "é" * 512}, {"path": ""}, {"action": "anything"}, {"cid": None, "prev": None}, {"x": {"y": [1]}}
    ):  # fmt: skip
        assert decoded(op_with(**fields))
    for name, value in (
        ("path", "p" * 1_025), ("path", "é" * 1_024), ("cid", SHORT_LINK), ("cid", RAW + bytes(32))
    ):  # fmt: skip
        assert not decoded(op_with(**{name: value}))


def test_commit_that_is_not_canonical_is_left_to_the_reference() -> None:
    frame = frame_with(seq=4)
    long_number = frame.replace(b"\x63seq\x04", b"\x63seq\x18\x04")
    assert reference(long_number) == reference(frame)
    assert not decoded(long_number)
    for header in ({"op": 1, "t": "com.atproto.sync.subscribeRepos#commit"}, {"op": 1, "t": "#commit", "v": 1}):
        other = dag_cbor.encode(header) + frame.removeprefix(HEADER)
        assert isinstance(reference(other), CommitEvent)
        assert not decoded(other)


REVERSED = Layout(tuple(reversed(range(BUCKETS))))


@pytest.mark.parametrize("layout", [PLAIN, REVERSED], ids=["plain", "reversed"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 256])
def test_commit_of_another_shard_is_recognized_by_its_did(count: int, layout: Layout) -> None:
    kinds = set()
    for number in range(50 if count < 256 else 5):
        frame = frame_with(repo=f"did:web:a{number}.example")
        for shard in (Shard(index, count, layout) for index in range(count)):
            assert decoded(frame, shard=shard)
            kinds.add(type(reference(frame, shard=shard)))
    assert kinds == ({CommitEvent} if count == 1 else {CommitEvent, OtherShardEvent})


@pytest.mark.parametrize("shard", [ALL, Shard(0, 2), Shard(1, 2), Shard(1, 2, REVERSED)], ids=repr)
def test_decoder_returns_the_event_of_any_frame_with_and_without_the_native_core(shard: Shard) -> None:
    account = SigningAccount()
    frames = [
        frame_with(),
        frame_with(seq=0),
        encoded_frame("account", account.account_event(active=False)),
        encoded_frame("sync", account.sync_event()),
        dag_cbor.encode({"op": -1}) + dag_cbor.encode({"error": "FutureCursor"}),
        b"",
    ]
    native = CountingCore()
    for core in (PYTHON_CORE, native):
        decode = core.decoder(DEFAULT_LIMITS, shard)
        assert [repr(decode(frame)) for frame in frames] == [repr(reference(frame, shard=shard)) for frame in frames]
    assert (native.frames, native.decoded) == (len(frames), 1)


@pytest.mark.parametrize("name", ["CommitEvent", "RepoOp", "OtherShardEvent"])
def test_native_core_rejects_events_with_other_fields(name: str) -> None:
    classes = {cls.__name__: cls for cls in (CommitEvent, RepoOp, OtherShardEvent)}
    new_decoder = native_module().FrameDecoder
    assert new_decoder(SimpleNamespace(**classes), DEFAULT_LIMITS, None).decode(frame_with()) is not None
    for fields in (classes[name]._fields[::-1], (*classes[name]._fields, "new"), classes[name]._fields[:-1]):
        other = SimpleNamespace(**classes | {name: type(name, (), {"_fields": fields})})
        with pytest.raises(ValueError, match=f"{name} has the fields"):
            new_decoder(other, DEFAULT_LIMITS, None)
