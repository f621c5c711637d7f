"""A verified export: its records in path order, and in chunks for a repo of which nothing is stored.

Only this module creates a `Snapshot`, so no plan is based on an unsigned commit or on a part of a tree. It is the
reference: the native core makes the same snapshots and chunks (`core.core`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.mst import BlockOf, MissingNodeError, leaves, load_node, walk
from indexer.atproto.range_walk import KeyRange, walk_ranges
from indexer.atproto.record import Problem
from indexer.sync.changes import Proof, RecordChange, RecordConverter
from indexer.sync.policy import Policy
from indexer.sync.repo import Head
from indexer.sync.resync import Entry
from indexer.sync.verify import VerifiedChange, verify_signed

CHUNK_RECORDS = 10_000
"""Maximum number of records in a chunk. A COPY costs as much as hundreds of records, however few it has."""
CHUNK_BYTES = 8 << 20
"""Bytes of record changes after which a chunk takes no further record."""
PIECE_BYTES = 512 << 10
"""Bytes of rows for COPY that are copied at a time."""


class ColumnLayout(NamedTuple):
    """The names of the columns of ready-made rows, in their order: for the tables of records and of changes."""

    records: tuple[str, ...]
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadyRows:
    """The rows of new records in the binary format of COPY, with the columns of a `ColumnLayout`."""

    chunk: Any  # the chunk of the native core (native/src/python_export.rs)

    def records(self) -> Iterator[bytes]:
        """Yield the rows of the records in pieces of at most `PIECE_BYTES`: the chunk is in memory only once."""
        start = 0
        while piece := self.chunk.record_rows(start, PIECE_BYTES):
            start += len(piece)
            yield piece

    def changes(self, segment: int, batch: int, first_ordinal: int) -> bytes:
        """Return the rows of the change log."""
        return bytes(self.chunk.change_rows(segment, batch, first_ordinal))


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """The next selected records of an export, in path order. Each is a create: nothing of the repo is stored."""

    count: int  # the number of records, without paths that are not selected or break the syntax
    missing: int  # the number of these records whose block is not in the export
    size: int  # the bytes of the records and their values, approximately
    changes: Sequence[RecordChange] = ()  # the records; empty if there are `rows`
    rows: ReadyRows | None = None  # the records as rows; None: the database driver encodes `changes`
    proof: Proof = "export"  # how the records were proven. That of `rows` is always an export


class NewRecords:
    """The selected records of an export, in chunks. It takes no entry before it is needed."""

    def __init__(
        self, entries: Iterator[Entry], block_of: BlockOf, converter: RecordConverter, proof: Proof = "export"
    ) -> None:
        creates = (converter.convert(VerifiedChange(path, None, cid, block_of(cid))) for path, cid in entries)
        self._changes = filter(None, creates)
        self._converter = converter
        self._proof = proof

    def next_chunk(self) -> RecordChunk | None:
        """Return the next chunk, or None after the last one.

        A chunk has at most `CHUNK_RECORDS`, and ends with the first record that takes it to `CHUNK_BYTES`. One that has
        fewer records and fewer bytes is the last one. It may be called in any thread, one call at a time.
        """
        converter = self._converter
        converter.forget_values()
        changes: list[RecordChange] = []
        missing, start = 0, converter.bytes_converted
        for change in self._changes:
            changes.append(change)
            missing += change.problem == Problem.MISSING
            if len(changes) == CHUNK_RECORDS or converter.bytes_converted >= start + CHUNK_BYTES:
                break
        size = converter.bytes_converted - start
        return RecordChunk(len(changes), missing, size, changes, proof=self._proof) if changes else None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A verified export: a valid signature, and every tree node present, canonical and in order."""

    proof: ClassVar[Proof] = "export"  # how this proves records
    did: str
    head: Head
    count: int  # the number of records
    block_of: BlockOf  # returns the block of a record; None if the export lacks it
    size: int  # the size of all blocks with their lengths and CIDs, in bytes

    def records(self) -> Iterator[Entry]:
        """Yield the path and the CID of each record, in bytewise path order."""
        return leaves(self.block_of, self.head.data)

    def new_records(self, policy: Policy) -> NewRecords:
        """Return the records that `policy` selects, converted."""
        converter = RecordConverter(policy, self.did, self.head.rev, self.size)
        return NewRecords(self.records(), self.block_of, converter, self.proof)


def verify_snapshot(did: str, root: bytes, block_of: BlockOf, key: PublicKey, limits: Limits, size: int) -> Snapshot:
    """Return the snapshot of a full export, after walking its whole tree. The blocks must have been hashed before.

    Raises:
        UpstreamError: The export breaks a rule (docs/protocol.md#exports).
        MissingNodeError: The export lacks a tree node: it was cut off, or created while the repo changed.
    """
    commit = verify_signed(root, block_of, key, did)
    count = sum(1 for _ in walk(block_of, commit.data, limits))
    return Snapshot(did, Head(commit.rev, commit.data, root), count, block_of, size)


@dataclass(frozen=True, slots=True)
class RangeSnapshot(Snapshot):
    """All records of a repo in ranges of paths, proven by the nodes that may have such paths."""

    proof: ClassVar[Proof] = "range"
    entries: Sequence[Entry]  # the records in ascending order of their paths. `count` is their number

    def records(self) -> Iterator[Entry]:
        """See `Snapshot`."""
        return iter(self.entries)


def verify_ranges(
    did: str, root: bytes, block_of: BlockOf, key: PublicKey, limits: Limits, size: int, ranges: Sequence[KeyRange]
) -> RangeSnapshot:
    """Return the records of a repo in ranges of paths. The blocks must have been hashed before.

    Raises:
        UpstreamError: The commit, or a node that may have such paths, breaks a rule.
        MissingNodeError: Such a node is missing, so that nothing is proven.
    """
    commit = verify_signed(root, block_of, key, did)
    walk = walk_ranges(lambda cid: load_node(block_of, cid, limits), commit.data, ranges, limits)
    if walk.unread:
        raise MissingNodeError(walk.unread[0].cid)
    head, entries = Head(commit.rev, commit.data, root), walk.entries
    return RangeSnapshot(did, head, len(entries), block_of, size, entries)


class ExportReader(Protocol):
    """Reads one export: `write` all of it, call `finish`, then `verify`. Call `close` once, last."""

    @property
    def size(self) -> int:
        """The size of all blocks with their lengths and CIDs, in bytes."""

    def write(self, chunk: bytes) -> None:
        """Add the next bytes of the CAR file, and hash each block that they complete.

        Raises:
            UpstreamError: The file breaks a rule of the CAR format.
            UnavailableError: SPOOL_FULL if the file cannot be created, or the disk is full. SPOOL_UNREADABLE if it
                cannot be read.
        """

    def finish(self) -> None:
        """Check that the file did not end within a block.

        Raises:
            UnavailableError: EXPORT_INCOMPLETE if it did.
        """

    def verify(self, did: str, key: PublicKey, limits: Limits) -> Snapshot:
        """Verify the whole export as `verify_snapshot` does. Call it in a thread.

        Raises:
            UnavailableError: SPOOL_UNREADABLE if the file cannot be read.
        """

    def close(self) -> None:
        """Delete the file. A call that runs in another thread fails soon."""
