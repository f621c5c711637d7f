"""Nodes of the Merkle search tree: one block each, in the one canonical form.

A node holds the keys of one layer in ascending order; between, before and after them hang the subtrees, all
one layer down. The layer of a key is its height, drawn from its hash:

    layer 1    left ── key[0] ── trees[0] ── key[1] ── trees[1]
                │                   │                     │
    layer 0    keys below        keys between        keys above

Keys are bytes here; what makes a valid path is not the tree's business. CIDs are their binary bytes.
The tree is a pure function of its keys and values: spec/repository, "MST Structure".
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import NoReturn

from indexer.atproto.cid import DAG_CBOR, SIZE, cid_of, is_link
from indexer.atproto.limits import Limits
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

MAX_HEIGHT = 128  # of a key whose hash is all zeros
MAX_KEY_BYTES = 1_024  # the reference implementation's cap; the longest legal path has 830

# CBOR heads and field names, in the order in which a canonical node has them.
_ENTRIES = b"\xa2\x61e"
_LEFT = b"\x61l"
_SUFFIX = b"\xa4\x61k"
_SHARED = b"\x61p"
_TREE = b"\x61t"
_VALUE = b"\x61v"
_NULL = b"\xf6"
_TAG = b"\xd8\x2a"
_LINK = _TAG + b"\x58\x25\x00"  # a CID of the usual size behind the multibase prefix of binary
_NODE_LINK = _LINK + DAG_CBOR  # the only form of a link to a node

_NO_TREE = _TREE + _NULL
_TREE_LINK = _TREE + _NODE_LINK
_VALUE_LINK = _VALUE + _NODE_LINK

_UNSIGNED, _BYTES, _ARRAY = 0x00, 0x40, 0x80  # CBOR major types, in place
_ONE_BYTE, _TWO_BYTES = 24, 25  # what a head says of its argument where it is not below 24 itself


class Node:
    """One decoded node.

    `keys`, `values`, `trees` and `heads` run in parallel; `trees[i]` is the subtree right of `keys[i]`, and
    `heads[i]` the entry's own bytes as far as they depend on its key and the key before it. `height` is the
    height of all its keys, None if it has none.
    """

    __slots__ = ("heads", "height", "keys", "left", "trees", "values")

    def __init__(self) -> None:
        self.left: bytes | None = None
        self.height: int | None = None
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.trees: list[bytes | None] = []
        self.heads: list[bytes] = []

    def gap(self, index: int) -> bytes | None:
        """The subtree before the entry at `index`, or behind the last one."""
        return self.trees[index - 1] if index else self.left


def malformed(detail: str) -> NoReturn:
    raise UpstreamError(Rejection.NODE_MALFORMED, detail)


def key_height(key: bytes) -> int:
    """The layer that a key belongs to: half the leading zero bits of its SHA-256, rounded down; 0 to 128."""
    digest = sha256(key).digest()
    if digest[0] >> 6:
        return 0
    return (256 - int.from_bytes(digest, "big").bit_length()) // 2


def common_prefix(left: bytes, right: bytes) -> int:
    """How many bytes two keys have in common at their beginning."""
    size = min(len(left), len(right))
    difference = int.from_bytes(left[:size], "big") ^ int.from_bytes(right[:size], "big")
    return size - (difference.bit_length() + 7) // 8


def decode_node(block: bytes, limits: Limits) -> Node:
    """Decode one node, which must be what `encode_node` would have made of it, byte by byte.

    The values may be any well-formed CID version 1; links to nodes have only one form. An entry-less node
    is in order here: whether it may stand where it stands is for `check_layer` and `root_layer` to say.
    Raises UpstreamError with NODE_MALFORMED.
    """
    try:
        return _decode(block, limits)
    except IndexError:
        malformed("the block ends within the node")


def _decode(block: bytes, limits: Limits) -> Node:
    if not block.startswith(_ENTRIES):
        malformed("not a map of e and l")
    count, at = _argument(block, 3, _ARRAY)
    if count > limits.node_entries:
        malformed(f"{count} entries")
    node = Node()
    key = b""
    for _ in range(count):
        key, at = _decode_entry(block, at, key, node)
    if block[at:] != _LEFT + _NULL:
        if len(block) != at + 43 or not block.startswith(_LEFT + _NODE_LINK, at):
            malformed("bad field l, or bytes behind the node")
        node.left = block[at + 7 :]
    if count:
        _check_heights(node)
    return node


def _decode_entry(block: bytes, at: int, previous: bytes, node: Node) -> tuple[bytes, int]:
    """Append the entry at `at` to the node; give its key and the place behind it."""
    if block[at : at + 3] != _SUFFIX:
        malformed("an entry is not a map of k, p, t and v")
    size = block[at + 3] - _BYTES
    start = at + 4
    if not 0 < size < _ONE_BYTE:
        size, start = _argument(block, at + 3, _BYTES)
    end = start + size
    if block[end : end + 2] != _SHARED:
        malformed("bad field k")
    shared = block[end + 2]
    tail = end + 3
    if shared >= _ONE_BYTE:
        shared, tail = _argument(block, end + 2, _UNSIGNED)

    # A key shares with the one before it exactly `shared` bytes and is greater: the first byte that differs is.
    if shared != len(previous) and (shared > len(previous) or block[start] <= previous[shared]):
        malformed("keys out of order, or a prefix that is not the longest")
    if not 0 < size <= MAX_KEY_BYTES - shared:
        malformed(f"a key of {shared + size} bytes")
    key = previous[:shared] + block[start:end]
    node.keys.append(key)
    node.heads.append(block[at:tail])

    if block[tail : tail + 3] == _NO_TREE:
        node.trees.append(None)
        tail += 3
    elif block[tail : tail + 11] == _TREE_LINK:
        node.trees.append(block[tail + 7 : tail + 43])
        tail += 43
    else:
        malformed("bad field t")
    if block[tail : tail + 11] == _VALUE_LINK:
        node.values.append(block[tail + 7 : tail + 43])
        return key, tail + 43
    value, tail = _decode_foreign_value(block, tail)
    node.values.append(value)
    return key, tail


def _decode_foreign_value(block: bytes, at: int) -> tuple[bytes, int]:
    """A value whose CID is well-formed, but not of the usual form."""
    if block[at : at + 4] != _VALUE + _TAG:
        malformed("bad field v")
    size, start = _argument(block, at + 4, _BYTES)
    value = block[start + 1 : start + size]
    if block[start] != 0 or len(value) != size - 1 or not is_link(value):
        malformed("a value that is not a CID version 1")
    return value, start + size


def _argument(block: bytes, at: int, major: int) -> tuple[int, int]:
    """The number in the CBOR head at `at`, in its shortest form, and the place behind it."""
    first = block[at] - major
    if 0 <= first < _ONE_BYTE:
        return first, at + 1
    if first == _ONE_BYTE and block[at + 1] >= _ONE_BYTE:
        return block[at + 1], at + 2
    if first == _TWO_BYTES and block[at + 1] > 0:
        return block[at + 1] << 8 | block[at + 2], at + 3
    malformed("a field of another type, not in its shortest form, or too long")


def _check_heights(node: Node) -> None:
    node.height = height = key_height(node.keys[0])
    for key in node.keys[1:]:
        if key_height(key) != height:
            malformed("keys of different heights")
    if height == 0 and (node.left is not None or any(node.trees)):
        malformed("a subtree below layer 0")


def subtree_place(block: bytes, key: bytes) -> int | None:
    """Where in a node's block the CID of the subtree stands into which `key` belongs.

    None if there is none, or the key itself is here. It looks no further than it must and checks next to nothing: what
    it gives of bytes that are no node is anything, but never an error.
    """
    place = len(block) - SIZE if block.startswith(_LEFT + _NODE_LINK, -len(_LEFT + _LINK) - SIZE) else None
    try:
        count, at = _argument(block, 3, _ARRAY)
        found = b""
        for _ in range(count):
            size, start = block[at + 3] - _BYTES, at + 4
            if size >= _ONE_BYTE:
                size, start = _argument(block, at + 3, _BYTES)
            shared, tail = block[start + size + 2], start + size + 3
            if shared >= _ONE_BYTE:
                shared, tail = _argument(block, tail - 1, _UNSIGNED)
            found = found[:shared] + block[start : start + size]
            if found >= key:
                return None if found == key else place
            place = None if block[tail + 2] == _NULL[0] else tail + len(_TREE + _LINK)
            at = tail + len(_NO_TREE + _VALUE + _LINK) + SIZE if place is None else place + SIZE + 43
    except (IndexError, UpstreamError):
        return None
    return place


def root_layer(node: Node, limits: Limits) -> int | None:
    """The layer of a tree's root; None for the empty tree, the only root without keys."""
    if node.height is None and node.left is not None:
        malformed("a root without keys")
    if node.height is not None and node.height > limits.tree_depth:
        malformed(f"a tree of height {node.height}")
    return node.height


def check_layer(node: Node, layer: int) -> None:
    """Check that a node other than the root is in order on `layer`: of that height, or a mere way further down."""
    if node.height is None:
        if node.left is None or layer == 0:
            malformed("a leaf without keys")
    elif node.height != layer:
        malformed(f"a node of layer {node.height} on layer {layer}")


def encode_node(
    keys: Sequence[bytes], values: Sequence[bytes], left: bytes | None, trees: Sequence[bytes | None]
) -> bytes:
    """The canonical bytes of a node: `keys` ascending, `values` and `trees` in parallel to them."""
    heads = [entry_head(previous, key) for previous, key in pairwise([b"", *keys])]
    return join_node(heads, values, left, trees)


def entry_head(previous: bytes, key: bytes) -> bytes:
    """The fields k and p of the entry of `key` behind that of `previous` (empty for the first)."""
    shared = common_prefix(previous, key)
    suffix = key[shared:]
    return _SUFFIX + _head(_BYTES, len(suffix)) + suffix + _SHARED + _head(_UNSIGNED, shared)


def join_node(
    heads: Sequence[bytes], values: Iterable[bytes], left: bytes | None, trees: Iterable[bytes | None]
) -> bytes:
    """The canonical bytes of a node whose entries' heads are there already."""
    parts = [_ENTRIES, _head(_ARRAY, len(heads))]
    for head, tree, value in zip(heads, trees, values, strict=True):
        parts += head, _TREE, _link(tree), _VALUE, _link(value)
    parts += _LEFT, _link(left)
    return b"".join(parts)


def _link(cid: bytes | None) -> bytes:
    if cid is None:
        return _NULL
    if len(cid) == SIZE:
        return _LINK + cid
    return _TAG + _head(_BYTES, len(cid) + 1) + b"\x00" + cid


def _head(major: int, argument: int) -> bytes:
    if argument < _ONE_BYTE:
        return bytes((major | argument,))
    if argument >> 8 == 0:
        return bytes((major | _ONE_BYTE, argument))
    return bytes((major | _TWO_BYTES, *argument.to_bytes(2, "big")))


EMPTY_NODE = encode_node([], [], None, [])
EMPTY_TREE = cid_of(EMPTY_NODE)
"""The root of the tree without keys."""
