"""The changes that were read from the log and not acknowledged yet, and which of them may be delivered now.

The changes of one repo are delivered in order. A live change waits until all earlier ones of its repo are acknowledged,
and later ones wait for it. Differences that resyncs found at one rev may be delivered at once. But the changes of one
record, which two such resyncs may have found, are delivered one after another. There is no order between repos.

Besides changes, the window has the repos and records of a snapshot, and what was set aside and is sent now, as changes
that have ids instead of numbers of the log. A page of the snapshot is read after the changes that are in the window, so
a deletion that the page does not show follows it.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

from indexer.sync.feed_delivery import SNAPSHOT_BEGIN, DeliveryProgress, LoggedChange, SetAside, SnapshotPosition

IDENTITY_ACTIONS = frozenset({"identity", "hidden", "visible", "deleted"})
"""Changes of a repo that are delivered as the present state of the account."""
RECORD_ACTIONS = frozenset({"create", "update", "delete"})
FIRST_SNAPSHOT_ID = 1 << 52
"""The first id of an event of a snapshot, or of one that was set aside.

It is above all numbers of changes, and exact in JavaScript.
"""
MAX_TURN = 100
"""Changes of one repo that are taken before it is the turn of the next repo."""

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


class DeliveryWindow:
    """The unacknowledged changes after a position.

    Attributes:
        read_to: The number of the newest change that was added.
        snapshot_read_to: The position of the last repo or record of the snapshot that was added; None if there is no
            snapshot, or if all of it is acknowledged.
    """

    def __init__(self, progress: DeliveryProgress, *, one_per_repo: bool = False) -> None:
        """Continue from stored progress. With `one_per_repo`, a repo never has two changes in flight."""
        self.read_to = progress.position
        self.snapshot_read_to = progress.snapshot
        self._stored = progress
        self._undelivered = frozenset(progress.undelivered)
        self._delivered_to = progress.delivered_to
        self._one_per_repo = one_per_repo
        self._changes: dict[int, LoggedChange] = {}
        self._snapshot: dict[int, LoggedChange] = {}
        self._snapshot_before: dict[int, SnapshotPosition] = {}  # the position before each event of the snapshot
        self._ids = count(FIRST_SNAPSHOT_ID)
        self._repos: dict[str, _Repo] = {}
        self._queue: deque[str] = deque()

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
    def oldest(self) -> LoggedChange | None:
        """The oldest unacknowledged change of the log."""
        return next(iter(self._changes.values()), None)

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
            before = change.seq <= self._stored.delivered_to and change.seq not in self._undelivered
            if not before and change.action in RECORD_ACTIONS | IDENTITY_ACTIONS:
                self._add(change)

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

    def take(self, limit: int) -> list[LoggedChange]:
        """Return at most `limit` changes that may be delivered now. From now on they are in flight."""
        taken: list[LoggedChange] = []
        while self._queue and len(taken) < limit:
            did = self._queue.popleft()
            repo = self._repos.get(did)
            if repo is None:
                continue
            repo.queued = False
            turn = min(limit - len(taken), MAX_TURN)
            taken += [change for _, change in zip(range(turn), self._deliverable(repo), strict=False)]
            self._enqueue(did, repo)
        return taken

    def _deliverable(self, repo: _Repo) -> Iterator[LoggedChange]:
        """Take changes of a repo until one has to wait."""
        while (change := self._first(repo)) is not None and self._may_deliver(change, repo):
            repo.waiting.popleft()
            repo.in_flight[_path(change)] = change.seq
            repo.group = self._group(change)
            yield change

    def _first(self, repo: _Repo) -> LoggedChange | None:
        while repo.waiting and repo.waiting[0].seq not in self:
            repo.waiting.popleft()
        return repo.waiting[0] if repo.waiting else None

    def _may_deliver(self, change: LoggedChange, repo: _Repo) -> bool:
        return not repo.in_flight or (self._group(change) == repo.group and _path(change) not in repo.in_flight)

    def _group(self, change: LoggedChange) -> object:
        """Return what is equal for changes that need no order, unless they are of one record: the rev of the export."""
        return change.seq if change.live or self._one_per_repo else change.rev

    def _enqueue(self, did: str, repo: _Repo) -> None:
        change = self._first(repo)
        if change is None and not repo.in_flight:
            self._repos.pop(did, None)
        elif change is not None and not repo.queued and self._may_deliver(change, repo):
            repo.queued = True
            self._queue.append(did)

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
        return True

    def give_back(self, seqs: Iterable[int]) -> None:
        """Deliver changes again that are in flight and not acknowledged."""
        for seq in sorted(seqs, reverse=True):
            change = self.get(seq)
            if change is None or not _end_delivery(change, repo := self._repos[change.did]):
                continue
            repo.waiting.appendleft(change)
            self._enqueue(change.did, repo)

    @property
    def in_flight(self) -> int:
        """The number of changes that are being delivered."""
        return sum(len(repo.in_flight) for repo in self._repos.values())

    @property
    def is_ready(self) -> bool:
        """True if `take` may return something."""
        return bool(self._queue)

    def progress(self) -> DeliveryProgress:
        """Return what has been acknowledged."""
        oldest = next(iter(self._changes), None)
        position = self.read_to if oldest is None else oldest - 1
        snapshot = next(iter(self._snapshot_before.values()), self.snapshot_read_to)
        if position >= self._delivered_to:
            return DeliveryProgress(position, position, snapshot=snapshot)
        return DeliveryProgress(position, self._delivered_to, self._until_delivered(), snapshot)

    def _until_delivered(self) -> tuple[int, ...]:
        # Numbers that are stored as undelivered, but were not read again yet, are still undelivered.
        unread: Sequence[int] = [seq for seq in self._stored.undelivered if seq > self.read_to]
        return (*takewhile(lambda seq: seq <= self._delivered_to, self._changes), *unread)


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
