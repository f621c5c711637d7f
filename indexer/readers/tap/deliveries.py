"""The deliveries of the feed for clients of tap, who take changes, get their events, and acknowledge or refuse them.

Events that clients cannot get now are set aside, so that the change log does not wait for them. Each row of these is
stored in the transaction with the progress that depends on it, and stands for one of:

- All events of records of a hidden repo, with the lowest rev. They are due when the repo is visible again: the records
  of this rev and later ones.
- An event that clients refused for too long. It is due when an operator says so.

What is due is sent like the snapshot, and its row is deleted when it is acknowledged. So a process that ends in between
repeats it at most.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, time
from typing import NamedTuple, Self

from indexer.db import Database
from indexer.db.change_log_reads import LoggedChange, StoredAccount, StoredRecord
from indexer.db.tap_feed import (
    DeliveryProgress,
    FeedSession,
    SetAside,
    SetAsideChanges,
    SetAsideKey,
)
from indexer.readers.events import FeedEvent, event_of
from indexer.readers.tap.delivery_window import FIRST_SNAPSHOT_ID, MAX_IN_FLIGHT, DeliveryWindow
from indexer.readers.tap.events import account_event, encode

MAX_EVENT_BYTES = 1_000_000
"""Bytes of events, and of the values loaded for them, that a client gets at a time. A single event may be longer."""

DUE_SECONDS = 1.0
"""Interval at which the feed looks for events that were set aside and are due."""
MAX_DUE = 100
"""Rows of such events that are sent at the same time."""


class RefusalLimits(NamedTuple):
    """When a refused event is set aside.

    Attributes:
        attempts: After so many attempts, if clients have acknowledged other events between them,
        seconds: and so many seconds after the first one.
        repo_attempts: After so many attempts if an event of its repo was set aside before.
        max_age: A change that waits in such a repo is set aside when it is older than this, in seconds.
    """

    attempts: int = 10
    seconds: float = 900.0
    repo_attempts: int = 3
    max_age: float = math.inf

    @classmethod
    def below(cls, consumer_lag_limit: float) -> Self:
        """Return limits such that no refused event lets the consumer reach this lag, in seconds; 0: no limit."""
        if not consumer_lag_limit:
            return cls()
        return cls(seconds=min(cls().seconds, consumer_lag_limit / 8), max_age=consumer_lag_limit / 2)


class Event(NamedTuple):
    """An event as it is sent: JSON in UTF-8."""

    seq: int
    message: bytes


@dataclass
class _Refused:
    """The attempts to deliver an event that were not acknowledged."""

    acknowledged: int  # the number of events that clients had acknowledged at the last attempt
    attempts: int = 0
    refusals: int = 1  # the first attempt, and those before which clients had acknowledged other events
    since: float = field(default_factory=time)  # when the first one was, in Unix seconds
    failure: str = ""  # why the last attempt failed


@dataclass(slots=True)
class Sending:
    """A row that is being sent."""

    row: SetAside
    after: tuple[str, str] | None = ("", "")  # path of the last record that was read; None if all of them were
    ids: set[int] = field(default_factory=set)  # the ids of its events that may be unacknowledged


class SetAsideEvents:
    """The rows that changed since they were stored, and those that are being sent."""

    def __init__(self, window: DeliveryWindow) -> None:
        self._window = window
        self._added: dict[SetAsideKey, SetAside] = {}
        self._visible = set[str]()
        self._look_at = 0.0
        self.sending: dict[SetAsideKey, Sending] = {}

    def add_hidden(self, change: LoggedChange) -> None:
        """Set a record of a hidden repo aside."""
        self._visible.discard(change.did)
        self._add(SetAside("hidden", change.did, "", "", change.rev or "", "", 0, time(), ""))

    def add_refused(self, change: LoggedChange, attempts: int, since: float, failure: str) -> None:
        """Set an event aside that clients have refused."""
        path = change.collection or "", change.rkey or ""
        self._add(SetAside("refused", change.did, *path, change.rev or "", change.action, attempts, since, failure))

    def _add(self, row: SetAside) -> None:
        self.sending.pop(row.key, None)  # it is not delivered, so its row stays
        if (before := self._added.get(row.key)) is not None:
            row = row._replace(rev=min(row.rev, before.rev), attempts=row.attempts + before.attempts)
        self._added[row.key] = row

    def show(self, did: str) -> None:
        """Let the records of a repo be due. They follow the event in the window that says that it is visible."""
        self._visible.add(did)

    async def read_due(self, session: FeedSession, max_events: int) -> None:
        """Add events that are due to the window, as long as it has fewer events without numbers than `max_events`."""
        if len(self.sending) < MAX_DUE and monotonic() >= self._look_at:
            self._look_at = monotonic() + DUE_SECONDS
            for row in await session.due(MAX_DUE):
                self.begin(row)
        for sending in list(self.sending.values()):
            share = max(1, min(max_events // 4, MAX_IN_FLIGHT)) - len(sending.ids)
            room = min(max_events - self._window.snapshot_events, share)
            if (after := sending.after) is None or room <= 0:
                continue
            row = sending.row
            if row.reason == "refused":
                self.read(sending, [(row.collection, row.rkey)], last=True)
            else:
                page = await session.records_from_rev(row.did, row.rev, after, room)
                self.read(sending, page, last=len(page) < room)

    def begin(self, row: SetAside) -> None:
        """Send a row, unless it is being sent, or was set aside again since it was read."""
        if row.key not in self._added and row.key not in self.sending:
            self.sending[row.key] = Sending(row)

    def read(self, sending: Sending, paths: Sequence[tuple[str, str]], *, last: bool) -> None:
        """Add the next events of a row to the window; with `last`, there are no more."""
        sending.ids.update(self._window.add_set_aside(sending.row, paths))
        sending.after = None if last else paths[-1]

    def changes(self) -> SetAsideChanges:
        """Return the changes that are not stored yet. The next call does not return them again."""
        delivered = []
        for key, sending in list(self.sending.items()):
            sending.ids = {id_ for id_ in sending.ids if id_ in self._window}
            if sending.after is None and not sending.ids:
                delivered.append(key)
                del self.sending[key]
        changes = SetAsideChanges(list(self._added.values()), sorted(self._visible), delivered)
        self._added, self._visible = {}, set()
        return changes


class Deliveries:
    """The deliveries of this process, while it owns the feed.

    Attributes:
        ended: Set when the process no longer owns the feed, or stops.
        paused: True if nothing more is delivered, because the process stops.
    """

    def __init__(self, db: Database, progress: DeliveryProgress, limits: RefusalLimits, *, one_per_repo: bool) -> None:
        self._db = db
        self.limits = limits
        self.window = DeliveryWindow(progress, one_per_repo=one_per_repo)
        self.set_aside = SetAsideEvents(self.window)
        self.ended = asyncio.Event()
        self.paused = False
        self._refused: dict[int, _Refused] = {}
        self._refusing = set[str]()  # repos of which an event was set aside
        self._acknowledgements = 0
        self._turn = asyncio.Lock()  # its waiters come in the order of their calls, so that all clients get a share

    async def take(self, limit: int) -> list[LoggedChange]:
        """Wait until changes may be delivered; return at most `limit` of them, which are in flight from now on.

        There are none if the deliveries have ended. A change that was refused is returned alone.
        """
        async with self._turn:
            while not self.ended.is_set():
                if not self.paused and (taken := self.window.take(limit, self._refused)):
                    return taken
                self.window.changed.clear()
                await self.window.changed.wait()
        return []

    def end(self) -> None:
        """Deliver nothing more."""
        self.ended.set()
        self.window.changed.set()

    def acknowledge(self, seq: int) -> None:
        """Record that a client has processed this change."""
        self._acknowledgements += self.window.acknowledge(seq)
        self._refused.pop(seq, None)

    def give_back_after(self, seconds: float, seqs: Sequence[int]) -> None:
        """Deliver these changes again after a pause."""
        asyncio.get_running_loop().call_later(seconds, self.window.give_back, seqs)

    def count_failure(self, seq: int, failure: str) -> int:
        """Count that a change was sent and not acknowledged, and why; return how often it was.

        A change that clients refuse for too long is set aside.
        """
        if (change := self.window.get(seq)) is None:
            return 0
        refused = self._refused.setdefault(seq, _Refused(self._acknowledgements))
        refused.attempts += 1
        refused.refusals += self._acknowledgements > refused.acknowledged
        refused.acknowledged, refused.failure = self._acknowledgements, failure
        limits = self.limits
        if (refused.refusals >= limits.attempts and time() - refused.since >= limits.seconds) or (
            refused.refusals >= limits.repo_attempts and change.did in self._refusing
        ):
            self._set_aside(change, refused)
        return refused.attempts

    def set_aside_late(self) -> None:
        """Set changes aside that have waited for too long in a repo that is behind, or that had a refused event."""
        max_age, window = self.limits.max_age, self.window
        if window.oldest is None or time() - window.oldest.batch_time / 1_000_000 < max_age:
            return
        for change in window.in_order():
            since = change.batch_time / 1_000_000
            if time() - since < max_age or not (change.did in self._refusing or change.did in window.behind):
                return
            late = f"it waited more than {max_age:g} seconds for other events of its repo"
            self._set_aside(change, self._refused.get(change.seq, _Refused(0, since=since, failure=late)))

    def _set_aside(self, change: LoggedChange, refused: _Refused) -> None:
        self._refusing.add(change.did)
        self.set_aside.add_refused(change, refused.attempts, refused.since, refused.failure)
        self._refused.pop(change.seq, None)
        self.window.acknowledge(change.seq)

    async def wait_until_acknowledged(self, seconds: float) -> None:
        """Wait until no change is in flight, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.window.has_in_flight:
                    self.window.changed.clear()
                    await self.window.changed.wait()

    async def events(self, changes: Sequence[LoggedChange]) -> list[Event]:
        """Return the events of changes in flight.

        Changes without an event are acknowledged: a later change says why, or they are set aside. From the first
        change on whose value or event would need too much memory now, they are given back.

        Raises:
            DatabaseError: The values could not be loaded.
        """
        page = await self._db.changes.load(changes, MAX_EVENT_BYTES)
        events, size, sent = list[Event](), 0, len(page.changes)
        for number, change in enumerate(page.changes):
            if change.collection is not None:
                event = self._record_event(change, page.values.get(number), hidden=number in page.hidden)
            else:
                event = self._account_event(change, page.accounts.get(change.did))
            if event is None:
                self.window.acknowledge(change.seq)
                continue
            message = encode(event)
            size += len(message)
            if events and size > MAX_EVENT_BYTES:
                sent = number
                break
            events.append(Event(change.seq, message))
        self.window.give_back([change.seq for change in changes[sent:]])
        return events

    def _record_event(self, change: LoggedChange, record: StoredRecord | None, *, hidden: bool) -> FeedEvent | None:
        if change.action == "delete" and (record or hidden):
            return None  # it was set aside, and the record was written again since
        if hidden:
            self.set_aside.add_hidden(change)
        return event_of(change, record, None)

    def _account_event(self, change: LoggedChange, account: StoredAccount | None) -> FeedEvent | None:
        if account is not None and account.visible and change.seq < FIRST_SNAPSHOT_ID:
            self.set_aside.show(change.did)
        return account_event(change, account)
