"""The firehose consumer: decode frames from the relay and put them into the inbox, in order."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.live.inbox import Inbox, StreamPosition
from indexer.live.stream_continuity import StreamContinuity
from indexer.net.relay.subscription import Subscription
from indexer.reasons import Rejection
from indexer.sync.batch import ReceivedMessage
from indexer.sync.events import (
    AccountEvent,
    CommitEvent,
    Event,
    InfoEvent,
    MalformedEvent,
    OtherShardEvent,
    RepoEvent,
    StreamError,
    UnknownEvent,
)
from indexer.sync.repo import Outcome
from indexer.sync.shard import Shard
from indexer.sync.stream import Position, Step, Watermark
from indexer.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class FirehoseConsumer:
    """Reads the stream, and puts the messages about the accounts of one shard into the inbox.

    Attributes:
        stage: Its progress. Each message, and each new connection until it is requested, is work.
        last_error: The last error of the stream; None after the next message in order.
        failing_since: When that error came first (monotonic seconds).
        last_message: When each relay sent its last message (monotonic seconds).
    """

    subscription: Subscription
    continuity: StreamContinuity
    inbox: Inbox
    position: StreamPosition
    shard: Shard
    decode: Callable[[bytes], Event]
    metrics: Metrics

    def __post_init__(self) -> None:
        self.stage = StageProgress("firehose consumer")
        self.last_error: str | None = None
        self.failing_since: float | None = None
        self.last_message: dict[str, float] = {}

    async def run(self) -> None:
        """Read the stream forever. Only an exception that is a bug ends it."""
        async with aclosing(self.subscription.frames(self.begin_connection)) as frames:
            async for frame in frames:
                event = self.decode(frame)
                if not (type(event) is CommitEvent and self._put_next(event, frame)):
                    await self._process(event, frame)

    def _put_next(self, event: CommitEvent, frame: bytes) -> bool:
        """Put a #commit with the next number into the inbox; return False, and do nothing, if anything is unusual.

        Nearly all messages take this path, at less than half the cost of `_process`. No other task runs meanwhile, so
        the stage need not report that it has work.
        """
        if not self.continuity.checked or self.inbox.is_full:
            return False
        if not self.position.watermark.add(event.seq, event.time):
            return False
        now = monotonic()
        self.last_message[self.position.relay] = now
        self.last_error = self.failing_since = None
        self.metrics.events_received[event.kind].inc()
        self.inbox.append(ReceivedMessage(event.seq, frame, event, now))
        return True

    async def _process(self, event: Event, frame: bytes) -> None:
        """Process any message."""
        self.stage.moved()
        at_start = not self.continuity.checked and not isinstance(event, InfoEvent | StreamError)
        if at_start and not await self.continuity.is_new(event):  # the stored cursor includes it
            self.metrics.events_received[event.kind].inc()
            self.metrics.events[event.kind, Outcome.REPLAYED].inc()
        else:
            await self._handle(event, frame)
        self.stage.idle()

    async def begin_connection(self, relay: str) -> int | None:
        """Return the cursor for a new connection, after all messages of the previous one are settled."""
        await self._wait_until_settled()
        entry = await self.continuity.begin(relay)
        start = entry.resumed_at or Position(entry.cursor, None)
        self.position.begin(relay, entry.epoch, Watermark(*start))
        self.stage.idle()
        return entry.cursor

    async def _wait_until_settled(self) -> None:
        """Wait for the batch writer, which is no work of this stage."""
        self.stage.idle()
        await self.inbox.wait_until_settled()
        self.stage.moved()

    async def _put(self, received: ReceivedMessage) -> None:
        """Put a message into the inbox, possibly after waiting for the batch writer."""
        if self.inbox.is_full:
            self.stage.idle()
        await self.inbox.put(received)

    async def _handle(self, event: Event, frame: bytes) -> None:
        self.last_message[self.position.relay] = monotonic()
        if isinstance(event, InfoEvent):
            await self._handle_info(event)
        elif isinstance(event, StreamError):
            self._handle_error(event)
        elif isinstance(event, UnknownEvent | MalformedEvent):
            await self._handle_unproven(event, frame)
        else:
            await self._handle_valid(event, frame)

    async def _handle_unproven(self, event: UnknownEvent | MalformedEvent, frame: bytes) -> None:
        """Process a message whose number proves nothing: the cursor passes it with the next valid message."""
        self.metrics.events_received[event.kind].inc()
        if isinstance(event, MalformedEvent) and not self._must_record(event):
            self.metrics.events[event.kind, Outcome.IGNORED].inc()
        else:
            await self._put(ReceivedMessage(None, frame, event, monotonic()))

    async def _handle_valid(self, event: RepoEvent | OtherShardEvent, frame: bytes) -> None:
        """Process a message according to its number.

        If lower numbers repeat, the relay has lost its sequence numbers, and an operator must decide what to do.
        """
        watermark = self.position.watermark
        if watermark.has_leap_below(event.seq):
            await self._wait_until_settled()
            watermark.confirm_leap()
        last = watermark.last
        match watermark.classify(event.seq, event.time):
            case Step.REPEATED:
                self.metrics.events_received[event.kind].inc()
                self.metrics.events[event.kind, Outcome.REPLAYED].inc()
            case Step.LOWER:
                detail = f"{event.seq} after {last}"
                self._fail(f"the relay sends lower sequence numbers than before: {detail}")
                rejected = MalformedEvent(Rejection.SEQ_NOT_INCREASING, detail, event.kind, event.seq, event.did)
                await self._handle_unproven(rejected, frame)
            case Step.LEAP:
                if isinstance(event, AccountEvent):  # later messages of the account are compared with its number
                    event = event._replace(seq=last + 1)
                await self._accept(event, None, frame)
            case Step.NEXT:
                await self._accept(event, event.seq, frame)

    async def _accept(self, event: RepoEvent | OtherShardEvent, seq: int | None, frame: bytes) -> None:
        """Put a message of this shard into the inbox, and ignore others; `seq` is None if the cursor must not pass."""
        self.metrics.events_received[event.kind].inc()
        self.last_error = self.failing_since = None
        if not isinstance(event, OtherShardEvent):
            await self._put(ReceivedMessage(seq, frame, event, monotonic()))
            return
        if seq is not None:
            self.position.watermark.mark_done((seq,))
        self.metrics.events[event.kind, Outcome.IGNORED].inc()

    def _must_record(self, event: MalformedEvent) -> bool:
        """Return True if this shard records the rejection. All shards read the message, and one shard records it."""
        return self.shard.index == 0 if event.did is None else self.shard.owns(event.did)

    async def _handle_info(self, event: InfoEvent) -> None:
        self.metrics.events_received[event.kind].inc()
        self.metrics.events[event.kind, Outcome.IGNORED].inc()
        if event.name == "OutdatedCursor":
            await self.continuity.announce(self.position.watermark.last + 1)

    def _handle_error(self, event: StreamError) -> None:
        """Log the error; the relay closes the stream after it.

        A stored cursor from the future belongs to a sequence that has ended. A cursor that the operator chose is not
        changed (docs/protocol.md#sequence-numbers-and-cursors).
        """
        self.metrics.events_received[event.kind].inc()
        self.metrics.events[event.kind, Outcome.IGNORED].inc()
        error, known = f"{event.error[:64]}: {event.message[:200]}", self.last_error
        if event.error == "FutureCursor" and not self.continuity.checked and self.continuity.entry.resumed_at:
            self.continuity.restart(error)
            return
        self._fail(error)
        if error != known:
            log.error("relay.error", relay=self.position.relay, error=error)

    def _fail(self, error: str) -> None:
        self.last_error = error
        self.failing_since = self.failing_since or monotonic()
