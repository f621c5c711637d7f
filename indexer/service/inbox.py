"""The queue between the socket and the batches: bounded by bytes, so that a slow database slows the socket."""

import asyncio
from collections import deque
from collections.abc import Iterable
from time import monotonic

from indexer.sync.batch import Received

MESSAGE_BYTES = 2_000  # what a decoded message holds beside its frame, roughly


class Inbox:
    """Messages in stream order, for one taker. What was taken counts against the bound until it is `finished`.

    The taker is woken for a whole batch and not for each message.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._queue: deque[Received] = deque()
        self._since = 0.0  # when the queue last became one of some messages
        self._wanted = 1
        self._enough = asyncio.Event()
        self._room = asyncio.Event()
        self._nothing_held = asyncio.Event()
        self._room.set()
        self._nothing_held.set()
        self.held_bytes = 0
        self.held = 0

    async def put(self, received: Received) -> None:
        """Waits for room first. One message always fits, however large."""
        while self.held_bytes >= self._max_bytes:
            self._room.clear()
            await self._room.wait()
        self.held += 1
        self.held_bytes += MESSAGE_BYTES + len(received.frame)
        self._nothing_held.clear()
        if not self._queue:
            self._since = monotonic()
        self._queue.append(received)
        if len(self._queue) >= self._wanted:
            self._enough.set()

    def put_back(self, messages: Iterable[Received]) -> None:
        """Messages taken before, to be taken again first, in their order."""
        self._queue.extendleft(reversed(list(messages)))
        if len(self._queue) >= self._wanted:
            self._enough.set()

    async def take(self, most: int, linger: float, patience: float | None = None) -> list[Received]:
        """Up to `most` messages: at least one, and what else has come `linger` seconds after it came.

        None of them if none comes within `patience` seconds.
        """
        if not await self._wait_for(1, patience):
            return []
        await self._wait_for(most, self._since + linger - monotonic())
        return [self._queue.popleft() for _ in range(min(most, len(self._queue)))]

    async def _wait_for(self, count: int, seconds: float | None) -> bool:
        """Whether so many messages are there in time."""
        if len(self._queue) < count and (seconds is None or seconds > 0):
            self._wanted = count
            self._enough.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._enough.wait()
            except TimeoutError:
                pass  # what has come by now is the answer
        return len(self._queue) >= count

    def finished(self, messages: Iterable[Received]) -> None:
        """These are settled for good."""
        for message in messages:
            self.held -= 1
            self.held_bytes -= MESSAGE_BYTES + len(message.frame)
        if self.held_bytes < self._max_bytes:
            self._room.set()
        if not self.held:
            self._nothing_held.set()

    async def empty(self) -> None:
        """Waits until everything that was put is finished."""
        await self._nothing_held.wait()
