"""The Merkle search tree, whole and built the obvious way: top down, from all keys, anew for every commit.

It shares no code with `indexer.atproto.mst`, so that each of the two can show the other wrong. Rules: a key's
height is half the leading zero bits of its SHA-256; a node holds the keys of one height, and a subtree one
layer below for every gap between them that is not empty. (Repository specification, "MST structure".)
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from os.path import commonprefix

from indexer.atproto import cid
from indexer.localnet import dag_cbor

Items = tuple[tuple[str, bytes], ...]
"""Pairs of path and record CID, by ascending path."""


@dataclass(frozen=True, slots=True)
class Node:
    """`children` has one place more than `keys`: the subtrees before, between and after them, or None."""

    cid: bytes
    block: bytes
    keys: tuple[str, ...]
    children: "tuple[Node | None, ...]"

    def walk(self) -> "Iterator[Node | str]":
        """The node, then its subtrees and keys in order, depth first."""
        yield self
        for place, child in enumerate(self.children):
            if child is not None:
                yield from child.walk()
            yield from self.keys[place : place + 1]


class Tree:
    """The tree of `records`, a map of paths to record CIDs."""

    def __init__(self, records: Mapping[str, bytes]) -> None:
        self._items: Items = tuple(sorted(records.items()))
        self.root = _build(self._items, max(map(height, records), default=0))

    @property
    def data(self) -> bytes:
        """The root's CID."""
        return self.root.cid

    def walk(self) -> Iterator[Node | str]:
        """Nodes and paths in the order of a streamable export."""
        return self.root.walk()

    def blocks(self) -> dict[bytes, bytes]:
        """All nodes: CID to block."""
        return {item.cid: item.block for item in self.walk() if isinstance(item, Node)}

    def proof(self, path: str) -> dict[bytes, bytes]:
        """What undoing a write of `path` needs: the nodes that lead to it, present or not, and to its neighbours.

        They hold every node that the write made as well: a node changes with what is in it or at its edges.
        """
        place = bisect_left(self._items, (path,))
        before = [key for key, _ in self._items[max(place - 1, 0) : place]]
        after = [key for key, _ in self._items[place : place + 2] if key != path]
        keys = [path, *before, *after[:1]]
        return {node.cid: node.block for key in keys for node in self._search(key)}

    def _search(self, path: str) -> Iterator[Node]:
        node: Node | None = self.root
        while node is not None:
            yield node
            place = bisect_left(node.keys, path)
            if path in node.keys[place : place + 1]:
                return
            node = node.children[place]


@lru_cache(maxsize=1 << 18)
def height(path: str) -> int:
    """The layer of the node that holds `path`; leaves are on layer 0."""
    return (256 - int.from_bytes(sha256(path.encode()).digest()).bit_length()) // 2


def _build(items: Items, layer: int) -> Node:
    own = [place for place, (path, _) in enumerate(items) if height(path) == layer]
    gaps = [items[before + 1 : after] for before, after in pairwise([-1, *own, len(items)])]
    children = tuple(_subtree(gap, layer - 1) if gap else None for gap in gaps)
    return _node([items[place] for place in own], children)


# A subtree is a function of its items alone, so one that didn't change needn't be encoded and hashed again.
_subtree = lru_cache(maxsize=1 << 14)(_build)


def _node(items: list[tuple[str, bytes]], children: tuple[Node | None, ...]) -> Node:
    links = [child.cid if child is not None else None for child in children]
    entries, previous = [], b""
    for (path, record), right in zip(items, links[1:], strict=True):
        key = path.encode()
        shared = len(commonprefix([previous, key]))  # noqa: RUF071  of bytes, not of file names
        entries.append({"k": key[shared:], "p": shared, "t": right, "v": record})
        previous = key
    block = dag_cbor.encode({"e": entries, "l": links[0]})
    return Node(cid.cid_of(block), block, tuple(path for path, _ in items), children)
