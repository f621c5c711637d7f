"""The watermark: the sequence number that is safe to save as a cursor."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from indexer.errors import BrokenInvariantError


class Position(NamedTuple):
    """A sequence number, and the `time` field of its message; None if it has none or is not known."""

    seq: int | None
    event_time: str | None


class Watermark:
    """Tracks sequence numbers that are added in increasing order and processed in any order.

    Attributes:
        position: The greatest added number at or below which every number is processed; `start` before that. It is
            safe to save as a cursor (docs/protocol.md#sequence-numbers-and-cursors).
        event_time: The time of the message at `position`.
    """

    def __init__(self, start: int | None = None, event_time: str | None = None) -> None:
        self.position = start
        self.event_time = event_time
        self._pending: deque[tuple[int, str | None]] = deque()
        self._done: set[int] = set()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, seq: int, event_time: str | None = None) -> None:
        """Add the number of a received message; numbers may be missing between two messages.

        Raises:
            BrokenInvariantError: The number is not above all earlier ones.
        """
        last = self._pending[-1][0] if self._pending else self.position
        if last is not None and seq <= last:
            raise BrokenInvariantError(f"seq {seq} after {last}")
        self._pending.append((seq, event_time))

    def position_if_done(self, seqs: Iterable[int]) -> Position:
        """Return the position once `seqs` are processed: the cursor for the transaction that writes them."""
        done = self._done.union(seqs)
        position: tuple[int | None, str | None] = self.position, self.event_time
        for pending in self._pending:
            if pending[0] not in done:
                break
            position = pending
        return Position(*position)

    def mark_done(self, seqs: Iterable[int]) -> None:
        """Mark `seqs` as processed: their effects are committed."""
        self._done.update(seqs)
        while self._pending and self._pending[0][0] in self._done:
            self.position, self.event_time = self._pending.popleft()
            self._done.discard(self.position)
