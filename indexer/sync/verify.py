"""Verify commits, #sync events and proofs of records against the account's signing key.

Only this module and the native core create `VerifiedCommit`, so no plan is based on an unsigned commit.

If a check up to that of the signature fails, a function raises `UpstreamError`: the message is rejected and changes
nothing. An error after a valid signature is a `flaw`: the repo has a newer commit that cannot be applied, so it needs a
resync (docs/protocol.md#order-of-checks, docs/protocol.md#inversion).
"""

from collections.abc import Sequence
from typing import NamedTuple

from indexer.atproto.car import split_car
from indexer.atproto.commit import Commit, decode_commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.inversion import NetOp, Verdict, invert
from indexer.atproto.limits import Limits
from indexer.atproto.mst import EMPTY_TREE, BlockOf, find, load_node
from indexer.atproto.record import ConvertedRecord
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.events import CommitEvent, RepoOp, SyncEvent
from indexer.sync.repo import Head


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


_DESYNC_OF_REJECTION = {Rejection.NODE_MALFORMED: Desync.STRUCTURE, Rejection.OPS_MISMATCH: Desync.OPS}
_DESYNC_OF_VERDICT = {
    Verdict.OK: None,
    Verdict.MISMATCH: Desync.INVERSION,
    Verdict.OPS_MISMATCH: Desync.OPS,
    Verdict.UNDECIDABLE: Desync.UNDECIDABLE,
}


class VerifiedChange(NamedTuple):
    """The net effect of a commit on one path: `old` is None for a create, `new` and `block` are None for a delete."""

    path: bytes
    old: bytes | None
    new: bytes | None
    block: bytes | None
    converted: ConvertedRecord | None = None  # the record in the block, if the native core has converted it


class VerifiedCommit(NamedTuple):
    """A commit with a valid signature. If `flaw` is None, its operations lead from `prev_data` to `head.data`.

    With the flaw `UNDECIDABLE`, `ops_hold` is True if the new tree shows the effect of every operation and no record is
    missing. With `RECORD_MISSING`, the operations are proven.
    """

    did: str
    head: Head
    prev_data: bytes  # the root of the tree before it; the empty tree for a first commit without `prevData`
    first: bool  # the message has no `since`
    changes: tuple[VerifiedChange, ...]
    flaw: Desync | None  # why the commit cannot be applied
    detail: str = ""
    ops_hold: bool = True
    size: int = 0  # the bytes of its CAR slice

    @property
    def whole(self) -> bool:
        """True if the commit contains the whole repo."""
        return self.flaw is None and self.first and self.prev_data == EMPTY_TREE


def verify_commit(event: CommitEvent, key: PublicKey, limits: Limits) -> VerifiedCommit:
    """Return the verified commit of a `#commit`, which may have a flaw.

    Raises:
        UpstreamError: The message, its CAR slice, the commit object or its signature is invalid.
    """
    commit, blocks = _signed_commit(event, key, limits, limits.commit_blocks_bytes)
    head = Head(commit.rev, commit.data, event.commit)
    first = event.since is None
    prev_data = previous_root(event)
    if prev_data is None:
        return VerifiedCommit(commit.did, head, b"", first, (), Desync.LEGACY, "no prevData")
    try:
        ops = fold_operations(event.ops)
        inversion = invert(blocks, commit.data, ops, prev_data, limits)
    except LegacyOperationsError as error:
        return VerifiedCommit(commit.did, head, prev_data, first, (), Desync.LEGACY, str(error))
    except UpstreamError as error:
        return VerifiedCommit(commit.did, head, prev_data, first, (), _DESYNC_OF_REJECTION[error.reason], error.detail)
    changes = tuple(
        [VerifiedChange(op.key, op.old, op.new, None if op.new is None else blocks.get(op.new)) for op in ops]
    )
    flaw, detail = _DESYNC_OF_VERDICT[inversion.verdict], inversion.detail
    missing = next((change for change in changes if change.new and change.block is None), None)
    if missing and flaw is None:
        flaw, detail = Desync.RECORD_MISSING, missing.path.decode()
    ops_hold = inversion.ops_hold and missing is None
    return VerifiedCommit(commit.did, head, prev_data, first, changes, flaw, detail, ops_hold, len(event.blocks))


def previous_root(event: CommitEvent) -> bytes | None:
    """Return the root of the tree before a commit, according to the sender; None for a commit of before Sync 1.1."""
    return event.prev_data or (EMPTY_TREE if event.since is None else None)


def verify_sync(event: SyncEvent, key: PublicKey, limits: Limits) -> Head:
    """Return the head in the signed commit of a `#sync`.

    Raises:
        UpstreamError: The message, its CAR slice, the commit object or its signature is invalid.
    """
    commit, _ = _signed_commit(event, key, limits, limits.sync_blocks_bytes)
    return Head(commit.rev, commit.data, commit.cid)


def verify_signed(
    root: bytes, block_of: BlockOf, key: PublicKey | None, did: str | None, rev: str | None = None
) -> Commit:
    """Return the signed commit object. For a key, DID or rev that is None, its check is left out.

    Raises:
        UpstreamError: The commit is missing or malformed, or a check fails.
    """
    block = block_of(root)
    if block is None:
        raise UpstreamError(Rejection.COMMIT_MISSING)
    commit = decode_commit(block, root)
    if did not in {None, commit.did} or rev not in {None, commit.rev}:
        raise UpstreamError(Rejection.ENVELOPE_MISMATCH, f"{commit.did[:64]} at {commit.rev}")
    if key is not None and not key.verify(commit.sig, commit.unsigned):
        raise UpstreamError(Rejection.SIGNATURE_INVALID)
    return commit


def verify_record(did: str, path: str, car: bytes, key: PublicKey, limits: Limits) -> bytes | None:
    """Return the block of a record from the proof that a PDS sends for it; None if the repo has no such record.

    `path` is the collection and the record key. The proof has the signed commit and the tree nodes down to the path.

    Raises:
        UpstreamError: The proof breaks a rule, lacks the commit, or is not signed with the key.
        UnavailableError: The proof lacks a tree node or the record.
    """
    roots, blocks = split_car(car, limits, max_bytes=limits.commit_blocks_bytes)
    commit = verify_signed(roots[0], blocks.get, key, did)
    cid = find(lambda node: load_node(blocks.get, node, limits), commit.data, path.encode(), limits)
    if cid is None:
        return None
    if cid not in blocks:
        raise UnavailableError(FetchFailure.BAD_ANSWER, f"the proof lacks the record {path}")
    return blocks[cid]


def _signed_commit(
    event: CommitEvent | SyncEvent, key: PublicKey, limits: Limits, max_bytes: int
) -> tuple[Commit, dict[bytes, bytes]]:
    roots, blocks = split_car(event.blocks, limits, max_bytes=max_bytes)
    root = roots[0]
    if isinstance(event, CommitEvent) and root != event.commit:
        raise UpstreamError(Rejection.COMMIT_MISMATCH)
    return verify_signed(root, blocks.get, key, event.did, event.rev), blocks
