"""Undo a single operation by changing the bytes of a few nodes: the fast path of inversion.

Most commits contain one operation, and most operations change the entries of one node. Every node above it has the
same bytes before and after the commit, except for the 36 bytes of the CID of its changed subtree. So the root before
the commit can be computed in two steps:

1. Change the node that contains the key, or that would contain it.
2. From there up to the root, replace the CID of the subtree and hash the node. Only the position of this CID is needed
   (`subtree_cid_offset`), so the nodes above are not decoded.

In step 1, undoing an update replaces the CID in field "v" of one entry. Undoing a create removes the entry. If there
are subtrees on both sides of the key, they are merged into one. Fields "k" and "p" of the next entry are encoded again,
because they depend on the previous key. For example, a node has the keys a, b and c of 32 bytes, of which a and b share
30 bytes, b and c share 31 bytes, and b was created. The node in hexadecimal (`node.py` explains the encoding):

    after the commit                    before the commit
      0  A2 61 65 83                      0  A2 61 65 82                 map of 2 fields; "e": 3 entries, 2 entries
      4  A4 61 6B 58 20 <32 bytes>        4  A4 61 6B 58 20 <32 bytes>   entry of a; "k": the key
     41     61 70 00                     41     61 70 00                 "p"
     44     61 74 <link to X>            44     61 74 <link to XY>       "t": the subtrees X and Y, merged
     87     61 76 <link>                 87     61 76 <link>             "v"
    130  A4 61 6B 42 <2 bytes>                                           entry of b: removed
    136     61 70 18 1E
    140     61 74 <link to Y>
    183     61 76 <link>
    226  A4 61 6B 41 <1 byte>           130  A4 61 6B 42 <2 bytes>       entry of c; "k": one byte more
    231     61 70 18 1F                 136     61 70 18 1E              "p": 31 bytes as b, 30 bytes as a
    235     61 74 F6                    140     61 74 F6                 "t"
    238     61 76 <link>                143     61 76 <link>             "v"
    281  61 6C F6                       186  61 6C F6                    "l"
    284                                 189

Undoing a delete is the opposite: the entry is inserted at a position where the node has no subtree.

In step 2, the node above has a field "t" or "l" with a link to this node. Its bytes 7 to 42, the CID, change:

                                0     2     4     6  7             43
    after the commit            61 74 D8 2A 58 25 00 <CID after>   …
    before the commit           61 74 D8 2A 58 25 00 <CID before>  …

In these cases `undo_in_place` returns None, and the general algorithm decides (`tree_builder.py`):

- A node on the way is not in the slice, or a subtree to be merged is not.
- The tree does not show the effect of the operation, so there is an error to report.
- A deleted key has another height than the node at its position. Undoing its delete adds a node or splits subtrees.
- A created key was the only entry of its node, without subtrees. Undoing its create removes the node.

The root that is returned proves something only if it equals `prevData`. Then the nodes on the path before the commit
are those of the previous tree, because their hashes are equal. If it differs, nothing follows, since the nodes above
were not checked.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from indexer.atproto.cid import CID_BYTES, cid_of
from indexer.atproto.limits import Limits
from indexer.atproto.mst.net_op import NetOp
from indexer.atproto.mst.node import (
    Node,
    assemble_node,
    check_layer,
    decode_node,
    encode_key_fields,
    key_height,
    subtree_cid_offset,
)
from indexer.atproto.mst.partial_tree import NodeNotInSliceError, load_node


def undo_in_place(blocks: Mapping[bytes, bytes], root: bytes, op: NetOp, limits: Limits) -> bytes | None:
    """Return the root of the tree before the operation; None if the general algorithm is needed.

    Raises:
        UpstreamError: With NODE_MALFORMED, if the node of the key, or a node to be merged, is not canonical.
    """
    path: list[tuple[bytes, int]] = []
    cid = root
    while (block := blocks.get(cid)) is not None and len(path) <= limits.tree_depth:
        offset = subtree_cid_offset(block, op.key)
        if offset is None:
            break
        path.append((block, offset))
        cid = block[offset : offset + CID_BYTES]
    else:
        return None
    try:
        changed = _undo_in_node(blocks, decode_node(block, limits), op, limits)
    except NodeNotInSliceError:
        return None
    if changed is None:
        return None
    cid = cid_of(changed)
    for block, offset in reversed(path):
        cid = cid_of(block[:offset] + cid + block[offset + CID_BYTES :])
    return cid


def _undo_in_node(blocks: Mapping[bytes, bytes], node: Node, op: NetOp, limits: Limits) -> bytes | None:
    """Return the block of the node before the operation; None if the general algorithm is needed."""
    index = bisect_left(node.keys, op.key)
    found = node.values[index] if index < len(node.keys) and node.keys[index] == op.key else None
    if found != op.new:
        return None
    if found is None:
        return _with_entry(node, index, op)
    if op.old is None:
        return _without_entry(blocks, node, index, limits)
    values = [*node.values[:index], op.old, *node.values[index + 1 :]]
    return assemble_node(node.key_fields, values, node.left, node.trees)


def _with_entry(node: Node, index: int, op: NetOp) -> bytes | None:
    """Return the block of the node with the deleted key at `index` again."""
    if op.old is None or node.height != key_height(op.key):
        return None
    keys = [*node.keys[:index], op.key, *node.keys[index:]]
    values = [*node.values[:index], op.old, *node.values[index:]]
    key_fields = [*node.key_fields[:index], *_key_fields(keys, index, 2), *node.key_fields[index + 1 :]]
    subtrees = [node.left, *node.trees]
    subtrees.insert(index, None)
    left, *trees = subtrees
    return assemble_node(key_fields, values, left, trees)


def _without_entry(blocks: Mapping[bytes, bytes], node: Node, index: int, limits: Limits) -> bytes | None:
    """Return the block of the node without the created key at `index`; None if nothing is left."""
    subtrees = [node.left, *node.trees]
    merged = _merge(blocks, subtrees[index], subtrees[index + 1], (node.height or 0) - 1, limits)
    subtrees[index : index + 2] = [merged]
    left, *trees = subtrees
    if left is None and not trees:
        return None
    keys = [*node.keys[:index], *node.keys[index + 1 :]]
    values = [*node.values[:index], *node.values[index + 1 :]]
    key_fields = [*node.key_fields[:index], *_key_fields(keys, index, 1), *node.key_fields[index + 2 :]]
    return assemble_node(key_fields, values, left, trees)


def _merge(
    blocks: Mapping[bytes, bytes], left: bytes | None, right: bytes | None, layer: int, limits: Limits
) -> bytes | None:
    """Return the CID of the subtree that contains the keys of two subtrees on `layer`, the left ones first.

    Only the nodes along the border between the two subtrees have to be merged.

    Raises:
        NodeNotInSliceError: One of these nodes is missing.
    """
    if left is None or right is None:
        return left or right
    first, second = load_node(blocks, left, limits), load_node(blocks, right, limits)
    check_layer(first, layer)
    check_layer(second, layer)
    border = len(first.keys)
    subtrees = [first.left, *first.trees, *second.trees]
    subtrees[border] = _merge(blocks, subtrees[border], second.left, layer - 1, limits)
    key_fields = [
        *first.key_fields,
        *_key_fields([*first.keys, *second.keys], border, 1),
        *second.key_fields[1:],
    ]
    return cid_of(assemble_node(key_fields, first.values + second.values, subtrees[0], subtrees[1:]))


def _key_fields(keys: Sequence[bytes], start: int, count: int) -> list[bytes]:
    """Return the encoded key fields of up to `count` entries from `start` on."""
    return [
        encode_key_fields(keys[index - 1] if index else b"", keys[index])
        for index in range(start, min(start + count, len(keys)))
    ]
