"""Read an export with the native core: as `Spool` does, with a fraction of its CPU time.

The native core handles exports without a flaw. In all other cases the Python code decides, on the same blocks:

| the native core meets | then |
|---|---|
| bytes that are no ordinary CAR file | `CarReader` goes on with them, and the core stores the blocks that it accepts |
| a bad commit, signature or tree | `verify_snapshot` verifies the whole export again, and raises the error |
| a record that is not ordinary, or missing | `ConvertedRecords` converts the chunk that begins with the next record |
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from indexer.atproto.car import CarReader
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.core.native_core import NativeCore
from indexer.core.native_export import NativeChunk, NativeExport, NativeProof, NativeRecords
from indexer.errors import UnavailableError, UpstreamError
from indexer.net.pds.pds_client import ReaderFactory
from indexer.net.pds.spool import DEFAULT_SIZES, Spool, SpoolSizes
from indexer.reasons import FetchFailure, Rejection
from indexer.sync.changes import RecordChange, RecordConverter
from indexer.sync.export import (
    CHUNK_BYTES,
    CHUNK_RECORDS,
    PIECE_BYTES,
    ConvertedRecords,
    NewRecords,
    RecordChunk,
    SnapshotExport,
    VerifiedExport,
)
from indexer.sync.policy import Policy
from indexer.sync.repo import Head
from indexer.sync.verify import verify_snapshot

_COLLECTION, _RKEY, _CID, _REV, _VALUE, _PROBLEM = 1, 2, 4, 5, 6, 7  # columns of `db.write.RECORD_COLUMNS`
_JSONB_VERSION = b"\x01"


def reader_factory(core: NativeCore | None) -> ReaderFactory:
    """Return the factory of readers for `PdsClient`: with the native core, or without one in Python."""
    return Spool if core is None else partial(NativeReader, core)


class NativeReader:
    """An `ExportReader` on the native core. `write` all of the export, call `finish`, then `verify` it."""

    def __init__(self, core: NativeCore, directory: Path, limits: Limits, sizes: SpoolSizes = DEFAULT_SIZES) -> None:
        self._export = core.new_export(str(directory), limits, sizes.buffer_bytes, sizes.page_bytes)
        self._limits = limits
        self._rest: CarReader | None = None  # reads from the first bytes on that the native core does not handle

    def write(self, chunk: bytes) -> None:
        """Add the next bytes of the CAR file, and hash each block that they complete.

        Raises:
            UpstreamError: The file breaks a rule of the CAR format.
            UnavailableError: SPOOL_FULL if the file cannot be created or read, or the disk is full.
        """
        if self._rest is not None:
            self._read_rest(self._rest, chunk)
        elif not self._feed(chunk):
            rest, offset, blocks = self._export.take_rest()
            roots = [] if self._export.root is None else [self._export.root]
            self._rest = CarReader.resumed(self._limits, roots, offset, blocks)
            self._read_rest(self._rest, rest)

    def finish(self) -> None:
        """Check that the file did not end within a block.

        Raises:
            UnavailableError: EXPORT_INCOMPLETE if it did.
        """
        if self._rest is None and self._export.is_whole():
            return
        rest = self._rest or CarReader(self._limits)
        try:
            rest.close()
        except UpstreamError as error:
            raise UnavailableError(FetchFailure.EXPORT_INCOMPLETE, error.detail) from None

    @property
    def root(self) -> bytes:
        """The CID of the commit."""
        root = self._export.root if self._rest is None else self._rest.roots[0]
        if root is None:
            raise IndexError("the header has not arrived")
        return root

    @property
    def size(self) -> int:
        """The size of all blocks with their lengths and CIDs, in bytes."""
        return self._export.size

    @property
    def ordinary(self) -> bool:
        """True if the native core read all bytes so far."""
        return self._rest is None

    def block(self, cid: bytes) -> bytes | None:
        """Return the bytes of a block; None if the export does not contain it.

        Raises:
            UnavailableError: SPOOL_UNREADABLE if the file cannot be read.
        """
        with _reading():
            return self._export.block(cid)

    def verify(self, did: str, key: PublicKey, limits: Limits) -> VerifiedExport:
        """Verify the whole export. The native core uses the limits of the constructor, which must be the same.

        Raises:
            UpstreamError: The export breaks a rule (docs/protocol.md#exports).
            MissingNodeError: The export lacks a tree node.
            UnavailableError: SPOOL_UNREADABLE if the file cannot be read.
        """
        with _reading():
            proof = self._export.prove(self.root, did, key.curve, key.uncompressed)
        if proof is None:
            return SnapshotExport(verify_snapshot(did, self.root, self.block, key, limits))
        return ProvenExport(self._export, proof, Head(proof.rev, proof.data, self.root))

    def close(self) -> None:
        """Free the file and the memory. A call that runs in another thread fails soon, and frees them at its end."""
        self._export.close()

    def __len__(self) -> int:
        """Return the number of different blocks."""
        return len(self._export)

    def _feed(self, data: bytes) -> bool:
        """Give bytes to the native core; return False if it leaves some of them to `CarReader`.

        Raises:
            UnavailableError: SPOOL_FULL if the file cannot be created or read, or the disk is full.
        """
        try:
            return self._export.feed(data)
        except OSError as error:
            raise UnavailableError(FetchFailure.SPOOL_FULL, str(error)) from error

    def _read_rest(self, rest: CarReader, chunk: bytes) -> None:
        """Split bytes into blocks in Python, and let the native core store each block."""
        for cid, block, _ in rest.feed(chunk):
            if not self._feed(_section(cid + block)):
                raise UpstreamError(Rejection.CAR_MALFORMED, f"a block of {len(block)} bytes")


class ProvenExport:
    """A `VerifiedExport` that the native core has verified. All reads raise as `NativeReader.block` does.

    Attributes:
        count: The number of records.
    """

    def __init__(self, export: NativeExport, proof: NativeProof, head: Head) -> None:
        self._export = export
        self._proof = proof
        self._head = head
        self.count = proof.count

    @property
    def head(self) -> Head:
        """The head of the repo in this export."""
        return self._head

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the path and the CID of each record, in bytewise path order."""
        return _entries(self._proof.records(["*"]))

    def block_of(self, cid: bytes) -> bytes | None:
        """Return the block of a record; None if the export lacks it."""
        with _reading():
            return self._export.block(cid)

    def new_records(self, policy: Policy, source_bytes: int) -> NewRecords:
        """Return the records that `policy` selects, converted as for an export of this size."""
        converter = RecordConverter(policy, self._head.rev, source_bytes)
        records = self._proof.records(list(policy.scope.collections.patterns))
        reference = ConvertedRecords(_entries(records), self.block_of, converter)
        if not policy.store_values:
            return reference
        return _NativeNewRecords(records, reference, converter)


class _NativeNewRecords:
    """The chunks of the native core, and those that it leaves to the reference. Both take records from one iterator."""

    def __init__(self, records: NativeRecords, reference: ConvertedRecords, converter: RecordConverter) -> None:
        self._records = records
        self._reference = reference
        self._converter = converter

    def next_chunk(self) -> RecordChunk | None:
        """Return the next chunk; None after the last one."""
        converter = self._converter
        with _reading():
            chunk = self._records.chunk(CHUNK_RECORDS, CHUNK_BYTES, converter.items_left, converter.bytes_left)
        if chunk is None:
            return self._reference.next_chunk()
        converter.count_converted(chunk.items, chunk.size)
        return ReadyChunk(chunk) if chunk.count else None


@contextmanager
def _reading() -> Iterator[None]:
    """Raise SPOOL_UNREADABLE if the native core cannot read the spool file."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(FetchFailure.SPOOL_UNREADABLE, str(error)) from error


def _entries(records: NativeRecords) -> Iterator[tuple[bytes, bytes]]:
    with _reading():
        yield from records


class ReadyChunk:
    """A chunk with ready-made rows.

    Attributes:
        count: The number of records.
        missing: 0: the reference converts the chunks with missing records.
        size: The bytes of the records and their values.
    """

    missing = 0

    def __init__(self, chunk: NativeChunk) -> None:
        self._chunk = chunk
        self.count = chunk.count
        self.size = chunk.size

    @property
    def record_rows(self) -> Iterator[bytes]:
        """The rows of `indexer.record` in the binary format of COPY, in pieces."""
        start = 0
        while piece := self._chunk.record_rows(start, PIECE_BYTES):
            start += len(piece)
            yield piece

    def changes(self) -> list[RecordChange]:
        """Return the records as changes. This decodes the rows, and is slow."""
        return [_change(fields) for fields in _fields_of_rows(b"".join(self.record_rows))]

    def change_rows(self, segment: int, batch: int, first_ordinal: int) -> bytes:
        """Return the rows of the change log in the same format."""
        return self._chunk.change_rows(segment, batch, first_ordinal)


def _section(data: bytes) -> bytes:
    """Return a section of a CAR file: the length of the data as a varint, and the data."""
    size, length = len(data), bytearray()
    while size >> 7:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes(length) + data


def _fields_of_rows(rows: bytes) -> Iterator[list[bytes]]:
    """Yield the fields of each row. Each one comes after its size in 4 bytes; null is returned as empty."""
    position = 0
    while position < len(rows):
        count, position = int.from_bytes(rows[position : position + 2]), position + 2
        fields = []
        for _ in range(count):
            size, start = int.from_bytes(rows[position : position + 4], signed=True), position + 4
            position = start + max(0, size)
            fields.append(rows[start:position])
        yield fields


def _change(fields: list[bytes]) -> RecordChange:
    return RecordChange(
        "create",
        fields[_COLLECTION].decode(),
        fields[_RKEY].decode(),
        fields[_REV].decode(),
        fields[_CID],
        fields[_VALUE].removeprefix(_JSONB_VERSION).decode(),
        fields[_PROBLEM].decode() or None,
    )
