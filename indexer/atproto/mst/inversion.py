"""Operation inversion: undoing a commit's operations on the part of its tree that the CAR slice holds.

If the tree that results is the one that the commit says it came from (`prevData`), the operations are the whole
difference between the two. All are undone at once, so their order doesn't matter: the tree is taken apart into a
row of keys and closed subtrees, the row is edited, and the one tree over it is built from left to right. Subtrees
are opened only where an operation lies within them, or where they stand in the way: of a key, or of another
subtree, that belongs into the same gap on the same layer or above (proposal 0006, "MST Operation Inversion").
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from indexer.atproto.cid import SIZE, cid_of, cid_text
from indexer.atproto.limits import Limits
from indexer.atproto.mst.node import (
    EMPTY_TREE,
    MAX_HEIGHT,
    Node,
    check_layer,
    decode_node,
    entry_head,
    join_node,
    key_height,
    malformed,
    root_layer,
    subtree_place,
)


@dataclass(frozen=True, slots=True)
class NetOp:
    """What a commit did to one key: its value's CID before and after, None where there was no such key."""

    key: bytes
    old: bytes | None
    new: bytes | None

    @property
    def action(self) -> Literal["create", "update", "delete"]:
        if self.old is None:
            return "create"
        return "delete" if self.new is None else "update"


class Verdict(Enum):
    """What came of undoing a commit's operations."""

    OK = "they are the whole difference between the two trees"
    MISMATCH = "undoing them gives another tree than the one before"
    OPS_MISMATCH = "the new tree holds something else than they say"
    UNDECIDABLE = "too few nodes came with the commit"


@dataclass(frozen=True, slots=True)
class Inversion:
    """The verdict, and the root that undoing gives, None if it can't be known.

    `ops_hold` says whether the effect of every operation was found in the new tree, which the verdict UNDECIDABLE
    leaves open; `detail` is for people.
    """

    verdict: Verdict
    root: bytes | None
    ops_hold: bool
    detail: str = ""


def invert(
    blocks: Mapping[bytes, bytes], root: bytes, ops: Sequence[NetOp], prev_data: bytes, limits: Limits
) -> Inversion:
    """Undo `ops`, at most one a key, on the tree `root` and compare the result with `prev_data`.

    `blocks` are the blocks of the CAR slice by CID, hashes checked; foreign ones do no harm. `prev_data` of a
    repo's first commit is `EMPTY_TREE`. Without operations no block is looked at.
    Raises UpstreamError with NODE_MALFORMED if a node that is needed breaks a rule.
    """
    if not ops:
        return Inversion(_verdict(root, prev_data), root, ops_hold=True)
    if len(ops) == 1 and _undo_in_place(blocks, root, ops[0], limits) == prev_data:
        return Inversion(Verdict.OK, prev_data, ops_hold=True)
    ops_hold = False
    try:
        tree = _PartialTree(blocks, root, limits)
        wrong = tree.contradicted(ops)
        if wrong is not None:
            return Inversion(Verdict.OPS_MISMATCH, None, ops_hold, f"{wrong.action} of {wrong.key!r}")
        ops_hold = True
        builder = _Builder(tree)
        builder.add_subtree(tree.root, tree.layer, sorted(ops, key=_key))
        before = builder.finish(prev_data)
    except _MissingNodeError as missing:
        return Inversion(Verdict.UNDECIDABLE, None, ops_hold, f"no node {cid_text(missing.cid)}")
    return Inversion(_verdict(before, prev_data), before, ops_hold)


def _verdict(before: bytes, prev_data: bytes) -> Verdict:
    return Verdict.OK if before == prev_data else Verdict.MISMATCH


def _key(op: NetOp) -> bytes:
    return op.key


class _MissingNodeError(Exception):
    """A node is needed that did not come with the commit."""

    def __init__(self, cid: bytes) -> None:
        super().__init__(cid)
        self.cid = cid


def _load(blocks: Mapping[bytes, bytes], cid: bytes, limits: Limits) -> Node:
    block = blocks.get(cid)
    if block is None:
        raise _MissingNodeError(cid)
    return decode_node(block, limits)


class _PartialTree:
    """The commit's tree as far as its nodes came with it, each decoded once.

    `root` is None for the empty tree.
    """

    def __init__(self, blocks: Mapping[bytes, bytes], root: bytes, limits: Limits) -> None:
        self._blocks = blocks
        self._limits = limits
        self._nodes: dict[bytes, Node] = {}
        layer = root_layer(self._load(root), limits)
        self.root = None if layer is None else root
        self.layer = layer or 0

    def _load(self, cid: bytes) -> Node:
        node = self._nodes.get(cid)
        if node is None:
            node = self._nodes[cid] = _load(self._blocks, cid, self._limits)
        return node

    def node(self, cid: bytes, layer: int) -> Node:
        node = self._load(cid)
        check_layer(node, layer)
        return node

    def find(self, key: bytes) -> bytes | None:
        """The value of `key`, or None if the tree is open all the way to where it would be, and it is not there."""
        cid, layer = self.root, self.layer
        while cid is not None:
            node = self.node(cid, layer)
            at = bisect_left(node.keys, key)
            if at < len(node.keys) and node.keys[at] == key:
                return node.values[at]
            cid, layer = node.gap(at), layer - 1
        return None

    def contradicted(self, ops: Sequence[NetOp]) -> NetOp | None:
        """An operation of which the tree holds something else; found even where nodes are missing for others."""
        missing: _MissingNodeError | None = None
        for op in ops:
            try:
                if self.find(op.key) != op.new:
                    return op
            except _MissingNodeError as error:
                missing = error
        if missing is not None:
            raise missing
        return None


def _undo_in_place(blocks: Mapping[bytes, bytes], root: bytes, op: NetOp, limits: Limits) -> bytes | None:
    """The root with one operation undone, where that changes entries of one node, and at most joins two subtrees below.

    None where it takes more than that, which is for `_Builder` to do; nearly all commits take no more. The nodes above
    the one that changes differ from those before in 36 bytes, and need not be decoded: if what comes of it is the tree
    before, they are as much in order as that one is, and else nothing follows from it.
    """
    path: list[tuple[bytes, int]] = []
    cid = root
    while (block := blocks.get(cid)) is not None and len(path) <= limits.tree_depth:
        place = subtree_place(block, op.key)
        if place is None:
            break
        path.append((block, place))
        cid = block[place : place + SIZE]
    else:
        return None
    try:
        changed = _changed(blocks, decode_node(block, limits), op, limits)
    except _MissingNodeError:
        return None
    if changed is None:
        return None
    cid = cid_of(changed)
    for block, place in reversed(path):
        cid = cid_of(block[:place] + cid + block[place + SIZE :])
    return cid


def _changed(blocks: Mapping[bytes, bytes], node: Node, op: NetOp, limits: Limits) -> bytes | None:
    """The node's block with the operation undone; None where that isn't all, or the node doesn't show its effect."""
    at = bisect_left(node.keys, op.key)
    keys, values, heads, gaps = node.keys, list(node.values), list(node.heads), [node.left, *node.trees]
    found = values[at] if at < len(keys) and keys[at] == op.key else None
    if found != op.new:
        return None
    if found is None:
        if op.old is None or node.height != key_height(op.key):
            return None
        keys = [*keys[:at], op.key, *keys[at:]]
        values.insert(at, op.old)
        gaps.insert(at, None)
        heads[at : at + 1] = _heads(keys, at, 2)
    elif op.old is not None:
        values[at] = op.old
    else:
        gaps[at : at + 2] = [_joined(blocks, gaps[at], gaps[at + 1], (node.height or 0) - 1, limits)]
        if gaps == [None]:
            return None
        keys = keys[:at] + keys[at + 1 :]
        del values[at]
        heads[at : at + 2] = _heads(keys, at, 1)
    left, *trees = gaps
    return join_node(heads, values, left, trees)


def _joined(
    blocks: Mapping[bytes, bytes], left: bytes | None, right: bytes | None, layer: int, limits: Limits
) -> bytes | None:
    """The subtree that two on `layer` become once the key between them is gone. Raises `_MissingNodeError`."""
    if left is None or right is None:
        return left or right
    first, second = _load(blocks, left, limits), _load(blocks, right, limits)
    check_layer(first, layer)
    check_layer(second, layer)
    at = len(first.keys)
    heads = [*first.heads, *_heads([*first.keys, *second.keys], at, 1), *second.heads[1:]]
    gaps = [first.left, *first.trees, *second.trees]
    gaps[at] = _joined(blocks, gaps[at], second.left, layer - 1, limits)
    return cid_of(join_node(heads, first.values + second.values, gaps[0], gaps[1:]))


def _heads(keys: Sequence[bytes], at: int, count: int) -> list[bytes]:
    """The heads of `count` entries from `at` on, as far as there are so many."""
    return [entry_head(keys[i - 1] if i else b"", keys[i]) for i in range(at, min(at + count, len(keys)))]


class _Level:
    """The rightmost node of one layer while it is being built."""

    __slots__ = ("_heads", "_last", "_left", "_trees", "_values")

    def __init__(self) -> None:
        self._last = b""
        self._left: bytes | None = None
        self._heads: list[bytes] = []
        self._values: list[bytes] = []
        self._trees: list[bytes | None] = []

    def append(self, key: bytes, value: bytes) -> None:
        self._heads.append(entry_head(self._last, key))
        self._values.append(value)
        self._trees.append(None)
        self._last = key

    def extend(self, node: Node, start: int, stop: int) -> None:
        """Take entries of a node with the subtrees between them, but without the one behind the last."""
        at = len(self._heads)
        self._heads += node.heads[start:stop]
        self._values += node.values[start:stop]
        self._trees += node.trees[start : stop - 1]
        self._trees.append(None)
        if self._last != (node.keys[start - 1] if start else b""):
            self._heads[at] = entry_head(self._last, node.keys[start])
        self._last = node.keys[stop - 1]

    def hang(self, tree: bytes) -> None:
        """Hang a subtree behind the last entry."""
        if self._trees:
            self._trees[-1] = tree
        else:
            self._left = tree

    def build(self) -> bytes:
        return cid_of(join_node(self._heads, self._values, self._left, self._trees))


class _Builder:
    """Builds the one tree over a row of keys and closed subtrees that come in ascending order.

    `_levels` is the right edge of the tree so far, from layer 0 up; those below `_bottom` are empty. `_closed` is
    a subtree, with its layer, that came last, and as long as it stands there all levels up to its layer are
    empty: it is opened if what comes next belongs into the same gap and can't do without a node on its layer.
    """

    def __init__(self, tree: _PartialTree) -> None:
        self._tree = tree
        self._levels: list[_Level] = []
        self._bottom = MAX_HEIGHT + 1
        self._closed: tuple[bytes, int] | None = None
        self._last = b""

    def add_subtree(self, cid: bytes | None, layer: int, ops: Sequence[NetOp]) -> None:
        """Add a subtree, or the place for one, with `ops` undone: all those whose keys belong into it."""
        if cid is None:
            for op in ops:
                self._add_key(op.key, op.old)
        elif ops:
            self._add_node(self._tree.node(cid, layer), layer, ops)
        else:
            self._add_whole(cid, layer)

    def _add_node(self, node: Node, layer: int, ops: Sequence[NetOp]) -> None:
        at = 0
        while True:
            upper = node.keys[at] if at < len(node.keys) else None
            here = len(ops) if upper is None else bisect_left(ops, upper, key=_key)
            self.add_subtree(node.gap(at), layer - 1, ops[:here])
            ops = ops[here:]
            if upper is None:
                return
            if ops and ops[0].key == upper:
                self._add_key(upper, ops[0].old)
                ops = ops[1:]
                at += 1
            else:
                stop = bisect_left(node.keys, ops[0].key) if ops else len(node.keys)
                self._level_for(upper, layer).extend(node, at, stop)
                self._last = node.keys[stop - 1]
                at = stop

    def _add_whole(self, cid: bytes, layer: int) -> None:
        self._open_closed(layer)
        if self._closed or self._bottom <= layer:
            self._add_node(self._tree.node(cid, layer), layer, ())
        else:
            self._closed = cid, layer

    def _add_key(self, key: bytes, value: bytes | None) -> None:
        if value is not None:
            self._level_for(key, key_height(key)).append(key, value)
            self._last = key

    def _level_for(self, key: bytes, height: int) -> _Level:
        """The level that takes `key`, once all that is left of the key and lower has been built."""
        if key <= self._last:
            malformed("keys out of order")
        self._open_closed(height)
        self._build_below(height)
        return self._levels[height]

    def _open_closed(self, layer: int) -> None:
        """Open the closed subtree as far down as it takes for none to reach up to `layer`."""
        while self._closed and self._closed[1] >= layer:
            cid, closed_layer = self._closed
            self._closed = None
            self._add_node(self._tree.node(cid, closed_layer), closed_layer, ())

    def _build_below(self, height: int) -> None:
        """Build the right edge up to below `height`, with nodes without entries where it skips a layer."""
        self._levels += [_Level() for _ in range(len(self._levels), height + 1)]
        if self._closed:
            cid, layer = self._closed
            self._closed = None
            self._bottom = layer + 1
            self._levels[self._bottom].hang(cid)
        for layer in range(self._bottom, height):
            self._levels[layer + 1].hang(self._levels[layer].build())
            self._levels[layer] = _Level()
        self._bottom = height

    def finish(self, prev_data: bytes) -> bytes:
        """The root. If it may be a node that we don't have, it is taken to be `prev_data` or else missing."""
        if self._levels:
            self._build_below(len(self._levels) - 1)
            return self._levels[-1].build()
        if self._closed is None:
            return EMPTY_TREE
        return self._trim(*self._closed, prev_data)

    def _trim(self, cid: bytes, layer: int, prev_data: bytes) -> bytes:
        """The root where only a subtree is left: the first node down from it that has keys."""
        try:
            node = self._tree.node(cid, layer)
        except _MissingNodeError:
            if cid != prev_data:
                raise
            return cid
        if node.keys or node.left is None:
            return cid
        return self._trim(node.left, layer - 1, prev_data)
