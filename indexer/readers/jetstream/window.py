"""The newest events in memory, which all subscribers share. It replaces a queue for each of them."""

import asyncio
from bisect import bisect_right
from collections import deque
from time import monotonic
from typing import NamedTuple

from indexer.concurrency.event_wait import wait_for_event
from indexer.readers.jetstream.events import EventChunk, LogPosition


class _Added(NamedTuple):
    """A chunk, and when it was added (monotonic seconds)."""

    chunk: EventChunk
    at: float


class EventWindow:
    """The newest chunks of events, bounded by bytes and by age. The chunks follow each other without a gap.

    A subscriber that takes chunks slower than they are added finds its position before `first`: what it needs next is
    not in memory any more.
    """

    def __init__(self, max_bytes: int, max_seconds: float) -> None:
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._added: deque[_Added] = deque()
        self._bytes = 0
        self._position: LogPosition | None = None
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True if the window has a position: it is filled from there on."""
        return self._position is not None

    @property
    def first(self) -> int:
        """The number of the last change before the oldest chunk."""
        self._drop_old()
        return self._added[0].chunk.before if self._added else self.last

    @property
    def last(self) -> int:
        """The number of the last change in the window."""
        return self._position.seq if self._position else 0

    @property
    def end(self) -> LogPosition | None:
        """The position after the newest chunk; None if the window is closed."""
        return self._position

    def open(self, position: LogPosition) -> None:
        """Empty the window. The next chunk follows this position."""
        self._empty()
        self._position = position
        self._notify()

    def close(self) -> None:
        """Empty the window, until it is opened at another position."""
        self._empty()
        self._position = None

    def add(self, chunk: EventChunk) -> None:
        """Add the next chunk, and drop the oldest ones that exceed the size limit, but never the new one."""
        self._added.append(_Added(chunk, monotonic()))
        self._bytes += chunk.size
        self._position = chunk.end
        while self._bytes > self._max_bytes and len(self._added) > 1:
            self._drop_oldest()
        self._drop_old()
        self._notify()

    def after(self, seq: int) -> EventChunk | None:
        """Return the chunk with the change that follows the number `seq`, which is not before `first`.

        Returns:
            None if there is no such change yet.
        """
        index = bisect_right(self._added, seq, key=lambda added: added.chunk.end.seq)
        return self._added[index].chunk if index < len(self._added) else None

    async def wait(self, seconds: float) -> bool:
        """Wait until the window changes, at most `seconds`; return False if it did not."""
        return await wait_for_event(self._changed, seconds)

    def _empty(self) -> None:
        self._added.clear()
        self._bytes = 0

    def _drop_old(self) -> None:
        while self._added and monotonic() - self._added[0].at > self._max_seconds:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._bytes -= self._added.popleft().chunk.size

    def _notify(self) -> None:
        """Wake up everybody who waits now."""
        self._changed.set()
        self._changed = asyncio.Event()
