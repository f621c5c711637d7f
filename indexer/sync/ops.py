"""Folding a commit's operations to what they did to each path, all in all."""

from collections.abc import Sequence

from indexer.atproto.mst.inversion import NetOp
from indexer.errors import UpstreamError
from indexer.reasons import Rejection
from indexer.sync.events import RepoOp


class LegacyOps(Exception):  # noqa: N818 - a finding, nobody's fault
    """An update or delete doesn't say what was there before: operations as they were before Sync 1.1."""


def fold(ops: Sequence[RepoOp]) -> list[NetOp]:
    """The net effect on each path, in the order in which the paths first come; without those left as they were.

    One commit may name a path more than once: the reference PDS takes batches of writes, and draws each
    operation's `prev` from the state before the batch. Such a `prev` may be absent, the first one, or
    the preceding operation's CID. What is accepted here is not believed: inversion holds it against the tree.

    Raises UpstreamError with OPS_MISMATCH if operations contradict themselves or each other; otherwise LegacyOps
    if they can't be undone.
    """
    effects: dict[str, NetOp] = {}
    legacy: RepoOp | None = None
    for op in ops:
        if (op.cid is None) != (op.action == "delete"):
            raise UpstreamError(Rejection.OPS_MISMATCH, f"{op.action} of {op.path}: cid is {op.cid and op.cid.hex()}")
        earlier = effects.get(op.path)
        if earlier is None:
            if op.prev is None and op.action != "create":
                legacy = op
            effects[op.path] = NetOp(op.path.encode(), op.prev, op.cid)
        elif op.prev in {None, earlier.old, earlier.new}:
            effects[op.path] = NetOp(earlier.key, earlier.old, op.cid)
        else:
            raise UpstreamError(Rejection.OPS_MISMATCH, f"{op.action} of {op.path}: prev is none that was there")
    if legacy is not None:
        raise LegacyOps(f"{legacy.action} of {legacy.path} without prev")
    return [effect for effect in effects.values() if effect.old != effect.new]
