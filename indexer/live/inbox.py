"""The queues of messages between the firehose consumers and the batch writer."""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from math import inf
from time import monotonic

from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.stage_progress import StageProgress
from indexer.sync.batch import ReceivedMessage
from indexer.sync.stream import Origin

MESSAGE_BYTES = 2_000
"""Approximate memory of a decoded message besides its frame."""


def message_bytes(message: ReceivedMessage) -> int:
    """Return the approximate memory of a message."""
    return MESSAGE_BYTES + len(message.frame)


@dataclass(eq=False, slots=True)
class _Queue:
    """The messages of one stream: those that wait, and what is unsettled."""

    waiting: deque[ReceivedMessage] = field(default_factory=deque)
    unsettled: int = 0
    unsettled_bytes: int = 0
    has_room: asyncio.Event = field(default_factory=asyncio.Event)
    all_settled: asyncio.Event = field(default_factory=asyncio.Event)


class Inbox:
    """A queue for each stream, and one taker, which takes a message of each stream in turn.

    Messages of each DID of a stream are in its order. A slow database slows the sockets. A message counts until it is
    settled, also while the taker has it. The taker gets all messages that arrived while it was busy, so batches grow
    with the load. So that one stream does not delay another, each may occupy an equal share of the bytes.

    Attributes:
        stage: Its progress. Queued messages are work, and the inbox moves when the taker takes some.
        max_bytes: The approximate memory of unsettled messages of all streams from which no more are read.
        streams: The number of streams that are read.
        limits: Bytes of streams that have a limit of their own in place of a share, by URL.
    """

    def __init__(self, max_bytes: int, streams: int = 1) -> None:
        self.stage = StageProgress("inbox", needs_shard=True)
        self.max_bytes = max_bytes
        self.streams = streams
        self.limits: dict[str, int] = {}
        self._queues: dict[Origin, _Queue] = {}
        self._returned: deque[ReceivedMessage] = deque()
        self._queued = 0
        self._has_messages = asyncio.Event()
        self._has_enough = asyncio.Event()
        self._enough = 1

    @property
    def unsettled(self) -> int:
        """The number of unsettled messages."""
        return sum([queue.unsettled for queue in self._queues.values()])

    @property
    def unsettled_bytes(self) -> int:
        """The approximate memory of unsettled messages."""
        return sum([queue.unsettled_bytes for queue in self._queues.values()])

    @property
    def share(self) -> float:
        """The approximate memory of unsettled messages of one stream from which no more of it are read."""
        return self.max_bytes / (self.streams - len(self.limits))

    def is_full(self, origin: Origin) -> bool:
        """Return True if `put` waits for room for a message of this stream."""
        queue = self._queues.get(origin)
        return queue is not None and queue.unsettled_bytes >= self._limit(origin)

    def _limit(self, origin: Origin) -> float:
        return self.limits.get(origin.relay, self.share) if self.limits else self.share

    def __len__(self) -> int:
        """Return the number of queued messages."""
        return self._queued

    async def put(self, received: ReceivedMessage) -> None:
        """Wait for room and append a message. A message larger than the share is appended if there is any room."""
        while self.is_full(received.origin):
            queue = self._queues[received.origin]
            queue.has_room.clear()
            await queue.has_room.wait()
        self.append(received)

    def append(self, received: ReceivedMessage) -> None:
        """Append a message without waiting. The caller has seen that there is room for its stream."""
        queue = self._queues.get(received.origin)
        if queue is None:
            queue = self._queues[received.origin] = _Queue()
        queue.unsettled_bytes += MESSAGE_BYTES + len(received.frame)
        queue.unsettled += 1
        queue.all_settled.clear()
        queue.waiting.append(received)
        self._note_queued(1)
        if queue.unsettled_bytes >= self._limit(received.origin):
            self._has_enough.set()

    def put_back(self, messages: Iterable[ReceivedMessage]) -> None:
        """Return messages, in their order, to the front of all queues."""
        returned = list(messages)
        self._returned.extendleft(reversed(returned))
        self._note_queued(len(returned))

    async def take(
        self, max_count: int, *, not_before: float = -inf, idle_timeout: float | None = None
    ) -> list[ReceivedMessage]:
        """Return the messages that are queued, at most `max_count`, as soon as there is one.

        Until `not_before` (monotonic seconds), wait for `max_count` messages or until the inbox is full. Without any
        message for `idle_timeout` seconds, the list is empty; None waits forever.
        """
        if not self._has_messages.is_set() and not await wait_for_event(self._has_messages, idle_timeout):
            return []
        if (seconds := not_before - monotonic()) > 0:
            self._enough = max_count
            self._has_enough.clear()
            if self._queued >= max_count or any(map(self.is_full, self._queues)):
                self._has_enough.set()
            await wait_for_event(self._has_enough, seconds)
        taken = self.peek(max_count)
        self._queued -= len(taken)
        returned = min(len(taken), len(self._returned))
        for _ in range(returned):
            self._returned.popleft()
        for message in islice(taken, returned, None):
            self._queues[message.origin].waiting.popleft()
        if self._queued:
            self.stage.moved()
        else:
            self._has_messages.clear()
            self.stage.idle()
        return taken

    def peek(self, max_count: int) -> list[ReceivedMessage]:
        """Return the messages that `take` would return now, which stay in the queues."""
        return list(islice(self._in_turn(), max_count))

    def _in_turn(self) -> Iterator[ReceivedMessage]:
        """Yield the queued messages in the order in which they are taken."""
        yield from self._returned
        queues = [queue.waiting for queue in self._queues.values() if queue.waiting]
        if len(queues) == 1:
            yield from queues[0]
        else:
            yield from (message for turn in zip_longest(*queues) for message in turn if message is not None)

    def _note_queued(self, count: int) -> None:
        self._queued += count
        if self._queued and not self._has_messages.is_set():
            self.stage.begin()
            self._has_messages.set()
        if self._queued >= self._enough:
            self._has_enough.set()

    def settle(self, messages: Iterable[ReceivedMessage]) -> None:
        """Release the memory of messages that were taken and whose outcome is durable."""
        for message in messages:
            queue = self._queues[message.origin]
            queue.unsettled -= 1
            queue.unsettled_bytes -= message_bytes(message)
        for origin, queue in self._queues.items():
            if not self.is_full(origin):
                queue.has_room.set()
            if not queue.unsettled:
                queue.all_settled.set()

    async def wait_until_settled(self, origin: Origin | None = None) -> None:
        """Wait until all messages are settled: of one stream, which then may begin again, or of all."""
        for one in list(self._queues) if origin is None else [origin]:
            if one in self._queues:
                await self._queues[one].all_settled.wait()
                del self._queues[one]
