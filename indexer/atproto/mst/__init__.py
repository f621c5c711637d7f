"""The Merkle search tree: nodes, walks over whole trees, and inversion (docs/protocol.md#merkle-search-tree)."""

from indexer.atproto.mst.inversion import Inversion, NetOp, Verdict, invert
from indexer.atproto.mst.node import EMPTY_TREE, Node, decode_node, encode_node, key_height
from indexer.atproto.mst.walk import MissingNodeError, find, leaves, walk

__all__ = [
    "EMPTY_TREE",
    "Inversion",
    "MissingNodeError",
    "NetOp",
    "Node",
    "Verdict",
    "decode_node",
    "encode_node",
    "find",
    "invert",
    "key_height",
    "leaves",
    "walk",
]
