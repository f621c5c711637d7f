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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Literal, NamedTuple

from indexer.atproto.cid import cid_of
from indexer.atproto.limits import Limits
from indexer.atproto.mst import (
    EMPTY_TREE,
    MissingNodeError,
    Node,
    check_layer,
    encode_node,
    find,
    key_height,
    load_node,
    raise_malformed,
    root_layer,
)


class NetOp(NamedTuple):
    """The net operation of a commit on one key."""

    key: bytes  # the path of the record
    old: bytes | None  # the CID of the record before the commit; None for a create
    new: bytes | None  # the CID of the record after the commit; None for a delete

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
    """A verdict with its details."""

    verdict: Verdict
    root: bytes | None  # of the tree before the operations; None if it is unknown
    ops_hold: bool  # the new tree shows the effect of every operation; UNDECIDABLE does not imply this
    detail: str = ""  # for people


def invert(
    blocks: Mapping[bytes, bytes], root: bytes, ops: Sequence[NetOp], prev_data: bytes, limits: Limits
) -> Inversion:
    """Undo operations on the tree with this root, and compare the result with `prev_data`.

    `blocks` are those of the CAR slice by CID, with checked hashes. `ops` are at most one for each key. If there are
    none, no block is needed. For a first commit, `prev_data` is `EMPTY_TREE`.

    Raises:
        UpstreamError: With NODE_MALFORMED, if a node that is needed breaks a rule.
    """
    before, ops_hold = root, not ops
    if ops:
        node_of = cache(lambda cid: load_node(blocks.get, cid, limits))
        try:
            contradicted = _contradicted_op(node_of, root, ops, limits)
            if contradicted is not None:
                detail = f"{contradicted.action} of {contradicted.key!r}"
                return Inversion(Verdict.OPS_MISMATCH, None, ops_hold, detail)
            ops_hold = True
            before = _TreeBefore(node_of, prev_data).root(root, root_layer(node_of(root), limits), ops)
        except MissingNodeError as missing:
            return Inversion(Verdict.UNDECIDABLE, None, ops_hold, missing.detail)
    return Inversion(Verdict.OK if before == prev_data else Verdict.MISMATCH, before, ops_hold)


def _contradicted_op(
    node_of: Callable[[bytes], Node], root: bytes, ops: Sequence[NetOp], limits: Limits
) -> NetOp | None:
    """Return an operation whose effect the tree does not show; None if it shows all effects.

    Such an operation is returned even if nodes are missing that other operations need.
    """
    missing: MissingNodeError | None = None
    for op in ops:
        try:
            if find(node_of, root, op.key, limits) != op.new:
                return op
        except MissingNodeError as error:
            missing = error
    if missing is not None:
        raise missing
    return None


_key_of = attrgetter("key")


@dataclass(slots=True)
class _TreeBefore:
    """Makes the row of keys and closed subtrees before the operations, and builds the one tree over it.

    Every method may raise MissingNodeError, or UpstreamError with NODE_MALFORMED. Each node is decoded at most once.
    """

    node_of: Callable[[bytes], Node]
    prev_data: bytes
    last_key: bytes = b""

    def root(self, cid: bytes, layer: int | None, ops: Sequence[NetOp]) -> bytes:
        """Return the root before `ops` of the tree with this root on a layer (None: the empty tree)."""
        row = self._row(None if layer is None else cid, layer or 0, sorted(ops, key=_key_of))
        return self._subtree(row, max(at for at, _, _ in row), is_root=True) if row else EMPTY_TREE

    def _row(self, cid: bytes | None, layer: int, ops: Sequence[NetOp]) -> list[_Item]:
        """Return the row of a subtree (None: an empty one). `ops` are the operations on its keys, by key."""
        if cid is None:
            return [(key_height(op.key), op.old, op.key) for op in ops if op.old is not None]
        return self._opened(cid, layer, ops) if ops else [(layer, cid, None)]

    def _opened(self, cid: bytes, layer: int, ops: Sequence[NetOp] = ()) -> list[_Item]:
        """Return the row of the subtrees and keys of a node, without the effects of `ops`."""
        node = self._node(cid, layer)
        row: list[_Item] = []
        for index, key in enumerate(node.keys):
            before = bisect_left(ops, key, key=_key_of) if ops else 0
            row += self._row(node.subtree_before(index), layer - 1, ops[:before])
            ops = ops[before:]
            value: bytes | None = node.values[index]
            if ops and ops[0].key == key:
                value, ops = ops[0].old, ops[1:]
            if value is not None:
                row.append((layer, value, key))
        return row + self._row(node.subtree_before(len(node.keys)), layer - 1, ops)

    def _subtree(self, row: list[_Item], layer: int, *, is_root: bool = False) -> bytes:
        """Return the CID of the subtree over a row with items, on this layer or below.

        A closed subtree remains as it is if it fills the row. A layer without keys has a node with a link, but the root
        has keys.
        """
        at, cid, key = row[0]
        if len(row) == 1 and key is None and (is_root or at == layer):
            return self._first_with_keys(cid, at) if is_root else cid
        if (layer, None) in [(at, key) for at, _, key in row]:
            groups = [self._opened(item[1], layer) if item[::2] == (layer, None) else [item] for item in row]
            row = [item for group in groups for item in group]
        if is_root and layer not in [at for at, _, _ in row]:
            return self._subtree(row, layer - 1, is_root=True)
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
            if key <= self.last_key:
                raise_malformed("keys out of order")
            self.last_key, gap = key, []
            keys.append(key)
            values.append(value)
        left, *trees = *subtrees, self._subtree(gap, layer - 1) if gap else None
        return cid_of(encode_node(keys, values, left, trees))

    def _first_with_keys(self, cid: bytes, layer: int) -> bytes:
        """Return the root if only one closed subtree is left: its first node that has keys.

        If that node is missing, it is the root if its CID is `prev_data`.
        """
        try:
            node = self._node(cid, layer)
        except MissingNodeError:
            if cid != self.prev_data:
                raise
            return cid
        return cid if node.keys or node.left is None else self._first_with_keys(node.left, layer - 1)

    def _node(self, cid: bytes, layer: int) -> Node:
        node = self.node_of(cid)
        check_layer(node, layer)
        return node
