"""Nodes: heights, prefixes, and that the decoder takes the canonical bytes and nothing else."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst.node import (
    EMPTY_TREE,
    MAX_KEY_BYTES,
    Node,
    common_prefix,
    decode_node,
    encode_node,
    key_height,
)
from indexer.errors import UpstreamError
from indexer.reasons import Rejection
from tests.atproto.mst import oracle
from tests.vectors import vectors

CID_A, CID_B, CID_C = (oracle.cid(name) for name in (b"a", b"b", b"c"))
KEYS = list(islice(oracle.keys_of_height(1), 4))
LEAVES = list(islice(oracle.keys_of_height(0), 4))


def refused(block: bytes) -> str:
    with pytest.raises(UpstreamError) as caught:
        decode_node(block, DEFAULT_LIMITS)
    assert caught.value.reason is Rejection.NODE_MALFORMED
    return caught.value.detail


def encoded(node: Node) -> bytes:
    return encode_node(node.keys, node.values, node.left, node.trees)


def test_key_heights_of_the_interop_tests() -> None:
    cases = json.loads(vectors("atproto-interop-tests/mst/key_heights.json").read_text())
    assert {case["key"]: key_height(case["key"].encode()) for case in cases} == {
        case["key"]: case["height"] for case in cases
    }


def test_example_keys_carry_their_height_in_their_name() -> None:
    keys = vectors("atproto-interop-tests/mst/example_keys.txt").read_text().split()
    assert len(keys) == 156
    assert [key_height(key.encode()) for key in keys] == [int(key[1]) for key in keys]


def test_common_prefixes_of_the_interop_tests() -> None:
    for case in json.loads(vectors("atproto-interop-tests/mst/common_prefix.json").read_text()):
        assert common_prefix(case["left"].encode(), case["right"].encode()) == case["len"], case


@given(st.binary(max_size=40))
def test_height_is_half_the_leading_zero_bits(key: bytes) -> None:
    assert key_height(key) == oracle.height(key)


@given(st.binary(max_size=6), st.binary(max_size=6), st.binary(max_size=6))
def test_common_prefix_is_common_and_longest(stem: bytes, left: bytes, right: bytes) -> None:
    size = common_prefix(stem + left, stem + right)
    assert (stem + left)[:size] == (stem + right)[:size]
    assert (stem + left)[size : size + 1] != (stem + right)[size : size + 1] or stem + left == stem + right


def test_the_empty_tree() -> None:
    assert oracle.cid_from_text("bafyreie5737gdxlw5i64vzichcalba3z2v5n6icifvx5xytvske7mr3hpm") == EMPTY_TREE
    node = decode_node(encode_node([], [], None, []), DEFAULT_LIMITS)
    assert (node.keys, node.left, node.height) == ([], None, None)


def test_published_roots() -> None:
    record = oracle.cid_from_text("bafyreigikq7wl24jegwvx22wca5gfsbzmwdftbco5ba2qiqfyxrmmsyrvy")
    single = encode_node([b"com.example.rec/self"], [record], None, [None])
    assert oracle.cid(single) == oracle.cid_from_text("bafyreiccafd5k5mikwmzppg3xzmyb2td6bblnubwxt7tuuaazgapdgxb5u")
    pair = encode_node([b"com.example.rec/a", b"com.example.rec/self"], [record] * 2, None, [None] * 2)
    assert oracle.cid(pair) == oracle.cid_from_text("bafyreibsktsrrzzf43sn2uthrfibaoekblumgsoaui2iw7f3qmwogshzfq")


@given(st.data(), st.sampled_from([0, 1]), st.integers(1, 40))
def test_decoding_undoes_encoding(data: st.DataObject, height: int, size: int) -> None:
    keys = sorted(islice(oracle.keys_of_height(height), size))
    cids = st.sampled_from([CID_A, CID_B, CID_C])
    subtrees = st.none() | cids if height else st.none()
    values = [data.draw(cids) for _ in keys]
    trees = [data.draw(subtrees) for _ in keys]
    left = data.draw(subtrees)
    block = encode_node(keys, values, left, trees)
    assert block == oracle.encode(keys, values, left, trees)
    node = decode_node(block, DEFAULT_LIMITS)
    assert (node.keys, node.values, node.left, node.trees, node.height) == (keys, values, left, trees, height)


@pytest.mark.parametrize("size", [23, 24, 255, 256, MAX_KEY_BYTES])
def test_keys_and_prefixes_of_every_head_size(size: int) -> None:
    keys = [b"k" * size + bytes([last]) for last in range(256)]
    leaves = [key[-size:] for key in keys if key_height(key[-size:]) == 0][:3]
    block = encode_node(leaves, [CID_A] * 3, None, [None] * 3)
    assert block == oracle.encode(leaves, [CID_A] * 3, None, [None] * 3)
    assert decode_node(block, DEFAULT_LIMITS).keys == leaves


def test_a_key_over_the_limit_is_refused() -> None:
    block = encode_node([b"k" * (MAX_KEY_BYTES + 1)], [CID_A], None, [None])
    assert "a key of 1025 bytes" in refused(block)


def test_more_entries_than_the_limit_are_refused() -> None:
    block = encode_node(sorted(LEAVES), [CID_A] * 4, None, [None] * 4)
    assert len(decode_node(block, replace(DEFAULT_LIMITS, node_entries=4)).keys) == 4
    with pytest.raises(UpstreamError, match="4 entries"):
        decode_node(block, replace(DEFAULT_LIMITS, node_entries=3))


@pytest.mark.parametrize(
    "value",
    [
        b"\x01\x55\x12\x20" + bytes(32),  # raw
        b"\x01\x71\x1b\x20" + bytes(32),  # another hash
        b"\x01\x71\x13\x40" + bytes(64),  # SHA-512
        b"\x01\x81\x02\x00\x03abc",  # identity, a codec of two bytes
    ],
)
def test_values_may_be_any_cid_of_version_1(value: bytes) -> None:
    block = oracle.encode([LEAVES[0]], [value], None, [None])
    node = decode_node(block, DEFAULT_LIMITS)
    assert node.values == [value]
    assert encoded(node) == block


@pytest.mark.parametrize(
    "value", [b"", b"\x01", b"\x12\x20" + bytes(32), b"\x01\x71\x12\x20" + bytes(31), b"\x01\x71\x12\x20" + bytes(33)]
)
def test_values_that_are_no_cid_are_refused(value: bytes) -> None:
    refused(oracle.encode([LEAVES[0]], [value], None, [None]))


def test_links_to_nodes_have_one_form() -> None:
    raw = b"\x01\x55\x12\x20" + bytes(32)
    refused(oracle.encode([KEYS[0]], [CID_A], raw, [None]))
    refused(oracle.encode([KEYS[0]], [CID_A], None, [raw]))


Fields = dict[str, object]


def rewritten(change: Callable[[Fields, list[Fields]], object]) -> bytes:
    """A node of two entries with one thing changed in it."""
    keys = sorted(KEYS)[:2]
    node = cbor2.loads(oracle.encode(keys, [CID_A, CID_B], None, [CID_C, None]))
    change(node, node["e"])
    return cbor2.dumps(node, canonical=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda node, _: node.pop("l"),
        lambda node, _: node.pop("e"),
        lambda node, _: node.update(x=1),
        lambda node, _: node.update(l=CID_A),
        lambda node, _: node.update(l=0),
        lambda node, _: node.update(e=None),
        lambda node, _: node.update(e={}),
        lambda node, _: node.update(e=[[]]),
        lambda _, entries: entries[0].pop("t"),
        lambda _, entries: entries[0].pop("k"),
        lambda _, entries: entries[0].update(x=1),
        lambda _, entries: entries[0].update(v=None),
        lambda _, entries: entries[0].update(v=CID_A),
        lambda _, entries: entries[0].update(v=cbor2.CBORTag(43, b"\x00" + CID_A)),
        lambda _, entries: entries[0].update(v=cbor2.CBORTag(42, CID_A)),
        lambda _, entries: entries[0].update(t=CID_A),
        lambda _, entries: entries[0].update(t=False),
        lambda _, entries: entries[0].update(k=entries[0]["k"].decode()),
        lambda _, entries: entries[0].update(k=b""),
        lambda _, entries: entries[1].update(k=b""),
        lambda _, entries: entries[0].update(p=1),
        lambda _, entries: entries[1].update(p=-1),
        lambda _, entries: entries[1].update(p=70000),
        lambda _, entries: entries[1].update(p=1.0),
        lambda _, entries: entries[1].update(p=200),
        lambda _, entries: entries.reverse(),
        lambda _, entries: entries.append(entries[1]),
    ],
)
def test_what_is_not_a_node_is_refused(change: Callable[[Fields, list[Fields]], object]) -> None:
    decode_node(rewritten(lambda *_: None), DEFAULT_LIMITS)
    refused(rewritten(change))


def test_keys_in_order_and_prefixes_longest() -> None:
    first, second = sorted(KEYS)[:2]

    def shorter_prefix(_: Fields, entries: list[Fields]) -> None:
        entries[1].update(p=3, k=second[3:])

    def same_key_twice(_: Fields, entries: list[Fields]) -> None:
        entries[1].update(p=len(first) - 1, k=first[-1:])

    def descending(_: Fields, entries: list[Fields]) -> None:
        entries[0].update(k=second)
        entries[1].update(k=first[common_prefix(first, second) :])

    for change in (shorter_prefix, same_key_twice, descending):
        assert "out of order" in refused(rewritten(change))

    def same_key_without_suffix(_: Fields, entries: list[Fields]) -> None:
        entries[1].update(p=len(first), k=b"")

    assert refused(rewritten(same_key_without_suffix)) == f"a key of {len(first)} bytes"
    assert refused(oracle.encode([b""], [CID_A], None, [None])) == "a key of 0 bytes"


def test_keys_of_one_height_and_nothing_below_layer_0() -> None:
    mixed = sorted([KEYS[0], LEAVES[0]])
    assert "different heights" in refused(oracle.encode(mixed, [CID_A] * 2, None, [None] * 2))
    assert "below layer 0" in refused(oracle.encode([LEAVES[0]], [CID_A], CID_B, [None]))
    assert "below layer 0" in refused(oracle.encode([LEAVES[0]], [CID_A], None, [CID_B]))


def test_longer_forms_of_the_same_values_are_refused() -> None:
    block = oracle.encode([KEYS[0]], [CID_A], None, [None])
    size = bytes([0x40 + len(KEYS[0])])
    for short, long in [
        (b"\x61e\x81", b"\x61e\x98\x01"),
        (b"\x61e\x81", b"\x61e\x9f"),
        (b"\x61k" + size, b"\x61k\x58" + size),
        (b"\x61p\x00", b"\x61p\x18\x00"),
        (b"\x61p\x00", b"\x61p\x19\x00\x00"),
        (b"\xd8\x2a", b"\xd9\x00\x2a"),
        (b"\x58\x25", b"\x59\x00\x25"),
    ]:
        assert block.count(short) == 1
        refused(block.replace(short, long))


@given(st.data())
def test_a_damaged_node_is_refused_or_is_another_canonical_node(data: st.DataObject) -> None:
    keys = sorted(islice(oracle.keys_of_height(1), 5))
    block = bytearray(oracle.encode(keys, [CID_A] * 5, CID_B, [None, CID_B, CID_C, None, CID_A]))
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(block)) | st.just(len(block)))
    canonical_or_refused(bytes(block[:cut]) + data.draw(st.binary(max_size=3)))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_a_canonical_node(block: bytes) -> None:
    canonical_or_refused(block)
    canonical_or_refused(b"\xa2\x61e\x81\xa4\x61k" + block)


def canonical_or_refused(block: bytes) -> None:
    """No other error than UpstreamError leaves the decoder."""
    with suppress(UpstreamError):
        node = decode_node(block, DEFAULT_LIMITS)
        assert oracle.encode(node.keys, node.values, node.left, node.trees) == block
        assert len(set(map(oracle.height, node.keys))) <= 1
