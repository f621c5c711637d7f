"""Plans: the changes that follow from an event or an export, as data.

Pure functions make plans from a repo's row and a verified value, so the same inputs give the same plan.
`db.write` writes plans. A resync also writes the differences to its export.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from indexer.reasons import Desync, Rejection
from indexer.sync.repo_state import Repo
from indexer.sync.repo_transitions import Outcome

Action = Literal["create", "update", "delete"]

CHANGE_BYTES = 200
"""Approximate bytes of a record change in a statement besides its path and its value."""
MAX_CHARACTER_BYTES = 4
"""Bytes of the longest character in UTF-8."""


class RecordChange(NamedTuple):
    """A change of one record. `cid`, `value`, `problem` and `original` are None for a delete.

    Attributes:
        action: What the commit or the export says. It may differ from what happens to the stored record: see
            `changes.effective_changes`.
        rev: The rev of the commit or the export; None for a delete that neither caused.
        value: The record as JSON text (docs/protocol.md#record-json).
        problem: Why `value` is None or differs from the original; None if it is complete.
        original: The record as DAG-CBOR, only if `value` does not contain all of it.
    """

    action: Action
    collection: str
    rkey: str
    rev: str | None
    cid: bytes | None = None
    value: str | None = None
    problem: str | None = None
    original: bytes | None = None

    @property
    def size(self) -> int:
        """Return the bytes that the change takes in a statement, or a little more."""
        value = self.value or ""
        value_bytes = len(value) if value.isascii() else MAX_CHARACTER_BYTES * len(value)
        return CHANGE_BYTES + len(self.collection) + len(self.rkey) + value_bytes + len(self.original or b"")


class Plan(NamedTuple):
    """The complete effect of one event on one repo.

    Attributes:
        repo: The row afterwards; the same object if the row does not change.
        changes: The changes of records, in the order in which they happened.
        buffer: True if the frame goes to the resync buffer.
        why: The reason for a rejection or a desynchronization, or why a #commit or #sync was not applied.
        lenient: True if the event is a commit that was applied although its inversion is undecidable.
        refresh_identity: True if the identity may have changed, so that it is looked up again.
    """

    repo: Repo
    outcome: Outcome
    changes: tuple[RecordChange, ...] = ()
    buffer: bool = False
    why: Rejection | Desync | None = None
    detail: str = ""
    lenient: bool = False
    refresh_identity: bool = False


@dataclass(frozen=True, slots=True)
class NeedsKey:
    """Planning needs the signing key of `did` first: with `refresh`, from a new lookup instead of the cache."""

    did: str
    refresh: bool


@dataclass(frozen=True, slots=True)
class BufferedEvent:
    """A frame in the resync buffer, which is applied at the end of the repo's resync."""

    did: str
    relay: str
    seq: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A rejected message.

    Attributes:
        frame: The frame, truncated to `plan_batch.DEAD_LETTER_BYTES`.
        epoch: The epoch of the relay's sequence that `seq` belongs to.
    """

    relay: str
    seq: int | None
    did: str | None
    kind: str
    reason: Rejection
    detail: str
    frame: bytes
    epoch: int = 0


class RepoWrite(NamedTuple):
    """The changes of one repo in one transaction.

    Attributes:
        expected_version: The version of the row that the changes were planned on; 0: no row. If the row has another
            version when the transaction runs, nothing is written.
        live: True if the stream caused the changes, False if a resync did.
        advances: True if nothing but the head changes (see `Repo.advances`).
        lenient_commits: Number of commits among them that were applied although their inversion is undecidable.
    """

    expected_version: int
    repo: Repo
    changes: tuple[RecordChange, ...] = ()
    buffered: tuple[BufferedEvent, ...] = ()
    live: bool = True
    lenient_commits: int = 0
    advances: bool = False


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in a relay's stream: the effects of all messages up to `seq` are in the database.

    Attributes:
        event_time: The `time` field of the message at `seq`, as the relay sent it.
        caught_up_at: Unix seconds until which everything is stored: by the times of most accounts, or the present time
            if the stream is open and no message has followed `seq` for a while. None if it is not known.
        epoch: The epoch of the relay's sequence: the number of times that it has started a new one.
        stored_until: Unix seconds until which everything is certainly stored: 35 % of the votes of the latest accounts
            are earlier (`indexer.live.event_clock`), not later than the arrival of their messages. None if it
            is not known: the stored one stays.
    """

    relay: str
    shard: str
    seq: int
    event_time: str | None = None
    caught_up_at: float | None = None
    epoch: int = 0
    stored_until: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The content of one transaction: at most one `RepoWrite` per repo, in any order.

    Attributes:
        stale_identities: DIDs that need an identity refresh.
        resolved: The ID of the dead letter whose replay has these effects; it is deleted.
    """

    writes: tuple[RepoWrite, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    stale_identities: frozenset[str] = field(default_factory=frozenset)
    cursor: Cursor | None = None
    resolved: int | None = None
