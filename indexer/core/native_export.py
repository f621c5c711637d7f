"""The classes of the native module that read an export, for the type checker (native/src/python_export.rs).

All of them may be used in any thread. A call that takes long releases the interpreter's lock.
"""

from collections.abc import Iterator
from typing import Protocol

from indexer.atproto.limits import Limits


class NativeChunk(Protocol):
    """Records that the native core has converted. `size` and `items` count as `RecordConverter` does."""

    count: int
    items: int
    size: int

    def record_rows(self, start: int, size: int) -> bytes:
        """Return at most `size` bytes of the rows of `indexer.record`, from `start` on; empty bytes at the end."""
        ...

    def change_rows(self, segment: int, batch: int, first_ordinal: int) -> bytes:
        """Return the rows of the change log."""
        ...


class NativeRecords(Protocol):
    """An iterator of paths and CIDs in path order, from which chunks can be taken."""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]: ...

    def __next__(self) -> tuple[bytes, bytes]: ...

    def chunk(self, max_records: int, max_bytes: int, items_left: int, bytes_left: int) -> NativeChunk | None:
        """Return the next records (an empty chunk at the end). Return None and take nothing if one is not ordinary."""
        ...


class NativeProof(Protocol):
    """An export whose signature and tree are proven. `data` is the CID of the tree's root."""

    rev: str
    data: bytes
    count: int

    def records(self, patterns: list[str]) -> NativeRecords:
        """Return the records of the collections that match the patterns."""
        ...


class NativeExport(Protocol):
    """The class `Export` of the native module.

    Attributes:
        root: The CID of the commit; None if no header of the usual form was read.
        size: The size of all blocks with their lengths and CIDs, in bytes.
    """

    root: bytes | None
    size: int

    def feed(self, chunk: bytes) -> bool:
        """Add bytes; return False if some of them are not ordinary. Raises `OSError`."""
        ...

    def take_rest(self) -> tuple[bytes, int, int]:
        """Remove and return the bytes that were not read, and the number of bytes and blocks that were.

        The next call of `feed` begins with a section of the file.
        """
        ...

    def is_whole(self) -> bool:
        """Return False if the file ends within its header or a block."""
        ...

    def block(self, cid: bytes) -> bytes | None:
        """Return a block; None if the export does not contain it. Raises `OSError`, also after `close`."""
        ...

    def close(self) -> None:
        """Free the file and the memory. A call that runs in another thread fails soon, and frees them at its end."""
        ...

    def prove(self, root: bytes, did: str, curve: str, point: bytes) -> NativeProof | None:
        """Verify the commit `root` and its whole tree; None if there is any flaw. `point` is uncompressed."""
        ...

    def __len__(self) -> int: ...


class ExportClass(Protocol):
    """Creates a `NativeExport`."""

    def __call__(self, directory: str, limits: Limits, buffer_bytes: int, page_bytes: int) -> NativeExport:
        """Return an export without bytes, whose file will be in `directory`. The sizes are those of `SpoolSizes`."""
        ...
