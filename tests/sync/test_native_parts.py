"""The parts of the native core, records and trees, accept nothing with another result than the reference."""

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto import cbor
from indexer.atproto.car import split_car
from indexer.atproto.cbor import count_items
from indexer.atproto.cid import DAG_CBOR, RAW, cid_of, is_cid
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import NetOp, invert, key_height
from indexer.atproto.record import MAX_DEPTH, Problem, Value, decode_record
from indexer.errors import UpstreamError
from indexer.localnet import dag_cbor
from indexer.sync.events import CommitEvent
from indexer.sync.frames import decode_frame
from tests.atproto.generated_cbor import DATA
from tests.atproto.mst import oracle, test_inversion
from tests.atproto.mst.oracle import Blocks, Records
from tests.atproto.mst.random_trees import KEYS, Edits, edited, edits_strategy, records_strategy
from tests.atproto.test_cbor import DASL_FILES
from tests.native_module import native_module
from tests.profiles import scaled
from tests.sync import test_published
from tests.vectors import vectors

NSID = "com.example.thing"
PROBLEMS = [None, Problem.NOT_A_MAP, Problem.NO_TYPE, Problem.OTHER_TYPE]
NO_LIMIT = 1 << 40


def converted(block: bytes, collection: str = NSID) -> bool:
    """Return True if the native core converts the record, after comparing the result with that of the reference."""
    limits = DEFAULT_LIMITS
    found = native_module().record_json(block, collection, limits.record_items, limits.record_json_bytes)
    if found is None:
        return False
    text, items, shape = found
    assert decode_record(block, collection, limits) == Value(text, PROBLEMS[shape], None)
    assert count_items(block, NO_LIMIT, MAX_DEPTH) == (items, False)
    return True


@settings(max_examples=scaled(2_000))
@given(DATA)
def test_generated_valid_and_broken_records_agree_with_the_reference(data: bytes) -> None:
    converted(data)


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: "$link" not in text and "$bytes" not in text
)
ORDINARY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | TEXTS
    | st.binary(max_size=40).filter(lambda data: data[:1] not in {b"\x01", b"\x12"})
    | st.binary(min_size=32, max_size=32).map(lambda digest: DAG_CBOR + digest)
    | st.binary(min_size=32, max_size=32).map(lambda digest: RAW + digest),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=6),
    max_leaves=20,
)


@settings(max_examples=scaled(500))
@given(ORDINARY, st.sampled_from([..., NSID, "com.example.other", 1, None]))
def test_all_ordinary_records_are_converted(value: Any, type_: Any) -> None:
    if isinstance(value, dict) and type_ is not ...:
        value |= {"$type": type_}
    block = dag_cbor.encode(value)
    assert converted(block) == (not any(name in block for name in (b"$link", b"$bytes")))


@pytest.mark.parametrize("step", [997, pytest.param(97, marks=pytest.mark.slow)])
def test_every_character_is_written_alike(step: int) -> None:
    """Each of the first ones, and every so many of the others."""
    left = [
        number
        for number in range(0x110000)
        if not 0xD800 <= number < 0xE000  # surrogates
        and (number < 0x3000 or number % step == 0)
        and not converted(dag_cbor.encode({"text": f"a{chr(number)}b", f"k{chr(number)}": 1}))
    ]
    assert left == [0]


def test_byte_strings_of_every_size_are_written_alike() -> None:
    for size in range(70):
        assert converted(dag_cbor.encode({"bytes": bytes(range(100, 100 + size))}))


@pytest.mark.parametrize(
    "number", [0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1, -1, -24, -25, -256, -257, -(2**63)]
)
def test_integers_are_written_alike(number: int) -> None:
    assert converted(dag_cbor.encode({"n": number, "list": [number]}))


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"\xff",
        b"\xf7",
        b"\xf8\x14",
        b"\x18\x17",
        b"\x19\x00\xff",
        b"\x1a\x00\x00\xff\xff",
        b"\x1b" + bytes(4) + b"\xff" * 4,
        b"\x1b\x80" + bytes(7),
        b"\x3b\x80" + bytes(7),
        b"\xfb\x3f\xf0" + bytes(6),
        b"\xf9\x3c\x00",
        b"\x5f\x40\xff",
        b"\x9f\xff",
        b"\xbf\xff",
        b"\xa0\x00",
        b"\xa2\x61b\x00\x61a\x00",
        b"\xa2\x62aa\x00\x61b\x00",
        b"\xa2\x61a\x00\x61a\x00",
        b"\xa1\x00\x00",
        b"\xa1\x41a\x00",
        b"\xa1\x61\xff\x00",
        b"\x63\xed\xa0\x80",
        b"\x62\xc0\x80",
        b"\xc0\x60",
        b"\xd8\x2b\x58\x25\x00" + cid_of(b""),
        b"\xd9\x00\x2a\x58\x25\x00" + cid_of(b""),
        b"\xd8\x2a\x58\x25\x01" + cid_of(b""),
        b"\xd8\x2a\x58\x24" + cid_of(b""),
        b"\xd8\x2a\x40",
        b"\xd8\x2a\x78\x25\x00" + cid_of(b""),
        b"\x58\x24" + cid_of(b""),
        b"\x44\x01\x71\x12\x00",
        b"\x58\x22\x12\x20" + bytes(32),
        b"\x9b" + b"\xff" * 8,
        b"\xbb" + b"\xff" * 8,
        b"\x7b" + b"\xff" * 8,
        b"\x5b" + b"\xff" * 8,
        b"\x81" * 65 + b"\x00",
        b"\x81" * 100_000,
        b"\xa1\x61a" * 50_000,
        b"\xd8\x2a" * 50_000,
        dag_cbor.encode({"$link": "x"}),
        dag_cbor.encode({"a": "x$bytesx"}),
        cbor.encode([None] * (DEFAULT_LIMITS.record_items)),
        cbor.encode([b""] * 160_000),
    ],
)
def test_unusual_and_invalid_records_are_left_to_the_reference(block: bytes) -> None:
    assert not converted(block)


def test_limits_of_items_and_of_json_are_exact() -> None:
    block = dag_cbor.encode({"a": [1, 2, 3], "b": "text"})
    text, items, _ = native_module().record_json(block, NSID, NO_LIMIT, NO_LIMIT)
    assert native_module().record_json(block, NSID, items, len(text)) == (text, items, 2)
    assert native_module().record_json(block, NSID, items - 1, len(text)) is None
    assert native_module().record_json(block, NSID, items, len(text) - 1) is None


def test_records_of_64_levels_are_converted() -> None:
    assert converted(b"\x81" * 63 + b"\x80")
    assert converted(b"\xa1\x61a" * 63 + b"\xa0")
    assert not converted(b"\x81" * 64 + b"\x80")


def test_the_published_records_and_fixtures_agree_with_the_reference() -> None:
    fixtures = json.loads(vectors("atproto-interop-tests/data-model/data-model-fixtures.json").read_text())
    assert all(converted(b64decode(case["cbor_base64"] + "==")) for case in fixtures)
    cases = [
        bytes.fromhex(case["data"])
        for name in DASL_FILES
        for case in json.loads(vectors(f"cbor/dasl-testing/{name}.json").read_text())
    ]
    paths = vectors("cbor/codec-fixtures").glob("fixtures/*/*.dag-cbor")
    assert sum(converted(data) for data in [*cases, *(path.read_bytes() for path in paths)]) > 40


def test_all_records_of_the_published_frames_are_converted() -> None:
    records = []
    for frame in test_published.commits():
        event = decode_frame(frame, DEFAULT_LIMITS)
        assert isinstance(event, CommitEvent)
        _, blocks = split_car(event.blocks, DEFAULT_LIMITS, max_bytes=len(event.blocks))
        records += [(op.path.partition("/")[0], blocks[op.cid]) for op in event.ops if op.cid]
    assert all(converted(block, collection) for collection, block in records)
    assert len(records) > 50


def root_before(blocks: Blocks, root: bytes, ops: Sequence[NetOp], prev_data: bytes) -> bytes | None:
    """Return the result of the native core, after comparing it with the reference.

    With the returned root as `prev_data`, the reference must find that the operations lead from it to `root`.
    """
    found: bytes | None = native_module().root_before(
        [(cid, block) for cid, block in blocks.items() if is_cid(cid)], root, ops, prev_data, DEFAULT_LIMITS
    )
    if found is not None:
        expected = invert(blocks, root, ops, found, DEFAULT_LIMITS)
        assert (expected.root, expected.ops_hold) == (found, True), expected
    return found


@settings(max_examples=scaled(300))
@given(records_strategy, edits_strategy, st.randoms())
def test_all_whole_trees_are_inverted(before: Records, edits: Edits, random: Any) -> None:
    after = edited(before, edits)
    ops = oracle.difference(before, after)
    random.shuffle(ops)
    prev_data = oracle.build(before)[0]
    root, blocks = oracle.build(after)
    if ops:
        assert root_before(blocks, root, ops, prev_data) == prev_data


@settings(max_examples=scaled(500))
@given(records_strategy, edits_strategy, edits_strategy, st.data())
def test_trees_with_missing_nodes_and_wrong_operations_agree_with_the_reference(
    before: Records, edits: Edits, others: Edits, data: st.DataObject
) -> None:
    after = edited(before, edits)
    prev_data = oracle.build(before)[0]
    root, blocks = oracle.build(after)
    ops = oracle.difference(before, edited(after, others) if data.draw(st.booleans()) else after)
    for cid in data.draw(st.sets(st.sampled_from(sorted(blocks)), max_size=3)):
        del blocks[cid]
    if not ops:
        return
    found = root_before(blocks, root, ops, prev_data)
    expected = invert_or_none(blocks, root, ops, prev_data)
    assert (found == prev_data) == (expected == prev_data)


def invert_or_none(blocks: Blocks, root: bytes, ops: Sequence[NetOp], prev_data: bytes) -> bytes | None:
    try:
        return invert(blocks, root, ops, prev_data, DEFAULT_LIMITS).root
    except UpstreamError:
        return None


@settings(max_examples=scaled(1_000))
@given(records_strategy, edits_strategy, st.data())
def test_trees_with_a_changed_node_agree_with_the_reference(before: Records, edits: Edits, data: st.DataObject) -> None:
    """A node with changed bytes gets its own CID, and the nodes above link to it."""
    after = edited(before, edits)
    ops = oracle.difference(before, after)
    root, blocks = oracle.build(after)
    cid = data.draw(st.sampled_from(sorted(blocks)))
    block = bytearray(blocks[cid])
    index = data.draw(st.integers(0, len(block) - 1))
    block[index] = data.draw(st.sampled_from([block[index] ^ 1, block[index] ^ 0x20, 0x18, 0x58, 0xF6, 0]))
    root = replaced(blocks, root, cid, bytes(block))
    if ops:
        root_before(blocks, root, ops, oracle.build(before)[0])


def replaced(blocks: Blocks, root: bytes, cid: bytes, block: bytes) -> bytes:
    """Replace a node and all nodes above it; return the new root."""
    while True:
        new = cid_of(block)
        blocks[new] = block
        if cid == root:
            return new
        above = next(found for found, other in blocks.items() if cid in other)
        cid, block = above, blocks[above].replace(cid, new)


NODE_FIELDS = st.fixed_dictionaries(
    {
        "k": st.sampled_from([b"", *KEYS[:12]]) | st.binary(max_size=3),
        "p": st.integers(0, 30),
        "t": st.none() | st.just(cid_of(b"")),
        "v": st.just(cid_of(b"v")),
    }
)


@settings(max_examples=scaled(1_000))
@given(st.lists(NODE_FIELDS, max_size=4), st.none() | st.just(cid_of(b"")), st.sampled_from(KEYS))
def test_roots_of_any_entries_agree_with_the_reference(
    entries: list[dict[str, Any]], left: bytes | None, key: bytes
) -> None:
    def link(cid: bytes | None) -> Any:
        return cid and cbor2.CBORTag(42, b"\0" + cid)

    fields = [entry | {"t": link(entry["t"]), "v": link(entry["v"])} for entry in entries]
    block = cbor2.dumps({"e": fields, "l": link(left)}, canonical=True)
    root_before({cid_of(block): block}, cid_of(block), [NetOp(key, cid_of(b"old"), None)], cid_of(b""))


@pytest.mark.slow
def test_all_cases_of_the_mst_test_suite_are_inverted_with_and_without_each_part() -> None:
    """With the whole proof, and without its last node."""
    found: Counter[str] = Counter()
    for blocks, root, ops, old in test_inversion.mst_test_suite():
        whole = root == old if not ops else root_before(blocks, root, ops, old) == old
        found["whole"] += whole
        part = dict(list(blocks.items())[:-1])
        if ops:
            decided = root_before(part, root, ops, old) == old
            assert decided == (invert_or_none(part, root, ops, old) == old)
    assert found == {"whole": 8192}


def deep_chain(key: bytes, value: bytes, layers: int) -> tuple[bytes, Blocks]:
    """Return the root and the nodes of a chain of nodes without keys, down to a node with one key."""
    blocks: Blocks = {}
    block = oracle.encode([key], [value], None, [None])
    for _ in range(layers):
        blocks[cid_of(block)] = block
        block = oracle.encode([], [], cid_of(block), [])
    blocks[cid_of(block)] = block
    return cid_of(block), blocks


@pytest.mark.parametrize("layers", [1, 5, 127, 128, 1_000])
def test_chains_of_nodes_without_keys_agree_with_the_reference(layers: int) -> None:
    key = KEYS[0]
    root, blocks = deep_chain(key, cid_of(b"v"), layers)
    assert root_before(blocks, root, [NetOp(key, None, cid_of(b"v"))], cid_of(b"")) is None


def nested(keys: Iterable[bytes]) -> Records:
    return dict.fromkeys(keys, cid_of(b"v"))


def test_high_trees_are_inverted() -> None:
    """A key of each height up to 7, so that whole subtrees are split and merged."""
    keys = [next(oracle.keys_of_height(height)) for height in range(8)]
    assert [key_height(key) for key in keys] == list(range(8))
    for removed in keys:
        before, after = nested(keys), nested(key for key in keys if key != removed)
        for old, new in ((before, after), (after, before)):
            root, blocks = oracle.build(new)
            assert root_before(blocks, root, oracle.difference(old, new), oracle.build(old)[0]) == oracle.build(old)[0]
