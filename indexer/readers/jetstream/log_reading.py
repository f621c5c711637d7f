"""Read the events of the change log: the newest ones once for all subscribers, and earlier ones for replays."""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple, NoReturn

import structlog

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.stage_progress import StageProgress
from indexer.concurrency.turns import Turns
from indexer.db import Database
from indexer.db.change_log_reads import ChangeSignal, LogTrimmedError
from indexer.db.periodic import DatabaseAttempt
from indexer.readers.jetstream.events import (
    ALL_EVENTS,
    EventChunk,
    EventFilter,
    LogPosition,
    encode_page,
    position_before,
)

WINDOW_BYTES = 32 << 20
WINDOW_SECONDS = 60.0
"""A subscriber that has caught up is disconnected when it is further behind than the window."""
RETRY_SECONDS = 1.0
FIRST_TIME = 10**15
"""Cursors from this one on are times, in microseconds since the Unix epoch; smaller ones are numbers of changes."""
PAGE_CHANGES = 1_000
PAGE_BYTES = 4 << 20
"""A page ends with the record by which its values reach this size. A record has at most 2 MiB."""
CACHED_PAGES = 8
CACHE_SECONDS = 10.0
"""Time for which a page is not read again, so that records that were deleted since are not sent for longer."""

log = structlog.get_logger(__name__)


async def load_chunk(
    db: Database, position: LogPosition, max_changes: int = PAGE_CHANGES, events: EventFilter = ALL_EVENTS
) -> EventChunk | None:
    """Return the events of the next entries of the log; None if there are no entries yet.

    If the filter selects none of them, the chunk has no events, and no records are read.

    Raises:
        DatabaseError: The database is unavailable.
        LogTrimmedError: Later entries have been trimmed.
    """
    page = await db.changes.page(position.seq, max_changes, PAGE_BYTES, events.may_select)
    return encode_page(position, page) if page.changes else None


class EventWindow:
    """The newest chunks of events, bounded by bytes and by age. All subscribers share it; none has a queue.

    The chunks follow each other without a gap. A subscriber that takes chunks slower than they are added finds its
    position before `first`: what it needs next is not in memory any more.

    Attributes:
        end: The position after the newest chunk; None while the window is closed.
    """

    def __init__(self, max_bytes: int = WINDOW_BYTES, max_seconds: float = WINDOW_SECONDS) -> None:
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._chunks: deque[EventChunk] = deque()
        self._bytes = 0
        self.end: LogPosition | None = None
        self._changed = asyncio.Event()

    @property
    def first(self) -> int:
        """The number of the last change before the oldest chunk."""
        self._drop_old()
        return self._chunks[0].before if self._chunks else self.last

    @property
    def last(self) -> int:
        """The number of the last change in the window."""
        return self.end.seq if self.end else 0

    def open(self, position: LogPosition) -> None:
        """Empty the window. The next chunk follows this position."""
        self.close()
        self.end = position
        self._notify()

    def close(self) -> None:
        """Empty the window, until it is opened at another position."""
        self._chunks.clear()
        self._bytes = 0
        self.end = None

    def add(self, chunk: EventChunk) -> None:
        """Add the next chunk, and drop the oldest ones that exceed the size limit, but never the new one.

        If a record is erased that the window has, all are dropped. Subscribers that are behind are disconnected.
        """
        if (erased := chunk.erased) and any(held.names(erased) for held in self._chunks):
            self.open(chunk.end)
        self._chunks.append(chunk)
        self.end = chunk.end
        chunk.on_growth = self._count
        self._count()
        self._notify()

    def after(self, seq: int) -> EventChunk | None:
        """Return the chunk with the change that follows `seq`, which is not before `first`; None if none follows."""
        index = bisect_right(self._chunks, seq, key=lambda chunk: chunk.end.seq)
        return self._chunks[index] if index < len(self._chunks) else None

    async def wait(self, seconds: float) -> bool:
        """Wait until the window changes, at most `seconds`; return False if it did not."""
        return await wait_for_event(self._changed, seconds)

    def _count(self) -> None:
        """Count the bytes again, and drop the oldest chunks that are too much."""
        self._bytes = sum([chunk.size for chunk in self._chunks])
        self._drop_old()

    def _drop_old(self) -> None:
        while self._chunks and (
            monotonic() - self._chunks[0].made_at > self._max_seconds
            or (self._bytes > self._max_bytes and len(self._chunks) > 1)
        ):
            self._bytes -= self._chunks.popleft().size

    def _notify(self) -> None:
        """Wake up everybody who waits now."""
        self._changed.set()
        self._changed = asyncio.Event()


class JetstreamReader:
    """Follows the change log while there are subscribers. Its window has the newest events."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.window = EventWindow()
        self.stage = StageProgress("jetstream reader")
        self.subscribers = 0
        self._wanted = asyncio.Event()
        self._signal: ChangeSignal | None = None

    @contextmanager
    def subscriber(self) -> Iterator[None]:
        """Follow the log during the block."""
        self.subscribers += 1
        self._wanted.set()
        if self._signal is not None and self.window.end is None:
            self._signal.notify()  # open the window now, and not after the next change
        try:
            yield
        finally:
            self.subscribers -= 1
            if not self.subscribers:
                self._wanted.clear()
                self.window.close()  # also in an outage: the next subscriber begins with new events

    async def run(self) -> NoReturn:
        """Fill the window while there are subscribers. After a database error, continue at the same position."""
        while True:
            await self._wanted.wait()
            with DatabaseAttempt(self.stage):
                async with self._db.changes.signal() as signal:
                    await self._follow(signal)
            if self._wanted.is_set():
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, signal: ChangeSignal) -> None:
        """Fill the window until there are no subscribers."""
        self._signal = signal
        try:
            while self._wanted.is_set():
                try:
                    await self._read_available()
                except LogTrimmedError as error:
                    log.warning("jetstream.log-trimmed", error=str(error), subscribers=self.subscribers)
                    self.window.close()
                    continue
                self.stage.idle()
                await signal.wait()
        finally:
            self._signal = None
            if not self._wanted.is_set():
                self.window.close()

    async def _read_available(self) -> None:
        """Add the events of all entries of the log that are not in the window yet, until the window is closed."""
        self.stage.begin()
        if self.window.end is None:
            self.window.open(LogPosition(await self._db.changes.latest_seq()))
        while (end := self.window.end) is not None and (chunk := await load_chunk(self._db, end)):
            if self.window.end is not end:
                return  # the last subscriber left during the read
            self.window.add(chunk)
            self.stage.moved()
            await asyncio.sleep(0)  # subscribers send this chunk before the next one is read


class Start(NamedTuple):
    """Where a subscriber with a cursor begins."""

    position: LogPosition
    is_seq: bool = False  # the cursor was the number of a change, and not a time
    too_old: bool = False  # the oldest change is newer than the cursor
    ahead: bool = False  # the cursor is beyond the next number


class ReplayPages:
    """Loads the pages of replays, one at a time, so that any number of replays uses one database connection.

    The networks of the clients take turns. Pages end at multiples of `PAGE_CHANGES`. So subscribers that replay the
    same part of the log, as all do after a restart, soon ask for the same pages.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self._turns = Turns()
        self._pages = BoundedDict[int, EventChunk](CACHED_PAGES)

    async def start(self, network: str, cursor: int) -> Start:
        """Return where a subscriber with this cursor begins: at least with the oldest change.

        Raises:
            DatabaseError: The database is unavailable.
        """
        changes, is_seq = self._db.changes, cursor < FIRST_TIME
        async with self._turns.turn(network):
            batch = await changes.batch_of(max(0, cursor)) if is_seq else await changes.find_batch(cursor)
            trimmed = await changes.trimmed_seq()
            ahead = is_seq and cursor > await changes.latest_seq() + 1
        position = batch and position_before(cursor - (batch.first_seq if is_seq else batch.time), batch)
        if position is None or position.seq < trimmed:
            if trimmed and not ahead:
                log.debug("jetstream.cursor-too-old", cursor=cursor, seq=trimmed)
            too_old = max(1, cursor) <= trimmed if is_seq else True
            return Start(LogPosition(trimmed), is_seq=is_seq, too_old=too_old, ahead=ahead)
        return Start(position, is_seq=is_seq, ahead=ahead)

    async def load(self, network: str, position: LogPosition, events: EventFilter) -> EventChunk | None:
        """Return the events of the entries after a position that a filter selects, or more; raise as `load_chunk`."""
        async with self._turns.turn(network):
            chunk = self._pages.get(position.seq)
            is_recent = chunk is not None and monotonic() - chunk.made_at <= CACHE_SECONDS
            if chunk is not None and is_recent and not any(map(events.may_select, chunk.skipped)):
                return chunk
            max_changes = PAGE_CHANGES - position.seq % PAGE_CHANGES
            loaded = await load_chunk(self._db, position, max_changes, events)
            if loaded is not None and loaded.end.seq % PAGE_CHANGES == 0:  # otherwise, the log may go on here
                self._pages[position.seq] = loaded
                loaded.on_growth = self._drop_pages
                self._drop_pages()
        return loaded

    def _drop_pages(self) -> None:
        while sum([page.size for page in self._pages.values()]) > WINDOW_BYTES:
            self._pages.popitem(last=False)
