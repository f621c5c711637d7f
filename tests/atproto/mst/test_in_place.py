"""Single operations that are undone in place: with the same result as by rebuilding the tree."""

from collections.abc import Callable
from itertools import cycle, islice

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
from tests.atproto.mst.random_trees import KEYS, A, B, C, edited, records_strategy
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


def keys_with(prefix: str) -> list[bytes]:
    return sorted(key for height in range(4) for key in islice(oracle.keys_of_height(height, prefix), 6))


SOME_KEYS = (
    KEYS,
    KEYS[::2],
    KEYS[1::3],
    KEYS[::7],
    keys_with("XXXX/"),
    keys_with("!/"),
    keys_with("24 bytes before a number/"[:24]),
)


def entry_of(blocks: Blocks, key: bytes) -> tuple[bool, list[bytes | None]]:
    """Return if the key is alone in its node, and the subtrees before and after it."""
    nodes = [oracle.decode(block) for block in blocks.values()]
    [node] = [node for node in nodes if key in node.keys]
    index = node.keys.index(key)
    return len(node.keys) == 1, [node.left, *node.trees][index : index + 2]


@pytest.mark.parametrize("records", SOME_KEYS)
def test_single_operations_are_undone_in_place_unless_nodes_appear_or_disappear(records: list[bytes]) -> None:
    with_all = dict(zip(records, cycle([A, B]), strict=False))
    root, blocks = oracle.build(with_all)
    assert list(walk(blocks.get, root, DEFAULT_LIMITS)) == list(leaves(blocks.get, root)) == list(with_all.items())
    results = set()
    for key, value in with_all.items():
        without, blocks_without = oracle.build({other: with_all[other] for other in records if other != key})
        alone, subtrees = entry_of(blocks, key)
        is_root = key in oracle.decode(blocks[root]).keys
        changed, _ = oracle.build(with_all | {key: C})
        update, create, delete = NetOp(key, C, value), NetOp(key, None, value), NetOp(key, value, None)
        assert undo_in_place(blocks, root, update, DEFAULT_LIMITS) == changed
        before_create = undo_in_place(blocks, root, create, DEFAULT_LIMITS)
        if alone and not any(subtrees):
            assert before_create is None
        elif not (alone and is_root):
            assert before_create == without
        before_delete = undo_in_place(blocks_without, without, delete, DEFAULT_LIMITS)
        assert before_delete == (None if alone or any(subtrees) else root)
        results |= {before_create is None, before_delete is None}
        for present, after, op, before in (
            (blocks, root, update, changed),
            (blocks, root, create, without),
            (blocks_without, without, delete, root),
        ):
            inversion = invert_by_rebuilding(present, after, [op], before, DEFAULT_LIMITS)
            assert inversion == Inversion(Verdict.OK, before, ops_hold=True)
    assert results == {True, False}


def test_single_operation_that_is_undone_in_place_does_not_rebuild_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("indexer.atproto.mst.inversion.invert_by_rebuilding")
    before = dict.fromkeys(KEYS, A)
    root, blocks = oracle.build(before | {KEYS[7]: B})
    inversion = invert(blocks, root, [NetOp(KEYS[7], A, B)], oracle.build(before)[0], DEFAULT_LIMITS)
    assert inversion.verdict is Verdict.OK
