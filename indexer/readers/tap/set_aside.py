"""Events that clients cannot get now. They are set aside, so that the change log does not wait for them.

Each row stands for one of these, and is stored in the transaction with the progress that depends on it:

- All events of records of a hidden repo, with the lowest rev. They are due when the repo is visible again: the records
  of this rev and later ones.
- An event that clients refused for too long. It is due when an operator says so.

What is due is sent like the snapshot, and its row is deleted when it is acknowledged. So a process that ends in between
repeats it at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, time

from indexer.db.change_log_reads import LoggedChange
from indexer.db.tap_feed import FeedSession, SetAside, SetAsideChanges, SetAsideKey
from indexer.readers.tap.delivery_window import MAX_IN_FLIGHT, DeliveryWindow

DUE_SECONDS = 1.0
"""Interval at which the feed looks for events that were set aside and are due."""
MAX_DUE = 100
"""Rows of such events that are sent at the same time."""


@dataclass(slots=True)
class Sending:
    """A row that is being sent.

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
