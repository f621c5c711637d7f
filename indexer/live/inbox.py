"""The queue of messages between the firehose consumer and the batch writer."""

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice
from math import inf
from time import monotonic

from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.stage_progress import StageProgress
from indexer.sync.batch import ReceivedMessage

MESSAGE_BYTES = 2_000
"""Approximate memory of a decoded message besides its frame."""


def message_bytes(message: ReceivedMessage) -> int:
    """Return the approximate memory of a message."""
    return MESSAGE_BYTES + len(message.frame)


class Inbox:
    """A queue with one taker. Messages of each DID are in stream order. A slow database slows the socket.

    A message counts against `max_bytes` until it is settled, also while the taker has it. The taker gets all messages
    that arrived while it was busy, so batches grow with the load.

    Attributes:
        stage: Its progress. Queued messages are work, and the inbox moves when the taker takes some.
        max_bytes: The approximate memory of unsettled messages from which no more are read.
    """

    def __init__(self, max_bytes: int) -> None:
        self.stage = StageProgress("inbox", needs_shard=True)
        self.max_bytes = max_bytes
        self._queue: deque[ReceivedMessage] = deque()
        self._has_messages = asyncio.Event()
        self._has_enough = asyncio.Event()
        self._enough = 1
        self._has_room = asyncio.Event()
        self._all_settled = asyncio.Event()
        self._has_room.set()
        self._all_settled.set()
        self.unsettled_bytes = 0
        self.unsettled = 0

    @property
    def is_full(self) -> bool:
        """True if `put` waits for room."""
        return self.unsettled_bytes >= self.max_bytes

    def __len__(self) -> int:
        """Return the number of queued messages."""
        return len(self._queue)

    async def put(self, received: ReceivedMessage) -> None:
        """Wait for room and append a message. A message larger than `max_bytes` is appended if there is any room."""
        while self.is_full:
            self._has_room.clear()
            await self._has_room.wait()
        self.append(received)

    def append(self, received: ReceivedMessage) -> None:
        """Append a message without waiting. The caller has seen that the inbox is not full."""
        self.unsettled_bytes += MESSAGE_BYTES + len(received.frame)
        if not self.unsettled:
            self._all_settled.clear()
        self.unsettled += 1
        if not self._queue:
            self.stage.begin()
            self._has_messages.set()
        self._queue.append(received)
        self._note_enough()

    def put_back(self, messages: Iterable[ReceivedMessage]) -> None:
        """Return messages, in their order, to the front of the queue."""
        self._queue.extendleft(reversed(list(messages)))
        if self._queue:
            self.stage.begin()
            self._has_messages.set()
        self._note_enough()

    async def take(
        self, max_count: int, *, not_before: float = -inf, idle_timeout: float | None = None
    ) -> list[ReceivedMessage]:
        """Return the messages that are queued, at most `max_count`, as soon as there is one.

        Args:
            max_count: The maximum number of messages.
            not_before: Until then (monotonic seconds), wait for `max_count` messages or until the inbox is full.
            idle_timeout: Seconds to wait for the first message before an empty list is returned; None waits forever.
        """
        if not self._queue and not await wait_for_event(self._has_messages, idle_timeout):
            return []
        if (seconds := not_before - monotonic()) > 0:
            self._enough = max_count
            self._has_enough.clear()
            self._note_enough()
            await wait_for_event(self._has_enough, seconds)
        taken = [self._queue.popleft() for _ in range(min(max_count, len(self._queue)))]
        if self._queue:
            self.stage.moved()
        else:
            self._has_messages.clear()
            self.stage.idle()
        return taken

    def peek(self, max_count: int) -> list[ReceivedMessage]:
        """Return the messages that `take` would return now, which stay in the queue."""
        return list(islice(self._queue, max_count))

    def _note_enough(self) -> None:
        if len(self._queue) >= self._enough or self.is_full:
            self._has_enough.set()

    def settle(self, messages: Iterable[ReceivedMessage]) -> None:
        """Release the memory of messages that were taken and whose outcome is durable."""
        for message in messages:
            self.unsettled -= 1
            self.unsettled_bytes -= message_bytes(message)
        if self.unsettled_bytes < self.max_bytes:
            self._has_room.set()
        if not self.unsettled:
            self._all_settled.set()

    async def wait_until_settled(self) -> None:
        """Wait until all messages are settled."""
        await self._all_settled.wait()
