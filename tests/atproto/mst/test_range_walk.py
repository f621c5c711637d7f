"""Walks of ranges find exactly the wanted records, read few nodes, and are never complete without one that matters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.atproto.mst import MissingNodeError, Node, leaves, load_node
from indexer.atproto.range_walk import RangeWalk, build_subtree, ranges_of, walk_ranges
from indexer.atproto.syntax import CollectionFilter
from indexer.errors import UpstreamError
from tests.atproto.mst import oracle
from tests.atproto.mst.oracle import Blocks, Records
from tests.atproto.mst.random_trees import A, B

COLLECTIONS = [
    *("com.example", "com.example.a", "com.example.a-x", "com.example.a.sub", "com.example.a0"),
    *("com.example.ax", "com.example.b", "com.example0", "com.examplf.a", "org.other.z"),
]
KEYS = [
    key
    for name in COLLECTIONS
    for height, size in enumerate([6, 3, 2, 1, 1])
    for key, _ in zip(oracle.keys_of_height(height, f"{name}/"), range(size), strict=False)
]
PATTERNS = ["com.example.a", "com.example.b", "com.example.a.*", "com.example.*", "com.*", "org.other.z", "net.none.a"]

records_strategy = st.dictionaries(st.sampled_from(KEYS), st.sampled_from([A, B]), max_size=60)
patterns_strategy = st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3)


def walked(blocks: Blocks, root: bytes, patterns: list[str], limits: Limits = DEFAULT_LIMITS) -> RangeWalk:
    def node_of(cid: bytes) -> Node:
        return load_node(blocks.get, cid, limits)

    return walk_ranges(node_of, root, ranges_of(patterns), limits)


def selected(records: Records, patterns: list[str]) -> list[tuple[bytes, bytes]]:
    """Return the wanted records of a whole tree."""
    wanted = CollectionFilter(patterns)
    return sorted((key, cid) for key, cid in records.items() if wanted.matches(key.partition(b"/")[0].decode()))


@given(records_strategy, patterns_strategy)
def test_walk_that_reads_only_what_it_asks_for_finds_the_wanted_records(records: Records, patterns: list[str]) -> None:
    root, blocks = oracle.build(records)
    read = {root: blocks[root]}
    while unread := (walk := walked(read, root, patterns)).unread:
        assert [node.cid not in read for node in unread] == [True] * len(unread)
        for node in unread:
            below = list(leaves(blocks.get, node.cid))
            assert not node.inside or selected(dict(below), patterns) == below
            read[node.cid] = blocks[node.cid]
    assert walk.entries == selected(records, patterns)
    assert walked(blocks, root, patterns) == walk


@given(records_strategy.filter(bool), patterns_strategy, st.data())
def test_walk_without_any_one_node_is_complete_only_if_the_node_does_not_matter(
    records: Records, patterns: list[str], data: st.DataObject
) -> None:
    root, blocks = oracle.build(records)
    missing = data.draw(st.sampled_from(sorted(blocks)))
    del blocks[missing]
    try:
        walk = walked(blocks, root, patterns)
    except MissingNodeError:
        assert missing == root
    else:
        assert [node.cid for node in walk.unread] in ([], [missing])
        assert walk.unread or walk.entries == selected(records, patterns)


def test_tree_with_more_layers_than_the_limit_is_rejected() -> None:
    root, blocks = oracle.build(dict.fromkeys(KEYS, A))
    assert walked(blocks, root, ["com.*"], Limits(tree_depth=4)).layer == 4
    with pytest.raises(UpstreamError, match="height 4"):
        walked(blocks, root, ["com.*"], Limits(tree_depth=3))


@given(records_strategy, patterns_strategy, st.data())
def test_each_subtree_is_rebuilt_from_exactly_its_entries(
    records: Records, patterns: list[str], data: st.DataObject
) -> None:
    """Also with nodes without keys, which have only a left subtree. With any other entries, its CID is another one."""
    root, blocks = oracle.build(records)
    read = {root: blocks[root]}
    while unread := walked(read, root, patterns).unread:
        for node in unread:
            read[node.cid] = blocks[node.cid]
            entries = list(leaves(blocks.get, node.cid))
            rebuilt = build_subtree(entries, node.layer)
            assert list(rebuilt)[-1] == node.cid
            assert rebuilt.items() <= blocks.items()
            assert list(leaves(rebuilt.get, node.cid)) == entries
            assert node.lower < entries[0][0]
            assert node.upper is None or entries[-1][0] < node.upper
            other = dict(entries)
            key = data.draw(st.sampled_from([*other, *KEYS]))
            other[key] = {None: A, A: B, B: A}[other.get(key)]
            if data.draw(st.booleans()):
                del other[data.draw(st.sampled_from(sorted(other)))]
            if other != dict(entries):
                assert node.cid not in build_subtree(sorted(other.items()), node.layer)


def test_entries_that_no_subtree_of_a_layer_has_rebuild_nothing() -> None:
    assert build_subtree([], 3) == {}
    high = next(oracle.keys_of_height(2))
    assert build_subtree([(high, A)], 1) == {}
    assert len(build_subtree([(high, A)], 4)) == 3
