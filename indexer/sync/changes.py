"""The effects of events and exports as data: changes of records, writes of repos, and entries of the change log.

Pure functions make them from a repo's row and a verified value, so the same inputs give the same effects. `db.write`
writes them. A resync also writes the differences to its export.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from indexer.atproto.record import ConvertedRecord, ItemBudget, Problem, Value, decode_record
from indexer.atproto.syntax import split_path
from indexer.errors import UpstreamError
from indexer.reasons import Desync, Rejection
from indexer.sync.policy import Policy
from indexer.sync.repo import DELETED, Outcome, Repo, SyncStatus
from indexer.sync.stream import Cursor
from indexer.sync.verify import VerifiedChange

Action = Literal["create", "update", "delete"]
Proof = Literal["commit", "export", "range"]
"""How a record was proven when it was written. A later proof that only confirms it changes nothing."""

CHANGE_BYTES = 200
"""Approximate bytes of a record change in a statement besides its path and its value."""
MAX_CHARACTER_BYTES = 4
"""Bytes of the longest character in UTF-8."""


class RecordChange(NamedTuple):
    """A change of one record. `cid`, `value`, `problem` and `original` are None for a delete."""

    action: Action  # of the commit or the export; see `effective_changes` for what happens to the stored record
    collection: str
    rkey: str
    rev: str | None  # the rev of the commit or the export; None for a delete that neither caused
    cid: bytes | None = None
    value: str | None = None  # the record as JSON text (docs/protocol.md#record-json)
    problem: str | None = None  # why `value` is None or differs from the original; None if it is complete
    original: bytes | None = None  # the record as DAG-CBOR, only if `value` does not contain all of it

    @property
    def size(self) -> int:
        """Return the bytes that the change takes in a statement, or a little more."""
        value = self.value or ""
        value_bytes = len(value) if value.isascii() else MAX_CHARACTER_BYTES * len(value)
        return CHANGE_BYTES + len(self.collection) + len(self.rkey) + value_bytes + len(self.original or b"")


class Plan(NamedTuple):
    """The complete effect of one event on one repo."""

    repo: Repo  # the row afterwards; the same object if the row does not change
    outcome: Outcome
    changes: tuple[RecordChange, ...] = ()  # the changes of records, in the order in which they happened
    buffer: bool = False  # the frame goes to the resync buffer
    why: Rejection | Desync | None = None  # of a rejection or desynchronization, or why the event was not applied
    detail: str = ""
    refresh_identity: bool = False  # the identity may have changed, so that it is looked up again


@dataclass(frozen=True, slots=True)
class NeedsKey:
    """Planning needs the signing key of `did` first: with `refresh`, from a new lookup instead of the cache."""

    did: str
    refresh: bool


@dataclass(frozen=True, slots=True)
class NeedsPredecessor:
    """A commit with this rev has come too early: another stream may bring the commits before it."""

    rev: str


@dataclass(frozen=True, slots=True)
class BufferedEvent:
    """A frame in the resync buffer, which is applied at the end of the repo's resync."""

    did: str
    relay: str
    seq: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A rejected message."""

    relay: str
    seq: int | None
    did: str | None
    kind: str
    reason: Rejection
    detail: str
    frame: bytes  # the frame, truncated to `batch.DEAD_LETTER_BYTES`
    epoch: int = 0  # the epoch of the relay's sequence that `seq` belongs to


class RepoWrite(NamedTuple):
    """The changes of one repo in one transaction.

    If the row has another version than `before` when the transaction runs, nothing is written.
    """

    before: Repo  # the row that the changes were planned on; with version 0, there is none
    repo: Repo
    changes: tuple[RecordChange, ...] = ()
    buffered: tuple[BufferedEvent, ...] = ()
    live: bool = True  # the stream caused the changes; False: a resync did
    advances: bool = False  # nothing but the head changes (see `Repo.advances`)


@dataclass(frozen=True, slots=True)
class Batch:
    """The content of one transaction: at most one `RepoWrite` per repo, in any order."""

    writes: tuple[RepoWrite, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    stale_identities: frozenset[str] = field(default_factory=frozenset)  # DIDs that need an identity refresh
    cursors: tuple[Cursor, ...] = ()  # at most one for each relay
    resolved: int | None = None  # the ID of the dead letter whose replay has these effects; it is deleted


MAX_EXPANSION = 16
"""Bytes of stored values per byte of their commit or export. The most that JSON takes is 14 bytes, for an empty byte
string, so only blocks that many paths name exceed this."""
MIN_VALUE_BYTES = 1 << 20
"""Bytes of values that even a small commit or export may have."""


def selected_path(path: bytes, policy: Policy) -> tuple[str, str] | None:
    """Return collection and record key; None if the path is outside the selected collections or breaks the syntax.

    A path with bad syntax in a signed tree still takes part in every proof. It only names no record
    (docs/protocol.md#merkle-search-tree).
    """
    try:
        collection, rkey = split_path(path.decode())
    except (UpstreamError, UnicodeDecodeError):
        return None
    return (collection, rkey) if policy.scope.collections.matches(collection) else None


class RecordConverter:
    """Converts the changes of one commit or of one export, within bounds that follow from its size.

    A block that many paths name is decoded once, and its value is in memory once. In the database, each path has a copy
    of the value, so that a small commit could fill the disk. Beyond `MAX_EXPANSION`, values are omitted.

    Attributes:
        bytes_converted: The sum of the sizes of the changes with values so far, in bytes (see `RecordChange.size`).
    """

    def __init__(self, policy: Policy, did: str, rev: str, source_bytes: int) -> None:
        self._policy = policy
        self._removed = policy.scope.removed.get(did)
        self._rev = rev
        self._max_bytes = MIN_VALUE_BYTES + MAX_EXPANSION * source_bytes
        self.bytes_converted = 0
        self.items = ItemBudget(source_bytes)
        self._decoded: dict[tuple[bytes, str], Value] = {}

    @property
    def bytes_left(self) -> int:
        """The bytes that may still be converted before values are omitted."""
        return max(0, self._max_bytes - self.bytes_converted)

    def count_converted(self, items: int, size: int) -> None:
        """Count records that were converted elsewhere, with so many items, and with changes of this size in bytes."""
        self.items.subtract(items)
        self.bytes_converted += size

    def forget_values(self) -> None:
        """Release the memory of the decoded values. A later path that names one of their blocks decodes it again."""
        self._decoded.clear()

    def convert(self, change: VerifiedChange) -> RecordChange | None:
        """Return the change to store; None if the path is not selected."""
        if self._removed and change.path in self._removed:
            return None
        names = selected_path(change.path, self._policy)
        if names is None:
            return None
        collection, rkey = names
        if change.new is None:
            return RecordChange("delete", collection, rkey, self._rev)
        action: Action = "create" if change.old is None else "update"
        if not self._policy.store_values:
            return RecordChange(action, collection, rkey, self._rev, change.new)
        if change.block is None:
            return RecordChange(action, collection, rkey, self._rev, change.new, problem=Problem.MISSING)
        if self.bytes_converted > self._max_bytes:  # without a conversion, whose result would need memory
            return RecordChange(action, collection, rkey, self._rev, change.new, problem=Problem.OMITTED)
        value = self._value(change.new, change.block, collection, change.converted)
        converted = RecordChange(
            action, collection, rkey, self._rev, change.new, value.json, value.problem, value.original
        )
        self.bytes_converted += converted.size
        if self.bytes_converted > self._max_bytes:
            return converted._replace(value=None, problem=Problem.OMITTED, original=None)
        return converted

    def _value(self, cid: bytes, block: bytes, collection: str, converted: ConvertedRecord | None) -> Value:
        value = self._decoded.get((cid, collection))
        if value is None:
            value = decode_record(block, collection, self._policy.limits, self.items, converted)
            self._decoded[cid, collection] = value
        return value


RepoAction = Literal["hidden", "visible", "deleted", "identity", "moved", "snapshot", "completed"]
RecordKey = tuple[str, str, str]
"""DID, collection and record key."""


class ChangeLogEntry(NamedTuple):
    """One entry of the change log."""

    did: str
    action: Action | RepoAction
    rev: str | None
    live: bool  # True if the stream caused the change, False if a resync did
    collection: str | None = None
    rkey: str | None = None
    cid: bytes | None = None  # the new CID of the record; None for a delete. An entry of a repo has no path and no CID


def hosting_status_of(repo: Repo) -> str:
    """Return "active", or why the account is not active."""
    return "active" if repo.active else repo.hosting_status or "inactive"


def change_log_entries(write: RepoWrite) -> Iterator[ChangeLogEntry]:
    """Return the entries of one write, in the order in which a consumer can apply them.

    Entries of records come while the repo is visible, if it is visible before or after the write, and before the
    "completed" entry of the resync that wrote them. "identity" says that the hosting status changed if no other entry
    does.
    """
    if write.advances:
        yield from record_entries(write.repo.did, write.changes, live=write.live)
        return
    repo, before = write.repo, write.before
    status, status_before = hosting_status_of(repo), hosting_status_of(before)
    rev = repo.head.rev if repo.head else None
    if repo.visible and not before.visible:
        yield ChangeLogEntry(repo.did, "visible", rev, live=True)
    yield from record_entries(repo.did, write.changes, live=write.live)
    if repo.sync_status is SyncStatus.SYNCHRONIZED is not before.sync_status:
        yield ChangeLogEntry(repo.did, "completed", rev, live=False)
    if before.visible and not repo.visible:
        yield ChangeLogEntry(repo.did, "hidden", rev, live=True)
    if status == DELETED != status_before:
        yield ChangeLogEntry(repo.did, "deleted", rev, live=True)
    elif repo.visible == before.visible and status != status_before:
        yield ChangeLogEntry(repo.did, "identity", rev, live=True)


def effective_changes(
    did: str, changes: Iterable[RecordChange], stored: Container[RecordKey]
) -> tuple[RecordChange, ...]:
    """Return the changes as they happened to the stored records, without deletions of records that did not exist.

    A commit says what it does to the tree of the repo. The stored records may differ from the tree: after a change of
    the selected collections, they follow at the next resync. There may be several changes of one record. `stored` has
    the keys of those that were stored before.
    """
    effective = []
    exists: dict[tuple[str, str], bool] = {}
    for change in changes:
        path = change.collection, change.rkey
        existed = exists.get(path, (did, *path) in stored)
        exists[path] = change.action != "delete"
        if exists[path]:
            action: Action = "update" if existed else "create"
            effective.append(change if change.action == action else change._replace(action=action))
        elif existed:
            effective.append(change)
    return tuple(effective)


def record_entries(did: str, changes: Iterable[RecordChange], *, live: bool) -> Iterator[ChangeLogEntry]:
    """Yield one entry per change of a record."""
    for change in changes:
        yield ChangeLogEntry(did, change.action, change.rev, live, change.collection, change.rkey, change.cid)
