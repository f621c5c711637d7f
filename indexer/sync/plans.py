"""Plans: the changes that follow from an event or an export, as data.

Pure functions make plans from a repo's row and a verified value, so the same inputs give the same plan.
`store.apply_batch` writes plans. A resync also writes the differences to its export, an erasure deletes records.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from indexer.reasons import Desync, Rejection
from indexer.sync.repo_state import Repo
from indexer.sync.repo_transitions import Outcome

Action = Literal["create", "update", "delete"]


class RecordChange(NamedTuple):
    """A change of one record. `cid`, `value`, `problem` and `original` are None for a delete.

    Attributes:
        value: The record as JSON text (docs/protocol.md#record-json).
        problem: Why `value` is None or differs from the original; None if it is complete.
        original: The record as DAG-CBOR, only if `value` does not contain all of it.
    """

    action: Action
    collection: str
    rkey: str
    rev: str
    cid: bytes | None = None
    value: str | None = None
    problem: str | None = None
    original: bytes | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The complete effect of one event on one repo.

    Attributes:
        repo: The row afterwards; the same object if the row does not change.
        changes: The changes of records, in the order in which they happened.
        buffer: True if the frame goes to the resync buffer.
        why: The reason for a rejection or a desynchronization, or why a #commit or #sync was not applied.
    """

    repo: Repo
    outcome: Outcome
    changes: tuple[RecordChange, ...] = ()
    buffer: bool = False
    why: Rejection | Desync | None = None
    detail: str = ""


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
    """A rejected message. `frame` is truncated to `plan_batch.DEAD_LETTER_BYTES`."""

    relay: str
    seq: int | None
    did: str | None
    kind: str
    reason: Rejection
    detail: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class RepoWrite:
    """The changes of one repo in one transaction.

    Attributes:
        expected_version: The version of the row that the changes were planned on; 0: no row. If the row has another
            version when the transaction runs, nothing is written.
        live: True if the stream caused the changes, False if a resync did.
    """

    expected_version: int
    repo: Repo
    changes: tuple[RecordChange, ...] = ()
    buffered: tuple[BufferedEvent, ...] = ()
    live: bool = True


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in a relay's stream: the effects of all messages up to `seq` are in the database.

    Attributes:
        event_time: The `time` field of the message at `seq`, as the relay sent it.
        caught_up_at: Unix seconds at which the stream was open and no message had followed `seq` for a while.
    """

    relay: str
    shard: str
    seq: int
    event_time: str | None = None
    caught_up_at: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The content of one transaction: at most one `RepoWrite` per repo, in any order.

    Attributes:
        stale_identities: DIDs that need an identity refresh.
    """

    writes: tuple[RepoWrite, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    stale_identities: frozenset[str] = field(default_factory=frozenset)
    cursor: Cursor | None = None
