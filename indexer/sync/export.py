"""The interface to the exports of repos, and its reference: read one, verify it, and take its records in path order.

`pds.spool.Spool`, `SnapshotExport` and `ConvertedRecords` implement it in Python. They are the reference for any other
implementation.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.atproto.record import Problem
from indexer.errors import BrokenInvariantError
from indexer.sync.changes import RecordChange, RecordConverter
from indexer.sync.policy import Policy
from indexer.sync.repo import Head
from indexer.sync.resync import Entry
from indexer.sync.verify import BlockOf, Snapshot, VerifiedChange

CHUNK_RECORDS = 2_000
"""Maximum number of records in a chunk."""
CHUNK_BYTES = 8 << 20
"""Bytes of record changes after which a chunk takes no further record."""
PIECE_BYTES = 512 << 10
"""Bytes of rows for COPY that are copied at a time."""


class RecordChunk(Protocol):
    """The next selected records of an export, in path order. Each is a create: nothing of the repo is stored."""

    @property
    def count(self) -> int:
        """The number of records, without paths that are not selected or break the syntax."""
        ...

    @property
    def missing(self) -> int:
        """The number of these records whose block is not in the export."""
        ...

    @property
    def size(self) -> int:
        """The bytes of the records and their values, approximately."""
        ...

    def changes(self) -> Sequence[RecordChange]:
        """Return the records as changes."""
        ...

    @property
    def record_rows(self) -> Iterable[bytes] | None:
        """The rows of `indexer.record` in the binary format of COPY (see `db.write`); None: use `changes`.

        They come in pieces of at most `PIECE_BYTES`, so that the chunk is in memory only once.
        """
        ...

    def change_rows(self, segment: int, batch: int, first_ordinal: int) -> bytes:
        """Return the rows of the change log in the same format. Call it only if there are `record_rows`."""
        ...


class NewRecords(Protocol):
    """The selected records of an export, in chunks."""

    def next_chunk(self) -> RecordChunk | None:
        """Return the next chunk, or None after the last one.

        A chunk has at most `CHUNK_RECORDS`, and ends with the first record that takes it to `CHUNK_BYTES`. One that has
        fewer records and fewer bytes is the last one.

        It may be called in any thread, one call at a time.
        """
        ...


class VerifiedExport(Protocol):
    """A verified export: a valid signature, and every tree node present, canonical and in order."""

    @property
    def head(self) -> Head:
        """The head of the repo in this export."""
        ...

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the path and the CID of each record, in bytewise path order."""
        ...

    def block_of(self, cid: bytes) -> bytes | None:
        """Return the block of a record; None if the export lacks it."""
        ...

    def new_records(self, policy: Policy, source_bytes: int) -> NewRecords:
        """Return the records that `policy` selects, converted as for an export of this size.

        Another call begins again at the first record.
        """
        ...


class ExportReader(Protocol):
    """Reads one export: `write` all of it, call `finish`, then `verify`. Call `close` once, last."""

    @property
    def size(self) -> int:
        """The size of all blocks with their CIDs, in bytes."""
        ...

    def write(self, chunk: bytes) -> None:
        """Add the next bytes of the CAR file, and hash each block that they complete.

        Raises:
            UpstreamError: The file breaks a rule of the CAR format.
            UnavailableError: The disk is full, or has an error.
        """
        ...

    def finish(self) -> None:
        """Check that the file did not end within a block.

        Raises:
            UnavailableError: EXPORT_INCOMPLETE if it did.
        """
        ...

    def verify(self, did: str, key: PublicKey, limits: Limits) -> VerifiedExport:
        """Verify the whole export. Call it in a thread.

        Raises:
            UpstreamError: The export breaks a rule (docs/protocol.md#exports).
            MissingNodeError: The export lacks a tree node: it was cut off, or created while the repo changed.
        """
        ...

    def close(self) -> None:
        """Delete the file."""
        ...


@dataclass(frozen=True, slots=True)
class SnapshotExport:
    """A `Snapshot` as a `VerifiedExport`."""

    snapshot: Snapshot

    @property
    def head(self) -> Head:
        """The head of the repo in this export."""
        return self.snapshot.head

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the path and the CID of each record, in bytewise path order."""
        return self.snapshot.records()

    def block_of(self, cid: bytes) -> bytes | None:
        """Return the block of a record; None if the export lacks it."""
        return self.snapshot.block_of(cid)

    def new_records(self, policy: Policy, source_bytes: int) -> "ConvertedRecords":
        """Return the records that `policy` selects, converted as for an export of this size."""
        converter = RecordConverter(policy, self.head.rev, source_bytes)
        return ConvertedRecords(self.records(), self.block_of, converter)


class ConvertedRecords:
    """The selected records of an export, in chunks. It takes no entry before it is needed."""

    def __init__(self, entries: Iterator[Entry], block_of: BlockOf, converter: RecordConverter) -> None:
        self._changes = _creates(entries, block_of, converter)
        self._converter = converter

    def next_chunk(self) -> "ConvertedChunk | None":
        """Return the next chunk; None after the last one."""
        converter = self._converter
        converter.forget_values()
        changes: list[RecordChange] = []
        missing, start = 0, converter.bytes_converted
        for change in self._changes:
            changes.append(change)
            missing += change.problem == Problem.MISSING
            if len(changes) == CHUNK_RECORDS or converter.bytes_converted >= start + CHUNK_BYTES:
                break
        return ConvertedChunk(changes, missing, converter.bytes_converted - start) if changes else None


class ConvertedChunk:
    """A chunk whose rows the database driver encodes.

    Attributes:
        missing: The number of records whose block is not in the export.
        size: The bytes of the records and their values.
        record_rows: None: there are no ready-made rows.
    """

    record_rows = None

    def __init__(self, changes: list[RecordChange], missing: int, size: int) -> None:
        self._changes = changes
        self.missing = missing
        self.size = size

    @property
    def count(self) -> int:
        """The number of records."""
        return len(self._changes)

    def changes(self) -> list[RecordChange]:
        """Return the records as changes."""
        return self._changes

    def change_rows(self, _segment: int, _batch: int, _first_ordinal: int) -> bytes:
        """Raise an error: there are no ready-made rows."""
        raise BrokenInvariantError("this chunk has no ready-made rows")


def _creates(entries: Iterator[Entry], block_of: BlockOf, converter: RecordConverter) -> Iterator[RecordChange]:
    for path, cid in entries:
        change = converter.convert(VerifiedChange(path, None, cid, block_of(cid)))
        if change is not None:
            yield change
