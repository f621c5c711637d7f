"""Plans: what an event or an export changes, as data. Same inputs, same plan.

A plan is made by pure functions from a repo's row and a verified value; `store` writes it. Nothing else
changes repos or records.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from indexer.reasons import Desync, Rejection
from indexer.sync.repo import Outcome, Repo

Action = Literal["create", "update", "delete"]


class RecordChange(NamedTuple):
    """One record's change. `cid`, `value`, `problem` and `original` are None for a delete.

    `value` is AT Protocol JSON text; `problem` says why it is None or not as it came; `original` is the
    record's DAG-CBOR, kept only where `value` doesn't hold all of it.
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
    """The whole effect of one event on one repo.

    `repo` is the row afterwards (the very same object if nothing in it changes); `changes` are in the
    order in which they happened; `keep` says that the frame is to be kept for after the resync.
    """

    repo: Repo
    outcome: Outcome
    changes: tuple[RecordChange, ...] = ()
    keep: bool = False
    why: Rejection | Desync | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NeedsKey:
    """The plan waits for the signing key of `did`: for any (`refresh` false), or for one looked up anew."""

    did: str
    refresh: bool


@dataclass(frozen=True, slots=True)
class KeptEvent:
    """A frame kept in the database until the resync of its repo is done."""

    did: str
    relay: str
    seq: int
    frame: bytes


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A refused message with its reason, and its frame, or the beginning of a very long one."""

    relay: str
    seq: int | None
    did: str | None
    kind: str
    reason: Rejection
    detail: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class RepoWrite:
    """All that one transaction does to one repo: only if its row is still at version `expected`."""

    expected: int
    repo: Repo
    changes: tuple[RecordChange, ...] = ()
    kept: tuple[KeptEvent, ...] = ()
    live: bool = True


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in one relay's stream: everything up to `seq` has its effect in the database.

    `event_time` is the time of that message in the relay's own words; `caught_up_at` the Unix time at which nothing
    more had come behind it for a while, on an open stream.
    """

    relay: str
    shard: str
    seq: int
    event_time: str | None = None
    caught_up_at: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one transaction writes: at most one `RepoWrite` a repo, in any order."""

    writes: tuple[RepoWrite, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    stale_identities: frozenset[str] = field(default_factory=frozenset)
    cursor: Cursor | None = None
