"""Walking whole trees: the only proof that an export is complete, since a CAR file has no end mark."""

from collections.abc import Callable, Iterator
from itertools import repeat

from indexer.atproto import cbor
from indexer.atproto.cid import cid_text
from indexer.atproto.limits import Limits
from indexer.atproto.mst.node import Node, check_layer, decode_node, malformed, root_layer
from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure

BlockOf = Callable[[bytes], bytes | None]
"""Gives the block of a CID, its hash already checked, or None."""

# A stop on the walk: a key and its value (None for a node's left edge), the subtree to the right, that
# subtree's layer, and the key above which nothing in it may lie (None: no bound).
_Stop = tuple[bytes, bytes | None, bytes | None, int, bytes | None]


class MissingNodeError(UnavailableError):
    """A tree refers to a node that is not there: the export was cut, or made while the repo changed."""

    def __init__(self, cid: bytes) -> None:
        super().__init__(FetchFailure.EXPORT_INCOMPLETE, f"no node {cid_text(cid)}")
        self.cid = cid


def walk(block_of: BlockOf, root: bytes, limits: Limits) -> Iterator[tuple[bytes, bytes]]:
    """Yield every key with its value's CID in ascending order, proving the tree on the way.

    Nothing is proven before the iterator is exhausted. Then every node was there, canonical, on its layer and
    within the gap between keys that it hangs in. So the keys ascend over the whole walk, and no subtree can
    come twice: the work is bounded by the blocks that are there, times the tree's depth.
    Raises UpstreamError with NODE_MALFORMED, or MissingNodeError.
    """
    node = _load(block_of, root, limits)
    layer = root_layer(node, limits)
    if layer is None:
        return
    todo = _stops(node, layer, b"", None)
    while todo:
        key, value, tree, layer, upper = todo.pop()
        if value is not None:
            yield key, value
        if tree is not None:
            node = _load(block_of, tree, limits)
            check_layer(node, layer)
            if node.keys and not (key < node.keys[0] and (upper is None or node.keys[-1] < upper)):
                malformed("a subtree reaches beyond the keys beside it")
            todo += _stops(node, layer, key, upper)


def leaves(block_of: BlockOf, root: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield what `walk` has yielded, for a tree that it has proven: four times as fast, and checking nothing.

    Raises MissingNodeError if a node is gone since.
    """
    todo: list[tuple[bytes, bytes | None, bytes | None]] = [(b"", None, root)]
    while todo:
        key, value, tree = todo.pop()
        if value is not None:
            yield key, value
        if tree is not None:
            node = cbor.decode(_block(block_of, tree))
            stops = [(b"", None, node["l"])]
            key = b""
            for entry in node["e"]:
                key = key[: entry["p"]] + entry["k"]
                stops.append((key, entry["v"], entry["t"]))
            stops.reverse()
            todo += stops


def _load(block_of: BlockOf, cid: bytes, limits: Limits) -> Node:
    return decode_node(_block(block_of, cid), limits)


def _block(block_of: BlockOf, cid: bytes) -> bytes:
    block = block_of(cid)
    if block is None:
        raise MissingNodeError(cid)
    return block


def _stops(node: Node, layer: int, lower: bytes, upper: bytes | None) -> list[_Stop]:
    """The node's stops, the first at the end of the list."""
    uppers = [*node.keys, upper]
    edge: _Stop = (lower, None, node.left, layer - 1, uppers[0])
    stops = [edge, *zip(node.keys, node.values, node.trees, repeat(layer - 1), uppers[1:], strict=False)]
    stops.reverse()
    return stops
