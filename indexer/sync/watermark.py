"""The watermark: the sequence number that is safe to save as a cursor."""

from collections.abc import Iterable
from typing import NamedTuple

from indexer.errors import BrokenInvariantError


class Position(NamedTuple):
    """A sequence number, and the `time` field of its message; None if it has none or is not known."""

    seq: int | None
    event_time: str | None


class Watermark:
    """Tracks sequence numbers that are added in increasing order and processed in any order.

    It holds only numbers that are not processed yet, because millions of messages may pass one that waits for its key.
    """

    def __init__(self, start: int | None = None, event_time: str | None = None) -> None:
        # Plain tuples take a third of the time of a `Position`, and one is made for each message.
        self._last: tuple[int | None, str | None] = (start, event_time)
        self._before: dict[int, tuple[int | None, str | None]] = {}  # each pending number, with the position before it

    def __len__(self) -> int:
        """Return the number of pending numbers."""
        return len(self._before)

    @property
    def position(self) -> int | None:
        """The greatest added number at or below which every number is processed; `start` before that.

        It is safe to save as a cursor (docs/protocol.md#sequence-numbers-and-cursors).
        """
        return self.position_if_done(()).seq

    @property
    def event_time(self) -> str | None:
        """The time of the message at `position`."""
        return self.position_if_done(()).event_time

    def add(self, seq: int, event_time: str | None = None) -> None:
        """Add the number of a received message; numbers may be missing between two messages.

        Raises:
            BrokenInvariantError: The number is not above all earlier ones.
        """
        last = self._last[0]
        if last is not None and seq <= last:
            raise BrokenInvariantError(f"seq {seq} after {last}")
        self._before[seq] = self._last
        self._last = (seq, event_time)

    def position_if_done(self, seqs: Iterable[int]) -> Position:
        """Return the position once `seqs` are processed: the cursor for the transaction that writes them."""
        done = set(seqs)
        for seq, before in self._before.items():
            if seq not in done:
                return Position(*before)
        return Position(*self._last)

    def mark_done(self, seqs: Iterable[int]) -> None:
        """Mark `seqs` as processed: their effects are committed. Numbers that are not pending are left out."""
        for seq in seqs:
            self._before.pop(seq, None)
