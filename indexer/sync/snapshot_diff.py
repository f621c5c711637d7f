"""Compare the stored records of a repo with a snapshot, by merging two sequences in path order.

Path order is the order of the tree: bytewise over `collection/rkey`. It differs from the order of (collection, rkey)
pairs, because `-` and `.` sort before `/`: `a.b.c/x` comes before `a.b/x`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from indexer.errors import BrokenInvariantError

Entry = tuple[bytes, bytes]
"""The path and the CID of a record."""


class Difference(NamedTuple):
    """A path with different CIDs: `old` is None for a create, `new` is None for a delete."""

    path: bytes
    old: bytes | None
    new: bytes | None


def without_value(cid: bytes) -> bytes:
    """Return the CID marked as "value missing". It equals no CID, so a snapshot that has the value differs."""
    return cid + b"\0"


class SnapshotDiff:
    """Merges the entries of a snapshot with the stored entries, which come in chunks. Holds one entry at a time.

    Call `compare` for each chunk in order, then `remaining` once. Exhaust each iterator before the next call.
    """

    def __init__(self, snapshot: Iterator[Entry]) -> None:
        self._snapshot = snapshot
        self._entry = next(snapshot, None)
        self._last = b""

    def compare(self, stored: Sequence[Entry]) -> Iterator[Difference]:
        """Yield the differences up to the last path of this chunk.

        Raises:
            BrokenInvariantError: The stored entries are out of order, so the merge would delete existing records.
        """
        entry = self._entry
        for path, cid in stored:
            if path <= self._last:
                raise BrokenInvariantError(f"stored paths out of order: {path!r} after {self._last!r}")
            self._last = path
            while entry is not None and entry[0] < path:
                yield Difference(entry[0], None, entry[1])
                entry = self._advance()
            if entry is None or entry[0] != path:
                yield Difference(path, cid, None)
                continue
            if entry[1] != cid:
                yield Difference(path, cid, entry[1])
            entry = self._advance()

    def remaining(self) -> Iterator[Difference]:
        """Yield the entries of the snapshot after the last stored path."""
        if self._entry is not None:
            yield Difference(self._entry[0], None, self._entry[1])
        for path, cid in self._snapshot:
            yield Difference(path, None, cid)

    def _advance(self) -> Entry | None:
        self._entry = next(self._snapshot, None)
        return self._entry
