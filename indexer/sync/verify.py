"""Proof: from bytes and a key to values that may be planned from.

`VerifiedCommit`, `VerifiedSync` and `Snapshot` are made here and nowhere else (a test holds it), so a plan
can't be made from an unsigned commit or a half-walked tree. Everything that a message can get wrong *before*
its signature is proven raises `UpstreamError`: the message is refused and changes nothing. What is wrong
*behind* a good signature is a `flaw`: the repo has moved on, and we can't follow (design: spec §4.2, §3.7).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from indexer.atproto.car import split_car
from indexer.atproto.commit import Commit, decode_commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.mst import EMPTY_TREE, Verdict, invert, leaves, walk
from indexer.errors import UpstreamError
from indexer.reasons import Desync, Rejection
from indexer.sync.events import CommitEvent, SyncEvent
from indexer.sync.ops import LegacyOps, fold
from indexer.sync.repo import Head

BlockOf = Callable[[bytes], bytes | None]


class VerifiedChange(NamedTuple):
    """The net effect of a commit on one path: `old` None for a create, `new` and `block` None for a delete."""

    path: bytes
    old: bytes | None
    new: bytes | None
    block: bytes | None


@dataclass(frozen=True, slots=True)
class VerifiedCommit:
    """A commit whose signature holds. If `flaw` is None, its operations lead from `prev_data` to `head.data`.

    `flaw` says why the commit can't be applied; with `UNDECIDABLE`, `ops_hold` says whether the new tree at least
    shows the effect of every operation. `prev_data` is the empty tree for a first commit.
    """

    did: str
    head: Head
    prev_data: bytes
    first: bool
    changes: tuple[VerifiedChange, ...]
    flaw: Desync | None
    detail: str = ""
    ops_hold: bool = True

    @property
    def whole(self) -> bool:
        """Whether the commit carries the repo's entire content."""
        return self.flaw is None and self.first and self.prev_data == EMPTY_TREE


@dataclass(frozen=True, slots=True)
class VerifiedSync:
    """A `#sync` whose commit is signed: the repo's head, taken from the signed commit alone."""

    did: str
    head: Head


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole repo: commit signed by the account's key, every tree node present, canonical and in order.

    `records()` gives (path, CID) in path order, bytewise, from the proven tree; `block_of` a record's bytes,
    or None where the export lacks them.
    """

    did: str
    head: Head
    count: int
    block_of: BlockOf

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        return leaves(self.block_of, self.head.data)


def verify_commit(event: CommitEvent, key: PublicKey, limits: Limits) -> VerifiedCommit:
    """Proves a `#commit`; raises `UpstreamError` for what is wrong up to and with its signature."""
    commit, blocks = _signed_commit(event, key, limits, limits.commit_blocks_bytes)
    head = Head(commit.rev, commit.data, event.commit)
    first = event.since is None
    prev_data = event.prev_data or (EMPTY_TREE if first else None)
    if prev_data is None:
        return VerifiedCommit(commit.did, head, b"", first, (), Desync.LEGACY, "no prevData")
    try:
        ops = fold(event.ops)
        inversion = invert(blocks, commit.data, ops, prev_data, limits)
    except LegacyOps as error:
        return VerifiedCommit(commit.did, head, prev_data, first, (), Desync.LEGACY, str(error))
    except UpstreamError as error:
        return VerifiedCommit(commit.did, head, prev_data, first, (), _FLAWS[error.reason], error.detail)
    changes = tuple(
        [VerifiedChange(op.key, op.old, op.new, None if op.new is None else blocks.get(op.new)) for op in ops]
    )
    flaw, detail = _VERDICTS[inversion.verdict], inversion.detail
    missing = next((change for change in changes if change.new and change.block is None), None)
    if missing and flaw in {None, Desync.UNDECIDABLE}:
        flaw, detail = Desync.RECORD_MISSING, missing.path.decode(errors="replace")
    return VerifiedCommit(commit.did, head, prev_data, first, changes, flaw, detail, inversion.ops_hold)


def verify_sync(event: SyncEvent, key: PublicKey, limits: Limits) -> VerifiedSync:
    """Proves a `#sync`; raises `UpstreamError`."""
    commit, _ = _signed_commit(event, key, limits, limits.sync_blocks_bytes)
    return VerifiedSync(commit.did, Head(commit.rev, commit.data, commit.cid))


def verify_snapshot(did: str, root: bytes, block_of: BlockOf, key: PublicKey, limits: Limits) -> Snapshot:
    """Proves a full export, whose blocks have been hashed, by walking its whole tree.

    Raises `UpstreamError` for an export that breaks a rule, `MissingNodeError` (an `UnavailableError`) for one
    that lacks a node: cut short, or taken while the repo changed (spec §3.5 CAR-6, §9-17).
    """
    block = block_of(root)
    if block is None:
        raise UpstreamError(Rejection.COMMIT_MISSING)
    commit = decode_commit(block, root)
    if commit.did != did:
        raise UpstreamError(Rejection.ENVELOPE_MISMATCH, f"export of {commit.did[:64]}")
    if not key.verify(commit.sig, commit.unsigned):
        raise UpstreamError(Rejection.SIGNATURE_INVALID)
    count = sum(1 for _ in walk(block_of, commit.data, limits))
    return Snapshot(did, Head(commit.rev, commit.data, root), count, block_of)


def _signed_commit(
    event: CommitEvent | SyncEvent, key: PublicKey, limits: Limits, max_bytes: int
) -> tuple[Commit, dict[bytes, bytes]]:
    roots, blocks = split_car(event.blocks, limits, max_bytes=max_bytes)
    root = roots[0]
    if isinstance(event, CommitEvent) and root != event.commit:
        raise UpstreamError(Rejection.COMMIT_MISMATCH)
    block = blocks.get(root)
    if block is None:
        raise UpstreamError(Rejection.COMMIT_MISSING)
    commit = decode_commit(block, root)
    if commit.did != event.did or commit.rev != event.rev:
        raise UpstreamError(Rejection.ENVELOPE_MISMATCH, f"{commit.did[:64]} at {commit.rev}")
    if not key.verify(commit.sig, commit.unsigned):
        raise UpstreamError(Rejection.SIGNATURE_INVALID)
    return commit, blocks


_FLAWS = {Rejection.NODE_MALFORMED: Desync.STRUCTURE, Rejection.OPS_MISMATCH: Desync.OPS}
_VERDICTS = {
    Verdict.OK: None,
    Verdict.MISMATCH: Desync.INVERSION,
    Verdict.OPS_MISMATCH: Desync.OPS,
    Verdict.UNDECIDABLE: Desync.UNDECIDABLE,
}
