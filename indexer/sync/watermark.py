"""The one number that is safe to keep as a cursor: everything up to it is done."""

from collections import deque
from collections.abc import Iterable

from indexer.errors import BrokenInvariantError


class Watermark:
    """Tracks sequence numbers from `start` on, finished in any order, and knows the contiguous low mark.

    Numbers are added in increasing order, gaps are legal. `position` is the greatest number with no
    unfinished one at or below it; None until something has been finished and no start was given.
    """

    def __init__(self, start: int | None = None) -> None:
        self.position = start
        self._open: deque[int] = deque()
        self._done: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, seq: int) -> None:
        """A message has arrived; raises `BrokenInvariantError` if it doesn't come behind all others."""
        last = self._open[-1] if self._open else self.position
        if last is not None and seq <= last:
            raise BrokenInvariantError(f"seq {seq} after {last}")
        self._open.append(seq)

    def if_done(self, seqs: Iterable[int]) -> int | None:
        """Where `position` would be if `seqs` were done as well: what a transaction that does them may save."""
        done = self._done.union(seqs)
        position = self.position
        for seq in self._open:
            if seq not in done:
                break
            position = seq
        return position

    def done(self, seqs: Iterable[int]) -> None:
        """The effects of `seqs` are durable."""
        self._done.update(seqs)
        while self._open and self._open[0] in self._done:
            self.position = self._open.popleft()
            self._done.discard(self.position)
