"""The tree the slow and obvious way: whole trees from their records, inversion by flatten, edit, rebuild.

Nothing here is shared with the product but the names of verdicts: nodes go through cbor2, heights through text.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import count, pairwise
from typing import Any

import cbor2

from indexer.atproto.mst.inversion import NetOp, Verdict

Records = Mapping[bytes, bytes]
Blocks = dict[bytes, bytes]


def cid(block: bytes) -> bytes:
    return b"\x01\x71\x12\x20" + sha256(block).digest()


def cid_from_text(text: str) -> bytes:
    return base64.b32decode(text[1:].upper() + "=" * (-len(text[1:]) % 8))


def height(key: bytes) -> int:
    bits = "".join(f"{byte:08b}" for byte in sha256(key).digest())
    return (len(bits) - len(bits.lstrip("0"))) // 2


def keys_of_height(wanted: int, prefix: str = "com.example.record/") -> Iterator[bytes]:
    return (key for key in (f"{prefix}{n}".encode() for n in count()) if height(key) == wanted)


# ------------------------------------------------------------------------------------------------ nodes


def link(target: bytes | None) -> Any:
    return None if target is None else cbor2.CBORTag(42, b"\x00" + target)


def encode(keys: list[bytes], values: list[bytes], left: bytes | None, trees: list[bytes | None]) -> bytes:
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
    """For nodes known to be good."""
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


# ------------------------------------------------------------------------------------------- whole trees


def build(records: Records) -> tuple[bytes, Blocks]:
    """The root and all nodes of the tree over `records`."""
    blocks: Blocks = {}
    top = max(map(height, records), default=0)
    root = _subtree(sorted(records.items()), top, blocks) or _put(encode([], [], None, []), blocks)
    return root, blocks


def _subtree(records: list[tuple[bytes, bytes]], layer: int, blocks: Blocks) -> bytes | None:
    if not records:
        return None
    own = [at for at, (key, _) in enumerate(records) if height(key) == layer]
    bounds = [-1, *own, len(records)]
    gaps = [records[start + 1 : stop] for start, stop in pairwise(bounds)]
    left, *trees = [_subtree(gap, layer - 1, blocks) for gap in gaps]
    keys, values = [records[at][0] for at in own], [records[at][1] for at in own]
    return _put(encode(keys, values, left, trees), blocks)


def _put(block: bytes, blocks: Blocks) -> bytes:
    blocks[cid(block)] = block
    return cid(block)


def difference(before: Records, after: Records) -> list[NetOp]:
    keys = sorted(before.keys() | after.keys())
    return [NetOp(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


# --------------------------------------------------------------------------------------------- inversion


@dataclass(frozen=True)
class Key:
    key: bytes
    value: bytes


@dataclass(frozen=True)
class Stub:
    cid: bytes
    layer: int


class UndecidableError(Exception):
    pass


def invert(blocks: Blocks, root: bytes, ops: Iterable[NetOp], prev_data: bytes) -> tuple[Verdict, bytes | None]:
    """Flatten everything that is there, edit the row of atoms, build the tree over it."""
    ops = list(ops)
    if not ops:
        return (Verdict.OK if root == prev_data else Verdict.MISMATCH), root
    if root not in blocks:
        return Verdict.UNDECIDABLE, None
    top = max(map(height, decode(blocks[root]).keys), default=0)
    atoms = list(_flatten(blocks, root, top))
    known = [_lookup(atoms, op.key) for op in ops]
    if any(found != op.new for found, op in zip(known, ops, strict=True) if not isinstance(found, Stub)):
        return Verdict.OPS_MISMATCH, None
    if any(isinstance(found, Stub) for found in known):
        return Verdict.UNDECIDABLE, None
    # Inserted first, while the neighbours that bound each place still stand.
    for op in (op for op in ops if op.new is None):
        _insert(atoms, op)
    for op in (op for op in ops if op.new is not None):
        _replace(atoms, op)
    try:
        before = _rebuild_all(atoms, prev_data)
    except UndecidableError:
        return Verdict.UNDECIDABLE, None
    return (Verdict.OK if before == prev_data else Verdict.MISMATCH), before


def _flatten(blocks: Blocks, root: bytes | None, layer: int) -> Iterator[Key | Stub]:
    if root is None:
        return
    if root not in blocks:
        yield Stub(root, layer)
        return
    node = decode(blocks[root])
    yield from _flatten(blocks, node.left, layer - 1)
    for key, value, tree in zip(node.keys, node.values, node.trees, strict=True):
        yield Key(key, value)
        yield from _flatten(blocks, tree, layer - 1)


def _lookup(atoms: list[Key | Stub], key: bytes) -> bytes | Stub | None:
    """The value at `key`, None if it is not there, or the stub that it may be in."""
    between: Stub | None = None
    for atom in atoms:
        if isinstance(atom, Stub):
            between = atom
        elif atom.key == key:
            return atom.value
        elif atom.key > key:
            break
        else:
            between = None
    return between


def _insert(atoms: list[Key | Stub], op: NetOp) -> None:
    assert op.old is not None
    later = (at for at, atom in enumerate(atoms) if isinstance(atom, Key) and atom.key > op.key)
    atoms.insert(next(later, len(atoms)), Key(op.key, op.old))


def _replace(atoms: list[Key | Stub], op: NetOp) -> None:
    at = next(at for at, atom in enumerate(atoms) if isinstance(atom, Key) and atom.key == op.key)
    atoms[at : at + 1] = [] if op.old is None else [Key(op.key, op.old)]


def _rebuild_all(atoms: list[Key | Stub], prev_data: bytes) -> bytes:
    if not atoms:
        return cid(encode([], [], None, []))
    heights = [height(atom.key) for atom in atoms if isinstance(atom, Key)]
    if not heights:
        if len(atoms) == 1 and isinstance(stub := atoms[0], Stub) and stub.cid == prev_data:
            return stub.cid
        raise UndecidableError
    return _rebuild(atoms, max(heights))


def _rebuild(atoms: list[Key | Stub], layer: int) -> bytes:
    if len(atoms) == 1 and isinstance(stub := atoms[0], Stub) and stub.layer == layer:
        return stub.cid
    if layer < 0 or any(isinstance(atom, Stub) and atom.layer >= layer for atom in atoms):
        raise UndecidableError
    gaps: list[list[Key | Stub]] = [[]]
    own: list[Key] = []
    for atom in atoms:
        if isinstance(atom, Key) and height(atom.key) == layer:
            own.append(atom)
            gaps.append([])
        else:
            gaps[-1].append(atom)
    left, *trees = [_rebuild(gap, layer - 1) if gap else None for gap in gaps]
    return cid(encode([atom.key for atom in own], [atom.value for atom in own], left, trees))


# -------------------------------------------------------------------------------------------------- CARs


def read_car(data: bytes) -> tuple[bytes, Blocks]:
    """Root and blocks of a well-formed CAR whose CIDs have 36 bytes."""
    size, at = _varint(data, 0)
    root = cbor2.loads(data[at : at + size])["roots"][0].value[1:]
    at += size
    blocks: Blocks = {}
    while at < len(data):
        size, at = _varint(data, at)
        blocks[data[at : at + 36]] = data[at + 36 : at + size]
        at += size
    return root, blocks


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in count(0, 7):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise AssertionError
