"""The deliveries of the feed for clients of tap: which changes clients have taken, acknowledged and refused.

What clients cannot get now is set aside, so that the change log waits neither for hidden repos nor for refused events.
Rows are stored in the transaction with the progress that depends on them:

- Events of records of a hidden repo are not sent. One row stands for all of them: the repo, with the lowest rev. When
  clients have acknowledged that the repo is visible again, its records of this rev and later ones are due.
- An event that clients refuse for too long is a row of its own. It is due when an operator says so. So are later events
  of its repo that have waited for most of the time after which a consumer is disconnected.

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
from indexer.db.change_log_reads import LoggedChange, StoredAccount
from indexer.db.tap_feed import DeliveryProgress, FeedRecords, SetAside, SetAsideChanges, SetAsideKey
from indexer.readers.tap.delivery_window import FIRST_SNAPSHOT_ID, RECORD_ACTIONS, DeliveryWindow
from indexer.readers.tap.events import identity_event, record_event
from indexer.telemetry.metrics import Metrics

FULL_SECONDS = 1.0
"""Repos give up changes if the window is three quarters full for so long and clients acknowledge less than a fourth.

So a change waits for few others, unless clients are fast.
"""
MAX_LOAD_LENGTH = 1 << 20
"""Characters of record values that are loaded at a time, for one client."""


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


@dataclass(slots=True)
class Sending:
    """A row of events that were set aside, and are being sent now.

    Attributes:
        after: Collection and record key of the last record that was read; None if all of them were.
        ids: The ids of its events that may be unacknowledged.
    """

    row: SetAside
    after: tuple[str, str] | None = ("", "")
    ids: set[int] = field(default_factory=set)


class SetAsideEvents:
    """The rows that changed since they were stored, and those that are being sent.

    Attributes:
        visible: Repos of which clients know since then that they are visible.
        sending: The rows that are being sent.
    """

    def __init__(self, window: DeliveryWindow) -> None:
        self._window = window
        self._added: dict[SetAsideKey, SetAside] = {}
        self.visible = set[str]()
        self.sending: dict[SetAsideKey, Sending] = {}

    def add_hidden(self, change: LoggedChange) -> None:
        """Set a record of a hidden repo aside."""
        self.visible.discard(change.did)
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

    def begin(self, row: SetAside) -> None:
        """Send what was set aside, unless it is being sent, or was set aside again since it was read."""
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
        changes = SetAsideChanges(list(self._added.values()), sorted(self.visible), delivered)
        self._added, self.visible = {}, set()
        return changes


class Event(NamedTuple):
    """An event as it is sent: JSON in UTF-8."""

    seq: int
    message: bytes


class _Failure(NamedTuple):
    """The attempts to deliver an event that were not acknowledged.

    Attributes:
        refusals: The attempts after the first one before which clients had acknowledged other events.
        since: When it first was, in Unix seconds.
        acknowledged: The number of events that clients had acknowledged at the last attempt.
        failure: What happened the last time.
    """

    attempts: int
    refusals: int
    since: float
    acknowledged: int
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
        self._failures: dict[int, _Failure] = {}
        self._acknowledgements = 0
        self._full_since: tuple[int, float] | None = None  # acknowledgements then, and when
        self._turn = asyncio.Lock()  # its waiters come in the order of their calls, so that all clients get a share

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

    async def take(self, limit: int) -> list[LoggedChange]:
        """Wait until changes may be delivered; return at most `limit` of them, which are in flight from now on.

        Returns:
            Nothing if the deliveries have ended.
        """
        async with self._turn:
            while not self.ended.is_set():
                if not self.paused and (taken := self.window.take(limit)):
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
        change = self.window.get(seq)
        self._acknowledgements += self.window.acknowledge(seq)
        self._failures.pop(seq, None)
        if change is not None and self._visible.get(change.did) == seq:
            del self._visible[change.did]
            self.set_aside.visible.add(change.did)

    def give_back_after(self, seconds: float, seq: int) -> None:
        """Deliver this change again after a pause."""
        asyncio.get_running_loop().call_later(seconds, self.window.give_back, [seq])

    def count_failure(self, seq: int, failure: str) -> int:
        """Count that a change was sent and not acknowledged, and why; return how often it was.

        A change that clients refuse for too long is set aside.
        """
        change, acknowledged = self.window.get(seq), self._acknowledgements
        if change is None:
            return 0
        before = self._failures.get(seq) or _Failure(0, 0, time(), acknowledged, failure)
        failed = before._replace(
            attempts=before.attempts + 1,
            refusals=before.refusals + (acknowledged > before.acknowledged),
            acknowledged=acknowledged,
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

    def set_aside_late(self) -> None:
        """Set changes aside that have waited for too long in a repo that is behind, or that had a refused event."""
        max_age, window = self.limits.max_age, self.window
        if window.oldest is None or time() - window.oldest.batch_time / 1_000_000 < max_age:
            return
        for change in window.in_order():
            since = change.batch_time / 1_000_000
            if time() - since < max_age or not (change.did in self._refusing or change.did in window.behind):
                return
            late = _Failure(0, 0, since, 0, f"it waited more than {max_age:g} seconds for other events of its repo")
            self._set_aside_refused(change, self._failures.get(change.seq, late))

    async def wait_until_acknowledged(self, seconds: float) -> None:
        """Wait until no change is in flight, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.window.has_in_flight:
                    self.window.changed.clear()
                    await self.window.changed.wait()

    async def events(self, changes: Sequence[LoggedChange]) -> list[Event]:
        """Return the events of changes in flight.

        Changes without an event are acknowledged: a later change says why, or they are set aside. Changes whose values
        would need too much memory now are given back.

        Raises:
            DatabaseError: The values could not be loaded.
        """
        keys = [_key(change) for change in changes if _needs_record(change)]
        dids = [change.did for change in changes if change.action not in RECORD_ACTIONS]
        records = await self._db.feed.records(keys, MAX_LOAD_LENGTH) if keys else FeedRecords({}, set(), set())
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
        self.window.give_back([change.seq for change in later])
        for seq in [seq for seq, message in events if message is None]:
            self.window.acknowledge(seq)
        return [Event(seq, message) for seq, message in events if message is not None]

    def _record_event(self, change: LoggedChange, records: FeedRecords) -> bytes | None:
        key = _key(change)
        if change.action == "delete" and (key in records.shown or key in records.hidden):
            return None  # it was set aside, and the record was written again since
        if key in records.hidden:
            self.set_aside.add_hidden(change)
            return None
        omitted = self._metrics.feed_values_omitted
        return record_event(change, records.shown.get(key), lambda reason: omitted[reason].inc())

    def _identity_event(self, change: LoggedChange, account: StoredAccount | None) -> bytes | None:
        if account is not None and account.visible and change.seq < FIRST_SNAPSHOT_ID:
            self._visible[change.did] = change.seq
        else:
            self._visible.pop(change.did, None)
        return identity_event(change, account)


def _needs_record(change: LoggedChange) -> bool:
    """Return True if the event depends on the stored record: a deletion does if it was set aside."""
    is_deletion_of_the_log = change.action == "delete" and change.seq < FIRST_SNAPSHOT_ID
    return change.action in RECORD_ACTIONS and not is_deletion_of_the_log


def _key(change: LoggedChange) -> tuple[str, str, str]:
    return change.did, change.collection or "", change.rkey or ""
