"""The feed for clients of tap: read the change log, deliver each change to one client, store what was acknowledged.

It is a consumer of the change log, which is registered when the first client connects, so that the log waits for nobody
if no client uses the feed. If changes were trimmed before, the first client gets a snapshot of the stored records.

One process serves the feed at a time; the others wait. The clients share the work: see `delivery_window` for the order.
What a client does not acknowledge is delivered again, to any client.

The window of unacknowledged changes is bounded. While it is full, nothing more is read, and the change log retains the
rest.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from time import time
from typing import NamedTuple

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.monitoring.conditions import FEED_CUT_OFF, FEED_EVENT_REFUSED, Conditions
from indexer.monitoring.metrics import Metrics
from indexer.service.feed.delivery_window import RECORD_ACTIONS, DeliveryWindow
from indexer.service.feed.tap_events import identity_event, record_event
from indexer.service.periodic import DatabaseAttempt
from indexer.store import Store
from indexer.store.feed_rows import FEED_CONSUMER, FeedSession
from indexer.sync.feed_delivery import DeliveryProgress, LoggedChange, RefusedEvent, SnapshotPosition

MAX_UNACKNOWLEDGED = 10_000
"""Changes in the window: some hundred bytes each. As long as there is a snapshot, it may be half of them."""
READ_BATCH = 1_000
POLL_SECONDS = 0.1
"""Interval at which the change log is read and acknowledgements are stored."""
CLAIM_SECONDS = 1.0
"""Interval at which a waiting process tries to own the feed."""
STOP_SECONDS = 2.0
"""Time for clients to acknowledge what was delivered before the process stops."""
MAX_LOAD_LENGTH = 1 << 20
"""Characters of record values that are loaded at a time, for one client."""
REFUSED_ATTEMPTS = 3
"""An event counts as refused after so many attempts, if clients have acknowledged others meanwhile."""
MAX_REFUSED = 20
"""Refused events that are reported."""

log = structlog.get_logger(__name__)


class Event(NamedTuple):
    """An event as it is sent: JSON in UTF-8."""

    seq: int
    message: bytes


class _Failure(NamedTuple):
    """The attempts to deliver an event that were not acknowledged.

    Attributes:
        since: When it first was, in Unix seconds.
        acknowledged: The number of events that clients had acknowledged by then.
        failure: What happened the last time.
    """

    attempts: int
    since: float
    acknowledged: int
    failure: str


class Deliveries:
    """The deliveries of this process, while it owns the feed. Clients take changes, and acknowledge them.

    Attributes:
        ended: Set when the process no longer owns the feed, or stops.
        paused: True if nothing more is delivered, because the process stops.
    """

    def __init__(self, store: Store, metrics: Metrics, progress: DeliveryProgress, *, one_per_repo: bool) -> None:
        self._store = store
        self._metrics = metrics
        self.window = DeliveryWindow(progress, one_per_repo=one_per_repo)
        self.ended = asyncio.Event()
        self.paused = False
        self._changed = asyncio.Event()
        self._acknowledged = asyncio.Event()  # or given back
        self._failures: dict[int, _Failure] = {}
        self._acknowledgements = 0
        self._turn = asyncio.Lock()  # its waiters come in the order of their calls, so that all clients get a share

    def add(self, changes: Iterable[LoggedChange]) -> None:
        """Add the next changes of the log."""
        self.window.add(changes)
        self._changed.set()

    def add_snapshot(self, positions: Sequence[SnapshotPosition]) -> None:
        """Add the next repos and records of the snapshot. Without any, it is complete."""
        self.window.add_snapshot(positions)
        self._changed.set()

    async def take(self, limit: int) -> list[LoggedChange]:
        """Wait until changes may be delivered; return at most `limit` of them, which are in flight from now on.

        Returns:
            Nothing if the deliveries have ended.
        """
        async with self._turn:
            while not self.ended.is_set():
                if not self.paused and (taken := self.window.take(limit)):
                    return taken
                self._changed.clear()
                await self._changed.wait()
        return []

    def end(self) -> None:
        """Deliver nothing more."""
        self.ended.set()
        self._changed.set()

    def acknowledge(self, seqs: Iterable[int]) -> None:
        """Record that a client has processed these changes."""
        for seq in seqs:
            self._acknowledgements += self.window.acknowledge(seq)
            self._failures.pop(seq, None)
        self._notify()

    def give_back(self, seqs: Iterable[int]) -> None:
        """Deliver these changes again, unless they are acknowledged."""
        self.window.give_back(seqs)
        self._notify()

    def give_back_after(self, seconds: float, seq: int) -> None:
        """Deliver this change again after a pause."""
        asyncio.get_running_loop().call_later(seconds, self.give_back, [seq])

    def count_failure(self, seq: int, failure: str) -> int:
        """Count that a change was sent and not acknowledged, and why; return how often it was."""
        if seq not in self.window:
            return 0
        before = self._failures.get(seq) or _Failure(0, time(), self._acknowledgements, failure)
        self._failures[seq] = before._replace(attempts=before.attempts + 1, failure=failure)
        return before.attempts + 1

    def refused(self) -> list[RefusedEvent]:
        """Return the events that clients do not acknowledge although they acknowledge others, the first ones."""
        found = (
            RefusedEvent(seq, change.action, _uri(change), failure.attempts, failure.since, failure.failure)
            for seq, failure in self._failures.items()
            if failure.attempts >= REFUSED_ATTEMPTS
            and failure.acknowledged < self._acknowledgements
            and (change := self.window.get(seq)) is not None
        )
        return list(islice(found, MAX_REFUSED))

    def _notify(self) -> None:
        self._changed.set()
        self._acknowledged.set()

    async def wait_until_acknowledged(self, seconds: float) -> None:
        """Wait until no change is in flight, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.window.in_flight:
                    self._acknowledged.clear()
                    await self._acknowledged.wait()

    async def events(self, changes: Sequence[LoggedChange]) -> list[Event]:
        """Return the events of changes in flight.

        Changes without an event are acknowledged: a later change says why. Changes whose values would need too much
        memory now are given back.

        Raises:
            DatabaseError: The values could not be loaded.
        """
        keys = [_key(change) for change in changes if change.action in RECORD_ACTIONS - {"delete"}]
        dids = [change.did for change in changes if change.action not in RECORD_ACTIONS]
        records, omitted = await self._store.feed_records(keys, MAX_LOAD_LENGTH) if keys else ({}, frozenset())
        accounts = await self._store.feed_accounts(dids) if dids else {}
        later = [change for change in changes if _key(change) in omitted]
        events = [
            (
                change.seq,
                record_event(change, records.get(_key(change)), self._metrics.feed_value_omitted)
                if change.action in RECORD_ACTIONS
                else identity_event(change, accounts.get(change.did)),
            )
            for change in changes
            if _key(change) not in omitted
        ]
        self.give_back([change.seq for change in later])
        for seq in [seq for seq, message in events if message is None]:
            self.window.acknowledge(seq)
        self._notify()
        return [Event(seq, message) for seq, message in events if message is not None]


def _key(change: LoggedChange) -> tuple[str, str, str]:
    return change.did, change.collection or "", change.rkey or ""


def _uri(change: LoggedChange) -> str:
    path = f"/{change.collection}/{change.rkey}" if change.collection else ""
    return f"at://{change.did}{path}"


class TapFeed:
    """The stage that owns the feed, fills the window, and stores what was acknowledged.

    Attributes:
        stage: Its progress. A read of the log and a write of acknowledgements are work.
        refused: The events that clients do not acknowledge although they acknowledge others.
        max_unacknowledged: The maximum number of changes in the window.
    """

    def __init__(self, store: Store, conditions: Conditions, metrics: Metrics, *, one_per_repo: bool = False) -> None:
        """With `one_per_repo`, a repo never has two changes in flight, as webhooks need it."""
        self.stage = StageProgress("tap feed")
        self._store = store
        self._conditions = conditions
        self._metrics = metrics
        self._one_per_repo = one_per_repo
        self._deliveries: Deliveries | None = None
        self._begun = asyncio.Event()
        self._stopping = asyncio.Event()
        self._saved: tuple[DeliveryProgress, list[RefusedEvent]] | None = None
        self._waiting = 0
        self._wanted = asyncio.Event()
        self.refused: list[RefusedEvent] = []
        self.max_unacknowledged = MAX_UNACKNOWLEDGED

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
                cut_off = await self._store.feed_is_cut_off()
                if cut_off:
                    self._report_cut_off()
                else:
                    self._conditions.end(FEED_CUT_OFF)
                if cut_off is False or (cut_off is None and self._waiting):
                    waited = await self._claim(waited=waited)
            await self._pause(CLAIM_SECONDS, self._wanted)

    async def _claim(self, *, waited: bool) -> bool:
        """Own and serve the feed, if no other process owns it; return True if one does."""
        async with self._store.feed_session() as session:
            if await session.lock.claim():
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

    async def _serve(self, session: FeedSession) -> None:
        """Deliver until the session ends, or the consumer has lost its place in the log."""
        progress = await session.begin()
        if progress is None:
            return
        log.info(
            "feed.began",
            consumer=FEED_CONSUMER,
            seq=progress.position,
            snapshot=progress.snapshot and progress.snapshot.did,
        )
        deliveries = Deliveries(self._store, self._metrics, progress, one_per_repo=self._one_per_repo)
        self._deliveries, self._saved = deliveries, None
        self._begun.set()
        try:
            while not session.lock.lost.is_set():
                last = self._stopping.is_set()
                self.stage.begin()
                if not await self._read(session, deliveries):
                    return
                await self._read_snapshot(session, deliveries)
                if not await self._save(session, deliveries) or last:
                    return
                self.stage.idle()
                await self._pause(POLL_SECONDS)
        finally:
            self._begun.clear()
            self._deliveries = None
            self._report_refused([])
            deliveries.end()

    async def _read(self, session: FeedSession, deliveries: Deliveries) -> bool:
        """Fill the window; return False if changes have been trimmed that were not delivered."""
        window = deliveries.window
        most = self.max_unacknowledged if window.snapshot_read_to is None else self.max_unacknowledged // 2
        while (room := most - len(window)) > 0:
            limit = min(room, READ_BATCH)
            changes = await session.changes_after(window.read_to, limit)
            if changes is None:
                return False
            deliveries.add(changes)
            self.stage.moved()
            if len(changes) < limit:
                break
        return True

    async def _read_snapshot(self, session: FeedSession, deliveries: Deliveries) -> None:
        """Fill the other half of the window with the next repos and records of the snapshot."""
        window = deliveries.window
        while (after := window.snapshot_read_to) is not None:
            room = min(self.max_unacknowledged // 2 - window.snapshot_events, READ_BATCH)
            if room <= 0:
                return
            page = await session.snapshot_after(after, room)
            deliveries.add_snapshot(page)
            self.stage.moved()
            if not page:
                if window.snapshot_read_to is None:
                    log.info("feed.snapshot-completed", consumer=FEED_CONSUMER)
                return

    async def _save(self, session: FeedSession, deliveries: Deliveries) -> bool:
        """Store new acknowledgements; return False if the consumer was removed."""
        state = deliveries.window.progress(), deliveries.refused()
        if state == self._saved:
            return True
        saved = await session.save(*state)
        self._saved = state
        self._report_refused(state[1])
        self.stage.moved()
        return saved

    async def _pause(self, seconds: float, *events: asyncio.Event) -> None:
        """Wait, but not longer than until `stop`, or until one of the events is set."""
        waits = [asyncio.create_task(event.wait()) for event in (self._stopping, *events)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _report_refused(self, refused: list[RefusedEvent]) -> None:
        """Report events that were refused again, and end the conditions of those that are not refused any more."""
        before, self.refused = self.refused, refused
        for event in refused:
            if event not in before:
                message = (
                    f"clients have not acknowledged event {event.id} ({event.action} of {event.uri}), which was sent "
                    f"{event.attempts} times: {event.failure}; it is sent again, later events of this repo wait, and "
                    "the change log is retained for it"
                )
                self._conditions.report(FEED_EVENT_REFUSED, event.uri, message=message)
        for uri in {event.uri for event in before} - {event.uri for event in refused}:
            self._conditions.end(FEED_EVENT_REFUSED, uri)

    def _report_cut_off(self) -> None:
        message = (
            "the change log no longer waits for the clients of the feed, which were too far behind; run `select "
            f"atproto.unregister_reader('{FEED_CONSUMER}')`, and the next client that connects gets all records again"
        )
        self._conditions.report(FEED_CUT_OFF, message=message)
