"""Inversion gives the results of the oracle, and never another root."""

from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.inversion import Inversion, NetOp, Verdict, invert
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import EMPTY_TREE, leaves, walk
from indexer.errors import UpstreamError
from indexer.reasons import Rejection
from tests.atproto.mst import oracle
from tests.atproto.mst.oracle import Blocks, Records
from tests.atproto.mst.random_trees import (
    KEYS,
    KEYS_BY_HEIGHT,
    A,
    B,
    C,
    Edits,
    edited,
    edits_strategy,
    records_strategy,
)
from tests.profiles import scaled


def undo(blocks: Blocks, root: bytes, ops: Sequence[NetOp], prev_data: bytes) -> Inversion:
    return invert(blocks, root, ops, prev_data, DEFAULT_LIMITS)


@settings(max_examples=scaled(300))
@given(records_strategy, edits_strategy, st.randoms())
def test_undoing_the_operations_gives_the_tree_before(before: Records, edits: Edits, random: Any) -> None:
    after = edited(before, edits)
    ops = oracle.difference(before, after)
    random.shuffle(ops)
    prev_data = oracle.build(before)[0]
    root, blocks = oracle.build(after)
    assert undo(blocks, root, ops, prev_data) == Inversion(Verdict.OK, prev_data, ops_hold=True)


def keys_with(prefix: str) -> list[bytes]:
    return sorted(key for height in range(4) for key in islice(oracle.keys_of_height(height, prefix), 6))


@pytest.mark.parametrize(
    "keys",
    [KEYS, KEYS[::2], KEYS[1::3], KEYS[::7], *map(keys_with, ("XXXX/", "!/", "24 bytes before a number/"[:24]))],
)
def test_each_single_operation_is_undone(keys: list[bytes]) -> None:
    with_all = dict(zip(keys, cycle([A, B]), strict=False))
    root, blocks = oracle.build(with_all)
    assert list(walk(blocks.get, root, DEFAULT_LIMITS)) == list(leaves(blocks.get, root)) == list(with_all.items())
    for key, value in with_all.items():
        without, blocks_without = oracle.build({other: with_all[other] for other in keys if other != key})
        changed, _ = oracle.build(with_all | {key: C})
        for present, after, op, before in (
            (blocks, root, NetOp(key, C, value), changed),
            (blocks, root, NetOp(key, None, value), without),
            (blocks_without, without, NetOp(key, value, None), root),
        ):
            assert undo(present, after, [op], before) == Inversion(Verdict.OK, before, ops_hold=True)


@settings(max_examples=scaled(500))
@given(records_strategy, edits_strategy, st.data())
def test_verdict_with_missing_nodes_equals_that_of_the_oracle(
    before: Records, edits: Edits, data: st.DataObject
) -> None:
    after = edited(before, edits)
    ops = oracle.difference(before, after)
    prev_data = oracle.build(before)[0]
    root, blocks = oracle.build(after)
    some = st.sets(st.sampled_from(sorted(blocks)))
    a_few = st.sets(st.sampled_from(sorted(blocks)), max_size=2)
    missing = blocks.keys() - data.draw(some) if data.draw(st.booleans()) else data.draw(a_few)
    for cid in missing:
        del blocks[cid]
    inversion = undo(blocks, root, ops, prev_data)
    assert (inversion.verdict, inversion.root) == oracle.invert(blocks, root, ops, prev_data)
    assert inversion.verdict in {Verdict.OK, Verdict.UNDECIDABLE}
    assert inversion.root in {None, prev_data}


@settings(max_examples=scaled(500))
@given(records_strategy, edits_strategy, edits_strategy, st.data())
def test_verdict_on_wrong_operations_equals_that_of_the_oracle(
    before: Records, edits: Edits, others: Edits, data: st.DataObject
) -> None:
    """The operations of another commit are mixed with the right ones."""
    after = edited(before, edits)
    right = oracle.difference(before, after)
    other = oracle.difference(edited(before, others), after)
    mixed = {op.key: op for op in data.draw(st.permutations(right + other))}
    by_key = sorted(mixed.values(), key=lambda op: op.key)
    ops = data.draw(st.lists(st.sampled_from(by_key), unique=True)) if by_key else []
    prev_data = oracle.build(before)[0]
    root, blocks = oracle.build(after)
    for cid in data.draw(st.sets(st.sampled_from(sorted(blocks)), max_size=1)):
        del blocks[cid]
    inversion = undo(blocks, root, ops, prev_data)
    assert (inversion.verdict, inversion.root) == oracle.invert(blocks, root, ops, prev_data)
    if inversion.verdict is Verdict.OK:
        assert sorted(ops, key=lambda op: op.key) == right


@given(records_strategy.filter(bool), st.data())
def test_each_error_in_a_single_operation_has_its_verdict(before: Records, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(before)))
    root, blocks = oracle.build(before)
    without = {other: value for other, value in before.items() if other != key}
    prev_data = oracle.build(without)[0]
    value = before[key]
    assert undo(blocks, root, [NetOp(key, None, value)], prev_data).verdict is Verdict.OK
    assert undo(blocks, root, [NetOp(key, A, value)], prev_data).verdict is Verdict.MISMATCH
    assert undo(blocks, root, [NetOp(key, None, C)], prev_data).verdict is Verdict.OPS_MISMATCH
    assert undo(blocks, root, [NetOp(key, value, None)], prev_data).verdict is Verdict.OPS_MISMATCH
    root, blocks = oracle.build(without)
    prev_data = oracle.build(before)[0]
    assert undo(blocks, root, [NetOp(key, value, None)], prev_data).verdict is Verdict.OK
    assert undo(blocks, root, [NetOp(key, C, None)], prev_data).verdict is Verdict.MISMATCH
    assert undo(blocks, root, [NetOp(key, None, value)], prev_data).verdict is Verdict.OPS_MISMATCH


def test_commit_without_operations_needs_no_blocks() -> None:
    root = oracle.build({KEYS[0]: A})[0]
    assert undo({}, root, [], root) == Inversion(Verdict.OK, root, ops_hold=True)
    assert undo({}, root, [], EMPTY_TREE).verdict is Verdict.MISMATCH


@pytest.mark.parametrize("size", [1, 2, 60])
def test_commits_from_and_to_the_empty_tree_are_inverted(size: int) -> None:
    records = dict.fromkeys(KEYS[:size], A)
    root, blocks = oracle.build(records)
    creates = oracle.difference({}, records)
    assert undo(blocks, root, creates, EMPTY_TREE) == Inversion(Verdict.OK, EMPTY_TREE, ops_hold=True)
    assert undo(blocks, root, creates[1:], EMPTY_TREE).verdict is Verdict.MISMATCH
    empty_root, empty_blocks = oracle.build({})
    assert undo(empty_blocks, empty_root, oracle.difference(records, {}), root).verdict is Verdict.OK


def test_commit_without_its_root_node_is_undecidable() -> None:
    root, _ = oracle.build({KEYS[0]: A})
    inversion = undo({}, root, [NetOp(KEYS[0], None, A)], EMPTY_TREE)
    assert (inversion.verdict, inversion.root, inversion.ops_hold) == (Verdict.UNDECIDABLE, None, False)
    assert "no node b" in inversion.detail


def test_undecidable_result_says_if_the_operations_hold() -> None:
    """Without the upper key, two leaves become one. The root alone shows the create of this key, but not that leaf."""
    key = KEYS_BY_HEIGHT[1][0]
    low = max(leaf for leaf in KEYS_BY_HEIGHT[0] if leaf < key)
    high = min(leaf for leaf in KEYS_BY_HEIGHT[0] if leaf > key)
    root, blocks = oracle.build({low: A, key: A, high: A})
    prev_data = oracle.build({low: A, high: A})[0]
    only_root = {root: blocks[root]}
    inversion = undo(only_root, root, [NetOp(key, None, A)], prev_data)
    assert (inversion.verdict, inversion.ops_hold) == (Verdict.UNDECIDABLE, True)
    for in_missing_leaf in (NetOp(low, None, A), NetOp(low, A, None)):
        inversion = undo(only_root, root, [in_missing_leaf], prev_data)
        assert (inversion.verdict, inversion.ops_hold) == (Verdict.UNDECIDABLE, False)


def test_operation_that_contradicts_the_tree_is_found_even_if_other_nodes_are_missing() -> None:
    key, low = KEYS_BY_HEIGHT[1][0], max(leaf for leaf in KEYS_BY_HEIGHT[0] if leaf < KEYS_BY_HEIGHT[1][0])
    root, blocks = oracle.build({low: A, key: A})
    ops = [NetOp(low, None, A), NetOp(key, None, B)]
    inversion = undo({root: blocks[root]}, root, ops, EMPTY_TREE)
    assert (inversion.verdict, inversion.ops_hold) == (Verdict.OPS_MISMATCH, False)
    assert inversion.detail == f"create of {key!r}"


def test_remaining_subtree_is_the_tree_before_if_its_root_is_known_or_is_prev_data() -> None:
    """A new key added three layers. Below it, under nodes without keys, is the whole tree before the commit."""
    leaf, top = min(KEYS_BY_HEIGHT[0]), max(KEYS_BY_HEIGHT[3])
    prev_data, _ = oracle.build({leaf: A})
    root, blocks = oracle.build({leaf: A, top: A})
    ops = [NetOp(top, None, A)]
    assert len(blocks) == 4
    for missing in [None, *blocks]:
        present = {cid: block for cid, block in blocks.items() if cid != missing}
        inversion = undo(present, root, ops, prev_data)
        expected = Verdict.OK if missing in {None, prev_data} else Verdict.UNDECIDABLE
        assert inversion.verdict is expected
        assert inversion.root == (prev_data if expected is Verdict.OK else None)
    assert undo(blocks, root, ops, EMPTY_TREE) == Inversion(Verdict.MISMATCH, prev_data, ops_hold=True)


class CountedBlocks(dict[bytes, bytes]):
    """Blocks that count how often each of them is read."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks)
        self.reads = Counter[bytes]()

    def get(self, cid: bytes, default: Any = None) -> Any:
        self.reads[cid] += 1
        return super().get(cid, default)


def test_each_node_is_decoded_at_most_once() -> None:
    before = dict.fromkeys(KEYS, A)
    after = edited(before, dict.fromkeys(KEYS[::3], B))
    root, blocks = oracle.build(after)
    counted = CountedBlocks(blocks)
    assert undo(counted, root, oracle.difference(before, after), oracle.build(before)[0]).verdict is Verdict.OK
    assert set(counted.reads.values()) == {1}


def test_subtree_that_only_moves_is_not_needed() -> None:
    """Without the key on layer 2, the leaf after it is the subtree after the key on layer 1 before it."""
    top = sorted(KEYS_BY_HEIGHT[2])[5]
    left = max(key for key in KEYS_BY_HEIGHT[1] if key < top)
    right = min(key for key in KEYS_BY_HEIGHT[0] if key > top)
    prev_data, before = oracle.build({left: A, right: A})
    root, blocks = oracle.build({left: A, top: A, right: A})
    (leaf,) = before.keys() & blocks.keys()
    del blocks[leaf]
    assert undo(blocks, root, [NetOp(top, None, A)], prev_data) == Inversion(Verdict.OK, prev_data, ops_hold=True)


def tree_with(block: bytes, key: bytes, right: bytes | None = None) -> tuple[Blocks, bytes]:
    """Return the blocks and the root of a tree with this block as the subtree before its only key."""
    root = oracle.encode([key], [A], oracle.cid_of(block), [right])
    return {oracle.cid_of(root): root, oracle.cid_of(block): block}, oracle.cid_of(root)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda keys: oracle.encode(keys, [A] * len(keys), None, [None] * len(keys))[:-1],
        lambda keys: oracle.encode(keys[::-1], [A] * len(keys), None, [None] * len(keys)),
        lambda keys: oracle.encode([*keys, max(KEYS_BY_HEIGHT[1])], [A] * 3, None, [None] * 3),
        lambda _: oracle.encode([max(KEYS_BY_HEIGHT[1])], [A], None, [None]),
        lambda _: oracle.encode([], [], None, []),
        lambda _: b"",
    ],
)
def test_malformed_node_is_rejected(spoil: Any) -> None:
    key = KEYS_BY_HEIGHT[1][0]
    leaves = sorted(leaf for leaf in KEYS_BY_HEIGHT[0] if leaf < key)[-2:]
    blocks, root = tree_with(spoil(leaves), key)
    with pytest.raises(UpstreamError) as caught:
        undo(blocks, root, [NetOp(leaves[0], B, A)], EMPTY_TREE)
    assert caught.value.reason is Rejection.NODE_MALFORMED


def test_subtree_with_keys_beyond_its_neighbours_or_of_another_subtree_is_rejected() -> None:
    key = KEYS_BY_HEIGHT[1][0]
    high = min(leaf for leaf in KEYS_BY_HEIGHT[0] if leaf > key)
    absent = min(other for other in KEYS_BY_HEIGHT[0] if other < key)
    blocks, root = tree_with(oracle.encode([high], [A], None, [None]), key)
    with pytest.raises(UpstreamError, match="out of order"):
        undo(blocks, root, [NetOp(absent, A, None)], EMPTY_TREE)
    leaf = oracle.encode([min(KEYS_BY_HEIGHT[0])], [A], None, [None])
    blocks, root = tree_with(leaf, key, right=oracle.cid_of(leaf))  # without the key, the two subtrees become one
    with pytest.raises(UpstreamError, match="out of order"):
        undo(blocks, root, [NetOp(key, None, A)], EMPTY_TREE)


def test_root_without_keys_is_rejected() -> None:
    leaf = oracle.encode([KEYS_BY_HEIGHT[0][0]], [A], None, [None])
    root = oracle.encode([], [], oracle.cid_of(leaf), [])
    blocks = {oracle.cid_of(root): root, oracle.cid_of(leaf): leaf}
    with pytest.raises(UpstreamError, match="root without keys"):
        undo(blocks, oracle.cid_of(root), [NetOp(KEYS_BY_HEIGHT[0][0], None, A)], EMPTY_TREE)
