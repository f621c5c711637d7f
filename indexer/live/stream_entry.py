"""Decide where to enter the stream of a relay, and whether messages are missing before the first ones.

A stored cursor resumes the stream one message early: the relay must send the message at the cursor again, with the same
time. That proves that nothing is missing in between, also for relays that report neither an outdated nor a future
cursor. If the relay calls that position outdated, it may have forgotten only the message at the cursor, which is
stored: a host on which nothing happened for a day has. Then the stream is resumed at the cursor, and the relay's word
counts. Without a cursor, the stream is entered at the time of the last message that was stored from another relay.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from indexer.db import Database
from indexer.live.resume_point import ResumePoint, known_until, resume_point
from indexer.net.relay.seek import Entry
from indexer.reasons import GapReason
from indexer.sync.events import event_seconds
from indexer.sync.shard import Shard
from indexer.sync.stream import Gap, Watermark

OVERLAP_SECONDS = 900.0
"""Seconds before the last stored message at which another relay is entered: relays differ in delay and order."""

Start = Literal["live", "oldest"] | int
Seek = Callable[[str, float], Awaitable[Entry]]
"""Finds the position of an event time (Unix seconds) in the stream of a relay; see `indexer.net.relay.seek`."""


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


class StreamEntries:
    """Finds the entry for each connection of one shard."""

    def __init__(self, db: Database, seek: Seek, shard: Shard, start: Start) -> None:
        self._db = db
        self._seek = seek
        self._shard = shard
        self._start = start
        self._ended_epochs: dict[str, int] = {}
        self._outdated: dict[str, ResumePoint | None] = {}

    def end_epoch(self, entry: StreamEntry) -> None:
        """Remember that the relay has started a new sequence, so that the stored cursor means nothing in it."""
        self._ended_epochs[entry.relay] = entry.epoch

    def resume_after_cursor(self, entry: StreamEntry) -> None:
        """Let the next connection to the relay resume at the stored cursor, not one message early."""
        self._outdated[entry.relay] = entry.resumed_at

    async def entry(self, relay: str) -> StreamEntry:
        """Return the entry for a new connection to `relay`.

        Raises:
            DatabaseError: The database is unavailable.
            OSError: The relay is unavailable (includes TimeoutError).
        """
        cursors = await self._db.gaps.cursors()
        point = resume_point(cursors, relay, self._shard)
        restarted = self._ended_epochs.get(relay) == point.epoch
        last_time = known_until(cursors, self._shard)
        outdated = self._outdated.pop(relay, None) == point
        resumed = None if restarted else _resumed(relay, point, after_cursor=outdated)
        if resumed is not None and not _is_far_behind(point, last_time):
            return resumed
        epoch = point.epoch + restarted
        if last_time is None:
            return await self._first_entry(relay, epoch)
        found = await self._seek(relay, last_time - OVERLAP_SECONDS)
        if resumed is not None and (found.cursor or 0) <= (point.seq or 0):
            return resumed
        complete = found.oldest_time is not None and found.oldest_time <= last_time
        reason = GapReason.SEQUENCE_RESTARTED if restarted else None if complete else GapReason.NO_CURSOR
        gap = self._gap(relay, reason)
        return StreamEntry(relay, epoch, found.cursor, gap=gap, from_oldest=found.cursor == 0)

    async def _first_entry(self, relay: str, epoch: int) -> StreamEntry:
        """Return the entry if no cursor of any relay is stored. Repos that are synchronized may be outdated then."""
        cursor = self._start if isinstance(self._start, int) else {"live": None, "oldest": 0}[self._start]
        reason = GapReason.NO_CURSOR if await self._db.gaps.has_synchronized_repo(self._shard.buckets) else None
        return StreamEntry(relay, epoch, cursor, gap=self._gap(relay, reason), from_oldest=cursor == 0)

    def _gap(self, relay: str, reason: GapReason | None) -> Gap | None:
        return None if reason is None else Gap(relay, str(self._shard), reason)


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
