"""Walks yield the records of a tree, and reject every tree that is not the one over its records."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst.node import EMPTY_TREE
from indexer.atproto.mst.walk import MissingNodeError, leaves, walk
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure, Rejection
from tests.atproto.mst import oracle
from tests.atproto.mst.oracle import Blocks
from tests.profiles import scaled
from tests.vectors import vectors

A, B, C = (oracle.cid_of(name) for name in (b"a", b"b", b"c"))
KEYS_BY_HEIGHT = {height: list(islice(oracle.keys_of_height(height), 12)) for height in range(5)}
RECORDS = {key: A for height, size in enumerate([9, 5, 3, 1]) for key in KEYS_BY_HEIGHT[height][:size]}

records_strategy = st.dictionaries(
    st.sampled_from([key for keys in KEYS_BY_HEIGHT.values() for key in keys]), st.sampled_from([A, B, C])
)


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


def test_walks_of_the_empty_tree_yield_nothing() -> None:
    root, blocks = oracle.build({})
    assert root == EMPTY_TREE
    assert walked(blocks, root) == {}
    assert list(leaves(blocks.get, root)) == []


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


def test_walks_yield_values_of_any_form_of_cid_v1() -> None:
    cids = [b"\x01\x55\x12\x20" + bytes(32), b"\x01\x71\x13\x40" + bytes(64), b"\x01\x71\x1b\x20" + bytes(32)]
    records = dict(zip(sorted(KEYS_BY_HEIGHT[0]), cids, strict=False))
    root, blocks = oracle.build(records)
    assert walked(blocks, root) == dict(leaves(blocks.get, root)) == records


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


def test_root_without_keys_is_rejected(nodes: NodeStore) -> None:
    leaf = nodes.add([KEYS_BY_HEIGHT[0][0]])
    assert "root without keys" in rejection_detail(nodes.blocks, nodes.add([], left=leaf))


def test_leaf_without_keys_is_rejected(nodes: NodeStore) -> None:
    top, higher = max(KEYS_BY_HEIGHT[1]), max(KEYS_BY_HEIGHT[2])
    empty = nodes.add([])
    assert "leaf without keys" in rejection_detail(nodes.blocks, nodes.add([top], left=empty))
    assert "leaf without keys" in rejection_detail(nodes.blocks, nodes.add([higher], left=empty))
    assert "leaf without keys" in rejection_detail(nodes.blocks, nodes.add([higher], left=nodes.add([], left=empty)))


def test_chain_of_nodes_without_keys_is_rejected_at_layer_0(nodes: NodeStore) -> None:
    chain = nodes.add([KEYS_BY_HEIGHT[0][0]])
    for _ in range(40):
        chain = nodes.add([], left=chain)
    root = nodes.add([max(KEYS_BY_HEIGHT[4])], left=chain)
    assert "leaf without keys" in rejection_detail(nodes.blocks, root)


def test_walk_of_a_node_that_is_its_own_child_ends() -> None:
    """Hashes make such a node impossible, but the walk does not rely on it."""
    without_keys, root = b"\x01\x71\x12\x20" + bytes(32), b"\x01\x71\x12\x20" + bytes(31) + b"\x01"
    top = max(KEYS_BY_HEIGHT[4])
    blocks = {
        without_keys: oracle.encode([], [], without_keys, []),
        root: oracle.encode([top], [A], without_keys, [root]),
    }
    rejection_detail(blocks, root)
    blocks[root] = oracle.encode([top], [A], None, [root])
    rejection_detail(blocks, root)


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


def test_subtree_beyond_the_keys_beside_it_is_rejected(nodes: NodeStore) -> None:
    top = sorted(KEYS_BY_HEIGHT[1])[5]
    low, high = nodes.add([below(top, 0)]), nodes.add([above(top, 0)])
    assert walked(nodes.blocks, nodes.add([top], left=low, trees={0: high}))
    assert "beyond" in rejection_detail(nodes.blocks, nodes.add([top], left=high))
    assert "beyond" in rejection_detail(nodes.blocks, nodes.add([top], trees={0: low}))
    wide = nodes.add(sorted([below(top, 0), above(top, 0)]))
    assert "beyond" in rejection_detail(nodes.blocks, nodes.add([top], left=wide))
    assert "beyond" in rejection_detail(nodes.blocks, nodes.add([top], trees={0: wide}))


def test_subtree_beyond_keys_two_layers_above_is_rejected(nodes: NodeStore) -> None:
    top = sorted(KEYS_BY_HEIGHT[2])[5]
    high = nodes.add([], left=nodes.add([above(top, 0)]))
    assert "beyond" in rejection_detail(nodes.blocks, nodes.add([top], left=high))
    low = nodes.add([], left=nodes.add([below(top, 0)]))
    assert "beyond" in rejection_detail(nodes.blocks, nodes.add([top], trees={0: low}))


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


@pytest.mark.slow
def test_flipped_bit_in_a_node_is_rejected_or_gives_another_valid_tree() -> None:
    root, blocks = oracle.build(RECORDS)
    assert len(blocks) > 6
    outcomes = [
        accepted_only_if_canonical({**blocks, cid: flipped}, root, flipped)
        for cid, block in blocks.items()
        for offset in range(len(block))
        for bit in range(8)
        for flipped in [block[:offset] + bytes([block[offset] ^ 1 << bit]) + block[offset + 1 :]]
    ]
    bits_of_values = 32 * 8 * len(RECORDS)  # another digest in the CID of a record gives another valid tree
    assert bits_of_values <= outcomes.count(True) < bits_of_values * 1.2
    assert outcomes.count(False) > 1_000


Fields = dict[str, object]


@pytest.mark.parametrize(
    "change",
    [
        lambda node: node["e"].clear(),
        lambda node: node["e"].pop(0),
        lambda node: node["e"].pop(),
        lambda node: node["e"].reverse(),
        lambda node: node["e"].append(dict(node["e"][-1])),
        lambda node: node.update(l=None),
        lambda node: node["e"][-1].update(t=None),
        lambda node: node["e"][0].update(t=node["l"], k=node["e"][0]["k"]),
        lambda node: node.update(l=node["e"][-1]["t"]),
        lambda node: node["e"][0].update(k=node["e"][0]["k"] + b"x"),
        lambda node: node["e"][-1].update(k=node["e"][-1]["k"] + b"x"),
        lambda node: node["e"][-1].update(p=0),
    ],
)
def test_changed_node_is_rejected_or_gives_another_valid_tree(change: Callable[[Fields], object]) -> None:
    root, blocks = oracle.build(RECORDS)
    for cid, block in blocks.items():
        node = cbor2.loads(block)
        if not node["e"]:
            continue
        change(node)
        changed = cbor2.dumps(node, canonical=True)
        if changed != block:
            accepted_only_if_canonical({**blocks, cid: changed}, root, changed)


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


def test_all_trees_of_the_mst_test_suite_are_walked() -> None:
    paths = sorted(vectors("mst-test-suite/cars/exhaustive").glob("*.car"))
    sizes = set()
    for path in paths:
        root, blocks = oracle.read_car(path.read_bytes())
        records = walked(blocks, root)
        assert oracle.build(records) == (root, blocks), path.name
        assert dict(leaves(blocks.get, root)) == records
        sizes.add(len(records))
    assert len(paths) == 128
    assert sizes == set(range(8))


WHOLE_REPOS = {
    "indigo/repos/greenground.repo.car": 2,
    "indigo/repos/fakermaker.repo.car": 142,
    "jetstream-corpus/repo.car": 23,
    "repos/atproto.dart/repo.car": 2836,
    "repos/php-car/repo.car": 83,
    "repos/arroba/snarfed2.car": 5,
    "repos/repo-stream/empty.car": 0,
    "repos/repo-stream/tiny.car": 8,
}
SLICES = ("indigo/repos/repo_slice.car", "repos/skyfall/attie.car")
WITH_OTHER_PREFIXES = "proto_rune-frames/sync/repo.car"


@pytest.mark.parametrize(("name", "count"), WHOLE_REPOS.items())
def test_whole_repos_are_walked(name: str, count: int) -> None:
    data, blocks = exported(name)
    records = walked(blocks, data)
    assert len(records) == count
    assert dict(leaves(blocks.get, data)) == records
    root, nodes = oracle.build(records)
    assert root == data
    assert nodes.items() <= blocks.items()


def test_records_of_a_real_repo_equal_the_published_list() -> None:
    data, blocks = exported("jetstream-corpus/repo.car")
    lines = vectors("jetstream-corpus/car_expected_records.tsv").read_text().splitlines()
    texts = {key.decode(): value for key, value in walked(blocks, data).items()}
    assert texts == {line.split("\t")[0]: oracle.cid_from_text(line.split("\t")[1]) for line in lines}


@pytest.mark.parametrize("name", SLICES)
def test_slices_of_repos_are_incomplete(name: str) -> None:
    data, blocks = exported(name)
    with pytest.raises(MissingNodeError):
        walked(blocks, data)


def test_tree_whose_prefixes_refer_to_keys_of_the_node_above_is_rejected() -> None:
    data, blocks = exported(WITH_OTHER_PREFIXES)
    assert "prefix" in rejection_detail(blocks, data)


def exported(name: str) -> tuple[bytes, Blocks]:
    """Return the root of the tree and the blocks of a published CAR file."""
    root, blocks = oracle.read_car(vectors(name).read_bytes())
    return cbor2.loads(blocks[root])["data"].value[1:], blocks


def test_every_published_repo_is_used() -> None:
    top = vectors("repos").parent
    found = {path.relative_to(top).as_posix() for path in top.rglob("*.car")}
    others = {name for name in found if name.startswith(("car-hostile/", "mst-test-suite/"))}
    assert found - others == {*WHOLE_REPOS, *SLICES, WITH_OTHER_PREFIXES}
