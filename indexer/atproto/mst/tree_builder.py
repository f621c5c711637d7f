"""Build the one tree over a row of keys and closed subtrees: the general algorithm of inversion.

The row is in key order, so the tree grows from left to right. Only its right edge is open, one node on each layer:

    layer 2    … key d ─┐
                        │
    layer 1             └─ key e ── key f ─┐
                                           │
    layer 0                                └─ key g ── key h

A key of height n completes the open nodes below layer n: each is encoded, and its CID is linked in the open node above
it. Then the key is appended to the open node of layer n.

A closed subtree is represented by its CID and its layer n. It is linked in the open node of layer n + 1, but not
before the next item of the row is known:

- The next item is a key above layer n, or there is none: the subtree is linked as it is.
- The next item is a key on layer n or below: it belongs into the same gap between two keys, so into the same subtree.
  The closed subtree is opened, and its contents are added to the row instead of it. Its own last subtree is then the
  closed one.
- The next item is another closed subtree: both belong into the same gap. They are opened from the top down along the
  border between them, so that their nodes on each layer become one.
"""

from bisect import bisect_left
from collections.abc import Sequence

from indexer.atproto.cid import cid_of
from indexer.atproto.mst.net_op import NetOp
from indexer.atproto.mst.node import (
    EMPTY_TREE,
    MAX_HEIGHT,
    Node,
    assemble_node,
    encode_key_fields,
    key_height,
    raise_malformed,
)
from indexer.atproto.mst.partial_tree import NodeNotInSliceError, PartialTree


def key_of(op: NetOp) -> bytes:
    """Return the key of an operation, by which operations are sorted."""
    return op.key


class _OpenNode:
    """The rightmost node of a layer, to which entries are appended."""

    __slots__ = ("_key_fields", "_last_key", "_left", "_trees", "_values")

    def __init__(self) -> None:
        self._last_key = b""
        self._left: bytes | None = None
        self._key_fields: list[bytes] = []
        self._values: list[bytes] = []
        self._trees: list[bytes | None] = []

    def append(self, key: bytes, value: bytes) -> None:
        """Append an entry without a subtree after it."""
        self._key_fields.append(encode_key_fields(self._last_key, key))
        self._values.append(value)
        self._trees.append(None)
        self._last_key = key

    def extend(self, node: Node, start: int, stop: int) -> None:
        """Append entries of another node with the subtrees between them, but without the subtree after the last one."""
        first = len(self._key_fields)
        self._key_fields += node.key_fields[start:stop]
        self._values += node.values[start:stop]
        self._trees += node.trees[start : stop - 1]
        self._trees.append(None)
        if self._last_key != (node.keys[start - 1] if start else b""):
            self._key_fields[first] = encode_key_fields(self._last_key, node.keys[start])
        self._last_key = node.keys[stop - 1]

    def link(self, subtree: bytes) -> None:
        """Link a subtree after the last entry."""
        if self._trees:
            self._trees[-1] = subtree
        else:
            self._left = subtree

    def encode(self) -> bytes:
        """Return the CID of the node."""
        return cid_of(assemble_node(self._key_fields, self._values, self._left, self._trees))


class TreeBuilder:
    """Takes a tree apart, undoes operations, and builds the tree before them.

    Every method may raise NodeNotInSliceError, or UpstreamError with NODE_MALFORMED.
    """

    def __init__(self, tree: PartialTree) -> None:
        self._tree = tree
        # The open node of each layer, from layer 0 up. Those below layer `_lowest` are empty.
        self._open_nodes: list[_OpenNode] = []
        self._lowest = MAX_HEIGHT + 1
        # The CID and the layer of the closed subtree that was added last, until it is linked or opened. While there is
        # one, the open nodes up to its layer are empty.
        self._closed: tuple[bytes, int] | None = None
        self._last_key = b""

    def add_subtree(self, cid: bytes | None, layer: int, ops: Sequence[NetOp]) -> None:
        """Add a subtree (None: an empty one) and undo `ops`: the operations on keys that belong into it, by key."""
        if cid is None:
            for op in ops:
                self._add_key(op.key, op.old)
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
            return self._open_nodes[-1].encode()
        if self._closed is None:
            return EMPTY_TREE
        return self._first_with_keys(*self._closed, prev_data)

    def _add_contents(self, cid: bytes, layer: int, ops: Sequence[NetOp]) -> None:
        """Open a subtree: add its subtrees and keys in order, and undo `ops`."""
        node = self._tree.node(cid, layer)
        index = 0
        while True:
            upper = node.keys[index] if index < len(node.keys) else None
            before_upper = len(ops) if upper is None else bisect_left(ops, upper, key=key_of)
            self.add_subtree(node.subtree_before(index), layer - 1, ops[:before_upper])
            ops = ops[before_upper:]
            if upper is None:
                return
            if ops and ops[0].key == upper:
                self._add_key(upper, ops[0].old)
                ops = ops[1:]
                index += 1
            else:
                # Entries up to the next operation remain as they are, so their subtrees are linked and not added.
                stop = bisect_left(node.keys, ops[0].key) if ops else len(node.keys)
                self._open_node_for(upper, layer).extend(node, index, stop)
                self._last_key = node.keys[stop - 1]
                index = stop

    def _add_closed(self, cid: bytes, layer: int) -> None:
        self._open_closed(layer)
        if self._closed or self._lowest <= layer:
            self._add_contents(cid, layer, ())
        else:
            self._closed = cid, layer

    def _add_key(self, key: bytes, value: bytes | None) -> None:
        """Add a key with its old value; None: the key did not exist."""
        if value is not None:
            self._open_node_for(key, key_height(key)).append(key, value)
            self._last_key = key

    def _open_node_for(self, key: bytes, height: int) -> _OpenNode:
        """Return the open node that the key belongs into, after completing the nodes below it."""
        if key <= self._last_key:
            raise_malformed("keys out of order")
        self._open_closed(height)
        self._complete_below(height)
        return self._open_nodes[height]

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
        self._open_nodes += [_OpenNode() for _ in range(len(self._open_nodes), height + 1)]
        if self._closed:
            cid, layer = self._closed
            self._closed = None
            self._lowest = layer + 1
            self._open_nodes[self._lowest].link(cid)
        for layer in range(self._lowest, height):
            self._open_nodes[layer + 1].link(self._open_nodes[layer].encode())
            self._open_nodes[layer] = _OpenNode()
        self._lowest = height

    def _first_with_keys(self, cid: bytes, layer: int, prev_data: bytes) -> bytes:
        """Return the root if only one closed subtree is left: its first node that has keys."""
        try:
            node = self._tree.node(cid, layer)
        except NodeNotInSliceError:
            if cid != prev_data:
                raise
            return cid
        if node.keys or node.left is None:
            return cid
        return self._first_with_keys(node.left, layer - 1, prev_data)
