"""Inversion: right on everything published, equal to the slow way, and never a wrong root."""

import base64
import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import inversion as inversion_module
from indexer.atproto.mst.inversion import Inversion, NetOp, Verdict, invert
from indexer.atproto.mst.node import EMPTY_TREE
from indexer.errors import UpstreamError
from indexer.reasons import Rejection
from tests.atproto.mst import oracle
from tests.atproto.mst.oracle import Blocks, Records
from tests.vectors import vectors

A, B, C = (oracle.cid(name) for name in (b"a", b"b", b"c"))
POOL = {height: list(islice(oracle.keys_of_height(height), 10)) for height in range(6)}
KEYS = sorted(key for keys in POOL.values() for key in keys)

records_strategy = st.dictionaries(st.sampled_from(KEYS), st.sampled_from([A, B]), max_size=40)
edits_strategy = st.dictionaries(st.sampled_from(KEYS), st.sampled_from([A, B, C, None]), min_size=1, max_size=8)


def undo(blocks: Blocks, root: bytes, ops: Sequence[NetOp], prev_data: bytes) -> Inversion:
    return invert(blocks, root, ops, prev_data, DEFAULT_LIMITS)


def edited(before: Records, edits: dict[bytes, bytes | None]) -> Records:
    return {key: value for key, value in {**before, **edits}.items() if value is not None}


# ------------------------------------------------------------------------------------------- random trees


@settings(max_examples=300)
@given(records_strategy, edits_strategy, st.randoms())
def test_undoing_what_was_done_gives_the_tree_before(
    before: Records, edits: dict[bytes, bytes | None], random: Any
) -> None:
    after = edited(before, edits)
    ops = oracle.difference(before, after)
    random.shuffle(ops)
    prev_data = oracle.build(before)[0]
    root, blocks = oracle.build(after)
    assert undo(blocks, root, ops, prev_data) == Inversion(Verdict.OK, prev_data, ops_hold=True)


@settings(max_examples=500)
@given(records_strategy, edits_strategy, st.data())
def test_with_any_nodes_missing_the_verdict_is_that_of_the_slow_way(
    before: Records, edits: dict[bytes, bytes | None], data: st.DataObject
) -> None:
    after = edited(before, edits)
    ops = oracle.difference(before, after)
    prev_data = oracle.build(before)[0]
    root, blocks = oracle.build(after)
    kept = data.draw(st.sets(st.sampled_from(sorted(blocks)))) if data.draw(st.booleans()) else None
    gone = data.draw(st.sets(st.sampled_from(sorted(blocks)), max_size=2))
    for cid in gone if kept is None else blocks.keys() - kept:
        del blocks[cid]
    inversion = undo(blocks, root, ops, prev_data)
    assert (inversion.verdict, inversion.root) == oracle.invert(blocks, root, ops, prev_data)
    assert inversion.verdict in {Verdict.OK, Verdict.UNDECIDABLE}
    assert inversion.root in {None, prev_data}


@settings(max_examples=500)
@given(records_strategy, edits_strategy, edits_strategy, st.data())
def test_other_operations_than_those_that_were_done_are_found_out(
    before: Records, edits: dict[bytes, bytes | None], others: dict[bytes, bytes | None], data: st.DataObject
) -> None:
    """Operations of another commit, mixed with the right ones: the same verdict as the slow way, never a wrong OK."""
    after = edited(before, edits)
    right = oracle.difference(before, after)
    other = oracle.difference(edited(before, others), after)
    mixed = {op.key: op for op in data.draw(st.permutations(right + other))}
    ops = (
        data.draw(st.lists(st.sampled_from(sorted(mixed.values(), key=lambda op: op.key)), unique=True))
        if mixed
        else []
    )
    prev_data = oracle.build(before)[0]
    root, blocks = oracle.build(after)
    for cid in data.draw(st.sets(st.sampled_from(sorted(blocks)), max_size=1)):
        del blocks[cid]
    inversion = undo(blocks, root, ops, prev_data)
    assert (inversion.verdict, inversion.root) == oracle.invert(blocks, root, ops, prev_data)
    assert (inversion.verdict is Verdict.OK) <= (sorted(ops, key=lambda op: op.key) == right)


@given(records_strategy.filter(bool), st.data())
def test_each_lie_about_one_operation_has_its_verdict(before: Records, data: st.DataObject) -> None:
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


# --------------------------------------------------------------------------------------------- odd commits


@settings(max_examples=500)
@given(records_strategy, st.sampled_from(KEYS), st.sampled_from([A, B, C, None]), st.data())
def test_what_is_undone_in_place_is_what_building_the_tree_anew_gives(
    before: Records, key: bytes, value: bytes | None, data: st.DataObject
) -> None:
    """With the true blocks, and with nodes put where they don't belong."""
    after = edited(before, {key: value})
    ops = oracle.difference(before, after)
    prev_data = oracle.build(before)[0]
    root, blocks = oracle.build(after)
    if data.draw(st.booleans()):
        moved, place = data.draw(st.sampled_from(sorted(blocks))), data.draw(st.sampled_from(sorted(blocks)))
        blocks[place] = blocks[moved]

    def outcome() -> Inversion | str:
        try:
            return undo(blocks, root, ops, prev_data)
        except UpstreamError as error:
            return error.reason

    quickly = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inversion_module, "_undo_in_place", lambda *_: None)
        assert outcome() == quickly


def test_most_single_operations_are_undone_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = sorted(b"app.bsky.feed.like/%013d" % number for number in range(0, 3_000, 3))
    before = dict.fromkeys(keys, A)
    seen: Counter[bool] = Counter()
    in_place = inversion_module._undo_in_place

    def counted(*arguments: Any) -> bytes | None:
        root = in_place(*arguments)
        seen[root is not None] += 1
        return root

    monkeypatch.setattr(inversion_module, "_undo_in_place", counted)
    prev_data = oracle.build(before)[0]
    for number in range(1, 300, 12):
        new = b"app.bsky.feed.like/%013d" % number
        edit: tuple[dict[bytes, bytes | None], ...] = ({new: B}, {keys[number]: B}, {keys[number]: None})
        for edits in edit:
            after = edited(before, edits)
            root, blocks = oracle.build(after)
            assert undo(blocks, root, oracle.difference(before, after), prev_data).verdict is Verdict.OK
    assert seen[True] > 5 * seen[False] > 0, seen


def test_an_empty_commit_needs_no_blocks() -> None:
    root = oracle.build({KEYS[0]: A})[0]
    assert undo({}, root, [], root) == Inversion(Verdict.OK, root, ops_hold=True)
    assert undo({}, root, [], EMPTY_TREE).verdict is Verdict.MISMATCH


@pytest.mark.parametrize("size", [1, 2, 60])
def test_a_first_commit_comes_from_the_empty_tree_and_a_last_one_goes_there(size: int) -> None:
    records = dict.fromkeys(KEYS[:size], A)
    root, blocks = oracle.build(records)
    creates = oracle.difference({}, records)
    assert undo(blocks, root, creates, EMPTY_TREE) == Inversion(Verdict.OK, EMPTY_TREE, ops_hold=True)
    assert undo(blocks, root, creates[1:], EMPTY_TREE).verdict is Verdict.MISMATCH
    empty, nothing = oracle.build({})
    assert undo(nothing, empty, oracle.difference(records, {}), root).verdict is Verdict.OK


def test_there_and_back_again() -> None:
    here, there = {KEYS[1]: A, KEYS[7]: B}, {KEYS[1]: C, KEYS[8]: B}
    (root, blocks), (other, others) = oracle.build(here), oracle.build(there)
    assert undo(others, other, oracle.difference(here, there), root).verdict is Verdict.OK
    assert undo(blocks, root, oracle.difference(there, here), other).verdict is Verdict.OK


def test_without_the_root_nothing_can_be_said() -> None:
    root, _ = oracle.build({KEYS[0]: A})
    inversion = undo({}, root, [NetOp(KEYS[0], None, A)], EMPTY_TREE)
    assert (inversion.verdict, inversion.root, inversion.ops_hold) == (Verdict.UNDECIDABLE, None, False)
    assert "no node b" in inversion.detail


def test_operations_that_hold_are_told_from_those_that_could_not_be_looked_up() -> None:
    """Removing the key above two leaves merges them: the root proves the operation, but not what was before."""
    key = POOL[1][0]
    low = max(leaf for leaf in POOL[0] if leaf < key)
    high = min(leaf for leaf in POOL[0] if leaf > key)
    root, blocks = oracle.build({low: A, key: A, high: A})
    prev_data = oracle.build({low: A, high: A})[0]
    only_root = {root: blocks[root]}
    inversion = undo(only_root, root, [NetOp(key, None, A)], prev_data)
    assert (inversion.verdict, inversion.ops_hold) == (Verdict.UNDECIDABLE, True)
    inversion = undo(only_root, root, [NetOp(low, None, A)], prev_data)
    assert (inversion.verdict, inversion.ops_hold) == (Verdict.UNDECIDABLE, False)


def test_a_contradiction_is_one_whatever_else_is_missing() -> None:
    key, low = POOL[1][0], max(leaf for leaf in POOL[0] if leaf < POOL[1][0])
    root, blocks = oracle.build({low: A, key: A})
    ops = [NetOp(low, None, A), NetOp(key, None, B)]
    inversion = undo({root: blocks[root]}, root, ops, EMPTY_TREE)
    assert (inversion.verdict, inversion.ops_hold) == (Verdict.OPS_MISMATCH, False)
    assert inversion.detail == f"create of {key!r}"


def test_a_lone_subtree_is_the_tree_before_only_if_it_is_known_to_be_its_root() -> None:
    """The tree grew by layers: what hung below the new key, through nodes without keys, was the whole tree."""
    leaf, top = min(POOL[0]), max(POOL[3])
    prev_data, _ = oracle.build({leaf: A})
    root, blocks = oracle.build({leaf: A, top: A})
    ops = [NetOp(top, None, A)]
    assert len(blocks) == 4
    for gone in [None, *blocks]:
        present = {cid: block for cid, block in blocks.items() if cid != gone}
        inversion = undo(present, root, ops, prev_data)
        expected = Verdict.OK if gone in {None, prev_data} else Verdict.UNDECIDABLE
        assert inversion.verdict is expected
        assert inversion.root == (prev_data if expected is Verdict.OK else None)
    assert undo(blocks, root, ops, EMPTY_TREE) == Inversion(Verdict.MISMATCH, prev_data, ops_hold=True)


def test_a_subtree_that_moves_up_beside_a_key_need_not_be_there() -> None:
    """Without the key on layer 2, the leaf to its right hangs directly behind the key on layer 1 to its left."""
    top = sorted(POOL[2])[5]
    left = max(key for key in POOL[1] if key < top)
    right = min(key for key in POOL[0] if key > top)
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
        lambda keys: oracle.encode([*keys, max(POOL[1])], [A] * (len(keys) + 1), None, [None] * (len(keys) + 1)),
        lambda _: oracle.encode([max(POOL[1])], [A], None, [None]),
        lambda _: oracle.encode([], [], None, []),
        lambda _: b"",
    ],
)
def test_a_malformed_node_on_the_way_is_upstreams_fault(spoil: Any) -> None:
    key = POOL[1][0]
    leaves = sorted(leaf for leaf in POOL[0] if leaf < key)[-2:]
    spoiled = spoil(leaves)
    root = oracle.encode([key], [A], oracle.cid(spoiled), [None])
    blocks = {oracle.cid(root): root, oracle.cid(spoiled): spoiled}
    with pytest.raises(UpstreamError) as caught:
        undo(blocks, oracle.cid(root), [NetOp(leaves[0], B, A)], EMPTY_TREE)
    assert caught.value.reason is Rejection.NODE_MALFORMED


def test_a_subtree_out_of_its_gap_is_refused() -> None:
    key = POOL[1][0]
    high = min(leaf for leaf in POOL[0] if leaf > key)
    leaf = oracle.encode([high], [A], None, [None])
    root = oracle.encode([key], [A], oracle.cid(leaf), [None])
    blocks = {oracle.cid(root): root, oracle.cid(leaf): leaf}
    absent = min(other for other in POOL[0] if other < key)
    with pytest.raises(UpstreamError, match="out of order"):
        undo(blocks, oracle.cid(root), [NetOp(absent, A, None)], EMPTY_TREE)


def test_a_root_without_keys_is_refused() -> None:
    leaf = oracle.encode([POOL[0][0]], [A], None, [None])
    root = oracle.encode([], [], oracle.cid(leaf), [])
    with pytest.raises(UpstreamError, match="root without keys"):
        undo(
            {oracle.cid(root): root, oracle.cid(leaf): leaf}, oracle.cid(root), [NetOp(POOL[0][0], None, A)], EMPTY_TREE
        )


@settings(max_examples=300)
@given(records_strategy.filter(bool), edits_strategy, st.data())
def test_damaged_nodes_never_give_another_error(
    before: Records, edits: dict[bytes, bytes | None], data: st.DataObject
) -> None:
    after = edited(before, edits)
    root, blocks = oracle.build(after)
    cid = data.draw(st.sampled_from(sorted(blocks)))
    block = bytearray(blocks[cid])
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    blocks[cid] = bytes(block)
    with suppress(UpstreamError):
        undo(blocks, root, oracle.difference(before, after), oracle.build(before)[0])


# ------------------------------------------------------------------------------------------------ published


def never_wrong(blocks: Blocks, root: bytes, ops: Sequence[NetOp], prev_data: bytes) -> Verdict:
    """The verdict; and with any one of the blocks dropped, OK with the right root or UNDECIDABLE."""
    for gone in blocks:
        inversion = undo({cid: block for cid, block in blocks.items() if cid != gone}, root, ops, prev_data)
        assert (inversion.verdict, inversion.root) in {(Verdict.OK, prev_data), (Verdict.UNDECIDABLE, None)}
    inversion = undo(blocks, root, ops, prev_data)
    assert inversion.root in {None, prev_data}
    return inversion.verdict


def suite() -> Iterator[tuple[Blocks, bytes, list[NetOp], bytes]]:
    """Blocks of the minimal proof, new root, operations, old root."""
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
def test_all_cases_of_the_mst_test_suite() -> None:
    verdicts = Counter(never_wrong(blocks, root, ops, old) for blocks, root, ops, old in suite())
    assert verdicts == {Verdict.OK: 8192}


@pytest.mark.slow
def test_all_cases_of_the_mst_test_suite_as_the_slow_way_has_them() -> None:
    """Of each case, the whole proof and the proof without its last node."""
    for blocks, root, ops, old in suite():
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
def test_commit_proof_fixtures(name: str) -> None:
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
        assert never_wrong(proof, root, oracle.difference(before, after), prev_data) is Verdict.OK, fixture["comment"]


def firehose_commit(seq: int) -> tuple[Blocks, bytes, list[NetOp]]:
    """A commit message in JSON; they are of the time before prevData."""
    message = json.loads(vectors(f"indigo/firehose-commits/firehose_commit_{seq}.json").read_text())
    encoded = message["blocks"]["$bytes"]
    root, blocks = oracle.read_car(base64.b64decode(encoded + "=" * (-len(encoded) % 4)))
    ops = [NetOp(op["path"].encode(), None, cid_of_json(op["cid"])) for op in message["ops"]]
    return blocks, data_of(blocks[root]), ops


def test_a_firehose_commit_that_came_with_too_few_blocks() -> None:
    blocks, root, ops = firehose_commit(4621317030)
    inversion = undo(blocks, root, ops, EMPTY_TREE)
    assert (inversion.verdict, inversion.root, inversion.ops_hold) == (Verdict.UNDECIDABLE, None, True)


def test_a_firehose_commit_whose_tree_before_is_a_subtree_that_did_not_come_with_it() -> None:
    blocks, root, ops = firehose_commit(4623075231)
    node = oracle.decode(blocks[root])
    assert node.keys == [ops[0].key]
    (prev_data,) = filter(None, [node.left, *node.trees])
    assert prev_data not in blocks
    assert never_wrong(blocks, root, ops, prev_data) is Verdict.OK
    assert undo(blocks, root, ops, EMPTY_TREE).verdict is Verdict.UNDECIDABLE


def cid_of_json(link: dict[str, str]) -> bytes:
    return oracle.cid_from_text(link["$link"])


def data_of(commit: bytes) -> bytes:
    return bytes(cbor2.loads(commit)["data"].value[1:])


def frames() -> Iterator[dict[str, Any]]:
    """The commit messages of jetstream's corpus, each frame behind its length."""
    data = vectors("jetstream-frames/frames.bin").read_bytes()
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        header, payload = cbor_pair(data[at + 4 : at + 4 + size])
        at += 4 + size
        if header.get("t") == "#commit":
            yield payload


def cbor_pair(data: bytes) -> tuple[Any, Any]:
    header = cbor2.loads(data)
    return header, cbor2.loads(data[len(cbor2.dumps(header)) :])


def test_commits_of_the_live_network() -> None:
    verdicts = Counter[Verdict]()
    for message in frames():
        root, blocks = oracle.read_car(message["blocks"])
        ops = [NetOp(op["path"].encode(), untagged(op.get("prev")), untagged(op["cid"])) for op in message["ops"]]
        verdicts[never_wrong(blocks, data_of(blocks[root]), ops, untagged(message["prevData"]) or b"")] += 1
    assert verdicts == {Verdict.OK: 73}


def untagged(link: Any) -> bytes | None:
    return None if link is None else bytes(link.value[1:])
