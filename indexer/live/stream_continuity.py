"""Decide where to enter the stream of a relay, and whether messages are missing before the first ones.

A stored cursor resumes the stream one message early: the relay must send the message at the cursor again, with the same
time. That proves that nothing is missing in between, also for relays that report neither an outdated nor a future
cursor. If the relay calls that position outdated, it may have forgotten only the message at the cursor, which is
stored: a host on which nothing happened for a day has. Then the stream is resumed at the cursor, and the relay's word
counts. Without a cursor of this relay, the setting decides, and a gap is opened. After a message over the size limit,
which follows the cursor, only new messages are requested.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Literal, TypeVar

import structlog

from indexer.crash_points import crash_point
from indexer.db import Database
from indexer.db.gaps import OpenGaps
from indexer.db.periodic import DatabaseAttempt
from indexer.net.relay.subscription import Subscription
from indexer.reasons import GapReason
from indexer.sync.events import MAX_SEQ, Event, OtherShardEvent, RepoEvent, event_seconds
from indexer.sync.shard import Shard
from indexer.sync.stream import Gap, OpenGap, Position, resume_point

PROOF_TIMEOUT = 15.0
"""Seconds after the connection in which the relay must send the message at the cursor again."""
RETRY_SECONDS = 1.0
"""Pause between two attempts to load the cursors or to store a gap."""

T = TypeVar("T")
Start = Literal["live", "oldest"] | int

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """The start of a connection.

    Attributes:
        cursor: The cursor of the request; None asks for new messages only.
        resumed_at: The stored cursor, whose message the relay must send again; None if there is none.
        gap: Messages that are missing, or may be, before the first message of this connection.
        from_oldest: True if the relay is asked for all that it has. Then it means nothing that the cursor is outdated.
    """

    relay: str
    epoch: int
    cursor: int | None
    resumed_at: Position | None = None
    gap: Gap | None = None
    from_oldest: bool = False

    @property
    def after_cursor(self) -> bool:
        """True if the stream is resumed at the stored cursor: the relay no longer has the message there."""
        return self.resumed_at is not None and self.cursor == self.resumed_at.seq


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
    shard: Shard
    start: Start  # of a stream without a cursor; a number is only for the first stream
    proof_timeout: float = PROOF_TIMEOUT
    retry: float = RETRY_SECONDS

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
        await self._retry(self.gaps.refresh)
        self.entry = entry = await self._retry(lambda: self._find_entry(relay))
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
            if self._early_gap is not None or not self.entry.after_cursor:
                await self._report_missing(cursor + 1, seq - 1)
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

    async def _report_missing(self, first_seq: int, last_seq: int) -> None:
        """Open a gap for these messages. If one was opened before the first message, store only where it ends."""
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
