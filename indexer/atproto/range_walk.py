"""Prove which records a repo has in ranges of keys, from the nodes of its tree that lie there or along the borders.

The subtree between two neighbouring keys of a node may have wanted keys if a range overlaps the interval between them.
When every such subtree is read, all wanted keys are found: another one would change the hash of a node on the way to
the root.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from indexer.atproto.cid import cid_of
from indexer.atproto.limits import Limits
from indexer.atproto.mst import MissingNodeError, Node, encode_node, key_height, load_subtree, root_layer

FAN_OUT = 4
"""Mean number of subtrees of a node: three of four keys are on the lowest layer, and so on."""


class KeyRange(NamedTuple):
    """The keys from `start` to before `end`."""

    start: bytes
    end: bytes

    def meets(self, lower: bytes, upper: bytes | None) -> bool:
        """Return True if a key between `lower` and `upper` (None: the end of the tree) may be in the range."""
        return lower < self.end and (upper is None or self.start < upper)


def ranges_of(patterns: Iterable[str]) -> list[KeyRange]:
    """Return the ranges of the keys that patterns of a `CollectionFilter` select.

    The byte after `.` is `/`, and the byte after `/` is `0`.
    """
    if "*" in (patterns := list(patterns)):
        return [KeyRange(b"", b"\xff")]
    starts = [pattern[:-1] if pattern.endswith(".*") else f"{pattern}/" for pattern in patterns]
    return [KeyRange(start.encode(), start[:-1].encode() + bytes([ord(start[-1]) + 1])) for start in starts]


class Unread(NamedTuple):
    """A subtree that may have wanted keys. Its node is missing."""

    cid: bytes
    layer: int
    inside: bool  # True if all keys of the subtree are in a range
    lower: bytes  # the key before the subtree; b"" if there is none
    upper: bytes | None  # the key after it; None if there is none


@dataclass(slots=True)
class RangeWalk:
    """The result of a walk. Nothing is proven while a subtree is unread."""

    layer: int | None  # of the root; None: the tree is empty
    root_keys: int  # the number of keys in the node of the root
    entries: list[tuple[bytes, bytes]] = field(default_factory=list)  # wanted keys with the CIDs of their records
    unread: list[Unread] = field(default_factory=list)  # the subtrees that have to be read as well

    @property
    def tree_keys(self) -> int:
        """The estimated number of keys of the whole tree."""
        return 0 if self.layer is None else self.root_keys * FAN_OUT**self.layer


def walk_ranges(node_of: Callable[[bytes], Node], root: bytes, ranges: Sequence[KeyRange], limits: Limits) -> RangeWalk:
    """Walk the part of a tree that may have keys in the ranges, as far as its nodes are available.

    `node_of` returns the node with a CID, as `mst.load_node` does. Each node is checked as `mst.walk` does.

    Raises:
        UpstreamError: With NODE_MALFORMED, if a node breaks a rule.
        MissingNodeError: The root is missing.
    """

    def walk_below(node: Node, layer: int, lower: bytes, upper: bytes | None, ranges: Sequence[KeyRange]) -> None:
        """Walk a node and its subtrees. `lower` and `upper` are the keys beside it in the nodes above it."""
        uppers = [*node.keys, upper]
        for index, tree in enumerate((node.left, *node.trees)):
            if index:
                lower = node.keys[index - 1]
                if any(wanted.start <= lower < wanted.end for wanted in ranges):
                    result.entries.append((lower, node.values[index - 1]))
            below = uppers[index]
            met = [wanted for wanted in ranges if tree is not None and wanted.meets(lower, below)]
            if tree is None or not met:
                continue
            try:
                child = load_subtree(node_of, tree, layer - 1, lower, below)
            except MissingNodeError:
                inside = any(wanted.start <= lower and (below or b"\xff") <= wanted.end for wanted in met)
                result.unread.append(Unread(tree, layer - 1, inside, lower, below))
            else:
                walk_below(child, layer - 1, lower, below, met)

    root_node = node_of(root)
    result = RangeWalk(root_layer(root_node, limits), len(root_node.keys))
    walk_below(root_node, result.layer or 0, b"", None, ranges)
    return result


def build_subtree(entries: Sequence[tuple[bytes, bytes]], layer: int) -> dict[bytes, bytes]:
    """Return the nodes of the subtree on a layer that has exactly these entries, by CID; its root is the last one.

    There are none if there is no such subtree. `entries` are keys in ascending order, with the CIDs of their records.
    The work is bounded by their number times the layer.
    """
    heights = [key_height(key) for key, _ in entries]
    blocks: dict[bytes, bytes] = {}

    def build(start: int, end: int, layer: int) -> bytes | None:
        """Return the CID of the subtree of the entries from `start` to before `end`."""
        if start == end:
            return None
        own = [index for index in range(start, end) if heights[index] == layer]
        left, *trees = [build(below + 1, above, layer - 1) for below, above in pairwise([start - 1, *own, end])]
        keys, values = [entries[index][0] for index in own], [entries[index][1] for index in own]
        block = encode_node(keys, values, left, trees)
        cid = cid_of(block)
        blocks[cid] = block
        return cid

    if max(heights, default=0) <= layer:
        build(0, len(entries), layer)
    return blocks
