"""Inversion: undo the operations of a commit on its tree (docs/protocol.md#inversion).

The tree depends only on its keys and values. So if undoing the operations gives the root that the commit names as its
`prevData`, they are the whole difference between the two trees.

A commit with one operation is first undone by changing a few bytes (`in_place.py`). If that is not possible, or gives
another root than `prevData`, the general algorithm decides:

1. Look up the key of each operation in the new tree. The tree must show the effect of the operation.
2. Take the new tree apart into a row of keys and closed subtrees, in key order. A *closed* subtree is represented by
   its CID. A subtree is opened only if the key of an operation belongs into it.
3. Edit the row: leave out each created key, insert each deleted key, and give each updated key its old value.
4. Build the one tree over the row (`tree_builder.py`). A closed subtree remains as it is unless a neighbour in the row
   belongs between the same keys of the layer above. Then it is opened, and its contents take its place in the row.
5. Compare the root with `prevData`.

All operations are undone at once, so their order does not matter. If a subtree has to be opened whose node is not in
the CAR slice, the result is undecidable.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from indexer.atproto.cid import cid_text
from indexer.atproto.limits import Limits
from indexer.atproto.mst.in_place import undo_in_place
from indexer.atproto.mst.net_op import NetOp
from indexer.atproto.mst.partial_tree import NodeNotInSliceError, PartialTree
from indexer.atproto.mst.tree_builder import TreeBuilder, key_of


class Verdict(Enum):
    """The result of an inversion."""

    OK = "the operations are the whole difference between the two trees"
    MISMATCH = "undoing the operations gives another root than prevData"
    OPS_MISMATCH = "the new tree does not show the effect of an operation"
    UNDECIDABLE = "a node that is needed is not in the CAR slice"


class Inversion(NamedTuple):
    """A verdict with its details.

    Attributes:
        root: The root of the tree before the operations; None if it is unknown.
        ops_hold: True if the new tree shows the effect of every operation. Verdict UNDECIDABLE does not imply this.
        detail: More about this case, for people.
    """

    verdict: Verdict
    root: bytes | None
    ops_hold: bool
    detail: str = ""


def invert(
    blocks: Mapping[bytes, bytes], root: bytes, ops: Sequence[NetOp], prev_data: bytes, limits: Limits
) -> Inversion:
    """Undo operations on the tree with this root, and compare the result with `prev_data`.

    Args:
        blocks: The blocks of the CAR slice by CID. Their hashes must have been checked. Other blocks are ignored.
        root: The CID of the root after the commit.
        ops: The operations of the commit, at most one for each key. If there are none, no block is needed.
        prev_data: The CID of the root before the commit; `EMPTY_TREE` for a first commit.
        limits: The limits of a tree.

    Raises:
        UpstreamError: With NODE_MALFORMED, if a node that is needed breaks a rule.
    """
    if not ops:
        return Inversion(_compare(root, prev_data), root, ops_hold=True)
    if len(ops) == 1 and undo_in_place(blocks, root, ops[0], limits) == prev_data:
        return Inversion(Verdict.OK, prev_data, ops_hold=True)
    return invert_by_rebuilding(blocks, root, ops, prev_data, limits)


def invert_by_rebuilding(
    blocks: Mapping[bytes, bytes], root: bytes, ops: Sequence[NetOp], prev_data: bytes, limits: Limits
) -> Inversion:
    """Return the same as `invert` by the general algorithm, for one or more operations."""
    ops_hold = False
    try:
        tree = PartialTree(blocks, root, limits)
        contradicted = tree.contradicted_op(ops)
        if contradicted is not None:
            detail = f"{contradicted.action} of {contradicted.key!r}"
            return Inversion(Verdict.OPS_MISMATCH, None, ops_hold, detail)
        ops_hold = True
        builder = TreeBuilder(tree)
        builder.add_subtree(tree.root, tree.layer, sorted(ops, key=key_of))
        before = builder.finish(prev_data)
    except NodeNotInSliceError as missing:
        return Inversion(Verdict.UNDECIDABLE, None, ops_hold, f"no node {cid_text(missing.cid)}")
    return Inversion(_compare(before, prev_data), before, ops_hold)


def _compare(before: bytes, prev_data: bytes) -> Verdict:
    return Verdict.OK if before == prev_data else Verdict.MISMATCH
