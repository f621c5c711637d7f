"""Inversion: undo the operations of a commit on its tree (docs/protocol.md#inversion).

The tree depends only on its keys and values. So if undoing the operations gives the root that the commit names as its
`prevData`, they are the whole difference between the two trees. This is the slow reference; the native core is fast.

1. Look up the key of each operation in the new tree. The tree must show the effect of the operation.
2. Take the new tree apart into a row of keys and closed subtrees, in key order. A *closed* subtree is represented by
   its CID. A subtree is opened only if the key of an operation belongs into it. The row does not have the created keys.
   It has the deleted keys, and the old values of the updated ones.
3. Build the one tree over the row, from the top down: the keys of the highest layer divide the row into gaps, and the
   tree over each gap is a subtree. A closed subtree of the layer below remains as it is if it fills its gap. Otherwise
   it is opened, and its contents take its place in the row.
4. Compare the root with `prevData`.

All operations are undone at once, so their order does not matter. If a subtree has to be opened whose node is not in
the CAR slice, the result is undecidable.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal, NamedTuple

from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.limits import Limits
from indexer.atproto.mst import (
    EMPTY_TREE,
    Node,
    check_layer,
    decode_node,
    encode_node,
    key_height,
    raise_malformed,
    root_layer,
)


class NetOp(NamedTuple):
    """The net operation of a commit on one key.

    Attributes:
        key: The path of the record.
        old: The CID of the record before the commit; None for a create.
        new: The CID of the record after the commit; None for a delete.
    """

    key: bytes
    old: bytes | None
    new: bytes | None

    @property
    def action(self) -> Literal["create", "update", "delete"]:
        """The action that leads from `old` to `new`."""
        if self.old is None:
            return "create"
        return "delete" if self.new is None else "update"


_Item = tuple[int, bytes, bytes | None]
"""One item of the row: the layer, value and name of a key; the layer and CID of a closed subtree, and None."""


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
    before, ops_hold = root, not ops
    if ops:
        try:
            tree = _PartialTree(blocks, root, limits)
            contradicted = tree.contradicted_op(ops)
            if contradicted is not None:
                detail = f"{contradicted.action} of {contradicted.key!r}"
                return Inversion(Verdict.OPS_MISMATCH, None, ops_hold, detail)
            ops_hold = True
            builder = _TreeBuilder(tree)
            before = builder.root(builder.row(tree.root, tree.layer, sorted(ops, key=_key_of)), prev_data)
        except _NodeNotInSliceError as missing:
            return Inversion(Verdict.UNDECIDABLE, None, ops_hold, f"no node {cid_text(missing.args[0])}")
    return Inversion(Verdict.OK if before == prev_data else Verdict.MISMATCH, before, ops_hold)


def _key_of(op: NetOp) -> bytes:
    return op.key


def _layer_of(item: _Item) -> int:
    return item[0]


class _NodeNotInSliceError(Exception):
    """A node with this CID is needed, and the CAR slice does not contain it."""


class _PartialTree:
    """A tree of which only the nodes in a CAR slice are known. Each is decoded at most once, when it is needed.

    Every method may raise _NodeNotInSliceError, or UpstreamError with NODE_MALFORMED.

    Attributes:
        root: The CID of the root; None for the empty tree.
        layer: The layer of the root.
    """

    def __init__(self, blocks: Mapping[bytes, bytes], root: bytes, limits: Limits) -> None:
        self._blocks = blocks
        self._limits = limits
        self._nodes: dict[bytes, Node] = {}
        layer = root_layer(self._load(root), limits)
        self.root = None if layer is None else root
        self.layer = layer or 0

    def node(self, cid: bytes, layer: int) -> Node:
        """Return the node with this CID, which must belong on `layer`."""
        node = self._load(cid)
        check_layer(node, layer)
        return node

    def contradicted_op(self, ops: Sequence[NetOp]) -> NetOp | None:
        """Return an operation whose effect the tree does not show; None if it shows all effects.

        Such an operation is returned even if nodes are missing that other operations need.
        """
        missing: _NodeNotInSliceError | None = None
        for op in ops:
            try:
                if self._find(op.key) != op.new:
                    return op
            except _NodeNotInSliceError as error:
                missing = error
        if missing is not None:
            raise missing
        return None

    def _find(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if the tree does not contain the key."""
        cid, layer = self.root, self.layer
        while cid is not None:
            node = self.node(cid, layer)
            index = bisect_left(node.keys, key)
            if index < len(node.keys) and node.keys[index] == key:
                return node.values[index]
            cid, layer = node.subtree_before(index), layer - 1
        return None

    def _load(self, cid: bytes) -> Node:
        if cid not in self._nodes:
            block = self._blocks.get(cid)
            if block is None:
                raise _NodeNotInSliceError(cid)
            self._nodes[cid] = decode_node(block, self._limits)
        return self._nodes[cid]


class _TreeBuilder:
    """Makes the row of keys and closed subtrees before the operations, and builds the one tree over it.

    Every method may raise _NodeNotInSliceError, or UpstreamError with NODE_MALFORMED.
    """

    def __init__(self, tree: _PartialTree) -> None:
        self._tree = tree
        self._last_key = b""

    def row(self, cid: bytes | None, layer: int, ops: Sequence[NetOp]) -> list[_Item]:
        """Return the row of a subtree (None: an empty one). `ops` are the operations on its keys, by key."""
        if cid is None:
            return [(key_height(op.key), op.old, op.key) for op in ops if op.old is not None]
        return self._opened(cid, layer, ops) if ops else [(layer, cid, None)]

    def root(self, row: list[_Item], prev_data: bytes) -> bytes:
        """Return the root of the tree over a row.

        If only a closed subtree is left and its node is missing, it is the root if its CID is `prev_data`.
        """
        if not row:
            return EMPTY_TREE
        layer, cid, key = max(row, key=_layer_of)
        if len(row) == 1 and key is None:
            return self._first_with_keys(cid, layer, prev_data)
        row = self._with_opened(row, layer)
        has_keys = layer in [item[0] for item in row]
        return self._build(row, layer) if has_keys else self.root(row, prev_data)

    def _opened(self, cid: bytes, layer: int, ops: Sequence[NetOp] = ()) -> list[_Item]:
        """Return the row of the subtrees and keys of a node, without the effects of `ops`."""
        node = self._tree.node(cid, layer)
        row: list[_Item] = []
        for index, key in enumerate(node.keys):
            before = bisect_left(ops, key, key=_key_of) if ops else 0
            row += self.row(node.subtree_before(index), layer - 1, ops[:before])
            ops = ops[before:]
            value: bytes | None = node.values[index]
            if ops and ops[0].key == key:
                value, ops = ops[0].old, ops[1:]
            if value is not None:
                row.append((layer, value, key))
        return row + self.row(node.subtree_before(len(node.keys)), layer - 1, ops)

    def _with_opened(self, row: list[_Item], layer: int) -> list[_Item]:
        """Return the row with the contents of the closed subtrees of this layer instead of them."""
        if (layer, None) not in [(at, key) for at, _, key in row]:
            return row
        groups = [self._opened(cid, layer) if key is None and at == layer else [(at, cid, key)] for at, cid, key in row]
        return [item for group in groups for item in group]

    def _subtree(self, gap: list[_Item], layer: int) -> bytes | None:
        """Return the CID of the subtree over a gap whose items are on this layer or below; None for an empty one.

        A closed subtree remains as it is if it fills the gap. A layer without keys has a node with a link.
        """
        if not gap:
            return None
        at, cid, key = gap[0]
        if len(gap) == 1 and key is None and at == layer:
            return cid
        return self._build(self._with_opened(gap, layer), layer)

    def _build(self, row: list[_Item], layer: int) -> bytes:
        """Return the CID of the node over a row whose items are keys of this layer, or below it."""
        keys: list[bytes] = []
        values: list[bytes] = []
        subtrees: list[bytes | None] = []
        gap: list[_Item] = []
        for item in row:
            at, value, key = item
            if key is None or at < layer:
                gap.append(item)
                continue
            subtrees.append(self._subtree(gap, layer - 1) if gap else None)
            if key <= self._last_key:
                raise_malformed("keys out of order")
            self._last_key, gap = key, []
            keys.append(key)
            values.append(value)
        left, *trees = *subtrees, self._subtree(gap, layer - 1)
        return cid_of(encode_node(keys, values, left, trees))

    def _first_with_keys(self, cid: bytes, layer: int, prev_data: bytes) -> bytes:
        """Return the root if only one closed subtree is left: its first node that has keys."""
        try:
            node = self._tree.node(cid, layer)
        except _NodeNotInSliceError:
            if cid != prev_data:
                raise
            return cid
        if node.keys or node.left is None:
            return cid
        return self._first_with_keys(node.left, layer - 1, prev_data)
