"""Authentic commits that hide a deletion: its operation is missing, and so is a tree node that inversion needs."""

from dataclasses import replace

from indexer.atproto.car import split_car
from indexer.atproto.inversion import NetOp, Verdict, invert
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.demo.local_repo import LocalChange, car
from indexer.demo.reference_tree import height


def high_path(prefix: str) -> str:
    """Return the first path with this prefix and three digits whose key is high in the tree.

    To undo its creation, neighbouring subtrees have to be merged.
    """
    return max((f"{prefix}{number:03}" for number in range(1_000)), key=height)


def hide_deletion(change: LocalChange, path: str) -> LocalChange:
    """Return the commit without the operation that deletes `path`, and without one node that inversion needs."""
    assert change.prev_data is not None
    ops = [op for op in change.ops if op["path"] != path]
    assert len(ops) == len(change.ops) - 1
    net = [NetOp(op["path"].encode(), op.get("prev"), op["cid"]) for op in ops]
    (root, *_), blocks = split_car(change.blocks, DEFAULT_LIMITS, max_bytes=len(change.blocks))
    needed = {root, *(op.new for op in net)}
    for left_out in sorted(blocks.keys() - needed):
        remaining = {root: blocks[root]} | {cid: block for cid, block in blocks.items() if cid != left_out}
        inversion = invert(remaining, change.commit.data, net, change.prev_data, DEFAULT_LIMITS)
        if inversion.verdict is Verdict.UNDECIDABLE and inversion.ops_hold:
            return replace(change, ops=ops, blocks=car(remaining))
    raise AssertionError("inversion is decidable without any one of the nodes")
