"""Events that the feed sets aside, so that the change log waits neither for hidden repos nor for refused events.

Events of records of a hidden repo are not sent. One row stands for all of them: the repo, with the lowest rev. When
clients have acknowledged that the repo is visible again, its records of this rev and later ones are due.

An event that clients refuse for too long is a row of its own. It is due when an operator says so. So are later events
of its repo that have waited for most of the time after which a consumer is disconnected.

Rows are stored in the transaction with the progress that depends on them. What is due is sent like the snapshot, and
its row is deleted when it is acknowledged. So a process that ends in between repeats it at most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import NamedTuple, Self

from indexer.db.feed_delivery import LoggedChange, SetAside, SetAsideChanges, SetAsideKey
from indexer.readers.tap.delivery_window import DeliveryWindow


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
        sending: The rows that are being sent.
    """

    def __init__(self, window: DeliveryWindow) -> None:
        self._window = window
        self._added: dict[SetAsideKey, SetAside] = {}
        self._visible = set[str]()
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

    def add_visible(self, did: str) -> None:
        """Record that clients know that the repo is visible."""
        self._visible.add(did)

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
        changes = SetAsideChanges(list(self._added.values()), sorted(self._visible), delivered)
        self._added, self._visible = {}, set()
        return changes
