"""The difference between the records that we store and a snapshot, by merge, both sides in path order.

Path order is the tree's order: bytewise over `collection/rkey`, which is not the order of the pair, since
`-` and `.` sort before `/` (`a.b.c/x` < `a.b/x`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from indexer.errors import BrokenInvariantError

Entry = tuple[bytes, bytes]


class Difference(NamedTuple):
    """One path whose CIDs differ: `old` None is a create, `new` None a delete."""

    path: bytes
    old: bytes | None
    new: bytes | None


def without_value(cid: bytes) -> bytes:
    """How a stored record stands whose value is missing: equal to no CID, so that an export that has it fills it in."""
    return cid + b"\0"


class Diff:
    """Merges a snapshot's (path, CID) entries with ours, which come in chunks; holds one entry at a time.

    Call `against` for each chunk of ours in order, then `rest` once; exhaust each iterator before the next.
    Raises `BrokenInvariantError` if ours come out of order: a merge would then plan deletes of living records.
    """

    def __init__(self, snapshot: Iterator[Entry]) -> None:
        self._snapshot = snapshot
        self._theirs = next(snapshot, None)
        self._last = b""

    def against(self, stored: Sequence[Entry]) -> Iterator[Difference]:
        """What differs up to the last path of this chunk."""
        theirs = self._theirs
        for path, cid in stored:
            if path <= self._last:
                raise BrokenInvariantError(f"stored paths out of order: {path!r} after {self._last!r}")
            self._last = path
            while theirs is not None and theirs[0] < path:
                yield Difference(theirs[0], None, theirs[1])
                theirs = self._advance()
            if theirs is None or theirs[0] != path:
                yield Difference(path, cid, None)
                continue
            if theirs[1] != cid:
                yield Difference(path, cid, theirs[1])
            theirs = self._advance()

    def rest(self) -> Iterator[Difference]:
        """What the snapshot holds behind our last path."""
        while self._theirs is not None:
            yield Difference(self._theirs[0], None, self._theirs[1])
            self._advance()

    def _advance(self) -> Entry | None:
        self._theirs = next(self._snapshot, None)
        return self._theirs
