"""A slow and obvious implementation of the tree and of inversion, to compare the product with.

A tree is built from all its records at once. An inversion takes the whole tree apart into a row of keys and closed
subtrees, edits the row, and builds a tree over it. Only `NetOp` and `Verdict` are shared with the product: nodes are
encoded by cbor2, and heights are counted in text.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import count, pairwise
from typing import Any

import cbor2

from indexer.atproto.inversion import NetOp, Verdict

Records = Mapping[bytes, bytes]
"""The CID of each record by its key."""
Blocks = dict[bytes, bytes]
"""Blocks by CID."""


def cid_of(block: bytes) -> bytes:
    return b"\x01\x71\x12\x20" + sha256(block).digest()


def cid_from_text(text: str) -> bytes:
    return base64.b32decode(text[1:].upper() + "=" * (-len(text[1:]) % 8))


def height(key: bytes) -> int:
    bits = f"{int.from_bytes(sha256(key).digest()):0256b}"
    return (len(bits) - len(bits.lstrip("0"))) // 2


def keys_of_height(wanted: int, prefix: str = "com.example.record/") -> Iterator[bytes]:
    """Yield as many keys of this height as are needed."""
    return (key for key in (f"{prefix}{n}".encode() for n in count()) if height(key) == wanted)


def link(target: bytes | None) -> Any:
    return None if target is None else cbor2.CBORTag(42, b"\x00" + target)


def encode(keys: list[bytes], values: list[bytes], left: bytes | None, trees: list[bytes | None]) -> bytes:
    """Return the block of a node."""
    entries, previous = [], b""
    for key, value, tree in zip(keys, values, trees, strict=True):
        shared = 0
        while shared < min(len(key), len(previous)) and key[shared] == previous[shared]:
            shared += 1
        entries.append({"k": key[shared:], "p": shared, "t": link(tree), "v": link(value)})
        previous = key
    return cbor2.dumps({"e": entries, "l": link(left)}, canonical=True)


@dataclass
class SlowNode:
    keys: list[bytes]
    values: list[bytes]
    left: bytes | None
    trees: list[bytes | None]


def decode(block: bytes) -> SlowNode:
    """Return a node whose block is known to be valid."""
    node = cbor2.loads(block)
    keys, previous = [], b""
    for entry in node["e"]:
        previous = previous[: entry["p"]] + entry["k"]
        keys.append(previous)
    return SlowNode(
        keys,
        [entry["v"].value[1:] for entry in node["e"]],
        node["l"] and node["l"].value[1:],
        [entry["t"] and entry["t"].value[1:] for entry in node["e"]],
    )


def build(records: Records) -> tuple[bytes, Blocks]:
    """Return the root and all nodes of the tree over these records."""
    blocks: Blocks = {}
    top = max(map(height, records), default=0)
    root = _build_subtree(sorted(records.items()), top, blocks) or _db(encode([], [], None, []), blocks)
    return root, blocks


def _build_subtree(records: list[tuple[bytes, bytes]], layer: int, blocks: Blocks) -> bytes | None:
    if not records:
        return None
    entries = [index for index, (key, _) in enumerate(records) if height(key) == layer]
    bounds = [-1, *entries, len(records)]
    gaps = [records[start + 1 : stop] for start, stop in pairwise(bounds)]
    left, *trees = [_build_subtree(gap, layer - 1, blocks) for gap in gaps]
    keys, values = [records[index][0] for index in entries], [records[index][1] for index in entries]
    return _db(encode(keys, values, left, trees), blocks)


def _db(block: bytes, blocks: Blocks) -> bytes:
    blocks[cid_of(block)] = block
    return cid_of(block)


def difference(before: Records, after: Records) -> list[NetOp]:
    """Return the operations that lead from `before` to `after`, by key."""
    keys = sorted(before.keys() | after.keys())
    return [NetOp(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


@dataclass(frozen=True)
class Key:
    key: bytes
    value: bytes


@dataclass(frozen=True)
class ClosedSubtree:
    """A subtree whose root is not in the blocks."""

    cid: bytes
    layer: int


Row = list[Key | ClosedSubtree]


class UndecidableError(Exception):
    """A closed subtree cannot remain as it is."""


def invert(blocks: Blocks, root: bytes, ops: Iterable[NetOp], prev_data: bytes) -> tuple[Verdict, bytes | None]:
    """Return the verdict, and the root of the tree before the operations; None if it is unknown."""
    ops = list(ops)
    if not ops:
        return (Verdict.OK if root == prev_data else Verdict.MISMATCH), root
    if root not in blocks:
        return Verdict.UNDECIDABLE, None
    top = max(map(height, decode(blocks[root]).keys), default=0)
    row: Row = list(_take_apart(blocks, root, top))
    found = [_look_up(row, op.key) for op in ops]
    if any(value != op.new for value, op in zip(found, ops, strict=True) if not isinstance(value, ClosedSubtree)):
        return Verdict.OPS_MISMATCH, None
    if any(isinstance(value, ClosedSubtree) for value in found):
        return Verdict.UNDECIDABLE, None
    # Deletes are undone first, because they find their positions by the keys beside them.
    for op in ops:
        if op.new is None:
            _insert(row, op)
    for op in ops:
        if op.new is not None:
            _replace(row, op)
    try:
        before = _root_of(row, prev_data)
    except UndecidableError:
        return Verdict.UNDECIDABLE, None
    return (Verdict.OK if before == prev_data else Verdict.MISMATCH), before


def _take_apart(blocks: Blocks, root: bytes | None, layer: int) -> Iterator[Key | ClosedSubtree]:
    if root is None:
        return
    if root not in blocks:
        yield ClosedSubtree(root, layer)
        return
    node = decode(blocks[root])
    yield from _take_apart(blocks, node.left, layer - 1)
    for key, value, tree in zip(node.keys, node.values, node.trees, strict=True):
        yield Key(key, value)
        yield from _take_apart(blocks, tree, layer - 1)


def _look_up(row: Row, key: bytes) -> bytes | ClosedSubtree | None:
    """Return the value of a key, None if the key does not exist, or the closed subtree that may contain it."""
    between: ClosedSubtree | None = None
    for item in row:
        if isinstance(item, ClosedSubtree):
            between = item
        elif item.key == key:
            return item.value
        elif item.key > key:
            break
        else:
            between = None
    return between


def _insert(row: Row, op: NetOp) -> None:
    assert op.old is not None
    later = (index for index, item in enumerate(row) if isinstance(item, Key) and item.key > op.key)
    row.insert(next(later, len(row)), Key(op.key, op.old))


def _replace(row: Row, op: NetOp) -> None:
    index = next(index for index, item in enumerate(row) if isinstance(item, Key) and item.key == op.key)
    row[index : index + 1] = [] if op.old is None else [Key(op.key, op.old)]


def _root_of(row: Row, prev_data: bytes) -> bytes:
    if not row:
        return cid_of(encode([], [], None, []))
    heights = [height(item.key) for item in row if isinstance(item, Key)]
    if not heights:
        if len(row) == 1 and isinstance(subtree := row[0], ClosedSubtree) and subtree.cid == prev_data:
            return subtree.cid
        raise UndecidableError
    return _subtree_of(row, max(heights))


def _subtree_of(row: Row, layer: int) -> bytes:
    if len(row) == 1 and isinstance(subtree := row[0], ClosedSubtree) and subtree.layer == layer:
        return subtree.cid
    if layer < 0 or any(isinstance(item, ClosedSubtree) and item.layer >= layer for item in row):
        raise UndecidableError
    gaps: list[Row] = [[]]
    entries: list[Key] = []
    for item in row:
        if isinstance(item, Key) and height(item.key) == layer:
            entries.append(item)
            gaps.append([])
        else:
            gaps[-1].append(item)
    left, *trees = [_subtree_of(gap, layer - 1) if gap else None for gap in gaps]
    return cid_of(encode([entry.key for entry in entries], [entry.value for entry in entries], left, trees))
