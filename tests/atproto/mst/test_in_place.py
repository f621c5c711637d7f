"""Single operations that are undone in place: with the same result as by rebuilding the tree."""

from collections.abc import Callable
from itertools import count, cycle, islice

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import Inversion, NetOp, Verdict, invert
from indexer.atproto.mst.in_place import undo_in_place
from indexer.atproto.mst.inversion import invert_by_rebuilding
from indexer.atproto.mst.walk import leaves, walk
from indexer.errors import UpstreamError
from indexer.reasons import Rejection
from tests.atproto.mst import oracle
from tests.atproto.mst.oracle import Blocks, Records
from tests.atproto.mst.random_trees import KEYS, A, B, C, Edits, edited, records_strategy
from tests.profiles import scaled


def result_or_reason(
    inverter: Callable[..., Inversion], blocks: Blocks, root: bytes, ops: list[NetOp], prev_data: bytes
) -> Inversion | Rejection:
    try:
        return inverter(blocks, root, ops, prev_data, DEFAULT_LIMITS)
    except UpstreamError as error:
        return error.reason


@settings(max_examples=scaled(500))
@given(records_strategy, st.sampled_from(KEYS), st.sampled_from([A, B, C, None]), st.data())
def test_result_equals_that_of_rebuilding_the_tree(
    before: Records, key: bytes, value: bytes | None, data: st.DataObject
) -> None:
    """With the right blocks, or with one of them under the CID of another."""
    after = edited(before, {key: value})
    ops = oracle.difference(before, after)
    assume(ops)
    prev_data = oracle.build(before)[0]
    root, blocks = oracle.build(after)
    if data.draw(st.booleans()):
        source, target = data.draw(st.sampled_from(sorted(blocks))), data.draw(st.sampled_from(sorted(blocks)))
        blocks[target] = blocks[source]
    expected = result_or_reason(invert_by_rebuilding, blocks, root, ops, prev_data)
    assert result_or_reason(invert, blocks, root, ops, prev_data) == expected


def test_most_single_operations_are_undone_in_place() -> None:
    keys = sorted(b"app.bsky.feed.like/%013d" % number for number in range(0, 600, 3))
    before = dict.fromkeys(keys, A)
    prev_data = oracle.build(before)[0]
    undone = rebuilt = 0
    for number in range(1, 200, 12):
        new = b"app.bsky.feed.like/%013d" % number
        commits: tuple[Edits, ...] = ({new: B}, {keys[number]: B}, {keys[number]: None})
        for edits in commits:
            after = edited(before, edits)
            root, blocks = oracle.build(after)
            (op,) = oracle.difference(before, after)
            if undo_in_place(blocks, root, op, DEFAULT_LIMITS) == prev_data:
                undone += 1
            else:
                rebuilt += 1
            assert invert(blocks, root, [op], prev_data, DEFAULT_LIMITS).verdict is Verdict.OK
    assert undone > 5 * rebuilt > 0


def keys_with(prefix: str) -> list[bytes]:
    return sorted(key for height in range(4) for key in islice(oracle.keys_of_height(height, prefix), 6))


SOME_KEYS = (KEYS, KEYS[::2], KEYS[1::3], KEYS[::7], keys_with("XXXX/"), keys_with("!/"))


def entry_of(blocks: Blocks, key: bytes) -> tuple[bool, list[bytes | None]]:
    """Return if the key is alone in its node, and the subtrees before and after it."""
    nodes = [oracle.decode(block) for block in blocks.values()]
    [node] = [node for node in nodes if key in node.keys]
    index = node.keys.index(key)
    return len(node.keys) == 1, [node.left, *node.trees][index : index + 2]


@pytest.mark.parametrize("records", SOME_KEYS)
def test_operations_are_undone_in_place_unless_nodes_appear_or_disappear(records: list[bytes]) -> None:
    with_all = dict(zip(records, cycle([A, B]), strict=False))
    root, blocks = oracle.build(with_all)
    results = set()
    for key, value in with_all.items():
        without_key = {other: with_all[other] for other in records if other != key}
        without, blocks_without = oracle.build(without_key)
        alone, subtrees = entry_of(blocks, key)
        is_root = key in oracle.decode(blocks[root]).keys

        changed, _ = oracle.build(with_all | {key: C})
        assert undo_in_place(blocks, root, NetOp(key, C, value), DEFAULT_LIMITS) == changed

        before_create = undo_in_place(blocks, root, NetOp(key, None, value), DEFAULT_LIMITS)
        if alone and not any(subtrees):
            assert before_create is None
        elif not (alone and is_root):
            assert before_create == without

        before_delete = undo_in_place(blocks_without, without, NetOp(key, value, None), DEFAULT_LIMITS)
        assert before_delete == (None if alone or any(subtrees) else root)
        results |= {before_create is None, before_delete is None}
    assert results == {True, False}


@pytest.mark.parametrize("records", SOME_KEYS)
def test_single_operations_are_undone_by_rebuilding(records: list[bytes]) -> None:
    with_all = dict(zip(records, cycle([A, B]), strict=False))
    root, blocks = oracle.build(with_all)
    assert list(walk(blocks.get, root, DEFAULT_LIMITS)) == list(leaves(blocks.get, root)) == list(with_all.items())
    for key, value in with_all.items():
        without, blocks_without = oracle.build({other: with_all[other] for other in records if other != key})
        changed, _ = oracle.build(with_all | {key: C})
        for present, after, op, before in (
            (blocks, root, NetOp(key, C, value), changed),
            (blocks, root, NetOp(key, None, value), without),
            (blocks_without, without, NetOp(key, value, None), root),
        ):
            inversion = invert_by_rebuilding(present, after, [op], before, DEFAULT_LIMITS)
            assert inversion == Inversion(Verdict.OK, before, ops_hold=True)


def test_single_operation_that_is_undone_in_place_does_not_rebuild_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("indexer.atproto.mst.inversion.invert_by_rebuilding")
    before = dict.fromkeys(KEYS, A)
    root, blocks = oracle.build(before | {KEYS[7]: B})
    inversion = invert(blocks, root, [NetOp(KEYS[7], A, B)], oracle.build(before)[0], DEFAULT_LIMITS)
    assert inversion.verdict is Verdict.OK


def keys_of_the_example() -> tuple[bytes, bytes, bytes]:
    """Return keys of height 1 and 32 bytes; the first two share 30 bytes, the last two 31 bytes."""
    prefix = b"app.bsky.feed.like/3l777777777"
    first, second = (
        [prefix + start + bytes([end]) for end in b"234567abcdefghijklmnopqrstuvwxyz"] for start in (b"q", b"r")
    )
    a = next(key for key in first if oracle.height(key) == 1)
    b, c = [key for key in second if oracle.height(key) == 1][:2]
    return a, b, c


def leaf_key_after(key: bytes) -> bytes:
    """Return a key of height 0 that begins with `key`."""
    return next(longer for n in count() if oracle.height(longer := key + str(n).encode()) == 0)


def test_bytes_of_the_documented_example() -> None:
    """The drawing in `in_place.py`: a node with the keys a, b and c, of which b was created."""
    a, b, c = keys_of_the_example()
    before = {a: A, leaf_key_after(a): A, leaf_key_after(b): A, c: A}
    prev_data, blocks_before = oracle.build(before)
    root, blocks = oracle.build({**before, b: A})
    assert undo_in_place(blocks, root, NetOp(b, None, A), DEFAULT_LIMITS) == prev_data

    link_start = "d82a582500"
    entry_of_a = {4: "a4616b5820", 41: "617000", 44: "6174" + link_start, 87: "6176" + link_start}
    entry_of_b = {130: "a4616b42", 136: "6170181e", 140: "6174" + link_start, 183: "6176" + link_start}
    after_commit = {0: "a2616583"} | entry_of_a | entry_of_b
    after_commit |= {226: "a4616b41", 231: "6170181f", 235: "6174f6", 238: "6176" + link_start, 281: "616cf6"}
    before_commit = {0: "a2616582"} | entry_of_a
    before_commit |= {130: "a4616b42", 136: "6170181e", 140: "6174f6", 143: "6176" + link_start, 186: "616cf6"}
    for block, size, parts in ((blocks[root], 284, after_commit), (blocks_before[prev_data], 189, before_commit)):
        assert len(block) == size
        for offset, part in parts.items():
            assert block[offset : offset + len(part) // 2].hex() == part
