"""Fold a commit's operations into one net operation per path."""

from collections.abc import Sequence

from indexer.atproto.mst import NetOp
from indexer.errors import UpstreamError
from indexer.reasons import Rejection
from indexer.sync.events import RepoOp


class LegacyOperationsError(Exception):
    """An update or delete has no `prev`, as before Sync 1.1, so it cannot be inverted."""


def fold_operations(ops: Sequence[RepoOp]) -> list[NetOp]:
    """Return the net operation on each path, in the order of first appearance, without paths that did not change.

    A commit may contain several operations on one path. The `prev` of a later one is accepted if it is absent, equals
    the first `prev` on the path (as the reference PDS sends), or equals the CID that the previous operation left.
    Inversion proves the result against the tree (docs/protocol.md#inversion).

    Raises:
        UpstreamError: With OPS_MISMATCH, if operations contradict themselves or each other.
        LegacyOperationsError: If the operations are consistent but cannot be inverted.
    """
    net: dict[str, NetOp] = {}
    legacy: RepoOp | None = None
    for op in ops:
        if (op.cid is None) != (op.action == "delete"):
            raise UpstreamError(Rejection.OPS_MISMATCH, f"{op.action} of {op.path}: cid is {op.cid and op.cid.hex()}")
        earlier = net.get(op.path)
        if earlier is None:
            if op.prev is None and op.action != "create":
                legacy = op
            net[op.path] = NetOp(op.path.encode(), op.prev, op.cid)
        elif op.prev in {None, earlier.old, earlier.new}:
            net[op.path] = NetOp(earlier.key, earlier.old, op.cid)
        else:
            raise UpstreamError(
                Rejection.OPS_MISMATCH, f"{op.action} of {op.path}: prev matches no earlier CID of the path"
            )
    if legacy is not None:
        raise LegacyOperationsError(f"{legacy.action} of {legacy.path} without prev")
    return [op for op in net.values() if op.old != op.new]
