"""The deliveries of the feed for clients of tap: which changes clients have taken, acknowledged and refused."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from time import monotonic, time
from typing import NamedTuple

from indexer.db import Database
from indexer.db.feed_delivery import DeliveryProgress, LoggedChange, RefusedEvent, SnapshotPosition, StoredAccount
from indexer.db.feed_rows import FeedRecords
from indexer.readers.tap.delivery_window import FIRST_SNAPSHOT_ID, RECORD_ACTIONS, DeliveryWindow
from indexer.readers.tap.events import identity_event, record_event
from indexer.readers.tap.set_aside import RefusalLimits, Sending, SetAsideEvents
from indexer.telemetry.metrics import Metrics

FULL_SECONDS = 1.0
"""Repos give up changes if the window is three quarters full for so long and clients acknowledge less than a fourth.

So a change waits for few others, unless clients are fast.
"""
MAX_LOAD_LENGTH = 1 << 20
"""Characters of record values that are loaded at a time, for one client."""
REFUSED_ATTEMPTS = 3
"""An event counts as refused after so many attempts, if clients have acknowledged others meanwhile."""
MAX_REFUSED = 20
"""Refused events that are reported."""


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
        self, db: Database, metrics: Metrics, progress: DeliveryProgress, limits: RefusalLimits, *, one_per_repo: bool
    ) -> None:
        self._db = db
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
        records = await self._db.feed.records(keys, MAX_LOAD_LENGTH) if keys else _NO_RECORDS
        accounts = await self._db.feed.accounts(dids) if dids else {}
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
