"""Nodes: heights and prefixes of keys, and a decoder that accepts canonical nodes only."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import (
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
from tests.atproto.mst.random_trees import A as CID_A
from tests.atproto.mst.random_trees import B as CID_B
from tests.atproto.mst.random_trees import C as CID_C

KEYS = list(islice(oracle.keys_of_height(1), 4))
LEAVES = list(islice(oracle.keys_of_height(0), 4))


def rejection_detail(block: bytes) -> str:
    """Check that the block is rejected, and return the detail of the error."""
    with pytest.raises(UpstreamError) as caught:
        decode_node(block, DEFAULT_LIMITS)
    assert caught.value.reason is Rejection.NODE_MALFORMED
    return caught.value.detail


def encoded(node: Node) -> bytes:
    return encode_node(node.keys, node.values, node.left, node.trees)


@given(st.binary(max_size=40))
def test_key_height_is_half_the_leading_zero_bits(key: bytes) -> None:
    assert key_height(key) == oracle.height(key)


@given(st.binary(max_size=6), st.binary(max_size=6), st.binary(max_size=6))
def test_common_prefix_is_the_longest_one(stem: bytes, left: bytes, right: bytes) -> None:
    size = common_prefix(stem + left, stem + right)
    assert (stem + left)[:size] == (stem + right)[:size]
    assert (stem + left)[size : size + 1] != (stem + right)[size : size + 1] or stem + left == stem + right


def test_empty_tree_has_the_published_root() -> None:
    assert oracle.cid_from_text("bafyreie5737gdxlw5i64vzichcalba3z2v5n6icifvx5xytvske7mr3hpm") == EMPTY_TREE
    node = decode_node(encode_node([], [], None, []), DEFAULT_LIMITS)
    assert (node.keys, node.left, node.height) == ([], None, None)


def test_nodes_have_the_published_roots() -> None:
    record = oracle.cid_from_text("bafyreigikq7wl24jegwvx22wca5gfsbzmwdftbco5ba2qiqfyxrmmsyrvy")
    single = encode_node([b"com.example.rec/self"], [record], None, [None])
    assert oracle.cid_of(single) == oracle.cid_from_text("bafyreiccafd5k5mikwmzppg3xzmyb2td6bblnubwxt7tuuaazgapdgxb5u")
    pair = encode_node([b"com.example.rec/a", b"com.example.rec/self"], [record] * 2, None, [None] * 2)
    assert oracle.cid_of(pair) == oracle.cid_from_text("bafyreibsktsrrzzf43sn2uthrfibaoekblumgsoaui2iw7f3qmwogshzfq")


@given(st.data(), st.sampled_from([0, 1]), st.integers(1, 40))
def test_node_is_encoded_as_by_the_oracle_and_decoded_again(data: st.DataObject, height: int, size: int) -> None:
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
def test_keys_and_prefixes_with_heads_of_every_size_are_decoded(size: int) -> None:
    keys = [b"k" * size + bytes([last]) for last in range(256)]
    leaves = [key[-size:] for key in keys if key_height(key[-size:]) == 0][:3]
    block = encode_node(leaves, [CID_A] * 3, None, [None] * 3)
    assert block == oracle.encode(leaves, [CID_A] * 3, None, [None] * 3)
    assert decode_node(block, DEFAULT_LIMITS).keys == leaves


def test_keys_with_their_prefixes_are_limited() -> None:
    first, second = b"k" * MAX_KEY_BYTES, b"k" * (MAX_KEY_BYTES - 1) + b"l"
    assert rejection_detail(oracle.encode([first + b"k"], [CID_A], None, [None])) == "a key of 1025 bytes"
    longer = oracle.encode([first, second + b"!"], [CID_A] * 2, None, [None] * 2)
    assert rejection_detail(longer) == "a key of 1025 bytes"
    block = oracle.encode([first, second], [CID_A] * 2, None, [None] * 2)
    assert decode_node(block, DEFAULT_LIMITS).keys == [first, second]


def test_subtrees_are_encoded_in_their_positions() -> None:
    keys = sorted(KEYS)[:2]
    parts = keys, [CID_A, CID_B], CID_C, [CID_B, None]
    assert encode_node(*parts) == oracle.encode(*parts)
    capital = next(oracle.keys_of_height(0, "XXXX/"))
    assert encode_node([capital], [CID_A], None, [None]) == oracle.encode([capital], [CID_A], None, [None])


def test_keys_that_are_too_long_for_a_node_are_encoded() -> None:
    """An operation may have such a path. So the tree before it has such a key, and another root than `prevData`."""
    keys = [b"k" * 4_000, b"k" * 4_000 + b"l" * 2_000]
    assert encode_node(keys, [CID_A] * 2, None, [None] * 2) == oracle.encode(keys, [CID_A] * 2, None, [None] * 2)


def test_node_needs_a_value_and_a_subtree_for_each_key() -> None:
    for values, trees in ((1, 2), (2, 1), (3, 2), (2, 3)):
        with pytest.raises(ValueError, match="zip"):
            encode_node(sorted(KEYS)[:2], [CID_A] * values, None, [None] * trees)


def test_node_with_more_entries_than_the_limit_is_rejected() -> None:
    block = encode_node(sorted(LEAVES), [CID_A] * 4, None, [None] * 4)
    assert len(decode_node(block, replace(DEFAULT_LIMITS, node_entries=4)).keys) == 4
    with pytest.raises(UpstreamError, match="4 entries"):
        decode_node(block, replace(DEFAULT_LIMITS, node_entries=3))


def test_value_may_be_any_form_of_cid_v1_and_a_link_to_a_node_only_the_usual_one() -> None:
    raw = b"\x01\x55\x12\x20" + bytes(32)
    for value in (
        raw,
        b"\x01\x71\x1b\x20" + bytes(32),  # another hash
        b"\x01\x71\x13\x40" + bytes(64),  # SHA-512
        b"\x01\x81\x02\x00\x03abc",  # identity, a codec of two bytes
        b"\x01\x55\x00\x60" + bytes(96),  # a digest that libipld does not decode
    ):
        block = oracle.encode([LEAVES[0]], [value], None, [None])
        node = decode_node(block, DEFAULT_LIMITS)
        assert node.values == [value]
        assert encoded(node) == block
    for size in (31, 33):
        rejection_detail(oracle.encode([LEAVES[0]], [CID_A[:4] + bytes(size)], None, [None]))
    for value in (b"", b"\x01", b"\x12\x20" + bytes(32)):
        rejection_detail(oracle.encode([LEAVES[0]], [value], None, [None]))
    rejection_detail(oracle.encode([KEYS[0]], [CID_A], raw, [None]))
    rejection_detail(oracle.encode([KEYS[0]], [CID_A], None, [raw]))


Fields = dict[str, object]


def changed_node(change: Callable[[Fields, list[Fields]], object]) -> bytes:
    """Return a node with two entries after `change(node, entries)`."""
    keys = sorted(KEYS)[:2]
    node = cbor2.loads(oracle.encode(keys, [CID_A, CID_B], None, [CID_C, None]))
    change(node, node["e"])
    return cbor2.dumps(node, canonical=True)


TAGGED = [cbor2.CBORTag(43, b"\x00" + CID_A), cbor2.CBORTag(42, CID_A), cbor2.CBORTag(42, b"\x01" + CID_A)]


@pytest.mark.parametrize(
    ("where", "name", "values"),
    [
        ("node", "l", [..., CID_A, 0]),
        ("node", "e", [..., None, {}, [[]]]),
        ("node", "x", [1]),
        (0, "k", [..., b"", "text"]),
        (0, "p", [1]),
        (0, "t", [..., CID_A, False]),
        (0, "v", [None, CID_A, *TAGGED]),
        (0, "x", [1]),
        (1, "k", [b""]),
        (1, "p", [-1, 70000, 1.0, 200]),
    ],
)
def test_node_with_an_invalid_field_is_rejected(where: Any, name: str, values: list[Any]) -> None:
    decode_node(changed_node(lambda *_: None), DEFAULT_LIMITS)
    for value in values:

        def change(node: Fields, entries: list[Fields], value: Any = value) -> None:
            fields = node if where == "node" else entries[where]
            fields[name] = value
            if value is ...:
                del fields[name]

        rejection_detail(changed_node(change))
    for reorder in (lambda _, entries: entries.reverse(), lambda _, entries: entries.append(entries[1])):
        rejection_detail(changed_node(reorder))


def test_node_with_unordered_keys_or_short_prefixes_is_rejected() -> None:
    first, second = sorted(KEYS)[:2]

    def descending(_: Fields, entries: list[Fields]) -> None:
        entries[0].update(k=second)
        entries[1].update(k=first[common_prefix(first, second) :])

    for change in (
        lambda _, entries: entries[1].update(p=3, k=second[3:]),
        lambda _, entries: entries[1].update(p=len(first) - 1, k=first[-1:]),
        descending,
    ):
        assert "out of order" in rejection_detail(changed_node(change))
    without_suffix = changed_node(lambda _, entries: entries[1].update(p=len(first), k=b""))
    assert rejection_detail(without_suffix) == f"a key of {len(first)} bytes"
    assert rejection_detail(oracle.encode([b""], [CID_A], None, [None])) == "a key of 0 bytes"


def test_node_with_mixed_heights_or_subtrees_below_layer_0_is_rejected() -> None:
    mixed = sorted([KEYS[0], LEAVES[0]])
    assert "different heights" in rejection_detail(oracle.encode(mixed, [CID_A] * 2, None, [None] * 2))
    assert "below layer 0" in rejection_detail(oracle.encode([LEAVES[0]], [CID_A], CID_B, [None]))
    assert "below layer 0" in rejection_detail(oracle.encode([LEAVES[0]], [CID_A], None, [CID_B]))


def test_longer_forms_of_the_same_values_are_rejected() -> None:
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
        rejection_detail(block.replace(short, long))


@given(st.data())
def test_damaged_node_is_rejected_or_is_another_canonical_node(data: st.DataObject) -> None:
    keys = sorted(islice(oracle.keys_of_height(1), 5))
    block = bytearray(oracle.encode(keys, [CID_A] * 5, CID_B, [None, CID_B, CID_C, None, CID_A]))
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(block)) | st.just(len(block)))
    check_canonical_or_rejected(bytes(block[:cut]) + data.draw(st.binary(max_size=3)))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_rejected_or_are_a_canonical_node(block: bytes) -> None:
    check_canonical_or_rejected(block)
    check_canonical_or_rejected(b"\xa2\x61e\x81\xa4\x61k" + block)


def check_canonical_or_rejected(block: bytes) -> None:
    """Check that the decoder returns a canonical node, or raises UpstreamError and nothing else."""
    with suppress(UpstreamError):
        node = decode_node(block, DEFAULT_LIMITS)
        assert oracle.encode(node.keys, node.values, node.left, node.trees) == block
        assert len(set(map(oracle.height, node.keys))) <= 1
