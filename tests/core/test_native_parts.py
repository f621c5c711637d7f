"""The parts of the native core, records and trees, accept nothing with another result than the reference."""

import json
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto import cbor
from indexer.atproto.car import split_car
from indexer.atproto.cbor import MAX_LEVELS, count_items
from indexer.atproto.cid import DAG_CBOR, cid_of, is_cid
from indexer.atproto.inversion import NetOp, invert
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.record import Problem, Value, decode_record
from indexer.demo import dag_cbor
from tests.atproto.generated_cbor import DATA
from tests.atproto.mst import oracle
from tests.atproto.mst.oracle import Blocks, Records
from tests.atproto.mst.random_trees import Edits, edited, edits_strategy, records_strategy
from tests.native_module import native_module
from tests.profiles import scaled
from tests.sync import published_frames
from tests.vectors import vectors

native_module()  # without it, the module is skipped

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
    assert count_items(block, NO_LIMIT, MAX_LEVELS) == (items, False)
    return True


@settings(max_examples=scaled(300))
@given(DATA)
def test_generated_valid_and_broken_records_agree_with_the_reference(data: bytes) -> None:
    converted(data)


TEXTS = st.text(st.characters(exclude_characters="\0$", exclude_categories=["Cs"]), max_size=20)
ORDINARY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | TEXTS
    | st.binary(max_size=31).filter(lambda data: data[:1] not in {b"\x01", b"\x12"})  # it may be a CID
    | st.binary(min_size=32, max_size=32).map(lambda digest: DAG_CBOR + digest),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=6),
    max_leaves=20,
)


@settings(max_examples=scaled(300))
@given(ORDINARY, st.sampled_from([..., NSID, "com.example.other", 1, None]))
def test_all_ordinary_records_are_converted(value: Any, type_: Any) -> None:
    if isinstance(value, dict) and type_ is not ...:
        value |= {"$type": type_}
    assert converted(dag_cbor.encode(value))


@pytest.mark.slow
def test_every_character_is_written_alike() -> None:
    """Each of the first ones, and every 97th of the others."""
    left = [
        number
        for number in range(0x110000)
        if not 0xD800 <= number < 0xE000  # surrogates
        and (number < 0x3000 or number % 97 == 0)
        and not converted(dag_cbor.encode({"text": f"a{chr(number)}b", f"k{chr(number)}": 1}))
    ]
    assert left == [0]


CID = cid_of(b"").hex()
UNUSUAL = f"""
    f7 f814 1817 1900ff 1a0000ffff 1b00000000ffffffff 1b8000000000000000 3b8000000000000000 fb3ff0000000000000 f93c00
    5f40ff 9fff bfff a000 a2616200616100 a2626161006162 a2616100616100 a10000 a1416100 a161ff00 ff
    63eda080 62c080 c060 d82b582500{CID} d9002a582500{CID} d82a582501{CID} d82a5824{CID} d82a40 d82a782500{CID}
    5824{CID} 4401711200 58221220{bytes(32).hex()} 9bffffffffffffffff bbffffffffffffffff 7bffffffffffffffff
    5bffffffffffffffff
"""
"""Numbers and lengths that are too long or too large, floats, other tags, repeated and unsorted keys, bad UTF-8."""


@pytest.mark.parametrize(
    "block",
    [
        b"",
        *map(bytes.fromhex, UNUSUAL.split()),
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


def test_limits_of_items_json_and_levels_are_exact() -> None:
    block = dag_cbor.encode({"a": [1, 2, 3], "b": "text"})
    text, items, _ = native_module().record_json(block, NSID, NO_LIMIT, NO_LIMIT)
    assert native_module().record_json(block, NSID, items, len(text)) == (text, items, 2)
    assert native_module().record_json(block, NSID, items - 1, len(text)) is None
    assert native_module().record_json(block, NSID, items, len(text) - 1) is None
    assert converted(b"\x81" * 63 + b"\x80")
    assert converted(b"\xa1\x61a" * 63 + b"\xa0")
    assert not converted(b"\x81" * 64 + b"\x80")


def test_published_records_and_fixtures_agree_with_the_reference() -> None:
    fixtures = json.loads(vectors("atproto-interop-tests/data-model/data-model-fixtures.json").read_text())
    assert all(converted(b64decode(case["cbor_base64"] + "==")) for case in fixtures)
    cases = [
        bytes.fromhex(case["data"])
        for path in vectors("cbor/dasl-testing").glob("*.json")
        for case in json.loads(path.read_text())
    ]
    paths = vectors("cbor/codec-fixtures").glob("fixtures/*/*.dag-cbor")
    assert sum(converted(data) for data in [*cases, *(path.read_bytes() for path in paths)]) > 40
    records = []
    for _, event in published_frames.commits():
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
