"""The feed for clients of tap: read the change log, deliver each change to one client, store what was acknowledged.

It is a consumer of the change log, which is registered when the first client connects, so that the log waits for nobody
if no client uses the feed. If changes were trimmed before, the first client gets a snapshot of the stored records.

One process serves the feed at a time; the others wait. The clients share the work: see `delivery_window` for the order.
What a client does not acknowledge is delivered again, to any client. Records of hidden repos, and events that clients
refuse for too long, are set aside: see `set_aside`.

The window of unacknowledged changes is bounded. While it is full, nothing more is read, and the change log retains the
rest. A repo has a share of the window, and is read again from the log beyond it.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from time import monotonic, time
from typing import NamedTuple

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Store
from indexer.db.feed_rows import FEED_CONSUMER, FeedRecords, FeedSession
from indexer.db.periodic import DatabaseAttempt
from indexer.readers.tap.delivery_window import (
    FIRST_SNAPSHOT_ID,
    MAX_IN_FLIGHT,
    MAX_UNACKNOWLEDGED,
    RECORD_ACTIONS,
    DeliveryWindow,
)
from indexer.readers.tap.events import identity_event, record_event
from indexer.readers.tap.set_aside import RefusalLimits, Sending, SetAsideEvents
from indexer.sync.feed_delivery import DeliveryProgress, LoggedChange, RefusedEvent, SnapshotPosition, StoredAccount
from indexer.telemetry.conditions import (
    FEED_CUT_OFF,
    FEED_EVENT_REFUSED,
    FEED_EVENTS_SET_ASIDE,
    FEED_STALLED,
    Conditions,
)
from indexer.telemetry.metrics import Metrics

READ_BATCH = 1_000
MAX_PAGES = 10
"""Pages of the log that are read at a time, both of new changes and of those that were left out."""
FULL_SECONDS = 1.0
"""Repos give up changes if the window is three quarters full for so long and clients acknowledge less than a fourth.

So a change waits for few others, unless clients are fast.
"""
READS_BEHIND = 10
"""Reads of changes that were left out in one interval, so that a fast client does not wait for a large repo."""
STALL_SECONDS = 120.0
"""The feed has stalled if clients have acknowledged nothing for so long, although it has something to deliver."""
POLL_SECONDS = 0.1
"""Interval at which the change log is read and acknowledgements are stored."""
CLAIM_SECONDS = 1.0
"""Interval at which a waiting process tries to own the feed."""
STOP_SECONDS = 2.0
"""Time for clients to acknowledge what was delivered before the process stops."""
MAX_LOAD_LENGTH = 1 << 20
"""Characters of record values that are loaded at a time, for one client."""
DUE_SECONDS = 1.0
"""Interval at which the feed looks for events that were set aside and are due."""
MAX_DUE = 100
"""Rows of such events that are sent at the same time."""
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
        refusals: The attempts after the first one before which clients had acknowledged other events.
        since: When it first was, in Unix seconds.
        acknowledged: The number of events that clients had acknowledged by then.
        last_acknowledged: The same at the last attempt.
        failure: What happened the last time.
    """

    attempts: int
    refusals: int
    since: float
    acknowledged: int
    last_acknowledged: int
    failure: str


class Deliveries:
    """The deliveries of this process, while it owns the feed. Clients take changes, and acknowledge them.

    Attributes:
        ended: Set when the process no longer owns the feed, or stops.
        paused: True if nothing more is delivered, because the process stops.
        set_aside: What is passed without its delivery.
        limits: When a refused event is set aside.
    """

    def __init__(
        self, store: Store, metrics: Metrics, progress: DeliveryProgress, limits: RefusalLimits, *, one_per_repo: bool
    ) -> None:
        self._store = store
        self._metrics = metrics
        self.limits = limits
        self.window = DeliveryWindow(progress, one_per_repo=one_per_repo)
        self.set_aside = SetAsideEvents(self.window)
        self._visible: dict[str, int] = {}  # by DID: the event that says so
        self._refusing = set[str]()  # repos of which an event was set aside
        self.ended = asyncio.Event()
        self.paused = False
        self._changed = asyncio.Event()
        self._acknowledged = asyncio.Event()  # or given back
        self._failures: dict[int, _Failure] = {}
        self._acknowledgements = 0
        self._progress = (0, monotonic())  # acknowledgements, and when this number was first seen
        self._full_since: tuple[int, float] | None = None  # acknowledgements then, and when
        self._turn = asyncio.Lock()  # its waiters come in the order of their calls, so that all clients get a share

    def add(self, changes: Iterable[LoggedChange]) -> None:
        """Add the next changes of the log."""
        self.window.add(changes)
        self._changed.set()

    def add_behind(self, dids: Iterable[str], changes: Sequence[LoggedChange]) -> None:
        """Add changes that were left out: see `DeliveryWindow.add_behind`."""
        self.window.add_behind(dids, changes)
        self._changed.set()

    def make_room(self) -> None:
        """Let repos that have many changes give some of them up if the window is full and clients are slow."""
        window, quarter, now = self.window, self.window.capacity // 4, monotonic()
        window.is_slow = window.is_slow and len(window) > quarter
        if window.capacity - len(window) >= quarter:
            self._full_since = None
            return
        acknowledgements, since = self._full_since or (self._acknowledgements, now)
        self._full_since = acknowledgements, since
        if now - since >= FULL_SECONDS or window.is_slow:
            self._full_since = None
            if self._acknowledgements - acknowledgements < quarter:
                window.make_room()

    def add_snapshot(self, positions: Sequence[SnapshotPosition]) -> None:
        """Add the next repos and records of the snapshot. Without any, it is complete."""
        self.window.add_snapshot(positions)
        self._changed.set()

    def add_set_aside(self, sending: Sending, paths: Sequence[tuple[str, str]], *, last: bool) -> None:
        """Add the next events that were set aside and are due."""
        self.set_aside.read(sending, paths, last=last)
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
            change = self.window.get(seq)
            self._acknowledgements += self.window.acknowledge(seq)
            self._failures.pop(seq, None)
            if change is not None and self._visible.get(change.did) == seq:
                del self._visible[change.did]
                self.set_aside.add_visible(change.did)
        self._notify()

    def give_back(self, seqs: Iterable[int]) -> None:
        """Deliver these changes again, unless they are acknowledged."""
        self.window.give_back(seqs)
        self._notify()

    def give_back_after(self, seconds: float, seq: int) -> None:
        """Deliver this change again after a pause."""
        asyncio.get_running_loop().call_later(seconds, self.give_back, [seq])

    def count_failure(self, seq: int, failure: str) -> int:
        """Count that a change was sent and not acknowledged, and why; return how often it was.

        A change that clients refuse for too long is set aside.
        """
        change, acknowledged = self.window.get(seq), self._acknowledgements
        if change is None:
            return 0
        before = self._failures.get(seq) or _Failure(0, 0, time(), acknowledged, acknowledged, failure)
        failed = before._replace(
            attempts=before.attempts + 1,
            refusals=before.refusals + (acknowledged > before.last_acknowledged),
            last_acknowledged=acknowledged,
            failure=failure,
        )
        self._failures[seq] = failed
        limits, refused = self.limits, failed.refusals + 1
        if (refused >= limits.attempts and time() - failed.since >= limits.seconds) or (
            refused >= limits.repo_attempts and change.did in self._refusing
        ):
            self._set_aside_refused(change, failed)
        return failed.attempts

    def _set_aside_refused(self, change: LoggedChange, failed: _Failure) -> None:
        self._refusing.add(change.did)
        self.set_aside.add_refused(change, failed.attempts, failed.since, failed.failure)
        self._failures.pop(change.seq, None)
        self.window.acknowledge(change.seq)
        self._notify()

    def set_aside_late(self) -> None:
        """Set changes aside that have waited for too long in a repo that is behind, or that had a refused event."""
        max_age, window = self.limits.max_age, self.window
        if window.oldest is None or time() - window.oldest.batch_time / 1_000_000 < max_age:
            return
        for change in window.in_order():
            since = change.batch_time / 1_000_000
            if time() - since < max_age or not (change.did in self._refusing or window.is_behind(change.did)):
                return
            late = _Failure(0, 0, since, 0, 0, f"it waited more than {max_age:g} seconds for other events of its repo")
            self._set_aside_refused(change, self._failures.get(change.seq, late))

    def stalled_seconds(self, *, has_clients: bool) -> float:
        """Return for how long clients have acknowledged nothing, although there are events that they do not refuse."""
        window, (acknowledgements, since) = self.window, self._progress
        has_events = window.room <= 0 or window.is_ready or any(not self._is_refused(seq) for seq in window.in_flight)
        if acknowledgements != self._acknowledgements or not (has_clients and has_events):
            since = monotonic()
        self._progress = self._acknowledgements, since
        return monotonic() - since

    def _is_refused(self, seq: int) -> bool:
        """Return True if clients have acknowledged others since they did not acknowledge this event."""
        failure = self._failures.get(seq)
        return failure is not None and failure.acknowledged < self._acknowledgements

    def refused(self) -> list[RefusedEvent]:
        """Return the events that clients do not acknowledge although they acknowledge others, the first ones."""
        found = (
            RefusedEvent(seq, change.action, _uri(change), failure.attempts, failure.since, failure.failure)
            for seq, failure in self._failures.items()
            if failure.attempts >= REFUSED_ATTEMPTS
            and self._is_refused(seq)
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
                while any(self.window.in_flight):
                    self._acknowledged.clear()
                    await self._acknowledged.wait()

    async def events(self, changes: Sequence[LoggedChange]) -> list[Event]:
        """Return the events of changes in flight.

        Changes without an event are acknowledged: a later change says why, or they are set aside. Changes whose values
        would need too much memory now are given back.

        Raises:
            DatabaseError: The values could not be loaded.
        """
        keys = [_key(change) for change in changes if _needs_record(change)]
        dids = [change.did for change in changes if change.action not in RECORD_ACTIONS]
        records = await self._store.feed_records(keys, MAX_LOAD_LENGTH) if keys else _NO_RECORDS
        accounts = await self._store.feed_accounts(dids) if dids else {}
        later = [change for change in changes if _needs_record(change) and _key(change) in records.omitted]
        events = [
            (
                change.seq,
                self._record_event(change, records)
                if change.action in RECORD_ACTIONS
                else self._identity_event(change, accounts.get(change.did)),
            )
            for change in changes
            if change not in later
        ]
        self.give_back([change.seq for change in later])
        for seq in [seq for seq, message in events if message is None]:
            self.window.acknowledge(seq)
        self._notify()
        return [Event(seq, message) for seq, message in events if message is not None]

    def _record_event(self, change: LoggedChange, records: FeedRecords) -> bytes | None:
        key = _key(change)
        if change.action == "delete" and (key in records.shown or key in records.hidden):
            return None  # it was set aside, and the record was written again since
        if key in records.hidden:
            self.set_aside.add_hidden(change)
            return None
        return record_event(change, records.shown.get(key), self._metrics.feed_value_omitted)

    def _identity_event(self, change: LoggedChange, account: StoredAccount | None) -> bytes | None:
        if account is not None and account.visible and change.seq < FIRST_SNAPSHOT_ID:
            self._visible[change.did] = change.seq
        else:
            self._visible.pop(change.did, None)
        return identity_event(change, account)


_NO_RECORDS = FeedRecords({}, frozenset(), frozenset())


def _needs_record(change: LoggedChange) -> bool:
    """Return True if the event depends on the stored record: a deletion does if it was set aside."""
    is_deletion_of_the_log = change.action == "delete" and change.seq < FIRST_SNAPSHOT_ID
    return change.action in RECORD_ACTIONS and not is_deletion_of_the_log


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
        set_aside: The number of events that clients refused for so long that they were set aside.
        max_unacknowledged: The maximum number of changes in the window.
        stall_seconds: See `STALL_SECONDS`.
        clients: The number of clients: connections, or the webhook.
    """

    def __init__(
        self,
        store: Store,
        conditions: Conditions,
        metrics: Metrics,
        refusal_limits: RefusalLimits,
        *,
        one_per_repo: bool = False,
    ) -> None:
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
        self._look_at = 0.0
        self.refused: list[RefusedEvent] = []
        self.set_aside = 0
        self._refusal_limits = refusal_limits
        self.max_unacknowledged = MAX_UNACKNOWLEDGED
        self.stall_seconds = STALL_SECONDS
        self.clients = 0

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
        deliveries = Deliveries(
            self._store, self._metrics, progress, self._refusal_limits, one_per_repo=self._one_per_repo
        )
        self._report_set_aside(await session.count_refused())
        self._deliveries, self._saved = deliveries, None
        self._begun.set()
        try:
            while not session.lock.lost.is_set():
                last = self._stopping.is_set()
                self.stage.begin()
                if not await self._read(session, deliveries):
                    return
                await self._read_snapshot(session, deliveries)
                await self._read_set_aside(session, deliveries)
                deliveries.set_aside_late()
                self._report_stalled(deliveries.stalled_seconds(has_clients=self.clients > 0))
                if not await self._save(session, deliveries) or last:
                    return
                self.stage.idle()
                reads = READS_BEHIND if deliveries.window.has_behind else 1
                for _ in range(reads):
                    await self._pause(POLL_SECONDS / reads)
                    if not await self._read_behind(session, deliveries):
                        return
        finally:
            self._begun.clear()
            self._deliveries = None
            self._report_refused([])
            self._report_set_aside(0)
            self._report_stalled(0.0)
            deliveries.end()

    async def _read(self, session: FeedSession, deliveries: Deliveries) -> bool:
        """Fill the window; return False if changes have been trimmed that were not delivered."""
        window = deliveries.window
        alone = window.snapshot_read_to is None and not window.snapshot_events
        window.capacity = self.max_unacknowledged if alone else self.max_unacknowledged // 2
        deliveries.make_room()
        for _ in range(MAX_PAGES):
            if (limit := min(window.room, READ_BATCH)) <= 0:
                break
            changes = await session.changes_after(window.read_to, limit)
            if changes is None:
                return False
            deliveries.add(changes)
            self.stage.moved()
            if len(changes) < limit:
                break
        return True

    async def _read_behind(self, session: FeedSession, deliveries: Deliveries) -> bool:
        """Read changes that were left out; return False if changes have been trimmed that were not delivered."""
        for _ in range(MAX_PAGES):
            if (following := deliveries.window.next_behind()) is None:
                break
            seq, dids = following
            changes = await session.changes_after(seq - 1, READ_BATCH)
            if changes is None:
                return False
            deliveries.add_behind(dids, changes)
            self.stage.moved()
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

    async def _read_set_aside(self, session: FeedSession, deliveries: Deliveries) -> None:
        """Fill the other half of the window with events that were set aside and are due."""
        set_aside, window = deliveries.set_aside, deliveries.window
        half = self.max_unacknowledged // 2
        if len(set_aside.sending) < MAX_DUE and monotonic() >= self._look_at:
            self._look_at = monotonic() + DUE_SECONDS
            for row in await session.due(MAX_DUE):
                set_aside.begin(row)
        for sending in list(set_aside.sending.values()):
            room = min(half - window.snapshot_events, max(1, min(half // 4, MAX_IN_FLIGHT)) - len(sending.ids))
            if (after := sending.after) is None or room <= 0:
                continue
            row = sending.row
            if row.reason == "refused":
                deliveries.add_set_aside(sending, [(row.collection, row.rkey)], last=True)
                continue
            page = await session.records_from_rev(row.did, row.rev, after, room)
            deliveries.add_set_aside(sending, page, last=len(page) < room)
            self.stage.moved()

    async def _save(self, session: FeedSession, deliveries: Deliveries) -> bool:
        """Store new acknowledgements; return False if the consumer was removed."""
        state, set_aside = (deliveries.window.progress(), deliveries.refused()), deliveries.set_aside.changes()
        if state == self._saved and not any(set_aside):
            return True
        saved = await session.save(*state, set_aside)
        self._saved = state
        self._report_refused(state[1])
        if any(set_aside):
            self._report_set_aside(await session.count_refused())
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
                    f"{event.attempts} times: {event.failure}; it is sent again, and later events of this repo wait, "
                    "until it is set aside"
                )
                self._conditions.report(FEED_EVENT_REFUSED, event.uri, message=message)
        for uri in {event.uri for event in before} - {event.uri for event in refused}:
            self._conditions.end(FEED_EVENT_REFUSED, uri)

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
            self._conditions.report(FEED_EVENTS_SET_ASIDE, message=message, value=count)

    def _report_stalled(self, seconds: float) -> None:
        """Report that the feed delivers nothing to its clients; end the condition if it does."""
        if seconds < self.stall_seconds:
            self._conditions.end(FEED_STALLED)
        elif not self._conditions.is_active(FEED_STALLED):
            message = (
                f"clients have acknowledged no event for {seconds:.0f} seconds, although there are events to deliver; "
                "the change log retains them; restart the clients, or see what they or the webhook report"
            )
            self._conditions.report(FEED_STALLED, message=message)

    def _report_cut_off(self) -> None:
        message = (
            "the change log no longer waits for the clients of the feed, which were too far behind; run `select "
            f"atproto.unregister_reader('{FEED_CONSUMER}')`, and the next client that connects gets all records again"
        )
        self._conditions.report(FEED_CUT_OFF, message=message)
