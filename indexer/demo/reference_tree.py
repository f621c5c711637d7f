"""A simple Merkle search tree that is built top down from all keys for every commit.

It shares no code with `indexer.atproto.mst`, so that tests can compare the two implementations. The rules are in
docs/protocol.md#merkle-search-tree: the layer of a key is half the number of leading zero bits of its SHA-256. A node
holds the keys of one layer, and a subtree one layer below for each non-empty gap between them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from os.path import commonprefix

from indexer.atproto import cid
from indexer.demo import dag_cbor

Items = tuple[tuple[str, bytes], ...]
"""Pairs of path and record CID, by ascending path."""


@dataclass(frozen=True, slots=True)
class ReferenceNode:
    """A node of the tree.

    Attributes:
        keys: The paths in this node, ascending.
        children: The subtrees before, between and after the keys, one more than keys; None for an empty subtree.
    """

    cid: bytes
    block: bytes
    keys: tuple[str, ...]
    children: "tuple[ReferenceNode | None, ...]"

    def walk(self) -> "Iterator[ReferenceNode | str]":
        """Yield the node, then its subtrees and keys in order, depth first."""
        yield self
        for index, child in enumerate(self.children):
            if child is not None:
                yield from child.walk()
            yield from self.keys[index : index + 1]


class ReferenceTree:
    """The tree of `records`, a map of paths to record CIDs. `data` is the CID of its root."""

    def __init__(self, records: Mapping[str, bytes]) -> None:
        self._items: Items = tuple(sorted(records.items()))
        self._root = _build(self._items, max(map(height, records), default=0))
        self.data = self._root.cid

    def walk(self) -> Iterator[ReferenceNode | str]:
        """Yield nodes and paths in the order of a streamable export."""
        return self._root.walk()

    def blocks(self) -> dict[bytes, bytes]:
        """Return all nodes: CID to block."""
        return {item.cid: item.block for item in self.walk() if isinstance(item, ReferenceNode)}

    def proof(self, path: str) -> dict[bytes, bytes]:
        """Return the nodes that inverting a write of `path` needs.

        These are the nodes on the way to the path, whether it exists or not, and to its neighbours. They include every
        node that the write created: a node changes with its content and with the subtrees at its edges.
        """
        index = bisect_left(self._items, (path,))
        before = [key for key, _ in self._items[max(index - 1, 0) : index]]
        after = [key for key, _ in self._items[index : index + 2] if key != path]
        keys = [path, *before, *after[:1]]
        return {cid: block for key in keys for cid, block in self.search(key).items()}

    def search(self, path: str) -> dict[bytes, bytes]:
        """Return the nodes on the way to a path, whether it exists or not."""
        node: ReferenceNode | None = self._root
        found = {}
        while node is not None:
            found[node.cid] = node.block
            index = bisect_left(node.keys, path)
            node = None if path in node.keys[index : index + 1] else node.children[index]
        return found


@lru_cache(maxsize=1 << 18)
def height(path: str) -> int:
    """Return the layer of the node that holds `path`; leaves are on layer 0."""
    return (256 - int.from_bytes(sha256(path.encode()).digest()).bit_length()) // 2


def _build(items: Items, layer: int) -> ReferenceNode:
    own = [index for index, (path, _) in enumerate(items) if height(path) == layer]
    gaps = [items[before + 1 : after] for before, after in pairwise([-1, *own, len(items)])]
    children = tuple(_subtree(gap, layer - 1) if gap else None for gap in gaps)
    links = [child and child.cid for child in children]
    entries, previous = [], b""
    for index, right in zip(own, links[1:], strict=True):
        path, record = items[index]
        key = path.encode()
        shared = len(commonprefix([previous, key]))  # noqa: RUF071 - of bytes, not of file names
        entries.append({"k": key[shared:], "p": shared, "t": right, "v": record})
        previous = key
    block = dag_cbor.encode({"e": entries, "l": links[0]})
    return ReferenceNode(cid.cid_of(block), block, tuple(items[index][0] for index in own), children)


# A subtree depends on its items alone, so an unchanged one is taken from the cache.
_subtree = lru_cache(maxsize=1 << 14)(_build)
