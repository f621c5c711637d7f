"""Walk a whole tree: the only proof that an export is complete (docs/protocol.md#merkle-search-tree)."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import repeat

from indexer.atproto import cbor
from indexer.atproto.cid import cid_text
from indexer.atproto.limits import Limits
from indexer.atproto.mst.node import Node, check_layer, decode_node, raise_malformed, root_layer
from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure

BlockOf = Callable[[bytes], bytes | None]
"""Returns the block of a CID; None if it is missing. The hash of the block must have been checked."""

# One step of a walk: a key and its value (None for the start of a node), then the subtree after the key, the layer of
# this subtree, and the key that all its keys must be below (None: no limit).
_Step = tuple[bytes, bytes | None, bytes | None, int, bytes | None]


class MissingNodeError(UnavailableError):
    """A tree node is missing: the export was cut off, or created while the repo changed.

    Attributes:
        cid: The CID of the node.
    """

    def __init__(self, cid: bytes) -> None:
        super().__init__(FetchFailure.EXPORT_INCOMPLETE, f"no node {cid_text(cid)}")
        self.cid = cid


def walk(block_of: BlockOf, root: bytes, limits: Limits) -> Iterator[tuple[bytes, bytes]]:
    """Yield each key with the CID of its record, in ascending order, and prove the tree.

    The tree is proven when the iterator is exhausted, and not before. Then every node was present, canonical, on its
    layer, and between the keys beside it in the node above. So the keys ascend over the whole tree, no subtree occurs
    twice, and the work is bounded by the number of blocks times the depth of the tree.

    Raises:
        UpstreamError: With NODE_MALFORMED, if a node breaks a rule.
        MissingNodeError: A node is missing.
    """
    node = _load(block_of, root, limits)
    layer = root_layer(node, limits)
    if layer is None:
        return
    steps = _steps(node, layer, b"", None)
    while steps:
        key, value, tree, layer, upper = steps.pop()
        if value is not None:
            yield key, value
        if tree is not None:
            node = _load(block_of, tree, limits)
            check_layer(node, layer)
            if node.keys and not (key < node.keys[0] and (upper is None or node.keys[-1] < upper)):
                raise_malformed("a subtree reaches beyond the keys beside it")
            steps += _steps(node, layer, key, upper)


def find(block_of: BlockOf, root: bytes, key: bytes, limits: Limits) -> bytes | None:
    """Return the CID of the record at a key; None if the tree has no such key. It reads only the nodes on the way.

    Raises:
        UpstreamError: With NODE_MALFORMED, if a node breaks a rule.
        MissingNodeError: A node is missing, so that nothing is proven.
    """
    tree: bytes | None = root
    while tree is not None:
        node = _load(block_of, tree, limits)
        index = bisect_left(node.keys, key)
        if index < len(node.keys) and node.keys[index] == key:
            return node.values[index]
        tree = node.subtree_before(index)
    return None


def leaves(block_of: BlockOf, root: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the same as `walk` for a tree that `walk` has proven. It checks nothing and is four times as fast.

    Raises:
        MissingNodeError: A node is missing that was present before.
    """
    steps: list[tuple[bytes, bytes | None, bytes | None]] = [(b"", None, root)]
    while steps:
        key, value, tree = steps.pop()
        if value is not None:
            yield key, value
        if tree is not None:
            node = cbor.decode(_block(block_of, tree))
            next_steps = [(b"", None, node["l"])]
            key = b""
            for entry in node["e"]:
                key = key[: entry["p"]] + entry["k"]
                next_steps.append((key, entry["v"], entry["t"]))
            next_steps.reverse()
            steps += next_steps


def _load(block_of: BlockOf, cid: bytes, limits: Limits) -> Node:
    return decode_node(_block(block_of, cid), limits)


def _block(block_of: BlockOf, cid: bytes) -> bytes:
    block = block_of(cid)
    if block is None:
        raise MissingNodeError(cid)
    return block


def _steps(node: Node, layer: int, lower: bytes, upper: bytes | None) -> list[_Step]:
    """Return the steps of a node in reverse order, since steps are taken from the end of a list.

    `lower` and `upper` are the keys beside the node in the nodes above it.
    """
    uppers = [*node.keys, upper]
    start: _Step = (lower, None, node.left, layer - 1, uppers[0])
    steps = [start, *zip(node.keys, node.values, node.trees, repeat(layer - 1), uppers[1:], strict=False)]
    steps.reverse()
    return steps
