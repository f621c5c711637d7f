"""A Merkle search tree that changes a key at a time: thousands of signed commits are made in a minute with it.

Nodes never change; each is encoded once, when its CID is first asked for. It shares no code with the product's trees
nor with `indexer.localnet`'s; a test holds it to the latter's roots and proofs.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from os.path import commonprefix

from indexer.atproto import cbor
from indexer.atproto.cid import cid_of


class Node:
    """`trees` has one place more than `keys`: the subtrees before, between and behind them, or None."""

    def __init__(self, keys: Sequence[str], values: Sequence[bytes], trees: "Sequence[Node | None]") -> None:
        self.keys = keys
        self.values = values
        self.trees = trees

    @cached_property
    def block(self) -> bytes:
        entries, previous = [], b""
        for path, value, tree in zip(self.keys, self.values, self.trees[1:], strict=True):
            key = path.encode()
            shared = len(commonprefix([previous, key]))  # noqa: RUF071 - of bytes, not of file names
            entries.append({"k": key[shared:], "p": shared, "t": tree and tree.cid, "v": value})
            previous = key
        left = self.trees[0]
        return cbor.encode({"e": entries, "l": left and left.cid})

    @cached_property
    def cid(self) -> bytes:
        return cid_of(self.block)

    def walk(self) -> "Iterator[Node | str]":
        """The node, then its subtrees and keys in order, depth first."""
        yield self
        for place, tree in enumerate(self.trees):
            if tree is not None:
                yield from tree.walk()
            yield from self.keys[place : place + 1]

    def changed(self, place: int, width: int, items: Sequence[tuple[str, bytes]], trees: "list[Node | None]") -> "Node":
        """With other `items`, and the trees around them, instead of `width` keys from `place` on."""
        end = place + width
        return Node(
            [*self.keys[:place], *(key for key, _ in items), *self.keys[end:]],
            [*self.values[:place], *(value for _, value in items), *self.values[end:]],
            [*self.trees[:place], *trees, *self.trees[end + 1 :]],
        )


EMPTY = Node((), (), (None,))


class Tree:
    def __init__(self) -> None:
        self.root = EMPTY
        self._layer = 0  # the root's

    def put(self, path: str, value: bytes) -> None:
        layer = height(path)
        if self.root is EMPTY:
            self._layer = layer
        root: Node | None = self.root
        while self._layer < layer:
            root = Node((), (), (root,))
            self._layer += 1
        self.root = _put(root, self._layer, path, value, layer)

    def delete(self, path: str) -> None:
        root = _delete(self.root, path) or EMPTY
        while not root.keys and root.trees[0] is not None:
            root = root.trees[0]
            self._layer -= 1
        self.root = root

    def proof(self, path: str) -> Iterator[Node]:
        """The nodes that lead to a path, present or not, and to its neighbours."""
        node: Node | None = self.root
        while node is not None:
            yield node
            place = bisect_left(node.keys, path)
            if path in node.keys[place : place + 1]:
                yield from _edge(node.trees[place], -1)
                yield from _edge(node.trees[place + 1], 0)
                return
            node = node.trees[place]


def height(path: str) -> int:
    """The layer of the node that holds `path`; leaves are on layer 0."""
    return (256 - int.from_bytes(sha256(path.encode()).digest()).bit_length()) // 2


def _put(node: Node | None, layer: int, path: str, value: bytes, height: int) -> Node:
    node = node or EMPTY
    place = bisect_left(node.keys, path)
    if layer > height:
        return node.changed(place, 0, (), [_put(node.trees[place], layer - 1, path, value, height)])
    if path in node.keys[place : place + 1]:
        return node.changed(place, 1, [(path, value)], [*node.trees[place : place + 2]])
    return node.changed(place, 0, [(path, value)], [*_split(node.trees[place], path)])


def _delete(node: Node | None, path: str) -> Node | None:
    if node is None:
        raise KeyError(path)
    place = bisect_left(node.keys, path)
    if path in node.keys[place : place + 1]:
        return _some(node.changed(place, 1, (), [_merge(node.trees[place], node.trees[place + 1])]))
    return _some(node.changed(place, 0, (), [_delete(node.trees[place], path)]))


def _split(node: Node | None, path: str) -> tuple[Node | None, Node | None]:
    """What is before and what is behind a path that isn't there."""
    if node is None:
        return None, None
    place = bisect_left(node.keys, path)
    before, behind = _split(node.trees[place], path)
    left = Node(node.keys[:place], node.values[:place], [*node.trees[:place], before])
    right = Node(node.keys[place:], node.values[place:], [behind, *node.trees[place + 1 :]])
    return _some(left), _some(right)


def _merge(left: Node | None, right: Node | None) -> Node | None:
    if left is None or right is None:
        return left or right
    between = _merge(left.trees[-1], right.trees[0])
    return Node(
        [*left.keys, *right.keys],
        [*left.values, *right.values],
        [*left.trees[:-1], between, *right.trees[1:]],
    )


def _some(node: Node) -> Node | None:
    return node if node.keys or node.trees[0] is not None else None


def _edge(node: Node | None, side: int) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.trees[side]
