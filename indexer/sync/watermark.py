"""The watermark: the sequence number that is safe to save as a cursor."""

from collections import deque
from collections.abc import Iterable

from indexer.errors import BrokenInvariantError


class Watermark:
    """Tracks sequence numbers that are added in increasing order and processed in any order.

    Attributes:
        position: The greatest added number at or below which every number is processed; `start` before that. It is
            safe to save as a cursor (docs/protocol.md#sequence-numbers-and-cursors).
    """

    def __init__(self, start: int | None = None) -> None:
        self.position = start
        self._pending: deque[int] = deque()
        self._done: set[int] = set()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, seq: int) -> None:
        """Add the number of a received message; gaps between numbers are allowed.

        Raises:
            BrokenInvariantError: The number is not above all earlier ones.
        """
        last = self._pending[-1] if self._pending else self.position
        if last is not None and seq <= last:
            raise BrokenInvariantError(f"seq {seq} after {last}")
        self._pending.append(seq)

    def position_if_done(self, seqs: Iterable[int]) -> int | None:
        """Return what `position` becomes once `seqs` are processed: the cursor for the transaction that writes them."""
        done = self._done.union(seqs)
        position = self.position
        for seq in self._pending:
            if seq not in done:
                break
            position = seq
        return position

    def mark_done(self, seqs: Iterable[int]) -> None:
        """Mark `seqs` as processed: their effects are committed."""
        self._done.update(seqs)
        while self._pending and self._pending[0] in self._done:
            self.position = self._pending.popleft()
            self._done.discard(self.position)
