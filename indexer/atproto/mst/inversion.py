"""Inversion: undo the operations of a commit on its tree (docs/protocol.md#inversion).

The tree depends only on its keys and values. So if undoing the operations gives the root that the commit names as its
`prevData`, they are the whole difference between the two trees. This is the slow reference; the native core is fast.

1. Look up the key of each operation in the new tree. The tree must show the effect of the operation.
2. Take the new tree apart into a row of keys and closed subtrees, in key order. A *closed* subtree is represented by
   its CID. A subtree is opened only if the key of an operation belongs into it.
3. Edit the row: leave out each created key, insert each deleted key, and give each updated key its old value.
4. Build the one tree over the row (`_TreeBuilder`). A closed subtree remains as it is unless a neighbour in the row
   belongs between the same keys of the layer above. Then it is opened, and its contents take its place in the row.
5. Compare the root with `prevData`.

All operations are undone at once, so their order does not matter. If a subtree has to be opened whose node is not in
the CAR slice, the result is undecidable.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal, NamedTuple

from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.limits import Limits
from indexer.atproto.mst.node import (
    EMPTY_TREE,
    MAX_HEIGHT,
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
            builder.add_subtree(tree.root, tree.layer, sorted(ops, key=_key_of))
            before = builder.finish(prev_data)
        except _NodeNotInSliceError as missing:
            return Inversion(Verdict.UNDECIDABLE, None, ops_hold, f"no node {cid_text(missing.cid)}")
    return Inversion(Verdict.OK if before == prev_data else Verdict.MISMATCH, before, ops_hold)


def _key_of(op: NetOp) -> bytes:
    return op.key


class _NodeNotInSliceError(Exception):
    """A node is needed that the CAR slice does not contain.

    Attributes:
        cid: The CID of the node.
    """

    def __init__(self, cid: bytes) -> None:
        super().__init__(cid)
        self.cid = cid


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
    """Takes a tree apart, undoes operations, and builds the tree before them from the row of keys and closed subtrees.

    The row is in key order, so the tree grows from left to right. Only its right edge is open, one node on each layer:

        layer 2    … key d ─┐
                            │
        layer 1             └─ key e ── key f ─┐
                                               │
        layer 0                                └─ key g ── key h

    A key of height n completes the open nodes below layer n: each is encoded, and its CID is linked in the open node
    above it. Then the key is appended to the open node of layer n.

    A closed subtree is represented by its CID and its layer n. It is linked in the open node of layer n + 1, but not
    before the next item of the row is known:

    - The next item is a key above layer n, or there is none: the subtree is linked as it is.
    - The next item is a key on layer n or below: it belongs into the same gap between two keys, so into the same
      subtree. The closed subtree is opened, and its contents are added to the row instead of it. Its own last subtree
      is then the closed one.
    - The next item is another closed subtree: both belong into the same gap. They are opened from the top down along
      the border between them, so that their nodes on each layer become one.

    Every method may raise _NodeNotInSliceError, or UpstreamError with NODE_MALFORMED.
    """

    def __init__(self, tree: _PartialTree) -> None:
        self._tree = tree
        # The open node of each layer, from layer 0 up. Those below layer `_lowest` are empty.
        self._open_nodes: list[Node] = []
        self._lowest = MAX_HEIGHT + 1
        # The CID and the layer of the closed subtree that was added last, until it is linked or opened. While there is
        # one, the open nodes up to its layer are empty.
        self._closed: tuple[bytes, int] | None = None
        self._last_key = b""

    def add_subtree(self, cid: bytes | None, layer: int, ops: Sequence[NetOp]) -> None:
        """Add a subtree (None: an empty one) and undo `ops`: the operations on keys that belong into it, by key."""
        if cid is None:
            for op in ops:
                self._add_key(op.key, op.old, key_height(op.key))
        elif ops:
            self._add_contents(cid, layer, ops)
        else:
            self._add_closed(cid, layer)

    def finish(self, prev_data: bytes) -> bytes:
        """Return the root of the tree.

        If only a closed subtree is left and its node is missing, it is the root if its CID is `prev_data`.
        """
        if self._open_nodes:
            self._complete_below(len(self._open_nodes) - 1)
            return _cid_of(self._open_nodes[-1])
        if self._closed is None:
            return EMPTY_TREE
        return self._first_with_keys(*self._closed, prev_data)

    def _add_contents(self, cid: bytes, layer: int, ops: Sequence[NetOp]) -> None:
        """Open a subtree: add its subtrees and keys in order, and undo `ops`."""
        node = self._tree.node(cid, layer)
        for index, key in enumerate(node.keys):
            before = bisect_left(ops, key, key=_key_of)
            self.add_subtree(node.subtree_before(index), layer - 1, ops[:before])
            ops = ops[before:]
            value: bytes | None = node.values[index]
            if ops and ops[0].key == key:
                value, ops = ops[0].old, ops[1:]
            self._add_key(key, value, layer)
        self.add_subtree(node.subtree_before(len(node.keys)), layer - 1, ops)

    def _add_closed(self, cid: bytes, layer: int) -> None:
        self._open_closed(layer)
        if self._closed or self._lowest <= layer:
            self._add_contents(cid, layer, ())
        else:
            self._closed = cid, layer

    def _add_key(self, key: bytes, value: bytes | None, height: int) -> None:
        """Add a key with its old value, after completing the nodes below it. None: the key did not exist."""
        if value is None:
            return
        if key <= self._last_key:
            raise_malformed("keys out of order")
        self._open_closed(height)
        self._complete_below(height)
        node = self._open_nodes[height]
        node.keys.append(key)
        node.values.append(value)
        node.trees.append(None)
        self._last_key = key

    def _open_closed(self, layer: int) -> None:
        """Open the last closed subtree until none is left that reaches up to `layer`."""
        while self._closed and self._closed[1] >= layer:
            cid, closed_layer = self._closed
            self._closed = None
            self._add_contents(cid, closed_layer, ())

    def _complete_below(self, height: int) -> None:
        """Link the last closed subtree, then encode and link each open node below layer `height`.

        If there is a layer between without keys, its node has only a link to the layer below.
        """
        self._open_nodes += [Node() for _ in range(len(self._open_nodes), height + 1)]
        if self._closed:
            cid, layer = self._closed
            self._closed = None
            self._lowest = layer + 1
            _link(self._open_nodes[self._lowest], cid)
        for layer in range(self._lowest, height):
            _link(self._open_nodes[layer + 1], _cid_of(self._open_nodes[layer]))
            self._open_nodes[layer] = Node()
        self._lowest = height

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


def _link(node: Node, subtree: bytes) -> None:
    """Link a subtree after the last entry of an open node."""
    if node.trees:
        node.trees[-1] = subtree
    else:
        node.left = subtree


def _cid_of(node: Node) -> bytes:
    return cid_of(encode_node(node.keys, node.values, node.left, node.trees))
