"""Nodes of the Merkle search tree (docs/protocol.md#merkle-search-tree).

A node contains the keys of one layer in ascending order, and links to subtrees before, between and after them. The
subtrees are one layer below.

    layer 1    left ── keys[0] ── trees[0] ── keys[1] ── trees[1]
                │                    │                      │
    layer 0    keys below        keys between           keys above

Each node is one DAG-CBOR block, and only one encoding of a node is valid. This module reads and writes the bytes
itself, which takes half the time of a decoder for any DAG-CBOR and checks for each field. In hexadecimal:

    A2                                map of 2 fields
      61 65  80+n | 98 nn | 99 nn nn    "e": list of n entries
        A4                                map of 4 fields
          61 6B  40+n | 58 nn | 59 nn nn    "k": byte string of n bytes, the end of the key
          <n bytes>
          61 70  00+n | 18 nn | 19 nn nn    "p": the key begins with n bytes of the previous key
          61 74  F6 | <link>                "t": null or link, the subtree after the key
          61 76  <link>                     "v": link, the record
      61 6C  F6 | <link>                "l": null or link, the subtree before the first key

Of the forms for n, only the shortest one is valid: n below 24 in the first byte, n below 256 in the second byte, or n
in the second and third byte. A field with a link has 43 bytes:

    offset
       0    61 74           name of the field: "t", "v" or "l"
       2    D8 2A           tag 42: link
       4    58 25           byte string of 37 bytes
       6    00              prefix of a binary CID
       7    01 71 12 20     CIDv1, dag-cbor, SHA-256, 32 bytes
      11    <32 bytes>      digest
      43                    the next field

Links to nodes always have this form. The CID of a record may have another form and another size.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import NoReturn

from indexer.atproto.cid import CID_BYTES, DAG_CBOR, cid_of, is_link
from indexer.atproto.limits import Limits
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

MAX_HEIGHT = 128
"""Height of a key whose SHA-256 is zero."""
MAX_KEY_BYTES = 1_024
"""Limit of the reference implementation. The longest valid path has 830 bytes."""

# Field names, and what else is always there, in the order of the fields.
_NODE_START = b"\xa2\x61e"
_ENTRY_START = b"\xa4\x61k"
_NAME_P = b"\x61p"
_NAME_T = b"\x61t"
_NAME_V = b"\x61v"
_NAME_L = b"\x61l"
_NULL = b"\xf6"
_TAG = b"\xd8\x2a"
_LINK_START = _TAG + b"\x58\x25\x00"  # 36 bytes of a CID follow
_NODE_LINK_START = _LINK_START + DAG_CBOR  # 32 bytes of a digest follow

_T_NULL = _NAME_T + _NULL
_L_NULL = _NAME_L + _NULL
_T_LINK_START = _NAME_T + _NODE_LINK_START
_V_LINK_START = _NAME_V + _NODE_LINK_START
_L_LINK_START = _NAME_L + _NODE_LINK_START

_NODE_START_BYTES = len(_NODE_START)
_ENTRY_START_BYTES = len(_ENTRY_START)
_NAME_BYTES = len(_NAME_T)
_NULL_FIELD_BYTES = len(_T_NULL)
_LINK_CID_OFFSET = len(_NAME_T + _LINK_START)
_LINK_DIGEST_OFFSET = len(_T_LINK_START)
_LINK_FIELD_BYTES = _LINK_CID_OFFSET + CID_BYTES

# Heads: the major type is in the upper 3 bits of the first byte. The lower 5 bits are the argument if it is below 24;
# otherwise they say how many bytes of argument follow.
_UNSIGNED, _BYTES, _LIST = 0x00, 0x40, 0x80
_ONE_BYTE, _TWO_BYTES = 24, 25


class Node:
    """A decoded node. The lists `keys`, `values` and `trees` have one item for each entry.

    Attributes:
        left: The CID of the subtree before the first key.
        height: The height of the keys; None without keys.
        keys: The whole keys, ascending.
        values: The CIDs of the records.
        trees: The CIDs of the subtrees; `trees[i]` is the one after `keys[i]`.
    """

    __slots__ = ("height", "keys", "left", "trees", "values")

    def __init__(self) -> None:
        self.left: bytes | None = None
        self.height: int | None = None
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.trees: list[bytes | None] = []

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
    try:
        return _decode(block, limits)
    except IndexError:
        raise_malformed("the block ends within the node")


def _decode(block: bytes, limits: Limits) -> Node:
    if not block.startswith(_NODE_START):
        raise_malformed("not a map of e and l")
    count, position = _decode_head(block, _NODE_START_BYTES, _LIST)
    if count > limits.node_entries:
        raise_malformed(f"{count} entries")
    node = Node()
    key = b""
    for _ in range(count):
        key, position = _decode_entry(block, position, key, node)
    if block[position:] != _L_NULL:
        if len(block) != position + _LINK_FIELD_BYTES or not block.startswith(_L_LINK_START, position):
            raise_malformed("bad field l, or bytes after the node")
        node.left = block[position + _LINK_CID_OFFSET :]
    if count:
        _check_heights(node)
    return node


def _decode_entry(block: bytes, start: int, previous_key: bytes, node: Node) -> tuple[bytes, int]:
    """Append the entry at `start` to the node; return its key and the position after the entry."""
    k_head = start + _ENTRY_START_BYTES
    if block[start:k_head] != _ENTRY_START:
        raise_malformed("an entry is not a map of k, p, t and v")
    size = block[k_head] - _BYTES
    suffix = k_head + 1
    if not 0 < size < _ONE_BYTE:
        size, suffix = _decode_head(block, k_head, _BYTES)
    suffix_end = suffix + size
    p_head = suffix_end + _NAME_BYTES
    if block[suffix_end:p_head] != _NAME_P:
        raise_malformed("bad field k")
    shared = block[p_head]
    t = p_head + 1
    if shared >= _ONE_BYTE:
        shared, t = _decode_head(block, p_head, _UNSIGNED)

    # A key shares exactly `shared` bytes with the previous key, and is above it, if the next byte is greater.
    if shared != len(previous_key) and (shared > len(previous_key) or block[suffix] <= previous_key[shared]):
        raise_malformed("keys out of order, or a prefix that is not the longest")
    if not 0 < size <= MAX_KEY_BYTES - shared:
        raise_malformed(f"a key of {shared + size} bytes")
    key = previous_key[:shared] + block[suffix:suffix_end]
    node.keys.append(key)

    if block[t : t + _NULL_FIELD_BYTES] == _T_NULL:
        v = t + _NULL_FIELD_BYTES
        node.trees.append(None)
    elif block[t : t + _LINK_DIGEST_OFFSET] == _T_LINK_START:
        v = t + _LINK_FIELD_BYTES
        node.trees.append(block[t + _LINK_CID_OFFSET : v])
    else:
        raise_malformed("bad field t")
    if block[v : v + _LINK_DIGEST_OFFSET] == _V_LINK_START:
        end = v + _LINK_FIELD_BYTES
        node.values.append(block[v + _LINK_CID_OFFSET : end])
        return key, end
    value, end = _decode_unusual_value(block, v)
    node.values.append(value)
    return key, end


def _decode_unusual_value(block: bytes, start: int) -> tuple[bytes, int]:
    """Return the CID in a field "v" that is a CIDv1 of any form, and the position after the field."""
    head = start + _NAME_BYTES + len(_TAG)
    if block[start:head] != _NAME_V + _TAG:
        raise_malformed("bad field v")
    size, prefix = _decode_head(block, head, _BYTES)
    end = prefix + size
    cid = block[prefix + 1 : end]
    if block[prefix] != 0 or len(cid) != size - 1 or not is_link(cid):
        raise_malformed("a value that is not a CIDv1")
    return cid, end


def _decode_head(block: bytes, position: int, major_type: int) -> tuple[int, int]:
    """Return the argument of a CBOR head in its shortest form, and the position after the head."""
    first = block[position] - major_type
    if 0 <= first < _ONE_BYTE:
        return first, position + 1
    if first == _ONE_BYTE and block[position + 1] >= _ONE_BYTE:
        return block[position + 1], position + 2
    if first == _TWO_BYTES and block[position + 1] > 0:
        return block[position + 1] << 8 | block[position + 2], position + 3
    raise_malformed("a field of another type, not in its shortest form, or too long")


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
    """Return the block of a node. `keys` are ascending; `values` and `trees` have one item for each key."""
    parts = [_NODE_START, _encode_head(_LIST, len(keys))]
    for (previous, key), value, tree in zip(pairwise([b"", *keys]), values, trees, strict=True):
        shared = common_prefix(previous, key)
        suffix = key[shared:]
        parts += _ENTRY_START, _encode_head(_BYTES, len(suffix)), suffix, _NAME_P, _encode_head(_UNSIGNED, shared)
        parts += _NAME_T, _encode_link(tree), _NAME_V, _encode_link(value)
    parts += _NAME_L, _encode_link(left)
    return b"".join(parts)


def _encode_link(cid: bytes | None) -> bytes:
    if cid is None:
        return _NULL
    if len(cid) == CID_BYTES:
        return _LINK_START + cid
    return _TAG + _encode_head(_BYTES, len(cid) + 1) + b"\x00" + cid


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
