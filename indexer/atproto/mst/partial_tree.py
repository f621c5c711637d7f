"""A tree of which only the nodes in a CAR slice are known."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from indexer.atproto.limits import Limits
from indexer.atproto.mst.net_op import NetOp
from indexer.atproto.mst.node import Node, check_layer, decode_node, root_layer


class NodeNotInSliceError(Exception):
    """A node is needed that the CAR slice does not contain.

    Attributes:
        cid: The CID of the node.
    """

    def __init__(self, cid: bytes) -> None:
        super().__init__(cid)
        self.cid = cid


def load_node(blocks: Mapping[bytes, bytes], cid: bytes, limits: Limits) -> Node:
    """Return the decoded node with this CID.

    Raises:
        NodeNotInSliceError: There is no such block.
        UpstreamError: With NODE_MALFORMED, if the block is not a canonical node.
    """
    block = blocks.get(cid)
    if block is None:
        raise NodeNotInSliceError(cid)
    return decode_node(block, limits)


class PartialTree:
    """The tree of a commit. Each node is decoded at most once, when it is needed.

    Every method may raise NodeNotInSliceError, or UpstreamError with NODE_MALFORMED.

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

    def find(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if the tree does not contain the key."""
        cid, layer = self.root, self.layer
        while cid is not None:
            node = self.node(cid, layer)
            index = bisect_left(node.keys, key)
            if index < len(node.keys) and node.keys[index] == key:
                return node.values[index]
            cid, layer = node.subtree_before(index), layer - 1
        return None

    def contradicted_op(self, ops: Sequence[NetOp]) -> NetOp | None:
        """Return an operation whose effect the tree does not show; None if it shows all effects.

        Such an operation is returned even if nodes are missing that other operations need.
        """
        missing: NodeNotInSliceError | None = None
        for op in ops:
            try:
                if self.find(op.key) != op.new:
                    return op
            except NodeNotInSliceError as error:
                missing = error
        if missing is not None:
            raise missing
        return None

    def _load(self, cid: bytes) -> Node:
        node = self._nodes.get(cid)
        if node is None:
            node = self._nodes[cid] = load_node(self._blocks, cid, self._limits)
        return node
