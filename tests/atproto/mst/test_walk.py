"""Whole walks: they yield what the tree holds, and refuse every tree that is not the one over its records."""

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
from tests.vectors import vectors

A, B, C = (oracle.cid(name) for name in (b"a", b"b", b"c"))
POOL = {height: list(islice(oracle.keys_of_height(height), 12)) for height in range(5)}
SOME = {key: A for height, size in enumerate([9, 5, 3, 1]) for key in POOL[height][:size]}

records_strategy = st.dictionaries(
    st.sampled_from([key for keys in POOL.values() for key in keys]), st.sampled_from([A, B, C])
)


def walked(blocks: Blocks, root: bytes) -> dict[bytes, bytes]:
    pairs = list(walk(blocks.get, root, DEFAULT_LIMITS))
    assert [key for key, _ in pairs] == sorted({key for key, _ in pairs})
    return dict(pairs)


def refused(blocks: Blocks, root: bytes) -> str:
    with pytest.raises(UpstreamError) as caught:
        walked(blocks, root)
    assert caught.value.reason is Rejection.NODE_MALFORMED
    return caught.value.detail


@given(records_strategy)
def test_a_walk_yields_the_records_of_the_tree(records: dict[bytes, bytes]) -> None:
    root, blocks = oracle.build(records)
    assert walked(blocks, root) == records
    assert list(leaves(blocks.get, root)) == sorted(records.items())


def test_the_empty_tree() -> None:
    root, blocks = oracle.build({})
    assert root == EMPTY_TREE
    assert walked(blocks, root) == {}
    assert list(leaves(blocks.get, root)) == []


@given(records_strategy.filter(bool), st.data())
def test_a_walk_without_one_node_is_not_taken_for_the_whole(records: dict[bytes, bytes], data: st.DataObject) -> None:
    root, blocks = oracle.build(records)
    gone = data.draw(st.sampled_from(sorted(blocks)))
    del blocks[gone]
    with pytest.raises(MissingNodeError) as caught:
        walked(blocks, root)
    assert isinstance(caught.value, UnavailableError)
    assert (caught.value.reason, caught.value.cid) == (FetchFailure.EXPORT_INCOMPLETE, gone)
    with pytest.raises(MissingNodeError):
        list(leaves(blocks.get, root))


def test_values_of_foreign_forms_come_through_both_walks() -> None:
    foreign = [b"\x01\x55\x12\x20" + bytes(32), b"\x01\x71\x13\x40" + bytes(64), b"\x01\x71\x1b\x20" + bytes(32)]
    records = dict(zip(sorted(POOL[0]), foreign, strict=False))
    root, blocks = oracle.build(records)
    assert walked(blocks, root) == dict(leaves(blocks.get, root)) == records


# ------------------------------------------------------------------------------ trees that are not trees


class Forge:
    """Nodes put together by hand, whatever they mean."""

    def __init__(self) -> None:
        self.blocks: Blocks = {}

    def node(self, keys: list[bytes], left: bytes | None = None, trees: dict[int, bytes] | None = None) -> bytes:
        block = oracle.encode(keys, [A] * len(keys), left, [(trees or {}).get(at) for at in range(len(keys))])
        self.blocks[oracle.cid(block)] = block
        return oracle.cid(block)


@pytest.fixture
def forge() -> Forge:
    return Forge()


def below(key: bytes, height: int) -> bytes:
    return max(candidate for candidate in POOL[height] if candidate < key)


def above(key: bytes, height: int) -> bytes:
    return min(candidate for candidate in POOL[height] if candidate > key)


def test_a_link_takes_every_layer(forge: Forge) -> None:
    top = max(POOL[2])
    leaf = forge.node([below(top, 0)])
    assert "on layer 1" in refused(forge.blocks, forge.node([top], left=leaf))
    root = forge.node([top], left=forge.node([], left=leaf))
    assert list(walked(forge.blocks, root)) == [below(top, 0), top]


def test_a_root_has_keys(forge: Forge) -> None:
    leaf = forge.node([POOL[0][0]])
    assert "root without keys" in refused(forge.blocks, forge.node([], left=leaf))


def test_a_leaf_has_keys(forge: Forge) -> None:
    top, higher = max(POOL[1]), max(POOL[2])
    empty = forge.node([])
    assert "leaf without keys" in refused(forge.blocks, forge.node([top], left=empty))
    assert "leaf without keys" in refused(forge.blocks, forge.node([higher], left=empty))
    assert "leaf without keys" in refused(forge.blocks, forge.node([higher], left=forge.node([], left=empty)))


def test_a_chain_of_nodes_without_keys_ends_at_the_bottom(forge: Forge) -> None:
    chain = forge.node([POOL[0][0]])
    for _ in range(40):
        chain = forge.node([], left=chain)
    root = forge.node([max(POOL[4])], left=chain)
    assert "leaf without keys" in refused(forge.blocks, root)


def test_a_node_that_is_its_own_child_ends() -> None:
    """No hash allows it; but the walk's end doesn't hang on that."""
    way, looping = b"\x01\x71\x12\x20" + bytes(32), b"\x01\x71\x12\x20" + bytes(31) + b"\x01"
    top = max(POOL[4])
    blocks = {way: oracle.encode([], [], way, []), looping: oracle.encode([top], [A], way, [looping])}
    refused(blocks, looping)
    blocks[looping] = oracle.encode([top], [A], None, [looping])
    refused(blocks, looping)


def test_a_subtree_comes_once(forge: Forge) -> None:
    first, second = sorted(POOL[1])[1:3]
    between = [key for key in POOL[0] if first < key < second] or [below(first, 0)]
    leaf = forge.node(between)
    assert "beyond" in refused(forge.blocks, forge.node([first, second], trees={0: leaf, 1: leaf}))


def test_repeated_subtrees_cost_no_more_than_the_blocks_that_are_there(forge: Forge) -> None:
    """Each layer links the one below it twice: 2^4 leaves if it were walked, a handful of nodes as it is refused."""
    child = forge.node([POOL[0][0]])
    for height in range(1, 5):
        child = forge.node([sorted(POOL[height])[5]], left=child, trees={0: child})
    loads = 0

    def block_of(cid: bytes) -> bytes | None:
        nonlocal loads
        loads += 1
        return forge.blocks.get(cid)

    with pytest.raises(UpstreamError, match="beyond"):
        list(walk(block_of, child, DEFAULT_LIMITS))
    assert loads <= 10


def test_keys_stay_in_their_gap(forge: Forge) -> None:
    top = sorted(POOL[1])[5]
    low, high = forge.node([below(top, 0)]), forge.node([above(top, 0)])
    assert walked(forge.blocks, forge.node([top], left=low, trees={0: high}))
    assert "beyond" in refused(forge.blocks, forge.node([top], left=high))
    assert "beyond" in refused(forge.blocks, forge.node([top], trees={0: low}))
    wide = forge.node(sorted([below(top, 0), above(top, 0)]))
    assert "beyond" in refused(forge.blocks, forge.node([top], left=wide))
    assert "beyond" in refused(forge.blocks, forge.node([top], trees={0: wide}))


def test_keys_two_layers_down_stay_in_their_gap(forge: Forge) -> None:
    top = sorted(POOL[2])[5]
    high = forge.node([], left=forge.node([above(top, 0)]))
    assert "beyond" in refused(forge.blocks, forge.node([top], left=high))
    low = forge.node([], left=forge.node([below(top, 0)]))
    assert "beyond" in refused(forge.blocks, forge.node([top], trees={0: low}))


def test_a_tree_deeper_than_the_limit_is_refused() -> None:
    root, blocks = oracle.build(SOME)
    assert len(list(walk(blocks.get, root, replace(DEFAULT_LIMITS, tree_depth=3)))) == len(SOME)
    with pytest.raises(UpstreamError, match="height 3"):
        list(walk(blocks.get, root, replace(DEFAULT_LIMITS, tree_depth=2)))


# ------------------------------------------------------------------------- one node of a good tree changed


def accepted_only_if_canonical(blocks: Blocks, root: bytes, changed: bytes) -> bool:
    """A walk over a changed block under its old CID; if it goes through, the block is one of the tree over its keys."""
    try:
        records = walked(blocks, root)
    except (UpstreamError, MissingNodeError):
        return False
    assert changed in oracle.build(records)[1].values()
    return True


@pytest.mark.slow
def test_every_bit_flipped_in_every_node() -> None:
    root, blocks = oracle.build(SOME)
    assert len(blocks) > 6
    outcomes = [
        accepted_only_if_canonical({**blocks, cid: flipped}, root, flipped)
        for cid, block in blocks.items()
        for at in range(len(block))
        for bit in range(8)
        for flipped in [block[:at] + bytes([block[at] ^ 1 << bit]) + block[at + 1 :]]
    ]
    values = sum(32 * 8 for _ in SOME)  # a flip in a value's hash makes another record of a good tree
    assert values <= outcomes.count(True) < values * 1.2
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
def test_every_node_changed(change: Callable[[Fields], object]) -> None:
    root, blocks = oracle.build(SOME)
    for cid, block in blocks.items():
        node = cbor2.loads(block)
        if not node["e"]:
            continue
        change(node)
        changed = cbor2.dumps(node, canonical=True)
        if changed != block:
            accepted_only_if_canonical({**blocks, cid: changed}, root, changed)


@settings(max_examples=300)
@given(records_strategy.filter(lambda records: len(records) > 3), st.data())
def test_nodes_of_other_trees_in_place_of_one(records: dict[bytes, bytes], data: st.DataObject) -> None:
    root, blocks = oracle.build(records)
    other = oracle.build(data.draw(records_strategy))[1]
    cid = data.draw(st.sampled_from(sorted(blocks)))
    changed = data.draw(st.sampled_from(sorted({**blocks, **other}.values())))
    accepted_only_if_canonical({**other, **blocks, cid: changed}, root, changed)


# --------------------------------------------------------------------------------------------- real trees


def test_all_trees_of_the_mst_test_suite() -> None:
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


WHOLE = {
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
MADE_UP = "proto_rune-frames/sync/repo.car"


@pytest.mark.parametrize(("name", "count"), WHOLE.items())
def test_real_repos(name: str, count: int) -> None:
    data, blocks = exported(name)
    records = walked(blocks, data)
    assert len(records) == count
    assert dict(leaves(blocks.get, data)) == records
    root, nodes = oracle.build(records)
    assert root == data
    assert nodes.items() <= blocks.items()


def test_the_records_of_a_real_repo_are_those_that_were_published_with_it() -> None:
    data, blocks = exported("jetstream-corpus/repo.car")
    lines = vectors("jetstream-corpus/car_expected_records.tsv").read_text().splitlines()
    texts = {key.decode(): value for key, value in walked(blocks, data).items()}
    assert texts == {line.split("\t")[0]: oracle.cid_from_text(line.split("\t")[1]) for line in lines}


@pytest.mark.parametrize("name", SLICES)
def test_slices_of_repos_are_not_taken_for_whole(name: str) -> None:
    data, blocks = exported(name)
    with pytest.raises(MissingNodeError):
        walked(blocks, data)


def test_a_made_up_tree_with_prefixes_against_the_parents_key_is_refused() -> None:
    data, blocks = exported(MADE_UP)
    assert "prefix" in refused(blocks, data)


def exported(name: str) -> tuple[bytes, Blocks]:
    root, blocks = oracle.read_car(vectors(name).read_bytes())
    return cbor2.loads(blocks[root])["data"].value[1:], blocks


def test_every_published_repo_is_tried() -> None:
    top = vectors("repos").parent
    found = {path.relative_to(top).as_posix() for path in top.rglob("*.car")}
    others = {name for name in found if name.startswith(("car-hostile/", "mst-test-suite/"))}
    assert found - others == {*WHOLE, *SLICES, MADE_UP}
