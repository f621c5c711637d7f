"""An export on disk: blocks by CID, with memory use that hardly depends on the size of the repo.

The most recent blocks are in memory; those of a small export all are. The others are in a file, each of them once,
after its length (4 bytes, little-endian) and its CID. The file has no name, so the system deletes it when it is closed
or the process ends. The index holds 12 bytes per slot: a part of a hash, and an offset in the file, where the whole CID
is compared. The file is not mapped into memory, because its pages would count as memory of this process. It is read in
pages, and a few of them are cached: each read releases the GIL, and blocks that are read together are usually close to
each other.
"""

import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Literal, Self

from indexer.atproto.car import CarReader
from indexer.atproto.cid import CID_BYTES
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import Limits
from indexer.errors import UnavailableError, UpstreamError
from indexer.reasons import FetchFailure
from indexer.sync.export import VerifiedExport
from indexer.sync.verify import verify_snapshot

_LENGTH_BYTES = 4
_HEAD_BYTES = _LENGTH_BYTES + CID_BYTES
_CACHED_PAGES = 1 << 6
_TABLES = 1 << 8
_FIRST_SLOTS = 1 << 4


@dataclass(frozen=True, slots=True)
class SpoolSizes:
    """Sizes of the buffers of a spool. Only tests need other ones.

    Attributes:
        buffer_bytes: Write the blocks in memory to the file when they have this size.
        page_bytes: Read the file in pages of this size.
        hash_mask: The bits of a hash that the index uses: 8 for the table, 32 within it.
    """

    buffer_bytes: int = 1 << 20
    page_bytes: int = 1 << 14
    hash_mask: int = (1 << 40) - 1


DEFAULT_SIZES = SpoolSizes()


class Spool:
    """One export. `write` all of it, call `finish`, then read any `block`, from any thread.

    It is a context manager that deletes the file.
    """

    def __init__(self, directory: Path, limits: Limits, sizes: SpoolSizes = DEFAULT_SIZES) -> None:
        self._directory = directory
        self._reader = CarReader(limits)
        self._recent: dict[bytes, bytes] = {}
        self._recent_bytes = 0
        self._sizes = sizes
        self._file: _SpoolFile | None = None  # most exports are small and need none

    def write(self, chunk: bytes) -> None:
        """See `ExportReader`."""
        recent, file = self._recent, self._file
        for cid, block, _ in self._reader.feed(chunk):
            if cid in recent or (file is not None and file.contains(cid)):
                continue
            recent[cid] = block
            self._recent_bytes += _HEAD_BYTES + len(block)
        if self._recent_bytes >= self._sizes.buffer_bytes:
            self._flush()

    def finish(self) -> None:
        """See `ExportReader`."""
        try:
            self._reader.close()
        except UpstreamError as error:
            raise UnavailableError(FetchFailure.EXPORT_INCOMPLETE, error.detail) from None

    @property
    def root(self) -> bytes:
        """The CID of the commit."""
        return self._reader.roots[0]

    @property
    def size(self) -> int:
        """The size of all blocks with their lengths and CIDs, in bytes."""
        return self._recent_bytes + (self._file.size if self._file is not None else 0)

    def block(self, cid: bytes) -> bytes | None:
        """Return the bytes of a block; None if the export does not contain it.

        Raises:
            UnavailableError: SPOOL_UNREADABLE if the file cannot be read.
        """
        block = self._recent.get(cid)
        return self._file.block(cid) if block is None and self._file is not None else block

    def verify(self, did: str, key: PublicKey, limits: Limits) -> VerifiedExport:
        """Verify the whole export: see `ExportReader`."""
        snapshot = verify_snapshot(did, self.root, self.block, key, limits)
        return VerifiedExport(snapshot.did, snapshot.head, snapshot.count, snapshot.block_of)

    def close(self) -> None:
        """Delete the file and forget the blocks."""
        self._recent.clear()
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        """Return the number of different blocks."""
        return len(self._recent) + (self._file.count if self._file is not None else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush(self) -> None:
        try:
            if self._file is None:
                self._file = _SpoolFile(self._directory, self._sizes)
            self._file.append(self._recent)
        except OSError as error:
            raise UnavailableError(FetchFailure.SPOOL_FULL, str(error)) from error
        self._recent.clear()
        self._recent_bytes = 0


class _SpoolFile:
    """Blocks in a file without a name.

    Attributes:
        size: The bytes of the file.
    """

    def __init__(self, directory: Path, sizes: SpoolSizes) -> None:
        """Create the file.

        Raises:
            OSError: It cannot be created in `directory`.
        """
        self.size = 0
        self._file = TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - `close` closes it
        self._index = _Index(sizes.hash_mask)
        self._page_bytes = sizes.page_bytes
        self._page = lru_cache(_CACHED_PAGES)(partial(_read_page, self._file, sizes.page_bytes))

    @property
    def count(self) -> int:
        """The number of blocks."""
        return self._index.count

    def append(self, blocks: Mapping[bytes, bytes]) -> None:
        """Write blocks that the file does not contain, at its end.

        Raises:
            OSError: The disk is full.
        """
        buffer = bytearray()
        for cid, block in blocks.items():
            buffer += len(block).to_bytes(_LENGTH_BYTES, "little")
            self._index.add(cid, self.size + len(buffer))
            buffer += cid
            buffer += block
        with memoryview(buffer) as view:
            written = 0
            while written < len(view):
                written += self._file.write(view[written:])
        self.size += written
        self._page.cache_clear()  # the last page was incomplete

    def contains(self, cid: bytes) -> bool:
        """Return True if the file contains the block."""
        for offset in self._index.candidates(cid):  # noqa: SIM110 - `any` needs a generator for each block
            if self._read(offset, CID_BYTES) == cid:
                return True
        return False

    def block(self, cid: bytes) -> bytes | None:
        """Return the bytes of a block; None if the file does not contain it."""
        for offset in self._index.candidates(cid):
            head = self._read(offset - _LENGTH_BYTES, _HEAD_BYTES)
            if head[_LENGTH_BYTES:] == cid:
                return self._read(offset + CID_BYTES, int.from_bytes(head[:_LENGTH_BYTES], "little"))
        return None

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def _read(self, offset: int, size: int) -> bytes:
        number, start = divmod(offset, self._page_bytes)
        stop = start + size
        if stop <= self._page_bytes:
            return self._page(number)[start:stop]
        return b"".join(map(self._page, range(number, number + -(-stop // self._page_bytes))))[start:stop]


def _read_page(file: FileIO, page_bytes: int, number: int) -> bytes:
    try:
        return os.pread(file.fileno(), page_bytes, number * page_bytes)
    except OSError as error:
        raise UnavailableError(FetchFailure.SPOOL_UNREADABLE, str(error)) from error


class _Index:
    """Offsets by CID, in many small tables, because the event loop waits while a table grows.

    It uses the hash function of Python, whose key differs in each process, so attackers cannot construct collisions.
    """

    __slots__ = ("_hash_mask", "_tables", "count")

    def __init__(self, hash_mask: int) -> None:
        self._hash_mask = hash_mask
        self._tables = [_Table() for _ in range(_TABLES)]
        self.count = 0

    def candidates(self, cid: bytes) -> Iterator[int]:
        """Return the offsets at which this block may be; rarely more than one."""
        hash_, table = divmod(hash(cid) & self._hash_mask, _TABLES)
        return self._tables[table].candidates(hash_)

    def add(self, cid: bytes, offset: int) -> None:
        """Add a block; `offset` is above 0."""
        self.count += 1
        hash_, table = divmod(hash(cid) & self._hash_mask, _TABLES)
        self._tables[table].add(hash_, offset)


class _Table:
    """An open-addressing hash table, at most two thirds full. The offset 0 marks an empty slot."""

    __slots__ = ("_count", "_hashes", "_offsets")

    def __init__(self) -> None:
        self._hashes = _zeros("I", _FIRST_SLOTS)
        self._offsets = _zeros("Q", _FIRST_SLOTS)
        self._count = 0

    def candidates(self, hash_: int) -> Iterator[int]:
        offsets, hashes = self._offsets, self._hashes
        mask = len(offsets) - 1
        slot = hash_ & mask
        while offset := offsets[slot]:
            if hashes[slot] == hash_:
                yield offset
            slot = (slot + 1) & mask

    def add(self, hash_: int, offset: int) -> None:
        self._count += 1
        if 3 * self._count > 2 * len(self._offsets):
            self._grow()
        self._put(hash_, offset)

    def _put(self, hash_: int, offset: int) -> None:
        offsets = self._offsets
        mask = len(offsets) - 1
        slot = hash_ & mask
        while offsets[slot]:
            slot = (slot + 1) & mask
        offsets[slot] = offset
        self._hashes[slot] = hash_

    def _grow(self) -> None:
        hashes, offsets = self._hashes, self._offsets
        self._hashes = _zeros("I", 2 * len(hashes))
        self._offsets = _zeros("Q", 2 * len(offsets))
        for hash_, offset in zip(hashes, offsets, strict=True):
            if offset:
                self._put(hash_, offset)


def _zeros(typecode: Literal["I", "Q"], count: int) -> "array[int]":
    return array(typecode, [0]) * count
