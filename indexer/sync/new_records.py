"""Convert all records of an export of a repo of which nothing is stored: there is nothing to compare them with."""

from collections.abc import Iterator
from dataclasses import dataclass

from indexer.atproto.record import Problem
from indexer.errors import BrokenInvariantError
from indexer.sync.export import CHUNK_BYTES, CHUNK_RECORDS
from indexer.sync.plans import RecordChange
from indexer.sync.policy import Policy
from indexer.sync.record_change import RecordConverter
from indexer.sync.repo_state import Head
from indexer.sync.snapshot_diff import Entry
from indexer.sync.verify import BlockOf, Snapshot, VerifiedChange


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
