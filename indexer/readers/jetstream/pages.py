"""Load events from the change log: the position of a cursor, and the pages that follow it, for all replays together."""

from collections import OrderedDict
from functools import partial
from time import monotonic

import structlog

from indexer.concurrency.turns import Turns
from indexer.db import Database
from indexer.db.feed_delivery import LoggedChange
from indexer.readers.jetstream.events import EventChunk, LogPosition, encode_page, position_before
from indexer.readers.jetstream.options import ALL_EVENTS, EventFilter
from indexer.readers.log_rate import LogRate

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
    page = await db.changes.page(position.seq, max_changes, PAGE_BYTES, partial(_is_wanted, events))
    return encode_page(position, page) if page.changes else None


def _is_wanted(events: EventFilter, change: LoggedChange) -> bool:
    return events.selects(change.did, change.collection, live=change.live)


class ReplayPages:
    """Loads the pages of replays, one at a time, so that any number of replays uses one database connection.

    The networks of the clients take turns.

    Pages end at multiples of `PAGE_CHANGES`. So subscribers that replay the same part of the log, as all do after a
    restart, soon ask for the same pages.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self._turns = Turns()
        self._log_rate = LogRate()
        self._pages: OrderedDict[int, tuple[float, EventChunk]] = OrderedDict()

    async def start(self, network: str, cursor: int) -> LogPosition:
        """Return the position from which a subscriber with this cursor continues: the oldest one if it is before that.

        Args:
            network: The network of the client.
            cursor: Microseconds since the Unix epoch.

        Raises:
            DatabaseError: The database is unavailable.
        """
        async with self._turns.turn(network):
            batch = await self._db.changes.find_batch(cursor)
            if batch is None:
                trimmed = await self._db.changes.trimmed_seq()
                if trimmed and self._log_rate.allows_line():
                    log.info("jetstream.cursor-too-old", cursor=cursor, seq=trimmed)
                return LogPosition(trimmed)
        return position_before(cursor, batch)

    async def load(self, network: str, position: LogPosition, events: EventFilter) -> EventChunk | None:
        """Return the events of the next entries of the log; None if there are no entries yet.

        Args:
            network: The network of the client.
            position: The position before the entries.
            events: The chunk may lack the events that this filter does not select.

        Raises:
            DatabaseError: The database is unavailable.
            LogTrimmedError: Later entries have been trimmed.
        """
        async with self._turns.turn(network):
            while self._pages and monotonic() - next(iter(self._pages.values()))[0] > CACHE_SECONDS:
                self._pages.popitem(last=False)
            if position.seq in self._pages:
                chunk = self._pages[position.seq][1]
                if not any(_is_wanted(events, change) for change in chunk.skipped):
                    return chunk
                del self._pages[position.seq]
            max_changes = PAGE_CHANGES - position.seq % PAGE_CHANGES
            loaded = await load_chunk(self._db, position, max_changes, events)
            if loaded is not None and loaded.end.seq % PAGE_CHANGES == 0:  # otherwise, the log may go on here
                self._pages[position.seq] = monotonic(), loaded
            while len(self._pages) > CACHED_PAGES:
                self._pages.popitem(last=False)
        return loaded
