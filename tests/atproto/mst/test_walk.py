"""Walks yield the records of a tree, and reject every tree that is not the one over its records."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import MissingNodeError, leaves, walk
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure, Rejection
from tests.atproto.mst import oracle
from tests.atproto.mst.oracle import Blocks
from tests.atproto.mst.random_trees import KEYS_BY_HEIGHT, A, records_strategy
from tests.profiles import scaled

RECORDS = {key: A for height, size in enumerate([9, 5, 3, 1]) for key in KEYS_BY_HEIGHT[height][:size]}


def walked(blocks: Blocks, root: bytes) -> dict[bytes, bytes]:
    pairs = list(walk(blocks.get, root, DEFAULT_LIMITS))
    assert [key for key, _ in pairs] == sorted({key for key, _ in pairs})
    return dict(pairs)


def rejection_detail(blocks: Blocks, root: bytes) -> str:
    """Check that the tree is rejected, and return the detail of the error."""
    with pytest.raises(UpstreamError) as caught:
        walked(blocks, root)
    assert caught.value.reason is Rejection.NODE_MALFORMED
    return caught.value.detail


@given(records_strategy)
def test_walks_yield_the_records_of_the_tree(records: dict[bytes, bytes]) -> None:
    root, blocks = oracle.build(records)
    assert walked(blocks, root) == records
    assert list(leaves(blocks.get, root)) == sorted(records.items())


def test_walks_yield_records_with_cids_of_any_form() -> None:
    records = {key: b"\x01\x55\x00\x60" + bytes(96) for key in RECORDS}
    root, blocks = oracle.build(records)
    assert walked(blocks, root) == records
    assert list(leaves(blocks.get, root)) == sorted(records.items())


@given(records_strategy.filter(bool), st.data())
def test_tree_with_one_node_missing_is_incomplete(records: dict[bytes, bytes], data: st.DataObject) -> None:
    root, blocks = oracle.build(records)
    missing = data.draw(st.sampled_from(sorted(blocks)))
    del blocks[missing]
    with pytest.raises(MissingNodeError) as caught:
        walked(blocks, root)
    assert isinstance(caught.value, UnavailableError)
    assert (caught.value.reason, caught.value.cid) == (FetchFailure.EXPORT_INCOMPLETE, missing)
    assert caught.value.detail.startswith("no node bafyrei")
    with pytest.raises(MissingNodeError):
        list(leaves(blocks.get, root))


class NodeStore:
    """Nodes that are created one by one and may break the rules of a tree."""

    def __init__(self) -> None:
        self.blocks: Blocks = {}

    def add(self, keys: list[bytes], left: bytes | None = None, trees: dict[int, bytes] | None = None) -> bytes:
        """Add a node; `trees` has the subtrees by the index of the key before them. Return its CID."""
        all_trees = [(trees or {}).get(index) for index in range(len(keys))]
        block = oracle.encode(keys, [A] * len(keys), left, all_trees)
        self.blocks[oracle.cid_of(block)] = block
        return oracle.cid_of(block)


@pytest.fixture
def nodes() -> NodeStore:
    return NodeStore()


def below(key: bytes, height: int) -> bytes:
    return max(candidate for candidate in KEYS_BY_HEIGHT[height] if candidate < key)


def above(key: bytes, height: int) -> bytes:
    return min(candidate for candidate in KEYS_BY_HEIGHT[height] if candidate > key)


def test_link_that_skips_a_layer_is_rejected(nodes: NodeStore) -> None:
    top = max(KEYS_BY_HEIGHT[2])
    leaf = nodes.add([below(top, 0)])
    assert "on layer 1" in rejection_detail(nodes.blocks, nodes.add([top], left=leaf))
    root = nodes.add([top], left=nodes.add([], left=leaf))
    assert list(walked(nodes.blocks, root)) == [below(top, 0), top]


def test_root_or_leaf_without_keys_is_rejected(nodes: NodeStore) -> None:
    leaf = nodes.add([KEYS_BY_HEIGHT[0][0]])
    assert "root without keys" in rejection_detail(nodes.blocks, nodes.add([], left=leaf))
    top, higher = max(KEYS_BY_HEIGHT[1]), max(KEYS_BY_HEIGHT[2])
    empty = nodes.add([])
    for key, left in ((top, empty), (higher, empty), (higher, nodes.add([], left=empty))):
        assert "leaf without keys" in rejection_detail(nodes.blocks, nodes.add([key], left=left))


def test_chain_of_nodes_without_keys_is_rejected_at_layer_0(nodes: NodeStore) -> None:
    chain = nodes.add([KEYS_BY_HEIGHT[0][0]])
    for _ in range(40):
        chain = nodes.add([], left=chain)
    root = nodes.add([max(KEYS_BY_HEIGHT[4])], left=chain)
    assert "leaf without keys" in rejection_detail(nodes.blocks, root)


def test_subtree_that_occurs_twice_is_rejected(nodes: NodeStore) -> None:
    first, second = sorted(KEYS_BY_HEIGHT[1])[1:3]
    between = [key for key in KEYS_BY_HEIGHT[0] if first < key < second] or [below(first, 0)]
    leaf = nodes.add(between)
    assert "beyond" in rejection_detail(nodes.blocks, nodes.add([first, second], trees={0: leaf, 1: leaf}))


def test_work_for_repeated_subtrees_is_bounded_by_the_number_of_blocks(nodes: NodeStore) -> None:
    """Each node links the node below it twice. Without a check, the walk would visit 2^4 leaves."""
    child = nodes.add([KEYS_BY_HEIGHT[0][0]])
    for height in range(1, 5):
        child = nodes.add([sorted(KEYS_BY_HEIGHT[height])[5]], left=child, trees={0: child})
    loads = 0

    def block_of(cid: bytes) -> bytes | None:
        nonlocal loads
        loads += 1
        return nodes.blocks.get(cid)

    with pytest.raises(UpstreamError, match="beyond"):
        list(walk(block_of, child, DEFAULT_LIMITS))
    assert loads <= 10


def test_subtree_beyond_the_keys_beside_and_above_it_is_rejected(nodes: NodeStore) -> None:
    top = sorted(KEYS_BY_HEIGHT[1])[5]
    low, high = nodes.add([below(top, 0)]), nodes.add([above(top, 0)])
    wide = nodes.add(sorted([below(top, 0), above(top, 0)]))
    assert walked(nodes.blocks, nodes.add([top], left=low, trees={0: high}))
    for left, right in ((high, None), (wide, None), (None, low), (None, wide)):
        root = nodes.add([top], left=left, trees={0: right} if right else None)
        assert "beyond" in rejection_detail(nodes.blocks, root)
    top = sorted(KEYS_BY_HEIGHT[2])[5]
    two_below = nodes.add([], left=nodes.add([above(top, 0)]))
    assert "beyond" in rejection_detail(nodes.blocks, nodes.add([top], left=two_below))
    two_below = nodes.add([], left=nodes.add([below(top, 0)]))
    assert "beyond" in rejection_detail(nodes.blocks, nodes.add([top], trees={0: two_below}))


def test_tree_with_more_layers_than_the_limit_is_rejected() -> None:
    root, blocks = oracle.build(RECORDS)
    assert len(list(walk(blocks.get, root, replace(DEFAULT_LIMITS, tree_depth=3)))) == len(RECORDS)
    with pytest.raises(UpstreamError, match="height 3"):
        list(walk(blocks.get, root, replace(DEFAULT_LIMITS, tree_depth=2)))


def accepted_only_if_canonical(blocks: Blocks, root: bytes, changed: bytes) -> bool:
    """Return True if a tree with one changed node is accepted, after checking that the node belongs to a valid tree.

    `blocks` has the changed node under the CID of the original one.
    """
    try:
        records = walked(blocks, root)
    except (UpstreamError, MissingNodeError):
        return False
    assert changed in oracle.build(records)[1].values()
    return True


@settings(max_examples=scaled(300))
@given(records_strategy.filter(lambda records: len(records) > 3), st.data())
def test_node_of_another_tree_is_rejected_or_gives_another_valid_tree(
    records: dict[bytes, bytes], data: st.DataObject
) -> None:
    root, blocks = oracle.build(records)
    other = oracle.build(data.draw(records_strategy))[1]
    cid = data.draw(st.sampled_from(sorted(blocks)))
    changed = data.draw(st.sampled_from(sorted({**blocks, **other}.values())))
    accepted_only_if_canonical({**other, **blocks, cid: changed}, root, changed)
