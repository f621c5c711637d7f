"""The firehose consumer: enter the stream of a relay, and put its messages into the inbox, in order.

A stored cursor resumes the stream one message early: the relay must send the message at the cursor again, with the same
time. That proves that nothing is missing in between, also for relays that report neither an outdated nor a future
cursor. If the relay calls that position outdated, it may have forgotten only the message at the cursor, which is
stored: a host on which nothing happened for a day has. Then the stream is resumed at the cursor, and the relay's word
counts. Without a cursor of this relay, the setting decides, and a gap is opened. After a message over the size limit,
which follows the cursor, only new messages are requested.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Literal, Protocol

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.crash_points import crash_point
from indexer.db import Database
from indexer.db.periodic import when_available
from indexer.live.inbox import Inbox
from indexer.live.stream_position import StreamPosition
from indexer.net.relay.subscription import Subscription
from indexer.reasons import GapReason, Rejection
from indexer.sync.batch import ReceivedMessage
from indexer.sync.events import (
    MAX_SEQ,
    AccountEvent,
    CommitEvent,
    Event,
    InfoEvent,
    MalformedEvent,
    OtherShardEvent,
    RepoEvent,
    StreamError,
    UnknownEvent,
    event_seconds,
)
from indexer.sync.repo import Outcome
from indexer.sync.shard import Shard
from indexer.sync.stream import Gap, OpenGap, Position, Step, Watermark, resume_point
from indexer.telemetry.metrics import Metrics

PROOF_TIMEOUT = 15.0
"""Seconds after the connection in which the relay must send the message at the cursor again."""
RETRY_SECONDS = 1.0
"""Pause between two attempts to load the cursors or to store a gap."""

Start = Literal["live", "oldest"] | int

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """The start of a connection."""

    relay: str
    epoch: int
    cursor: int | None  # the cursor of the request; None asks for new messages only
    resumed_at: Position | None = None  # the stored cursor, whose message the relay must send again
    gap: Gap | None = None  # messages that are missing, or may be, before the first message of this connection
    from_oldest: bool = False  # the relay is asked for all that it has: an outdated cursor means nothing

    @property
    def after_cursor(self) -> bool:
        """True if the stream is resumed at the stored cursor: the relay no longer has the message there."""
        return self.resumed_at is not None and self.cursor == self.resumed_at.seq


class GapRecorder(Protocol):
    """Records gaps, as `OpenGaps` does."""

    async def refresh(self) -> None:
        """Load what is known about gaps."""

    async def open(self, gap: Gap) -> OpenGap:
        """Record a gap before the next message is processed."""


@dataclass(eq=False)
class StreamContinuity:
    """The start of the present connection of one shard.

    A gap is stored before the first message after it is processed, so no cursor passes a gap that is not stored.

    Attributes:
        first_entries: Holds the first entry until all streams of the process have theirs. Otherwise, at the first start
            of all, one stream would find what another one has just stored, and open a gap.
        entry: Where the connection entered the stream.
        checked: True once it is known whether messages before the first one are missing. If some are, a gap is stored.
    """

    db: Database
    gaps: GapRecorder
    subscription: Subscription
    shard: Shard
    start: Start  # of a stream without a cursor; a number is only for the first stream
    proof_timeout: float = PROOF_TIMEOUT
    retry: float = RETRY_SECONDS
    first_entries: asyncio.Barrier | None = None

    def __post_init__(self) -> None:
        # Opened before the first new message, because the relay said that messages are lost, or said nothing.
        self._early_gap: OpenGap | None = None
        self._restarting = False
        self._ended_epochs: dict[str, int] = {}  # of relays that have started a new sequence
        self._outdated: dict[str, Position] = {}  # cursors at which relays are resumed, not one message early
        self.entry = StreamEntry("", 0, None)
        self.checked = True

    @property
    def is_known(self) -> bool:
        """True while the stream is connected, and it is known whether messages before it are missing."""
        return self.subscription.connection is not None and (self.checked or self._early_gap is not None)

    async def begin(self, relay: str) -> StreamEntry:
        """Return the entry for a new connection.

        The gaps are loaded again, because a former owner of the shard may have opened one.
        """
        await when_available(self.gaps.refresh, self.retry)
        self.entry = entry = await when_available(lambda: self._find_entry(relay), self.retry)
        if self.first_entries is not None:
            await self.first_entries.wait()
            self.first_entries = None
        crash_point("stream.entered")
        self.subscription.oversized.discard(relay)
        self.checked = entry.resumed_at is None and entry.gap is None
        self._early_gap = None
        self._restarting = False
        return entry

    async def _find_entry(self, relay: str) -> StreamEntry:
        cursors = await self.db.gaps.cursors()
        epoch, point = resume_point(cursors, relay, self.shard)
        after_cursor = self._outdated.pop(relay, None) == point
        restarted, oversized = self._ended_epochs.get(relay) == epoch, relay in self.subscription.oversized
        if point is not None and not (restarted or oversized):
            if not point.seq:  # the relay had sent nothing yet
                return StreamEntry(relay, epoch, 0)
            return StreamEntry(relay, epoch, point.seq if after_cursor else point.seq - 1, point)
        is_first = not any(self.shard.overlaps(Shard.parse(cursor.shard)) for cursor in cursors)
        may_be_outdated = not is_first or await self.db.gaps.has_synchronized_repo(self.shard.buckets)
        reason = GapReason.SEQUENCE_RESTARTED if restarted else GapReason.NO_CURSOR
        gap = Gap(relay, str(self.shard), reason) if may_be_outdated else None
        chosen = self.start if isinstance(self.start, int) and is_first else None
        cursor = None if oversized else 0 if self.start == "oldest" else chosen
        return StreamEntry(relay, epoch + restarted, cursor, gap=gap, from_oldest=cursor == 0)

    async def is_new(self, event: Event) -> bool:
        """Compare a message at the start of the connection with the stored cursor; return True if it comes after it.

        A message of another sequence is not new: the stream is entered again. Without a cursor, the gap is opened.
        """
        if self._restarting:
            return False
        if (point := self.entry.resumed_at) is None:
            if self.entry.gap is not None and self._early_gap is None:
                await self._open(self.entry.gap)
            self.checked = True
            return True
        if not isinstance(event, RepoEvent | OtherShardEvent):
            return False  # its number proves nothing; the next message shows whether messages are missing
        seq, cursor = event.seq, point.seq or 0
        if seq == cursor - 1:
            return False
        if seq > cursor:
            if self._early_gap is not None:  # its first number is stored already
                gap_id = self._early_gap.id
                await when_available(lambda: self.db.gaps.set_last_seq(gap_id, seq - 1), self.retry)
            elif not self.entry.after_cursor:
                await self._open(self._gap(GapReason.CURSOR_OUTDATED, cursor + 1, seq - 1))
            self.checked = True
            return True
        stored, sent = event_seconds(point.event_time), event_seconds(event.time)
        if seq < cursor or (stored is not None and sent is not None and stored != sent):
            self.restart(f"seq {seq} at {event.time}")
        else:
            self.checked = True
        return False

    def restart(self, evidence: str) -> None:
        """Enter the stream again without the stored cursor, in a new epoch."""
        self._enter_again()
        self._ended_epochs[self.entry.relay] = self.entry.epoch
        cursor = self.entry.resumed_at and self.entry.resumed_at.seq
        log.error("relay.sequence-restarted", relay=self.entry.relay, cursor=cursor, evidence=evidence)

    def _enter_again(self) -> None:
        """End this connection. Its further messages count as replayed."""
        self._restarting = True
        self.subscription.reconnect()

    async def announce(self, first_seq: int) -> None:
        """Open a gap because the relay says that it no longer has all messages from `first_seq`.

        If it may lack only the message at the stored cursor, enter the stream again without asking for that one.
        Bluesky's PDS compares the age of the first message after the requested position with its window, which is a
        day (`packages/pds/src/api/com/atproto/sync/subscribeRepos.ts`).
        """
        if self._restarting or self.entry.from_oldest:
            return
        if not self.checked and self.entry.resumed_at is not None and not self.entry.after_cursor:
            self._enter_again()
            self._outdated[self.entry.relay] = self.entry.resumed_at
        elif self._early_gap is None:
            self._early_gap = await self._open(self._gap(GapReason.CURSOR_OUTDATED, first_seq))

    async def check_silence(self) -> None:
        """Open the gap of a connection without a cursor, or one if the relay does not send the message at the cursor.

        If it was not asked for that one, there was nothing to send: it would have said that the cursor is outdated.

        Raises:
            DatabaseError: The database is unavailable.
        """
        connection, entry = self.subscription.connection, self.entry
        if connection is None or connection.frames or self.checked or self._early_gap is not None:
            return
        if entry.gap is None and monotonic() - connection.opened_at <= self.proof_timeout:
            return
        if entry.after_cursor:
            self.checked = True
            return
        cursor = (entry.resumed_at and entry.resumed_at.seq) or 0
        opened = await self.gaps.open(entry.gap or self._gap(GapReason.CURSOR_UNPROVEN, cursor + 1))
        if entry is self.entry:
            self._early_gap = opened

    async def _open(self, gap: Gap) -> OpenGap:
        return await when_available(lambda: self.gaps.open(gap), self.retry)

    def _gap(self, reason: GapReason, first_seq: int, last_seq: int | None = None) -> Gap:
        first = first_seq if first_seq <= MAX_SEQ else None  # no message can follow the highest number
        return Gap(self.entry.relay, str(self.shard), reason, first, last_seq)


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
    name: str = "firehose consumer"

    def __post_init__(self) -> None:
        self.stage = StageProgress(self.name)
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
        if not self.continuity.checked or self.inbox.is_full(self.position.origin):
            return False
        if not self.position.watermark.add(event.seq, event.time):
            return False
        now = monotonic()
        self.last_message[self.position.origin.relay] = now
        self.last_error = self.failing_since = None
        self.metrics.events_received[event.kind].inc()
        self.inbox.append(ReceivedMessage(self.position.origin, event.seq, frame, event, now))
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
        await self.inbox.wait_until_settled(self.position.origin)
        self.stage.moved()

    async def _put(self, received: ReceivedMessage) -> None:
        """Put a message into the inbox, possibly after waiting for the batch writer."""
        if self.inbox.is_full(received.origin):
            self.stage.idle()
        await self.inbox.put(received)

    async def _handle(self, event: Event, frame: bytes) -> None:
        self.last_message[self.position.origin.relay] = monotonic()
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
        # All shards read the message, and one shard records its rejection.
        recorder = self.shard.index == 0 if event.did is None else self.shard.owns(event.did)
        if isinstance(event, MalformedEvent) and not recorder:
            self.metrics.events[event.kind, Outcome.IGNORED].inc()
        else:
            await self._put(ReceivedMessage(self.position.origin, None, frame, event, monotonic()))

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
            await self._put(ReceivedMessage(self.position.origin, seq, frame, event, monotonic()))
            return
        if seq is not None:
            self.position.watermark.mark_done((seq,))
        self.metrics.events[event.kind, Outcome.IGNORED].inc()

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
            log.error("relay.error", relay=self.position.origin.relay, error=error)

    def _fail(self, error: str) -> None:
        self.last_error = error
        self.failing_since = self.failing_since or monotonic()
