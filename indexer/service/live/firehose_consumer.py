"""The firehose consumer: decode frames from the relay and put them into the inbox, in order."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Literal

import structlog

from indexer.atproto.limits import Limits
from indexer.monitoring.metrics import Metrics
from indexer.reasons import Rejection
from indexer.relay.subscription import Subscription
from indexer.service.live.inbox import Inbox
from indexer.service.live.stream_position import StreamPosition
from indexer.service.periodic import DatabaseAttempt
from indexer.store import Store
from indexer.sync.events import Event, InfoEvent, MalformedEvent, OtherShardEvent, StreamError
from indexer.sync.frames import decode_frame
from indexer.sync.plan_batch import ReceivedMessage
from indexer.sync.repo_transitions import Outcome
from indexer.sync.shard import Shard

Start = Literal["live", "oldest"] | int

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """Settings of the consumer.

    Attributes:
        shard: Only messages about accounts of this shard are put into the inbox.
        start: The cursor for a relay without a stored cursor: the newest event, the oldest event, or a seq.
        max_pending: Maximum unfinished sequence numbers in the watermark. Above it, the consumer waits for the writer.
        retry_interval: Seconds between two attempts to load the cursor.
    """

    shard: Shard
    limits: Limits
    start: Start = "live"
    max_pending: int = 200_000
    retry_interval: float = 1.0


class FirehoseConsumer:
    """Reads the stream for one shard.

    Attributes:
        last_error: The last error of the stream; None after the next message in order.
        gaps: How often the relay no longer had all events after the cursor.
    """

    def __init__(
        self,
        store: Store,
        subscription: Subscription,
        inbox: Inbox,
        position: StreamPosition,
        settings: ConsumerSettings,
        metrics: Metrics,
        on_gap: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._subscription = subscription
        self._inbox = inbox
        self._position = position
        self._settings = settings
        self._metrics = metrics
        self._on_gap = on_gap
        self._last_seq = 0
        self._skipped = 0
        self.last_error: str | None = None
        self.gaps = 0

    async def run(self) -> None:
        """Read the stream forever. Only an exception that is a bug ends it."""
        shard, limits = self._settings.shard, self._settings.limits
        owns = None if shard.count == 1 else shard.owns
        async for frame in self._subscription.frames(self._begin_connection):
            if self._skipped != self._subscription.skipped:
                await self._reject_skipped()
            await self._handle(self._check_order(decode_frame(frame, limits, owns)), frame)

    async def _begin_connection(self, relay: str) -> int | None:
        """Return the cursor for a new connection, after all messages of the previous one are settled."""
        await self._inbox.wait_until_settled()
        cursor = await self._load_cursor(relay)
        if cursor is None:
            start = self._settings.start
            cursor = start if isinstance(start, int) else {"live": None, "oldest": 0}[start]
        self._position.begin(relay, cursor)
        self._last_seq = cursor or 0
        return cursor

    async def _load_cursor(self, relay: str) -> int | None:
        while True:
            with DatabaseAttempt():
                return await self._store.cursor(relay, str(self._settings.shard))
            await asyncio.sleep(self._settings.retry_interval)

    async def _reject_skipped(self) -> None:
        """Record a rejection for each message over the size limit, which the subscription skipped."""
        for _ in range(self._subscription.skipped - self._skipped):
            detail = f"the message after seq {self._last_seq}"
            await self._handle(MalformedEvent(Rejection.FRAME_TOO_LARGE, detail, "", None, None), b"")
        self._skipped = self._subscription.skipped

    def _check_order(self, event: Event) -> Event:
        """Replace an event by a malformed one if its seq is lower than the last one.

        If this repeats, the relay has lost its sequence numbers, and an operator must decide what to do.
        """
        if event.seq is None or event.seq >= self._last_seq:
            return event
        detail = f"{event.seq} after {self._last_seq}"
        self.last_error = f"the relay sends lower sequence numbers than before: {detail}"
        return MalformedEvent(Rejection.SEQ_NOT_INCREASING, detail, event.kind, None, getattr(event, "did", None))

    async def _handle(self, event: Event, frame: bytes) -> None:
        self._metrics.received(event.kind)
        if isinstance(event, OtherShardEvent) or (isinstance(event, MalformedEvent) and not self._must_record(event)):
            await self._ignore(event)
        elif isinstance(event, InfoEvent):
            self._handle_info(event)
        elif isinstance(event, StreamError):
            self._handle_error(event)
        elif event.seq is None or self._advance(event.kind, event.seq):
            await self._inbox.put(ReceivedMessage(event.seq, frame, event, monotonic()))

    def _must_record(self, event: MalformedEvent) -> bool:
        """Return True if this shard records the rejection. All shards read the message, and one shard records it."""
        shard = self._settings.shard
        return shard.index == 0 if event.did is None else shard.owns(event.did)

    async def _ignore(self, event: OtherShardEvent | MalformedEvent) -> None:
        if len(self._position.watermark) > self._settings.max_pending:
            await self._inbox.wait_until_settled()
        if event.seq is not None:
            if not self._advance(event.kind, event.seq):
                return
            self._position.watermark.mark_done((event.seq,))
        self._metrics.outcome(event.kind, Outcome.IGNORED)

    def _advance(self, kind: str, seq: int) -> bool:
        """Return True if the message is new. Many relays send the message of the cursor again."""
        if seq == self._last_seq:
            self._metrics.outcome(kind, Outcome.REPLAYED)
            return False
        self._last_seq = seq
        self.last_error = None
        self._position.watermark.add(seq)
        return True

    def _handle_info(self, event: InfoEvent) -> None:
        self._metrics.outcome(event.kind, Outcome.IGNORED)
        if event.name == "OutdatedCursor":
            self.gaps += 1
            self._on_gap()
            log.error("relay.gap", relay=self._position.relay, cursor=self._last_seq, message=event.message[:300])
        else:
            log.info("relay.info", relay=self._position.relay, name=event.name[:64])

    def _handle_error(self, event: StreamError) -> None:
        """Log the error; the relay closes the stream after it.

        A cursor from the future is not reset automatically (docs/protocol.md#sequence-numbers-and-cursors).
        """
        self._metrics.outcome(event.kind, Outcome.IGNORED)
        self.last_error = f"{event.error[:64]}: {event.message[:200]}"
        log.error("relay.error", relay=self._position.relay, error=self.last_error)
