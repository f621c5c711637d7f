"""The Merkle search tree: its nodes, and walks over whole trees (docs/protocol.md#merkle-search-tree).

A node contains the keys of one layer in ascending order, and links to subtrees before, between and after them. The
subtrees are one layer below.

    layer 1    left ── keys[0] ── trees[0] ── keys[1] ── trees[1]
                │                    │                      │
    layer 0    keys below        keys between           keys above

Each node is one DAG-CBOR block, and only one encoding of a node is valid:

    node     {"e": [entry, …], "l": null or link}       "l": the subtree before the first key
    entry    {"k": bytes, "p": number,                  the key: the first p bytes of the previous key, then k
              "t": null or link, "v": link}             the subtree after the key, and the record

Links to nodes always have the form of the protocol. The CID of a record may have another form and another size.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any, NoReturn

from indexer.atproto import cbor
from indexer.atproto.cid import CID_BYTES, DAG_CBOR, RAW, cid_of, cid_text, is_link
from indexer.atproto.limits import Limits
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure, Rejection

MAX_KEY_BYTES = 1_024
"""Limit of the reference implementation. The longest valid path has 830 bytes."""

_UNCOUNTED_BYTES = 1 << 14  # a block of at most this size is decoded without counting its items
_NODE_ITEMS, _ENTRY_ITEMS = 6, 11  # containers, keys, values and tags
_NODE_FIELDS, _ENTRY_FIELDS = 2, 4
_CID_STARTS = (DAG_CBOR, RAW)
_FIRST_TEXT_BYTE = 0x20  # above the first byte of any CID

# Heads of CBOR: the major type is in the upper 3 bits of the first byte. The lower 5 bits are the argument if it is
# below 24; otherwise they say how many bytes of argument follow.
_UNSIGNED, _BYTES, _LIST = 0x00, 0x40, 0x80
_ONE_BYTE, _TWO_BYTES = 24, 25
_NULL, _LINK_START = b"\xf6", b"\xd8\x2a\x58\x25\x00"  # 36 bytes of a CID follow


@dataclass(slots=True)
class Node:
    """A decoded node. The lists have one item for each entry."""

    left: bytes | None = None  # the CID of the subtree before the first key
    height: int | None = None  # of the keys; None without keys
    keys: list[bytes] = field(default_factory=list)  # ascending
    values: list[bytes] = field(default_factory=list)  # the CIDs of the records
    trees: list[bytes | None] = field(default_factory=list)  # the CIDs of the subtrees after the keys

    def subtree_before(self, index: int) -> bytes | None:
        """Return the CID of the subtree before the entry at `index`; with the number of entries, after the last one."""
        return self.trees[index - 1] if index else self.left


def raise_malformed(detail: str) -> NoReturn:
    """Raise UpstreamError with NODE_MALFORMED."""
    raise UpstreamError(Rejection.NODE_MALFORMED, detail)


def key_height(key: bytes) -> int:
    """Return the layer that a key belongs to, 0 to 128: half the leading zero bits of its SHA-256, rounded down."""
    digest = sha256(key).digest()
    if digest[0] >> 6:
        return 0
    return (256 - int.from_bytes(digest, "big").bit_length()) // 2


def common_prefix(left: bytes, right: bytes) -> int:
    """Return the number of bytes that two keys share at their beginning."""
    size = min(len(left), len(right))
    difference = int.from_bytes(left[:size], "big") ^ int.from_bytes(right[:size], "big")
    return size - (difference.bit_length() + 7) // 8


def decode_node(block: bytes, limits: Limits) -> Node:
    """Return the node in a block, whose bytes must be those that `encode_node` would return.

    A node without entries is accepted; `check_layer` and `root_layer` check whether it is allowed in its position.

    Raises:
        UpstreamError: With NODE_MALFORMED, if the block is not a canonical node.
    """
    max_items = _NODE_ITEMS + _ENTRY_ITEMS * limits.node_entries  # counted first, because decoding them is slow
    if len(block) > _UNCOUNTED_BYTES and cbor.count_items(block, max_items, max_items)[0] > max_items:
        raise_malformed(f"over {max_items} items")
    try:
        fields = _decode(block)
        node = Node()
        usual = _read_fields(fields, node, limits)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise_malformed(f"not a node: {error!r:.100}")
    # libipld encodes a node in a quarter of the time, if all links and no keys look like links to it.
    encoded = cbor.encode(fields) if usual else encode_node(node.keys, node.values, node.left, node.trees)
    if encoded != block:
        raise_malformed("not the canonical encoding of the node")
    if node.keys:
        _check_heights(node)
    return node


def _decode(block: bytes) -> Any:
    """Return the object in a block, with links as bytes, which may be a `Link`."""
    try:
        return cbor.decode(block)
    except cbor.CborError:
        return cbor.decode_canonical(block)  # libipld knows no digest of more than 64 bytes


def _read_fields(fields: Any, node: Node, limits: Limits) -> bool:
    """Set the fields of the node; return True if all values have the form of the protocol, and no key looks like a CID.

    A missing field or one of another type raises KeyError, TypeError or AttributeError.
    """
    entries, node.left = fields["e"], fields["l"]
    if type(entries) is not list or len(fields) != _NODE_FIELDS:
        raise_malformed("not a map of e and l")
    if len(entries) > limits.node_entries:
        raise_malformed(f"{len(entries)} entries")
    key, usual = b"", True
    for entry in entries:
        suffix, shared, value = entry["k"], entry["p"], entry["v"]
        if len(entry) != _ENTRY_FIELDS or type(suffix) is not bytes or type(shared) is not int:
            raise_malformed("an entry is not a map of k, p, t and v")
        # A key shares exactly `shared` bytes with the previous key, and is above it, if the next byte is greater.
        if shared != len(key) and not (0 <= shared < len(key) and suffix[:1] > key[shared : shared + 1]):
            raise_malformed("keys out of order, or a prefix that is not the longest")
        if not 0 < len(suffix) <= MAX_KEY_BYTES - shared:
            raise_malformed(f"a key of {shared + len(suffix)} bytes")
        if suffix[0] < _FIRST_TEXT_BYTE or len(value) != CID_BYTES or not value.startswith(_CID_STARTS):
            usual = False
            if not isinstance(value, bytes) or not is_link(value):
                raise_malformed("a value that is not a CIDv1")
        key = key[:shared] + suffix
        node.keys.append(key)
        node.values.append(value)
    node.trees = [entry["t"] for entry in entries]
    for tree in (node.left, *node.trees):
        if tree is not None and not (len(tree) == CID_BYTES and tree.startswith(DAG_CBOR)):
            raise_malformed("a subtree that is not a link to a node")
    return usual


def _check_heights(node: Node) -> None:
    node.height = height = key_height(node.keys[0])
    for key in node.keys[1:]:
        if key_height(key) != height:
            raise_malformed("keys of different heights")
    if height == 0 and (node.left is not None or any(node.trees)):
        raise_malformed("a subtree below layer 0")


def root_layer(node: Node, limits: Limits) -> int | None:
    """Return the layer of a root; None for the empty tree, the only tree whose root has no keys.

    Raises:
        UpstreamError: With NODE_MALFORMED, if the node cannot be a root.
    """
    if node.height is None and node.left is not None:
        raise_malformed("a root without keys")
    if node.height is not None and node.height > limits.tree_depth:
        raise_malformed(f"a tree of height {node.height}")
    return node.height


def check_layer(node: Node, layer: int) -> None:
    """Check that a node other than the root belongs on `layer`: by its keys, or without keys as a link to lower layers.

    Raises:
        UpstreamError: With NODE_MALFORMED, if it does not.
    """
    if node.height is None:
        if node.left is None or layer == 0:
            raise_malformed("a leaf without keys")
    elif node.height != layer:
        raise_malformed(f"a node of layer {node.height} on layer {layer}")


def encode_node(
    keys: Sequence[bytes], values: Sequence[bytes], left: bytes | None, trees: Sequence[bytes | None]
) -> bytes:
    """Return the block of a node. `keys` are ascending; `values` and `trees` have one item for each key.

    libipld cannot do this, because a key may have the bytes of a CID, which it would encode as a link.
    """
    parts = [b"\xa2\x61e", _encode_head(_LIST, len(keys))]
    previous = b""
    for key, value, tree in zip(keys, values, trees, strict=True):
        shared = common_prefix(previous, key)
        suffix = key[shared:]
        k, p = _encode_head(_BYTES, len(suffix)), _encode_head(_UNSIGNED, shared)
        t = _NULL if tree is None else _LINK_START + tree
        v = _LINK_START + value
        if len(value) != CID_BYTES:  # the record has a CID of another form
            v = b"\xd8\x2a" + _encode_head(_BYTES, len(value) + 1) + b"\x00" + value
        parts += b"\xa4\x61k", k, suffix, b"\x61p", p, b"\x61t", t, b"\x61v", v
        previous = key
    parts += b"\x61l", _NULL if left is None else _LINK_START + left
    return b"".join(parts)


@lru_cache(maxsize=4_096)
def _encode_head(major_type: int, argument: int) -> bytes:
    if argument < _ONE_BYTE:
        return bytes((major_type | argument,))
    if argument >> 8 == 0:
        return bytes((major_type | _ONE_BYTE, argument))
    return bytes((major_type | _TWO_BYTES, *argument.to_bytes(2, "big")))


EMPTY_NODE = encode_node([], [], None, [])
"""The block of the only node of the empty tree."""
EMPTY_TREE = cid_of(EMPTY_NODE)
"""The CID of the root of the empty tree."""


BlockOf = Callable[[bytes], bytes | None]
"""Returns the block of a CID; None if it is missing. The hash of the block must have been checked."""


class MissingNodeError(UnavailableError):
    """A tree node is missing: the export was cut off, or created while the repo changed."""

    def __init__(self, cid: bytes) -> None:
        super().__init__(FetchFailure.EXPORT_INCOMPLETE, f"no node {cid_text(cid)}")
        self.cid = cid


def load_node(block_of: BlockOf, cid: bytes, limits: Limits) -> Node:
    """Return the node with this CID.

    Raises:
        UpstreamError: With NODE_MALFORMED, if the block is not a canonical node.
        MissingNodeError: The node is missing.
    """
    return decode_node(_block(block_of, cid), limits)


def load_subtree(node_of: Callable[[bytes], Node], cid: bytes, layer: int, lower: bytes, upper: bytes | None) -> Node:
    """Return the root of a subtree on `layer` between two keys, which may be b"" and None.

    Raises:
        UpstreamError: With NODE_MALFORMED, if it breaks a rule.
        MissingNodeError: As `node_of`.
    """
    node = node_of(cid)
    check_layer(node, layer)
    if node.keys and not (lower < node.keys[0] and (upper is None or node.keys[-1] < upper)):
        raise_malformed("a subtree reaches beyond the keys beside it")
    return node


def walk(block_of: BlockOf, root: bytes, limits: Limits) -> Iterator[tuple[bytes, bytes]]:
    """Yield each key with the CID of its record, in ascending order, and prove the tree.

    The tree is proven when the iterator is exhausted, and not before. Then every node was present, canonical, on its
    layer, and between the keys beside it in the node above. So the keys ascend over the whole tree, no subtree occurs
    twice, and the work is bounded by the number of blocks times the depth of the tree.

    Raises:
        UpstreamError: With NODE_MALFORMED, if a node breaks a rule.
        MissingNodeError: A node is missing.
    """

    def node_of(cid: bytes) -> Node:
        return load_node(block_of, cid, limits)

    node = node_of(root)
    layer = root_layer(node, limits)
    if layer is not None:
        yield from _walk(node_of, node, layer, b"", None)


def _walk(
    node_of: Callable[[bytes], Node], node: Node, layer: int, lower: bytes, upper: bytes | None
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys of a node and its subtrees. `lower` and `upper` are the keys beside it in the nodes above it."""
    uppers = [*node.keys, upper]
    for index, tree in enumerate((node.left, *node.trees)):
        if index:
            lower = node.keys[index - 1]
            yield lower, node.values[index - 1]
        if tree is not None:
            child = load_subtree(node_of, tree, layer - 1, lower, uppers[index])
            yield from _walk(node_of, child, layer - 1, lower, uppers[index])


def find(node_of: Callable[[bytes], Node], root: bytes, key: bytes, limits: Limits) -> bytes | None:
    """Return the CID of the record at a key; None if the tree has no such key. It reads only the nodes on the way.

    `node_of` returns the node with a CID, as `load_node` does.

    Raises:
        UpstreamError: With NODE_MALFORMED, if a node breaks a rule.
        MissingNodeError: A node is missing, so that nothing is proven.
    """
    node = node_of(root)
    layer = root_layer(node, limits) or 0
    while True:
        index = bisect_left(node.keys, key)
        if index < len(node.keys) and node.keys[index] == key:
            return node.values[index]
        tree = node.subtree_before(index)
        if tree is None:
            return None
        node, layer = node_of(tree), layer - 1
        check_layer(node, layer)


def leaves(block_of: BlockOf, root: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the same as `walk` for a tree that `walk` has proven. It checks nothing and is four times as fast.

    Raises:
        MissingNodeError: A node is missing that was present before.
    """
    node, key = _decode(_block(block_of, root)), b""
    if node["l"] is not None:
        yield from leaves(block_of, node["l"])
    for entry in node["e"]:
        key = key[: entry["p"]] + entry["k"]
        yield key, entry["v"]
        if entry["t"] is not None:
            yield from leaves(block_of, entry["t"])


def _block(block_of: BlockOf, cid: bytes) -> bytes:
    block = block_of(cid)
    if block is None:
        raise MissingNodeError(cid)
    return block
