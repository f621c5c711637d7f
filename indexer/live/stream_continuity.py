"""Check at the start of a connection that no message is missing, and open a gap if one may be."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

import structlog

from indexer.crash_points import crash_point
from indexer.db.open_gaps import OpenGaps
from indexer.db.periodic import DatabaseAttempt
from indexer.live.stream_entry import Continuity, StreamEntries, StreamEntry, continuity
from indexer.net.relay.subscription import Subscription
from indexer.reasons import GapReason
from indexer.sync.events import MAX_SEQ, Event, MalformedEvent, UnknownEvent
from indexer.sync.stream import Gap, OpenGap

PROOF_TIMEOUT = 15.0
"""Seconds after the connection in which the relay must send the message at the cursor again."""
RETRY_SECONDS = 1.0
"""Pause between two attempts to load the cursors or to store a gap."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


class StreamContinuity:
    """The start of the present connection of one shard.

    A gap is stored before the first message after it is processed, so no cursor passes a gap that is not stored.

    Attributes:
        entry: Where the connection entered the stream.
        checked: True once it is known whether messages before the first one are missing. If some are, a gap is stored.
    """

    def __init__(
        self,
        entries: StreamEntries,
        gaps: OpenGaps,
        subscription: Subscription,
        shard: str,
        *,
        proof_timeout: float = PROOF_TIMEOUT,
        retry: float = RETRY_SECONDS,
    ) -> None:
        self._entries = entries
        self._gaps = gaps
        self._subscription = subscription
        self._shard = shard
        self._proof_timeout = proof_timeout
        self._pause = retry
        # Opened before the first new message, because the relay said that messages are lost, or said nothing.
        self._early_gap: OpenGap | None = None
        self._restarting = False
        self.entry = StreamEntry("", 0, None)
        self.checked = True

    @property
    def is_known(self) -> bool:
        """True while the stream is connected, and it is known whether messages before it are missing."""
        return self._subscription.connection is not None and (self.checked or self._early_gap is not None)

    async def begin(self, relay: str) -> StreamEntry:
        """Return the entry for a new connection, after its gap is stored, if it has one.

        The gaps are loaded again, because a former owner of the shard may have opened one.

        Raises:
            OSError: The relay is unavailable.
        """
        await self._retry(self._gaps.refresh)
        self.entry = entry = await self._retry(lambda: self._entries.entry(relay))
        if entry.gap is not None:
            await self._open(entry.gap)
        crash_point("stream.entered")
        self.checked = entry.resumed_at is None
        self._early_gap = None
        self._restarting = False
        return entry

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
        self._entries.end_epoch(self.entry)
        cursor = self.entry.resumed_at and self.entry.resumed_at.seq
        log.error("relay.sequence-restarted", relay=self.entry.relay, cursor=cursor, evidence=evidence)

    def _enter_again(self) -> None:
        """End this connection. Its further messages count as replayed."""
        self._restarting = True
        self._subscription.reconnect()

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
            self._entries.resume_after_cursor(self.entry)
        elif self._early_gap is None:
            self._early_gap = await self._open(self._gap(GapReason.CURSOR_OUTDATED, first_seq))

    async def check_silence(self) -> None:
        """Open a gap if the relay has sent nothing since the connection, not even the message at the cursor.

        If it was not asked for that one, there was nothing to send: it would have said that the cursor is outdated.

        Raises:
            DatabaseError: The database is unavailable.
        """
        connection, point = self._subscription.connection, self.entry.resumed_at
        if connection is None or connection.frames or self.checked or self._early_gap is not None or point is None:
            return
        if monotonic() - connection.opened_at <= self._proof_timeout:
            return
        if self.entry.after_cursor:
            self.checked = True
        else:
            self._early_gap = await self._gaps.open(self._gap(GapReason.CURSOR_UNPROVEN, (point.seq or 0) + 1))

    async def _report_missing(self, first_seq: int, last_seq: int) -> None:
        """Open a gap for these messages. If one was opened before the first message, store only where it ends."""
        connection = self._subscription.connection
        if connection is not None and connection.skips and last_seq <= (connection.cursor or 0):
            return  # only messages over the size limit are missing, and they are dead letters
        if self._early_gap is None:
            await self._open(self._gap(GapReason.CURSOR_OUTDATED, first_seq, last_seq))
        else:
            gap_id = self._early_gap.id
            await self._retry(lambda: self._gaps.set_last_seq(gap_id, last_seq))

    async def _open(self, gap: Gap) -> OpenGap:
        return await self._retry(lambda: self._gaps.open(gap))

    def _gap(self, reason: GapReason, first_seq: int, last_seq: int | None = None) -> Gap:
        first = first_seq if first_seq <= MAX_SEQ else None  # no message can follow the highest number
        return Gap(self.entry.relay, self._shard, reason, first, last_seq)

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, which is repeated while the database is unavailable."""
        while True:
            with DatabaseAttempt():
                return await attempt()
            await asyncio.sleep(self._pause)
