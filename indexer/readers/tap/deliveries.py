"""The deliveries of the feed for clients of tap, who take changes, get their events, and acknowledge or refuse them.

Two kinds of events are set aside (`set_aside`), so that nothing waits for them: those of hidden repos when they are to
be sent, and those that clients refuse for too long.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import time
from typing import NamedTuple, Self

from indexer.db import Database
from indexer.db.change_log_reads import LoggedChange, StoredAccount
from indexer.db.tap_feed import DeliveryProgress, FeedRecords
from indexer.readers.tap.delivery_window import FIRST_SNAPSHOT_ID, RECORD_ACTIONS, DeliveryWindow
from indexer.readers.tap.events import identity_event, record_event
from indexer.readers.tap.set_aside import SetAsideEvents

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


class Event(NamedTuple):
    """An event as it is sent: JSON in UTF-8."""

    seq: int
    message: bytes


@dataclass
class _Refused:
    """The attempts to deliver an event that were not acknowledged.

    Attributes:
        acknowledged: The number of events that clients had acknowledged at the last attempt.
        refusals: The first attempt, and those before which clients had acknowledged other events.
        since: When the first one was, in Unix seconds.
        failure: What happened the last time.
    """

    acknowledged: int
    attempts: int = 0
    refusals: int = 1
    since: float = field(default_factory=time)
    failure: str = ""


class Deliveries:
    """The deliveries of this process, while it owns the feed.

    Attributes:
        ended: Set when the process no longer owns the feed, or stops.
        paused: True if nothing more is delivered, because the process stops.
        set_aside: What is passed without its delivery.
        limits: When a refused event is set aside.
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
        self._acknowledgements += self.window.acknowledge(seq)
        self._refused.pop(seq, None)

    def give_back_after(self, seconds: float, seq: int) -> None:
        """Deliver this change again after a pause."""
        asyncio.get_running_loop().call_later(seconds, self.window.give_back, [seq])

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

        Changes without an event are acknowledged: a later change says why, or they are set aside. Changes whose values
        would need too much memory now are given back.

        Raises:
            DatabaseError: The values could not be loaded.
        """
        keys = [_key(change) for change in changes if _needs_record(change)]
        dids = [change.did for change in changes if change.action not in RECORD_ACTIONS]
        records = await self._db.feed.records(keys, MAX_LOAD_LENGTH) if keys else FeedRecords({}, set(), set())
        accounts = await self._db.feed.accounts(dids) if dids else {}
        events, later = [], []
        for change in changes:
            if _needs_record(change) and _key(change) in records.omitted:
                later.append(change.seq)
                continue
            if change.action in RECORD_ACTIONS:
                message = self._record_event(change, records)
            else:
                message = self._identity_event(change, accounts.get(change.did))
            if message is None:
                self.window.acknowledge(change.seq)
            else:
                events.append(Event(change.seq, message))
        self.window.give_back(later)
        return events

    def _record_event(self, change: LoggedChange, records: FeedRecords) -> bytes | None:
        key = _key(change)
        if change.action == "delete" and (key in records.shown or key in records.hidden):
            return None  # it was set aside, and the record was written again since
        if key in records.hidden:
            self.set_aside.add_hidden(change)
            return None
        return record_event(change, records.shown.get(key))

    def _identity_event(self, change: LoggedChange, account: StoredAccount | None) -> bytes | None:
        if account is not None and account.visible and change.seq < FIRST_SNAPSHOT_ID:
            self.set_aside.show(change.did)
        return identity_event(change, account)


def _needs_record(change: LoggedChange) -> bool:
    """Return True if the event depends on the stored record: a deletion does if it was set aside."""
    is_deletion_of_the_log = change.action == "delete" and change.seq < FIRST_SNAPSHOT_ID
    return change.action in RECORD_ACTIONS and not is_deletion_of_the_log


def _key(change: LoggedChange) -> tuple[str, str, str]:
    return change.did, change.collection or "", change.rkey or ""
