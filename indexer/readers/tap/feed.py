"""The feed for clients of tap: read the change log, deliver each change to one client, store what was acknowledged.

It is a consumer of the change log, which is registered when the first client connects, so that the log waits for nobody
if no client uses the feed. If changes were trimmed before, the first client gets a snapshot of the stored records.

One process serves the feed at a time; the others wait. The clients share the work: see `delivery_window` for the order.
What a client does not acknowledge is delivered again, to any client. Records of hidden repos, and events that clients
refuse for too long, are set aside: see `deliveries`.

The window of unacknowledged changes is bounded. While it is full, nothing more is read, and the change log retains the
rest. A repo has a share of the window, and is read again from the log beyond it.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from time import time

import structlog

from indexer.concurrency.event_wait import wait_for_event
from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.change_log_reads import LogTrimmedError
from indexer.db.periodic import DatabaseAttempt
from indexer.db.tap_feed import FEED_CONSUMER, DeliveryProgress, FeedSession
from indexer.readers.tap.deliveries import Deliveries, RefusalLimits
from indexer.readers.tap.delivery_window import MAX_UNACKNOWLEDGED, DeliveryWindow
from indexer.telemetry.conditions import (
    FEED_CUT_OFF,
    FEED_EVENTS_SET_ASIDE,
    Conditions,
)
from indexer.telemetry.metrics import Metrics

READ_BATCH = 1_000
MAX_PAGES = 10
"""Pages of the log that are read at a time, both of new changes and of those that were left out."""
READS_BEHIND = 10
"""Reads of changes that were left out in one interval, so that a fast client does not wait for a large repo."""
POLL_SECONDS = 0.1
"""Interval at which the change log is read and acknowledgements are stored."""
CLAIM_SECONDS = 1.0
"""Interval at which a waiting process tries to own the feed."""
STOP_SECONDS = 2.0
"""Time for clients to acknowledge what was delivered before the process stops."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class TapFeed:
    """The stage that owns the feed, fills the window, and stores what was acknowledged.

    Attributes:
        one_per_repo: All changes of a repo in flight are of one request, as webhooks need it.
        max_unacknowledged: The maximum number of changes in the window.
        set_aside: The number of events that clients refused for so long that they were set aside.
        clients: The number of clients: connections, or the webhook.
        stage: Its progress. A read of the log and a write of acknowledgements are work.
    """

    _db: Database
    _conditions: Conditions
    _metrics: Metrics
    _refusal_limits: RefusalLimits
    one_per_repo: bool = False
    max_unacknowledged: int = MAX_UNACKNOWLEDGED
    set_aside: int = 0
    clients: int = 0

    def __post_init__(self) -> None:
        self.stage = StageProgress("tap feed")
        self._deliveries: Deliveries | None = None
        self._saved: DeliveryProgress | None = None
        self._waiting = 0
        self._wanted, self._begun, self._stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def deliveries(self) -> Deliveries:
        """Wait until this process owns the feed; return its deliveries. The consumer is registered if it is not yet."""
        self._waiting += 1
        self._wanted.set()
        try:
            while self._deliveries is None:
                await self._begun.wait()
            return self._deliveries
        finally:
            self._waiting -= 1

    def oldest_unacknowledged_seconds(self) -> float:
        """Return the age of the oldest change that no client has acknowledged; 0 if this process serves no feed."""
        oldest = self._deliveries and self._deliveries.window.oldest
        return max(0.0, time() - oldest.batch_time / 1_000_000) if oldest else 0.0

    async def run(self) -> None:
        """Own and serve the feed until `stop`."""
        waited = False
        while not self._stopping.is_set():
            self._wanted.clear()
            with DatabaseAttempt(self.stage):
                cut_off = await self._db.feed.is_cut_off()
                if cut_off:
                    self._report_cut_off()
                else:
                    self._conditions.end(FEED_CUT_OFF)
                if cut_off is False or (cut_off is None and self._waiting):
                    waited = await self._claim(waited=waited)
            await wait_for_event(self._wanted, CLAIM_SECONDS)

    async def _claim(self, *, waited: bool) -> bool:
        """Own and serve the feed, if no other process owns it; return True if one does."""
        async with self._db.feed.session() as session:
            if await session.lock.claim():
                with suppress(LogTrimmedError):  # the consumer was disconnected, or removed
                    await self._serve(session)
                return False
        if not waited:
            log.warning("feed.waiting", consumer=FEED_CONSUMER)
        return True

    async def stop(self) -> None:
        """Deliver nothing more, wait a moment for the acknowledgements of what was delivered, and end `run`.

        The client `@atproto/tap` waits forever if its connection ends before it has acknowledged what it processes.
        """
        if self._deliveries is not None:
            self._deliveries.paused = True
            await self._deliveries.wait_until_acknowledged(STOP_SECONDS)
        self._stopping.set()
        self._wanted.set()

    async def _serve(self, session: FeedSession) -> None:
        """Deliver until the session ends, or the consumer is removed; raise `LogTrimmedError` if it was cut off."""
        progress = await session.begin()
        if progress is None:
            return
        snapshot = progress.snapshot and progress.snapshot.did
        log.info("feed.began", consumer=FEED_CONSUMER, seq=progress.position, snapshot=snapshot)
        deliveries = Deliveries(self._db, progress, self._refusal_limits, one_per_repo=self.one_per_repo)
        self._report_set_aside(await session.count_refused())
        self._deliveries, self._saved = deliveries, None
        self._begun.set()
        try:
            while not session.lock.lost.is_set():
                last = self._stopping.is_set()
                self.stage.begin()
                await self._read(session, deliveries.window)
                await self._read_snapshot(session, deliveries.window)
                await deliveries.set_aside.read_due(session, self.max_unacknowledged // 2)
                deliveries.set_aside_late()
                if not await self._save(session, deliveries) or last:
                    return
                self.stage.idle()
                reads = READS_BEHIND if deliveries.window.behind else 1
                for _ in range(reads):
                    await wait_for_event(self._stopping, POLL_SECONDS / reads)
                    await self._read_behind(session, deliveries.window)
        finally:
            self._begun.clear()
            self._deliveries = None
            self._report_set_aside(0)
            deliveries.end()

    async def _read(self, session: FeedSession, window: DeliveryWindow) -> None:
        """Fill the window."""
        alone = window.snapshot_read_to is None and not window.snapshot_events
        window.capacity = self.max_unacknowledged if alone else self.max_unacknowledged // 2
        for _ in range(MAX_PAGES):
            if (limit := min(window.room, READ_BATCH)) <= 0:
                return
            changes = await session.changes_after(window.read_to, limit)
            window.add(changes)
            self.stage.moved()
            if len(changes) < limit:
                return

    async def _read_behind(self, session: FeedSession, window: DeliveryWindow) -> None:
        """Read changes that were left out."""
        for _ in range(MAX_PAGES):
            if (following := window.next_behind()) is None:
                return
            seq, dids = following
            window.add_behind(dids, await session.changes_after(seq - 1, READ_BATCH))
            self.stage.moved()

    async def _read_snapshot(self, session: FeedSession, window: DeliveryWindow) -> None:
        """Fill the other half of the window with the next repos and records of the snapshot."""
        while (after := window.snapshot_read_to) is not None:
            room = min(self.max_unacknowledged // 2 - window.snapshot_events, READ_BATCH)
            if room <= 0:
                return
            page = await session.snapshot_after(after, room)
            window.add_snapshot(page)
            self.stage.moved()
            if not page:
                if window.snapshot_read_to is None:
                    log.info("feed.snapshot-completed", consumer=FEED_CONSUMER)
                return

    async def _save(self, session: FeedSession, deliveries: Deliveries) -> bool:
        """Store new acknowledgements; return False if the consumer was removed."""
        progress, set_aside = deliveries.window.progress(), deliveries.set_aside.changes()
        if progress == self._saved and not any(set_aside):
            return True
        saved = await session.save(progress, set_aside)
        self._saved = progress
        if any(set_aside):
            self._report_set_aside(await session.count_refused())
        self.stage.moved()
        return saved

    def _report_set_aside(self, count: int) -> None:
        """Report that events were set aside because clients refused them; end the condition if there are none."""
        before, self.set_aside = self.set_aside, count
        if not count:
            self._conditions.end(FEED_EVENTS_SET_ASIDE)
        elif count != before:
            message = (
                f"clients refused {count} events for so long that they were set aside; `indexer rejected list --feed` "
                "lists them, and `indexer rejected replay --feed` sends them again"
            )
            self._conditions.report(FEED_EVENTS_SET_ASIDE, message=message)

    def _report_cut_off(self) -> None:
        message = (
            "the change log no longer waits for the clients of the feed, which were too far behind; run `select "
            f"atproto.unregister_reader('{FEED_CONSUMER}')`, and the next client that connects gets all records again"
        )
        self._conditions.report(FEED_CUT_OFF, message=message)
