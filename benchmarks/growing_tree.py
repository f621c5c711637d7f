"""A Merkle search tree that is changed key by key, fast enough to generate thousands of commits in a minute.

Nodes are immutable. Each is encoded when its CID is read for the first time. The module shares no code with the trees
of the indexer or of `indexer.demo`; a test compares it with the latter.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from os.path import commonprefix

from indexer.atproto import cbor
from indexer.atproto.cid import cid_of


class GrowingNode:
    """A node.

    Attributes:
        keys: The paths in this node, ascending.
        values: Their record CIDs.
        trees: The subtrees before, between and after the keys, one more than keys; None for an empty subtree.
    """

    def __init__(self, keys: Sequence[str], values: Sequence[bytes], trees: "Sequence[GrowingNode | None]") -> None:
        self.keys = keys
        self.values = values
        self.trees = trees

    @cached_property
    def block(self) -> bytes:
        """The DAG-CBOR of the node."""
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
        """The CID of the node."""
        return cid_of(self.block)

    def walk(self) -> "Iterator[GrowingNode | str]":
        """Yield the node, then its subtrees and keys in order, depth first."""
        yield self
        for index, tree in enumerate(self.trees):
            if tree is not None:
                yield from tree.walk()
            yield from self.keys[index : index + 1]

    def changed(
        self, index: int, width: int, items: Sequence[tuple[str, bytes]], trees: "list[GrowingNode | None]"
    ) -> "GrowingNode":
        """Return a node with `items` and the trees around them instead of `width` keys from `index` on."""
        end = index + width
        return GrowingNode(
            [*self.keys[:index], *(key for key, _ in items), *self.keys[end:]],
            [*self.values[:index], *(value for _, value in items), *self.values[end:]],
            [*self.trees[:index], *trees, *self.trees[end + 1 :]],
        )


EMPTY = GrowingNode((), (), (None,))


class GrowingTree:
    """A tree.

    Attributes:
        root: The root node.
    """

    def __init__(self) -> None:
        self.root = EMPTY
        self._layer = 0  # of the root

    def put(self, path: str, value: bytes) -> None:
        """Create or update a key."""
        layer = height(path)
        if self.root is EMPTY:
            self._layer = layer
        root: GrowingNode | None = self.root
        while self._layer < layer:
            root = GrowingNode((), (), (root,))
            self._layer += 1
        self.root = _put(root, self._layer, path, value, layer)

    def delete(self, path: str) -> None:
        """Delete a key; raise `KeyError` if it does not exist."""
        root = _delete(self.root, path) or EMPTY
        while not root.keys and root.trees[0] is not None:
            root = root.trees[0]
            self._layer -= 1
        self.root = root

    def search(self, path: str) -> Iterator[GrowingNode]:
        """Yield the nodes on the way to a path, whether it exists or not."""
        node: GrowingNode | None = self.root
        while node is not None:
            yield node
            index = bisect_left(node.keys, path)
            node = None if path in node.keys[index : index + 1] else node.trees[index]

    def proof(self, path: str) -> Iterator[GrowingNode]:
        """Yield the nodes on the way to a path, whether it exists or not, and to its neighbours."""
        node = EMPTY
        for node in self.search(path):
            yield node
        index = bisect_left(node.keys, path)
        if path in node.keys[index : index + 1]:
            yield from _edge(node.trees[index], -1)
            yield from _edge(node.trees[index + 1], 0)


def height(path: str) -> int:
    """Return the layer of the node that holds `path`; leaves are on layer 0."""
    return (256 - int.from_bytes(sha256(path.encode()).digest()).bit_length()) // 2


def _put(node: GrowingNode | None, layer: int, path: str, value: bytes, height: int) -> GrowingNode:
    node = node or EMPTY
    index = bisect_left(node.keys, path)
    if layer > height:
        return node.changed(index, 0, (), [_put(node.trees[index], layer - 1, path, value, height)])
    if path in node.keys[index : index + 1]:
        return node.changed(index, 1, [(path, value)], [*node.trees[index : index + 2]])
    return node.changed(index, 0, [(path, value)], [*_split(node.trees[index], path)])


def _delete(node: GrowingNode | None, path: str) -> GrowingNode | None:
    if node is None:
        raise KeyError(path)
    index = bisect_left(node.keys, path)
    if path in node.keys[index : index + 1]:
        return _unless_empty(node.changed(index, 1, (), [_merge(node.trees[index], node.trees[index + 1])]))
    return _unless_empty(node.changed(index, 0, (), [_delete(node.trees[index], path)]))


def _split(node: GrowingNode | None, path: str) -> tuple[GrowingNode | None, GrowingNode | None]:
    """Return the parts of a subtree before and after a path that it does not contain."""
    if node is None:
        return None, None
    index = bisect_left(node.keys, path)
    before, after = _split(node.trees[index], path)
    left = GrowingNode(node.keys[:index], node.values[:index], [*node.trees[:index], before])
    right = GrowingNode(node.keys[index:], node.values[index:], [after, *node.trees[index + 1 :]])
    return _unless_empty(left), _unless_empty(right)


def _merge(left: GrowingNode | None, right: GrowingNode | None) -> GrowingNode | None:
    if left is None or right is None:
        return left or right
    between = _merge(left.trees[-1], right.trees[0])
    return GrowingNode(
        [*left.keys, *right.keys],
        [*left.values, *right.values],
        [*left.trees[:-1], between, *right.trees[1:]],
    )


def _unless_empty(node: GrowingNode) -> GrowingNode | None:
    return node if node.keys or node.trees[0] is not None else None


def _edge(node: GrowingNode | None, side: int) -> Iterator[GrowingNode]:
    while node is not None:
        yield node
        node = node.trees[side]
