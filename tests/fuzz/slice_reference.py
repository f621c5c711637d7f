"""A slice of a tree as an obvious reference reads it: if it is part of a tree, and which entries it shows."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.mst import EMPTY_TREE, decode_node
from tests.atproto.mst import oracle
from tests.fuzz.comparison import accepted

Slice = Mapping[bytes, bytes]
"""Blocks by CID, not all of which belong to the tree."""


def is_tree(blocks: Slice, cid: bytes, layer: int | None = None, low: bytes = b"", high: bytes = b"\xff") -> bool:
    """Return True if the nodes in the slice are a tree: keys in order, each in its layer. Some nodes may be missing.

    Args:
        blocks: The slice.
        cid: The root.
        layer: The layer of the root; None if it is that of its keys.
        low: All keys are above this one.
        high: All keys are below this one.
    """
    if cid not in blocks:
        return True
    node = accepted(lambda: decode_node(blocks[cid], DEFAULT_LIMITS))
    if node is None or not (node.keys or node.left or (layer is None and cid == EMPTY_TREE)):
        return False
    if layer is None:
        layer = max(map(oracle.height, node.keys), default=-1 if node.left else 0)
    bounds = [low, *node.keys, high]
    return (
        layer >= 0
        and all(one < other for one, other in pairwise(bounds))
        and all(oracle.height(key) == layer for key in node.keys)
        and all(
            tree is None or (layer > 0 and is_tree(blocks, tree, layer - 1, *between))
            for tree, between in zip([node.left, *node.trees], pairwise(bounds), strict=True)
        )
    )


def entries(blocks: Slice, cid: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield the keys of a tree with their values, in order; for a node that is missing, its CID and None."""
    node = accepted(lambda: decode_node(blocks[cid], DEFAULT_LIMITS)) if cid in blocks else None
    if node is None:
        yield cid, None
        return
    if node.left is not None:
        yield from entries(blocks, node.left)
    for key, value, tree in zip(node.keys, node.values, node.trees, strict=True):
        yield key, value
        if tree is not None:
            yield from entries(blocks, tree)


def hides(blocks: Slice, root: bytes, key: bytes) -> bool:
    """Return True if a missing node is at the place of a key, so that a valid tree may have the key or not."""
    hidden = False
    for shown, value in entries(blocks, root):
        if value is None:
            hidden = True
        elif shown < key:
            hidden = False
        else:
            return hidden and shown != key
    return hidden
