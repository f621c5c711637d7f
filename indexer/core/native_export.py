"""Read an export with the native core: as `Spool` does, with a fraction of its CPU time.

The native core handles exports without a flaw. In all other cases the Python code decides, on the same blocks:

| the native core meets | then |
|---|---|
| bytes that are no ordinary CAR file | `CarReader` goes on with them, and the core stores the blocks that it accepts |
| a bad commit, signature or tree | `verify_snapshot` verifies the whole export again, and raises the error |
| a record that is not ordinary, or missing | `NewRecords` converts the chunk that begins with the next record |

native/src/python_export.rs describes the native objects. All of them may be used in any thread. A call that takes long
releases the interpreter's lock.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexer.atproto.car import CarReader
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.core.spool import BUFFER_BYTES
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure, Rejection
from indexer.sync.changes import RecordConverter
from indexer.sync.export import (
    CHUNK_BYTES,
    CHUNK_RECORDS,
    PIECE_BYTES,
    ColumnLayout,
    NewRecords,
    RecordChunk,
    VerifiedExport,
)
from indexer.sync.policy import Policy
from indexer.sync.repo import Head
from indexer.sync.verify import BlockOf, verify_snapshot

PAGE_BYTES = 1 << 14


class NativeReader:
    """An `ExportReader` on the native core."""

    def __init__(
        self,
        new_export: Callable[..., Any],
        directory: Path,
        limits: Limits,
        layout: ColumnLayout,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        """Write blocks to the file when they have `buffer_bytes`, and read it in pages of `page_bytes`."""
        self._export = new_export(str(directory), limits, buffer_bytes, page_bytes, *layout)
        self._limits = limits
        self._rest: CarReader | None = None  # reads from the first bytes on that the native core does not handle

    def write(self, chunk: bytes) -> None:
        """See `ExportReader`."""
        if self._rest is not None:
            self._read_rest(self._rest, chunk)
        elif not self._feed(chunk):
            rest, offset, blocks = self._export.take_rest()
            roots = [] if self._export.root is None else [self._export.root]
            self._rest = CarReader.resumed(self._limits, roots, offset, blocks)
            self._read_rest(self._rest, rest)

    def finish(self) -> None:
        """See `ExportReader`."""
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
        root: bytes | None = self._export.root if self._rest is None else self._rest.roots[0]
        if root is None:
            raise IndexError("the header has not arrived")
        return root

    @property
    def size(self) -> int:
        """The size of all blocks with their lengths and CIDs, in bytes."""
        return int(self._export.size)

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
            block: bytes | None = self._export.block(cid)
        return block

    def verify(self, did: str, key: PublicKey, limits: Limits) -> VerifiedExport:
        """Verify the whole export. The native core uses the limits of the constructor, which must be the same."""
        with _reading():
            proof = self._export.prove(self.root, did, key.curve, key.uncompressed)
        if proof is None:
            snapshot = verify_snapshot(did, self.root, self.block, key, limits)
            return VerifiedExport(snapshot.did, snapshot.head, snapshot.count, snapshot.block_of, self.size)
        return ProvenExport(did, Head(proof.rev, proof.data, self.root), proof.count, self.block, self.size, proof)

    def close(self) -> None:
        """Free the file and the memory. A call that runs in another thread fails soon, and frees them at its end."""
        self._export.close()

    def _feed(self, data: bytes) -> bool:
        """Give bytes to the native core; return False if it leaves some of them to `CarReader`."""
        try:
            return bool(self._export.feed(data))
        except OSError as error:
            raise UnavailableError(FetchFailure.SPOOL_FULL, str(error)) from error

    def _read_rest(self, rest: CarReader, chunk: bytes) -> None:
        """Split bytes into blocks in Python, and let the native core store each block."""
        for cid, block in rest.feed(chunk):
            if not self._feed(_section(cid + block)):
                raise UpstreamError(Rejection.CAR_MALFORMED, f"a block of {len(block)} bytes")


@dataclass(frozen=True, slots=True)
class ProvenExport(VerifiedExport):
    """An export that the native core has verified. All reads raise as `NativeReader.block` does."""

    proof: Any

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the path and the CID of each record, in bytewise path order."""
        return _entries(self.proof.records(["*"]))

    def new_records(self, policy: Policy) -> NewRecords:
        """Return the records that `policy` selects, converted."""
        converter = RecordConverter(policy, self.head.rev, self.size)
        records = self.proof.records(list(policy.scope.collections.patterns))
        if policy.store_values:
            return _NativeNewRecords(records, self.block_of, converter)
        return NewRecords(_entries(records), self.block_of, converter)


class _NativeNewRecords(NewRecords):
    """The chunks of the native core, and those that it leaves to the reference. Both take records from one iterator."""

    def __init__(self, records: Any, block_of: BlockOf, converter: RecordConverter) -> None:
        super().__init__(_entries(records), block_of, converter)
        self._records = records

    def next_chunk(self) -> RecordChunk | None:
        converter = self._converter
        with _reading():
            chunk = self._records.chunk(CHUNK_RECORDS, CHUNK_BYTES, converter.items_left, converter.bytes_left)
        if chunk is None:
            return super().next_chunk()
        converter.count_converted(chunk.items, chunk.size)
        # The reference converts the chunks with missing records.
        return RecordChunk(chunk.count, 0, chunk.size, rows=_Rows(chunk)) if chunk.count else None


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that the native core has made of a chunk."""

    chunk: Any

    def records(self) -> Iterator[bytes]:
        start = 0
        while piece := self.chunk.record_rows(start, PIECE_BYTES):
            start += len(piece)
            yield piece

    def changes(self, segment: int, batch: int, first_ordinal: int) -> bytes:
        return bytes(self.chunk.change_rows(segment, batch, first_ordinal))


@contextmanager
def _reading() -> Iterator[None]:
    """Raise SPOOL_UNREADABLE if the native core cannot read the spool file."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(FetchFailure.SPOOL_UNREADABLE, str(error)) from error


def _entries(records: Any) -> Iterator[tuple[bytes, bytes]]:
    with _reading():
        yield from records


def _section(data: bytes) -> bytes:
    """Return a section of a CAR file: the length of the data as a varint, and the data."""
    size, length = len(data), bytearray()
    while size >> 7:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes(length) + data
