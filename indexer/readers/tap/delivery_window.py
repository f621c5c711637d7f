"""The changes that were read from the log and not acknowledged yet, and which of them may be delivered now.

The changes of one repo are delivered in order. A live change waits until all earlier ones of its repo are acknowledged,
and later ones wait for it. Differences that resyncs found at one rev may be delivered at once. But the changes of one
record, which two such resyncs may have found, are delivered one after another. There is no order between repos.

Each repo has a share of the window, so that no repo fills it. A repo that has used its share is behind: its further
changes are left out, and only the number of the first one is kept. They are read again when it has few changes.

Besides changes, the window has the repos and records of a snapshot, and what was set aside and is sent now, as changes
that have ids instead of numbers of the log. A page of the snapshot is read after the changes that are in the window, so
a deletion that the page does not show follows it.
"""

import asyncio
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from indexer.db.change_log_reads import LoggedChange
from indexer.db.tap_feed import SNAPSHOT_BEGIN, DeliveryProgress, SetAside, SnapshotPosition

IDENTITY_ACTIONS = frozenset({"identity", "hidden", "visible", "deleted"})
"""Changes of a repo that are delivered as the present state of the account."""
FIRST_SNAPSHOT_ID = 1 << 52
"""The first id of an event of a snapshot, or of one that was set aside.

It is above all numbers of changes, and exact in JavaScript.
"""
MAX_UNACKNOWLEDGED = 10_000
"""Changes in the window: some hundred bytes each. As long as there is a snapshot, it may be half of them."""
MIN_SHARE = 10
"""Changes of a repo in the window, however full it is."""
MAX_SHARE = 1 / 16
"""The part of the window that one repo may have."""
MAX_BEHIND = 1_000
"""Repos that are behind. If there are more, nothing more is read."""
MAX_IN_FLIGHT = 100
"""Changes of one repo that are in flight, so that a slow client has those of other repos soon."""

Path = tuple[str | None, str | None]
"""Collection and record key; both are None if the change is not about a record."""


@dataclass(slots=True)
class _Repo:
    """The changes of one repo.

    Attributes:
        waiting: Changes that are not being delivered, in order. Those that were acknowledged meanwhile are skipped.
        in_flight: Changes that are being delivered: their numbers by path. No two of them have the same path.
        group: What the changes in flight have in common; changes of other groups wait for them.
        queued: The repo is in the queue of repos that may have a deliverable change.
    """

    waiting: deque[LoggedChange] = field(default_factory=deque)
    in_flight: dict[Path, int] = field(default_factory=dict)
    group: object = None
    queued: bool = False

    def __len__(self) -> int:
        """Return the number of its changes in the window."""
        return len(self.waiting) + len(self.in_flight)


class DeliveryWindow:
    """The unacknowledged changes after a position.

    Attributes:
        capacity: The maximum number of changes of the log.
        read_to: The number of the newest change that was read.
        changed: Set when another repo may have a deliverable change, and when one is acknowledged or given back.
        behind: Repos of which changes are left out, with the number of the first one, in the order of their turns.
        snapshot_read_to: The position of the last repo or record of the snapshot that was added; None if there is no
            snapshot, or if all of it is acknowledged.
    """

    def __init__(self, progress: DeliveryProgress, *, one_per_repo: bool = False) -> None:
        """Continue from stored progress. With `one_per_repo`, all changes of a repo in flight are of one `take`."""
        self.capacity = MAX_UNACKNOWLEDGED
        self.read_to = progress.position
        self.snapshot_read_to = progress.snapshot
        self._stored = progress
        self._undelivered = frozenset(progress.undelivered)
        self._behind_before = dict(progress.behind)
        self.behind = dict(progress.behind)
        self._delivered_to = progress.delivered_to
        self._one_per_repo, self._turn = one_per_repo, 0
        self._changes: dict[int, LoggedChange] = {}
        self._snapshot: dict[int, LoggedChange] = {}
        self._snapshot_before: dict[int, SnapshotPosition] = {}  # the position before each event of the snapshot
        self._ids = count(FIRST_SNAPSHOT_ID)
        self._repos: dict[str, _Repo] = {}
        self._queue: deque[str] = deque()
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of unacknowledged changes of the log."""
        return len(self._changes)

    def __contains__(self, seq: int) -> bool:
        """Return True if the change was added and is not acknowledged."""
        return self.get(seq) is not None

    @property
    def snapshot_events(self) -> int:
        """The number of unacknowledged events of the snapshot, and of those that were set aside."""
        return len(self._snapshot)

    @property
    def room(self) -> int:
        """The number of changes of the log that may be added."""
        return self.capacity - len(self) if len(self.behind) < MAX_BEHIND else 0

    @property
    def oldest(self) -> LoggedChange | None:
        """The oldest unacknowledged change of the log."""
        return self._changes[min(self._changes)] if self._changes else None

    def in_order(self) -> list[LoggedChange]:
        """Return the unacknowledged changes of the log."""
        return [self._changes[seq] for seq in sorted(self._changes)]

    def get(self, seq: int) -> LoggedChange | None:
        """Return an unacknowledged change by its number or id."""
        return self._changes.get(seq) or self._snapshot.get(seq)

    def add_snapshot(self, positions: Sequence[SnapshotPosition]) -> None:
        """Add the next repos and records of the snapshot. Without any, it is complete."""
        before = self.snapshot_read_to or SNAPSHOT_BEGIN
        if not positions and not self._snapshot_before:
            self.snapshot_read_to = None
        for position in positions:
            id_ = next(self._ids)
            self._snapshot_before[id_] = before
            self._add(_snapshot_change(id_, position))
            self.snapshot_read_to = before = position

    def add_set_aside(self, row: SetAside, paths: Iterable[tuple[str, str]]) -> list[int]:
        """Add events that were set aside, of these collections and record keys; return their ids."""
        ids = []
        for collection, rkey in paths:
            id_ = next(self._ids)
            path = collection or None, rkey or None
            action = row.action or "create"
            self._add(LoggedChange(id_, row.did, *path, action, None, row.rev, live=False, batch_time=0))
            ids.append(id_)
        return ids

    def add(self, changes: Iterable[LoggedChange]) -> None:
        """Add the next changes of the log. Those that were delivered before, and that no client needs, are skipped."""
        for change in changes:
            self.read_to = change.seq
            if change.seq < self.behind.get(change.did, inf):
                self._add_logged(change, self._max_share)

    def next_behind(self) -> tuple[int, frozenset[str]] | None:
        """Return the number of the next change of a repo that was left out, and the repos to be read from there.

        Repos take turns.
        """
        may_read = [did for did, seq in self.behind.items() if seq <= self.read_to and self._has_room(did)]
        if not may_read:
            return None
        seq = self.behind[may_read[0]]
        return seq, frozenset(did for did in may_read if self.behind[did] >= seq)

    def _has_room(self, did: str) -> bool:
        """Return True if half of the share of a repo that is behind is free."""
        return len(self) < self.capacity and len(self._repos.get(did, ())) <= self._share // 2

    def add_behind(self, dids: Iterable[str], changes: Sequence[LoggedChange]) -> None:
        """Add changes of repos that `next_behind` returned: all of the log from that number on, up to any one."""
        behind = {did: self.behind.pop(did) for did in dids}
        for change in changes:
            is_next = behind.get(change.did, inf) <= change.seq < self.behind.get(change.did, inf)
            if is_next and change.seq <= self.read_to:
                self._add_logged(change, self._share)
        if changes and changes[-1].seq < self.read_to:
            for did, seq in behind.items():
                self.behind.setdefault(did, max(seq, changes[-1].seq + 1))

    @property
    def _share(self) -> int:
        """The number of changes that each repo may have, so that all of them have half of the window."""
        return max(MIN_SHARE, min(self._max_share, self.capacity // (2 * max(1, len(self._repos)))))

    @property
    def _max_share(self) -> int:
        return max(MIN_SHARE, int(self.capacity * MAX_SHARE))

    def _add_logged(self, change: LoggedChange, share: int) -> None:
        """Add a change of the log that a client needs, or leave it out if its repo has its share.

        Changes that are stored as undelivered were in the window before, and later ones of their repo may be delivered.
        """
        before = change.seq <= self._stored.delivered_to and change.seq not in self._undelivered
        if before and change.seq < self._behind_before.get(change.did, inf):
            return
        if change.collection is None and change.action not in IDENTITY_ACTIONS:
            return
        has_room = len(self) < self.capacity and len(self._repos.get(change.did, ())) < share
        if has_room or change.seq in self._undelivered:
            self._add(change)
        else:
            self.behind[change.did] = change.seq

    def _add(self, change: LoggedChange) -> None:
        repo = self._repos.setdefault(change.did, _Repo())
        if repo.waiting and repo.waiting[-1].action in IDENTITY_ACTIONS and change.action in IDENTITY_ACTIONS:
            self._remove(repo.waiting.pop().seq)  # both are delivered as the present state
        (self._changes if change.seq < FIRST_SNAPSHOT_ID else self._snapshot)[change.seq] = change
        repo.waiting.append(change)
        self._enqueue(change.did, repo)

    def _remove(self, seq: int) -> LoggedChange | None:
        self._snapshot_before.pop(seq, None)
        return self._changes.pop(seq, None) or self._snapshot.pop(seq, None)

    def take(self, limit: int, alone: Container[int] = ()) -> list[LoggedChange]:
        """Return at most `limit` changes that may be delivered now. From now on they are in flight.

        A change whose number is in `alone` is not returned with others.
        """
        taken: list[LoggedChange] = []
        while self._queue and len(taken) < limit:
            did = self._queue.popleft()
            repo = self._repos.get(did)
            if repo is None:
                continue
            repo.queued = False
            while len(taken) < limit and (change := self._first(repo)) is not None and self._may_deliver(change, repo):
                if taken and (taken[-1].seq in alone or change.seq in alone):
                    limit = len(taken)
                    break
                repo.waiting.popleft()
                repo.in_flight[_path(change)] = change.seq
                repo.group = self._group(change)
                taken.append(change)
            self._turn += 1
            self._enqueue(did, repo)
        return taken

    def _first(self, repo: _Repo) -> LoggedChange | None:
        while repo.waiting and repo.waiting[0].seq not in self:
            repo.waiting.popleft()
        return repo.waiting[0] if repo.waiting else None

    def _may_deliver(self, change: LoggedChange, repo: _Repo) -> bool:
        return not repo.in_flight or (
            len(repo.in_flight) < MAX_IN_FLIGHT
            and self._group(change) == repo.group
            and _path(change) not in repo.in_flight
        )

    def _group(self, change: LoggedChange) -> object:
        """Return the group of a change: changes of a repo in one group may be in flight at the same time.

        A live change is a group of its own. Differences that resyncs found at one rev are a group. With `one_per_repo`,
        it is the changes that are taken together.
        """
        if self._one_per_repo:
            return self._turn
        return change.seq if change.live else change.rev

    def _enqueue(self, did: str, repo: _Repo) -> None:
        change = self._first(repo)
        if change is None and not repo.in_flight:
            self._repos.pop(did, None)
        elif change is not None and not repo.queued and self._may_deliver(change, repo):
            repo.queued = True
            self._queue.append(did)
            self.changed.set()

    def acknowledge(self, seq: int) -> bool:
        """Record that a client has processed a change; return False if the change is not in the window."""
        change = self._remove(seq)
        if change is None:
            return False
        if seq < FIRST_SNAPSHOT_ID:
            self._delivered_to = max(self._delivered_to, seq)
        repo = self._repos[change.did]
        _end_delivery(change, repo)
        self._enqueue(change.did, repo)
        self.changed.set()
        return True

    def give_back(self, seqs: Iterable[int]) -> None:
        """Deliver changes again that are in flight and not acknowledged."""
        for seq in sorted(seqs, reverse=True):
            change = self.get(seq)
            if change is None or not _end_delivery(change, repo := self._repos[change.did]):
                continue
            repo.waiting.appendleft(change)
            self._enqueue(change.did, repo)
            self.changed.set()

    @property
    def has_in_flight(self) -> bool:
        """True if any change is being delivered."""
        return any(repo.in_flight for repo in self._repos.values())

    def progress(self) -> DeliveryProgress:
        """Return what has been acknowledged."""
        oldest = min(self._changes, default=self.read_to + 1)
        position = min([oldest, *self.behind.values()]) - 1
        delivered_to = max(position, self._delivered_to)
        snapshot = next(iter(self._snapshot_before.values()), self.snapshot_read_to)
        # Numbers that are stored as undelivered, but were not read again yet, are still undelivered.
        unread = (seq for seq in self._stored.undelivered if seq > self.read_to)
        undelivered = (*sorted(seq for seq in self._changes if seq <= delivered_to), *unread)
        return DeliveryProgress(position, delivered_to, undelivered, snapshot, tuple(self.behind.items()))


def _path(change: LoggedChange) -> Path:
    return change.collection, change.rkey


def _end_delivery(change: LoggedChange, repo: _Repo) -> bool:
    """Remove a change from those in flight; return False if it is not among them."""
    path = _path(change)
    if repo.in_flight.get(path) != change.seq:
        return False
    del repo.in_flight[path]
    return True


def _snapshot_change(id_: int, position: SnapshotPosition) -> LoggedChange:
    """Return an event of the snapshot. Those of the records of a repo need no order, and follow that of the repo."""
    did, collection, rkey = position
    if not collection:
        return LoggedChange(id_, did, None, None, "identity", None, None, live=True, batch_time=0)
    return LoggedChange(id_, did, collection, rkey, "create", None, None, live=False, batch_time=0)
