"""Decide where to enter the stream of a relay, and whether messages are missing before the first ones.

A stored cursor resumes the stream one message early: the relay must send the message at the cursor again, with the same
time. That proves that nothing is missing in between, also for relays that report neither an outdated nor a future
cursor. If the relay calls that position outdated, it may have forgotten only the message at the cursor, which is
stored: a host on which nothing happened for a day has. Then the stream is resumed at the cursor, and the relay's word
counts. Without a cursor, the stream is entered at the time of the last message that was stored from another relay.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from time import monotonic
from typing import Literal, TypeVar

import structlog

from indexer.crash_points import crash_point
from indexer.db import Database
from indexer.db.gaps import OpenGaps
from indexer.db.periodic import DatabaseAttempt
from indexer.net.relay.seek import Entry
from indexer.net.relay.subscription import Subscription
from indexer.reasons import GapReason
from indexer.sync.events import MAX_AHEAD, MAX_SEQ, Event, MalformedEvent, UnknownEvent, event_seconds
from indexer.sync.shard import Shard
from indexer.sync.stream import Gap, OpenGap, StoredCursor, Watermark

OVERLAP_SECONDS = 900.0
"""Seconds before the last stored message at which another relay is entered: relays differ in delay and order."""
PROOF_TIMEOUT = 15.0
"""Seconds after the connection in which the relay must send the message at the cursor again."""
RETRY_SECONDS = 1.0
"""Pause between two attempts to load the cursors or to store a gap."""

T = TypeVar("T")
Start = Literal["live", "oldest"] | int
Seek = Callable[[str, float], Awaitable[Entry]]
"""Finds the position of an event time (Unix seconds) in the stream of a relay; see `indexer.net.relay.seek`."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The position after which a shard resumes a stream.

    Attributes:
        epoch: The newest epoch of the relay's sequence.
        seq: None if the shard has no cursor in this epoch.
        event_time: The `time` field of the message at `seq`. With `seq`, it identifies the message.
    """

    epoch: int
    seq: int | None = None
    event_time: str | None = None


def resume_point(cursors: Sequence[StoredCursor], relay: str, shard: Shard) -> ResumePoint:
    """Return the position in the stream after which `shard` resumes: all its buckets have been processed up to there.

    The number of shards may change at any time: some buckets then receive messages again, which changes nothing.
    Buckets that were never processed do not count.
    """
    of_relay = [cursor for cursor in cursors if cursor.relay == relay]
    epoch = max((cursor.epoch for cursor in of_relay), default=0)
    reached: list[StoredCursor] = []
    for position in shard.positions:
        processed = [cursor for cursor in of_relay if position in cursor.shard.positions]
        current = [cursor for cursor in processed if cursor.epoch == epoch]
        if processed and not current:
            return ResumePoint(epoch)
        reached.extend([max(current, key=lambda cursor: cursor.seq)] if current else [])
    if not reached:
        return ResumePoint(epoch)
    lowest = min(reached, key=lambda cursor: cursor.seq)
    return ResumePoint(epoch, lowest.seq, lowest.event_time)


def known_until(cursors: Sequence[StoredCursor], shard: Shard) -> float | None:
    """Return the time of the last message that `shard` has stored from the relay that it consumed last.

    Returns:
        Unix seconds; 0 if the message has no time, None if no bucket of the shard was ever processed.
    """
    latest = [
        max(processed, key=lambda cursor: cursor.updated_at)
        for position in shard.positions
        if (processed := [cursor for cursor in cursors if position in cursor.shard.positions])
    ]
    return min(map(_known_until, latest), default=None)


def _known_until(cursor: StoredCursor) -> float:
    """Return the time of the message at the cursor, but not more than most accounts of the latest messages say.

    A time after the last update is wrong and is not used. If the result is too early, messages are received again. If
    it is too late, messages are lost.
    """
    seconds = event_seconds(cursor.event_time) or 0.0
    if seconds > cursor.updated_at + MAX_AHEAD:
        return 0.0
    bounds = (cursor.updated_at, cursor.caught_up_at, cursor.stored_until)
    return min(seconds, *[bound for bound in bounds if bound is not None])


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """The start of a connection.

    Attributes:
        epoch: The epoch of the relay's sequence.
        cursor: The cursor of the request; None asks for new messages only.
        resumed_at: The stored cursor, whose message the relay must send again; None if there is none.
        gap: Messages that may be missing before the first message of this connection.
        from_oldest: True if the relay is asked for all that it has. Then it means nothing that the cursor is outdated.
    """

    relay: str
    epoch: int
    cursor: int | None
    resumed_at: ResumePoint | None = None
    gap: Gap | None = None
    from_oldest: bool = False

    @property
    def after_cursor(self) -> bool:
        """True if the stream is resumed at the stored cursor: the relay no longer has the message there."""
        return self.resumed_at is not None and self.cursor == self.resumed_at.seq

    @property
    def watermark(self) -> Watermark:
        """The watermark at the start of the connection."""
        if self.resumed_at is not None:
            return Watermark(self.resumed_at.seq, self.resumed_at.event_time)
        return Watermark(self.cursor)


class Continuity(Enum):
    """The relation of a message at the start of a connection to the stored cursor."""

    REPLAYED = auto()
    PROVEN = auto()
    BROKEN = auto()
    RESTARTED = auto()


def continuity(resumed_at: ResumePoint, seq: int | None, event_time: str | None) -> Continuity:
    """Compare a message at the start of a connection with the stored cursor.

    Returns:
        REPLAYED for a message before the cursor, PROVEN for the message at the cursor, BROKEN if messages after the
        cursor are missing, RESTARTED if the message belongs to another sequence.
    """
    cursor = resumed_at.seq or 0
    if seq is None or seq == cursor - 1:
        return Continuity.REPLAYED
    if seq < cursor:
        return Continuity.RESTARTED
    if seq > cursor:
        return Continuity.BROKEN
    stored, sent = event_seconds(resumed_at.event_time), event_seconds(event_time)
    return Continuity.RESTARTED if stored is not None and sent is not None and stored != sent else Continuity.PROVEN


@dataclass(eq=False)
class StreamContinuity:
    """The start of the present connection of one shard.

    A gap is stored before the first message after it is processed, so no cursor passes a gap that is not stored.

    Attributes:
        entry: Where the connection entered the stream.
        checked: True once it is known whether messages before the first one are missing. If some are, a gap is stored.
    """

    db: Database
    gaps: OpenGaps
    subscription: Subscription
    seek: Seek
    shard: Shard
    start: Start
    proof_timeout: float = PROOF_TIMEOUT
    retry: float = RETRY_SECONDS

    def __post_init__(self) -> None:
        # Opened before the first new message, because the relay said that messages are lost, or said nothing.
        self._early_gap: OpenGap | None = None
        self._restarting = False
        self._ended_epochs: dict[str, int] = {}  # of relays that have started a new sequence
        self._outdated: dict[str, ResumePoint | None] = {}  # cursors at which relays are resumed, not one message early
        self.entry = StreamEntry("", 0, None)
        self.checked = True

    @property
    def is_known(self) -> bool:
        """True while the stream is connected, and it is known whether messages before it are missing."""
        return self.subscription.connection is not None and (self.checked or self._early_gap is not None)

    async def begin(self, relay: str) -> StreamEntry:
        """Return the entry for a new connection, after its gap is stored, if it has one.

        The gaps are loaded again, because a former owner of the shard may have opened one.

        Raises:
            OSError: The relay is unavailable.
        """
        await self._retry(self.gaps.refresh)
        self.entry = entry = await self._retry(lambda: self._find_entry(relay))
        if entry.gap is not None:
            await self._open(entry.gap)
        crash_point("stream.entered")
        self.checked = entry.resumed_at is None
        self._early_gap = None
        self._restarting = False
        return entry

    async def _find_entry(self, relay: str) -> StreamEntry:
        """Return the entry for a new connection to `relay`.

        Raises:
            DatabaseError: The database is unavailable.
            OSError: The relay is unavailable (includes TimeoutError).
        """
        cursors = await self.db.gaps.cursors()
        point = resume_point(cursors, relay, self.shard)
        restarted = self._ended_epochs.get(relay) == point.epoch
        last_time = known_until(cursors, self.shard)
        outdated = self._outdated.pop(relay, None) == point
        resumed = None if restarted else _resumed(relay, point, after_cursor=outdated)
        if resumed is not None and not _is_far_behind(point, last_time):
            return resumed
        epoch = point.epoch + restarted
        if last_time is None:
            return await self._first_entry(relay, epoch)
        found = await self.seek(relay, last_time - OVERLAP_SECONDS)
        if resumed is not None and (found.cursor or 0) <= (point.seq or 0):
            return resumed
        complete = found.oldest_time is not None and found.oldest_time <= last_time
        reason = GapReason.SEQUENCE_RESTARTED if restarted else None if complete else GapReason.NO_CURSOR
        gap = self._gap_before(relay, reason)
        return StreamEntry(relay, epoch, found.cursor, gap=gap, from_oldest=found.cursor == 0)

    async def _first_entry(self, relay: str, epoch: int) -> StreamEntry:
        """Return the entry if no cursor of any relay is stored. Repos that are synchronized may be outdated then."""
        cursor = self.start if isinstance(self.start, int) else {"live": None, "oldest": 0}[self.start]
        reason = GapReason.NO_CURSOR if await self.db.gaps.has_synchronized_repo(self.shard.buckets) else None
        return StreamEntry(relay, epoch, cursor, gap=self._gap_before(relay, reason), from_oldest=cursor == 0)

    def _gap_before(self, relay: str, reason: GapReason | None) -> Gap | None:
        return None if reason is None else Gap(relay, str(self.shard), reason)

    async def is_new(self, event: Event) -> bool:
        """Compare a message at the start of the connection with the stored cursor; return True if it comes after it.

        A message of another sequence is not new: the stream is entered again.
        """
        if self._restarting or (point := self.entry.resumed_at) is None:
            return False
        if isinstance(event, UnknownEvent | MalformedEvent):
            return False  # its number proves nothing; the next message shows whether messages are missing
        match continuity(point, event.seq, getattr(event, "time", None)):
            case Continuity.REPLAYED:
                return False
            case Continuity.PROVEN:
                self.checked = True
                return False
            case Continuity.RESTARTED:
                self.restart(f"seq {event.seq} at {getattr(event, 'time', None)}")
                return False
            case Continuity.BROKEN:
                self.checked = True
                if self._early_gap is not None or not self.entry.after_cursor:
                    await self._report_missing((point.seq or 0) + 1, (event.seq or 0) - 1)
                return True

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
        if not self.checked and not self.entry.after_cursor:
            self._enter_again()
            self._outdated[self.entry.relay] = self.entry.resumed_at
        elif self._early_gap is None:
            self._early_gap = await self._open(self._gap(GapReason.CURSOR_OUTDATED, first_seq))

    async def check_silence(self) -> None:
        """Open a gap if the relay has sent nothing since the connection, not even the message at the cursor.

        If it was not asked for that one, there was nothing to send: it would have said that the cursor is outdated.

        Raises:
            DatabaseError: The database is unavailable.
        """
        connection, point = self.subscription.connection, self.entry.resumed_at
        if connection is None or connection.frames or self.checked or self._early_gap is not None or point is None:
            return
        if monotonic() - connection.opened_at <= self.proof_timeout:
            return
        if self.entry.after_cursor:
            self.checked = True
        else:
            self._early_gap = await self.gaps.open(self._gap(GapReason.CURSOR_UNPROVEN, (point.seq or 0) + 1))

    async def _report_missing(self, first_seq: int, last_seq: int) -> None:
        """Open a gap for these messages. If one was opened before the first message, store only where it ends."""
        connection = self.subscription.connection
        if connection is not None and connection.skips and last_seq <= (connection.cursor or 0):
            return  # only messages over the size limit are missing, and they are dead letters
        if self._early_gap is None:
            await self._open(self._gap(GapReason.CURSOR_OUTDATED, first_seq, last_seq))
        else:
            gap_id = self._early_gap.id
            await self._retry(lambda: self.db.gaps.set_last_seq(gap_id, last_seq))

    async def _open(self, gap: Gap) -> OpenGap:
        return await self._retry(lambda: self.gaps.open(gap))

    def _gap(self, reason: GapReason, first_seq: int, last_seq: int | None = None) -> Gap:
        first = first_seq if first_seq <= MAX_SEQ else None  # no message can follow the highest number
        return Gap(self.entry.relay, str(self.shard), reason, first, last_seq)

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, which is repeated while the database is unavailable."""
        while True:
            with DatabaseAttempt():
                return await attempt()
            await asyncio.sleep(self.retry)


def _resumed(relay: str, point: ResumePoint, *, after_cursor: bool) -> StreamEntry | None:
    """Return the entry at the stored cursor of the relay, or one message before it; None if there is none."""
    if point.seq is None:
        return None
    if point.seq == 0:  # the relay had sent nothing yet
        return StreamEntry(relay, point.epoch, 0)
    return StreamEntry(relay, point.epoch, point.seq if after_cursor else point.seq - 1, point)


def _is_far_behind(point: ResumePoint, last_time: float | None) -> bool:
    """Return True if later messages than those after the stored cursor of this relay are stored from another one.

    From the stored cursor, old messages would be processed again for hours, while new ones wait.
    """
    cursor_time = event_seconds(point.event_time)
    return cursor_time is not None and last_time is not None and last_time - OVERLAP_SECONDS > cursor_time
