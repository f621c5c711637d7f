"""Inversion gives the published results and the results of the oracle, and never another root than these."""

import base64
import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import EMPTY_TREE, Inversion, NetOp, Verdict, invert
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
from tests.vectors import vectors


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


def test_tree_that_returns_to_an_earlier_root_is_inverted() -> None:
    first, second = {KEYS[1]: A, KEYS[7]: B}, {KEYS[1]: C, KEYS[8]: B}
    (first_root, first_blocks), (second_root, second_blocks) = oracle.build(first), oracle.build(second)
    forth, back = oracle.difference(first, second), oracle.difference(second, first)
    assert undo(second_blocks, second_root, forth, first_root).verdict is Verdict.OK
    assert undo(first_blocks, first_root, back, second_root).verdict is Verdict.OK


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


@pytest.mark.parametrize(
    "spoil",
    [
        lambda keys: oracle.encode(keys, [A] * len(keys), None, [None] * len(keys))[:-1],
        lambda keys: oracle.encode(keys[::-1], [A] * len(keys), None, [None] * len(keys)),
        lambda keys: oracle.encode(
            [*keys, max(KEYS_BY_HEIGHT[1])], [A] * (len(keys) + 1), None, [None] * (len(keys) + 1)
        ),
        lambda _: oracle.encode([max(KEYS_BY_HEIGHT[1])], [A], None, [None]),
        lambda _: oracle.encode([], [], None, []),
        lambda _: b"",
    ],
)
def test_malformed_node_is_rejected(spoil: Any) -> None:
    key = KEYS_BY_HEIGHT[1][0]
    leaves = sorted(leaf for leaf in KEYS_BY_HEIGHT[0] if leaf < key)[-2:]
    spoiled = spoil(leaves)
    root = oracle.encode([key], [A], oracle.cid_of(spoiled), [None])
    blocks = {oracle.cid_of(root): root, oracle.cid_of(spoiled): spoiled}
    with pytest.raises(UpstreamError) as caught:
        undo(blocks, oracle.cid_of(root), [NetOp(leaves[0], B, A)], EMPTY_TREE)
    assert caught.value.reason is Rejection.NODE_MALFORMED


def test_subtree_with_keys_beyond_its_neighbours_is_rejected() -> None:
    key = KEYS_BY_HEIGHT[1][0]
    high = min(leaf for leaf in KEYS_BY_HEIGHT[0] if leaf > key)
    leaf = oracle.encode([high], [A], None, [None])
    root = oracle.encode([key], [A], oracle.cid_of(leaf), [None])
    blocks = {oracle.cid_of(root): root, oracle.cid_of(leaf): leaf}
    absent = min(other for other in KEYS_BY_HEIGHT[0] if other < key)
    with pytest.raises(UpstreamError, match="out of order"):
        undo(blocks, oracle.cid_of(root), [NetOp(absent, A, None)], EMPTY_TREE)


def test_key_that_is_in_two_subtrees_is_rejected() -> None:
    """Without the key above them, the two subtrees become one."""
    key = KEYS_BY_HEIGHT[1][0]
    leaf = oracle.encode([min(KEYS_BY_HEIGHT[0])], [A], None, [None])
    root = oracle.encode([key], [A], oracle.cid_of(leaf), [oracle.cid_of(leaf)])
    blocks = {oracle.cid_of(root): root, oracle.cid_of(leaf): leaf}
    with pytest.raises(UpstreamError, match="out of order"):
        undo(blocks, oracle.cid_of(root), [NetOp(key, None, A)], EMPTY_TREE)


def test_root_without_keys_is_rejected() -> None:
    leaf = oracle.encode([KEYS_BY_HEIGHT[0][0]], [A], None, [None])
    root = oracle.encode([], [], oracle.cid_of(leaf), [])
    with pytest.raises(UpstreamError, match="root without keys"):
        undo(
            {oracle.cid_of(root): root, oracle.cid_of(leaf): leaf},
            oracle.cid_of(root),
            [NetOp(KEYS_BY_HEIGHT[0][0], None, A)],
            EMPTY_TREE,
        )


@settings(max_examples=scaled(300))
@given(records_strategy.filter(bool), edits_strategy, st.data())
def test_damaged_node_raises_no_other_error(before: Records, edits: Edits, data: st.DataObject) -> None:
    after = edited(before, edits)
    root, blocks = oracle.build(after)
    cid = data.draw(st.sampled_from(sorted(blocks)))
    block = bytearray(blocks[cid])
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    blocks[cid] = bytes(block)
    with suppress(UpstreamError):
        undo(blocks, root, oracle.difference(before, after), oracle.build(before)[0])


def checked_verdict(blocks: Blocks, root: bytes, ops: Sequence[NetOp], prev_data: bytes) -> Verdict:
    """Return the verdict, after checking that without any one of the blocks it is OK or UNDECIDABLE."""
    for missing in blocks:
        inversion = undo({cid: block for cid, block in blocks.items() if cid != missing}, root, ops, prev_data)
        assert (inversion.verdict, inversion.root) in {(Verdict.OK, prev_data), (Verdict.UNDECIDABLE, None)}
    inversion = undo(blocks, root, ops, prev_data)
    assert inversion.root in {None, prev_data}
    return inversion.verdict


def mst_test_suite() -> Iterator[tuple[Blocks, bytes, list[NetOp], bytes]]:
    """Yield the blocks of the minimal proof, the new root, the operations and the old root of each case."""
    cars = vectors("mst-test-suite/cars/exhaustive")
    trees = {path.stem: oracle.read_car(path.read_bytes()) for path in cars.iterdir()}
    with tarfile.open(vectors("mst-test-suite/tests-diff-half.tar.gz")) as cases:
        for member in cases:
            file = cases.extractfile(member)
            if file is None:
                continue
            case = json.load(file)
            old, _ = trees[Path(case["inputs"]["mst_a"]).stem]
            new, blocks = trees[Path(case["inputs"]["mst_b"]).stem]
            proof = [oracle.cid_from_text(text) for text in case["results"]["inductive_proof_nodes"]]
            yield {cid: blocks[cid] for cid in proof}, new, [net_op(op) for op in case["results"]["record_ops"]], old


def net_op(op: dict[str, str | None]) -> NetOp:
    rpath, *values = op["rpath"], op["old_value"], op["new_value"]
    assert rpath
    old, new = [None if text is None else oracle.cid_from_text(text) for text in values]
    return NetOp(rpath.encode(), old, new)


@pytest.mark.slow
def test_all_cases_of_the_mst_test_suite_are_inverted() -> None:
    verdicts = Counter(checked_verdict(blocks, root, ops, old) for blocks, root, ops, old in mst_test_suite())
    assert verdicts == {Verdict.OK: 8192}


@pytest.mark.slow
def test_all_cases_of_the_mst_test_suite_give_the_result_of_the_oracle() -> None:
    """With the whole proof, and without its last node."""
    for blocks, root, ops, old in mst_test_suite():
        for present in (blocks, dict(list(blocks.items())[:-1])):
            inversion = undo(present, root, ops, old)
            assert (inversion.verdict, inversion.root) == oracle.invert(present, root, ops, old)


@pytest.mark.parametrize(
    "name",
    [
        "atproto-interop-tests/firehose/commit-proof-fixtures.json",
        "atproto-monorepo/packages/repo/tests/commit-proof-fixtures.json",
    ],
)
def test_published_commit_proof_fixtures_are_inverted(name: str) -> None:
    fixtures = json.loads(vectors(name).read_text())
    assert len(fixtures) == 6
    for fixture in fixtures:
        value = oracle.cid_from_text(fixture["leafValue"])
        before = {key.encode(): value for key in fixture["keys"]}
        edits = {key.encode(): value for key in fixture["adds"]} | {key.encode(): None for key in fixture["dels"]}
        after = edited(before, edits)
        root, blocks = oracle.build(after)
        prev_data = oracle.build(before)[0]
        assert prev_data == oracle.cid_from_text(fixture["rootBeforeCommit"])
        assert root == oracle.cid_from_text(fixture["rootAfterCommit"])
        proof = {cid: blocks[cid] for cid in map(oracle.cid_from_text, fixture["blocksInProof"])}
        assert checked_verdict(proof, root, oracle.difference(before, after), prev_data) is Verdict.OK, fixture[
            "comment"
        ]


def firehose_commit(seq: int) -> tuple[Blocks, bytes, list[NetOp]]:
    """Return the blocks, the root and the operations of a published commit. It has no prevData."""
    message = json.loads(vectors(f"indigo/firehose-commits/firehose_commit_{seq}.json").read_text())
    encoded = message["blocks"]["$bytes"]
    root, blocks = oracle.read_car(base64.b64decode(encoded + "=" * (-len(encoded) % 4)))
    ops = [NetOp(op["path"].encode(), None, cid_from_json(op["cid"])) for op in message["ops"]]
    return blocks, data_of(blocks[root]), ops


def test_real_commit_with_too_few_blocks_is_undecidable() -> None:
    blocks, root, ops = firehose_commit(4621317030)
    inversion = undo(blocks, root, ops, EMPTY_TREE)
    assert (inversion.verdict, inversion.root, inversion.ops_hold) == (Verdict.UNDECIDABLE, None, True)


def test_real_commit_whose_previous_tree_is_a_subtree_that_is_not_in_the_slice_is_inverted() -> None:
    blocks, root, ops = firehose_commit(4623075231)
    node = oracle.decode(blocks[root])
    assert node.keys == [ops[0].key]
    (prev_data,) = filter(None, [node.left, *node.trees])
    assert prev_data not in blocks
    assert checked_verdict(blocks, root, ops, prev_data) is Verdict.OK
    assert undo(blocks, root, ops, EMPTY_TREE).verdict is Verdict.UNDECIDABLE


def cid_from_json(link: dict[str, str]) -> bytes:
    return oracle.cid_from_text(link["$link"])


def data_of(commit: bytes) -> bytes:
    return bytes(cbor2.loads(commit)["data"].value[1:])


def frames() -> Iterator[dict[str, Any]]:
    """Yield the payloads of the commits in the corpus of jetstream, where each frame follows its length."""
    data = vectors("jetstream-frames/frames.bin").read_bytes()
    position = 0
    while position < len(data):
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        header, payload = cbor_pair(data[start:position])
        if header.get("t") == "#commit":
            yield payload


def cbor_pair(data: bytes) -> tuple[Any, Any]:
    header = cbor2.loads(data)
    return header, cbor2.loads(data[len(cbor2.dumps(header)) :])


def test_commits_of_the_live_network_are_inverted() -> None:
    verdicts = Counter[Verdict]()
    for message in frames():
        root, blocks = oracle.read_car(message["blocks"])
        ops = [NetOp(op["path"].encode(), cid_in(op.get("prev")), cid_in(op["cid"])) for op in message["ops"]]
        verdicts[checked_verdict(blocks, data_of(blocks[root]), ops, cid_in(message["prevData"]) or b"")] += 1
    assert verdicts == {Verdict.OK: 73}


def cid_in(link: Any) -> bytes | None:
    return None if link is None else bytes(link.value[1:])
