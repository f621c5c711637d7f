"""The queue between the socket and the batches: bounded by bytes, so that a slow database slows the socket."""

import asyncio
from collections import deque
from collections.abc import Iterable

from indexer.sync.batch import Received

MESSAGE_BYTES = 2_000  # what a decoded message holds beside its frame, roughly


class Inbox:
    """Messages in stream order. What was taken counts against the bound until it is `finished`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._queue: deque[Received] = deque()
        self._changed = asyncio.Condition()
        self.held_bytes = 0
        self.held = 0

    async def put(self, received: Received) -> None:
        """Waits for room first. One message always fits, however large."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.held_bytes < self._max_bytes)
            self.held += 1
            self.held_bytes += MESSAGE_BYTES + len(received.frame)
            self._queue.append(received)
            self._changed.notify_all()

    async def put_back(self, messages: Iterable[Received]) -> None:
        """Messages taken before, to be taken again first, in their order."""
        async with self._changed:
            self._queue.extendleft(reversed(list(messages)))
            self._changed.notify_all()

    async def take(self, most: int, linger: float, patience: float | None = None) -> list[Received]:
        """Up to `most` messages: at least one, and what else comes within `linger` seconds.

        None of them if none comes within `patience` seconds.
        """
        async with self._changed:
            try:
                async with asyncio.timeout(patience):
                    await self._changed.wait_for(lambda: self._queue)
            except TimeoutError:
                return []
            if len(self._queue) < most:
                try:
                    async with asyncio.timeout(linger):
                        await self._changed.wait_for(lambda: len(self._queue) >= most)
                except TimeoutError:
                    pass  # what has come by now is the batch
            return [self._queue.popleft() for _ in range(min(most, len(self._queue)))]

    async def finished(self, messages: Iterable[Received]) -> None:
        """These are settled for good."""
        async with self._changed:
            for message in messages:
                self.held -= 1
                self.held_bytes -= MESSAGE_BYTES + len(message.frame)
            self._changed.notify_all()

    async def empty(self) -> None:
        """Waits until everything that was put is finished."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.held == 0)
