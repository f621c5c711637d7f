"""A repo's state and the table of its transitions. Every change of sync status in this program is in `TRANSITIONS`.

Two axes that never mix: the *sync status* (how our copy stands to the network's) and the *hosting status*
(what upstream says of the account, beside our own takedown). Why a repo is desynchronized, attempts and
times are fields, not states.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from indexer.errors import BrokenInvariantError
from indexer.reasons import Desync


class SyncStatus(StrEnum):
    """The three states of the protocol's page on synchronization."""

    DESYNCHRONIZED = "desynchronized"
    IN_PROGRESS = "in-progress"
    SYNCHRONIZED = "synchronized"


class Outcome(StrEnum):
    """What became of one received event; exactly one each."""

    APPLIED = "applied"
    REPLAYED = "replayed"
    BUFFERED = "buffered"
    IGNORED = "ignored"
    DESYNCHRONIZED = "desynchronized"
    REJECTED = "rejected"


class Finding(StrEnum):
    """What an event, or a resync worker, means to a repo."""

    EXTENDS = "a commit that extends the chain"
    BREAKS = "a valid commit that breaks the chain, or can't be applied"
    WHOLE = "a first commit that carries its whole tree, or a #sync to the empty tree"
    NOT_NEWER = "a commit or #sync not newer than ours"
    AT_FAULT = "a message that fails verification by its own fault"
    UNCHECKED = "a message that could not be checked"
    SYNC_EQUAL = "a #sync equal to ours"
    SYNC_ADVANCES = "a #sync with our data and a higher rev"
    SYNC_OTHER = "a #sync with other data"
    CLAIMED = "claimed by a worker"
    COMPLETED = "export applied, buffer drained without a break"
    FAILED = "fetch failed, buffer overflowed, drain broke, lease expired"
    REQUESTED = "a resync asked for"
    REACTIVATED = "the account active again"
    ERASED = "the account stayed deleted for the time of grace"


_D, _P, _S = SyncStatus.DESYNCHRONIZED, SyncStatus.IN_PROGRESS, SyncStatus.SYNCHRONIZED

TRANSITIONS: dict[SyncStatus, dict[Finding, tuple[Outcome, SyncStatus]]] = {
    _D: {
        Finding.EXTENDS: (Outcome.IGNORED, _D),
        Finding.BREAKS: (Outcome.IGNORED, _D),
        Finding.WHOLE: (Outcome.APPLIED, _S),
        Finding.NOT_NEWER: (Outcome.REPLAYED, _D),
        Finding.AT_FAULT: (Outcome.REJECTED, _D),
        Finding.UNCHECKED: (Outcome.IGNORED, _D),
        Finding.SYNC_EQUAL: (Outcome.IGNORED, _D),
        Finding.SYNC_ADVANCES: (Outcome.IGNORED, _D),
        Finding.SYNC_OTHER: (Outcome.IGNORED, _D),
        Finding.CLAIMED: (Outcome.APPLIED, _P),
        Finding.ERASED: (Outcome.APPLIED, _D),
    },
    _P: {
        Finding.EXTENDS: (Outcome.BUFFERED, _P),
        Finding.BREAKS: (Outcome.BUFFERED, _P),
        Finding.WHOLE: (Outcome.BUFFERED, _P),
        Finding.NOT_NEWER: (Outcome.REPLAYED, _P),
        Finding.AT_FAULT: (Outcome.REJECTED, _P),
        Finding.UNCHECKED: (Outcome.BUFFERED, _P),
        Finding.SYNC_EQUAL: (Outcome.BUFFERED, _P),
        Finding.SYNC_ADVANCES: (Outcome.BUFFERED, _P),
        Finding.SYNC_OTHER: (Outcome.BUFFERED, _P),
        Finding.COMPLETED: (Outcome.APPLIED, _S),
        Finding.FAILED: (Outcome.DESYNCHRONIZED, _D),
        Finding.REQUESTED: (Outcome.APPLIED, _D),
        Finding.REACTIVATED: (Outcome.APPLIED, _D),
        Finding.ERASED: (Outcome.APPLIED, _D),
    },
    _S: {
        Finding.EXTENDS: (Outcome.APPLIED, _S),
        Finding.BREAKS: (Outcome.DESYNCHRONIZED, _D),
        Finding.NOT_NEWER: (Outcome.REPLAYED, _S),
        Finding.AT_FAULT: (Outcome.REJECTED, _S),
        Finding.UNCHECKED: (Outcome.DESYNCHRONIZED, _D),
        Finding.SYNC_EQUAL: (Outcome.IGNORED, _S),
        Finding.SYNC_ADVANCES: (Outcome.APPLIED, _S),
        Finding.SYNC_OTHER: (Outcome.DESYNCHRONIZED, _D),
        Finding.REQUESTED: (Outcome.APPLIED, _D),
        Finding.REACTIVATED: (Outcome.APPLIED, _D),
        Finding.ERASED: (Outcome.APPLIED, _D),
    },
}


def transition(status: SyncStatus, finding: Finding) -> tuple[Outcome, SyncStatus]:
    """What becomes of an event and of the repo; raises `BrokenInvariantError` for what can't happen."""
    try:
        return TRANSITIONS[status][finding]
    except KeyError:
        raise BrokenInvariantError(f"a {status} repo met {finding}") from None


@dataclass(frozen=True, slots=True)
class Head:
    """The commit that our records stand at: revision, CID of the tree's root, CID of the commit block."""

    rev: str
    data: bytes
    commit: bytes


PARKED = inf


@dataclass(frozen=True, slots=True)
class Repo:
    """One repo's row, as far as planning needs it.

    `version` counts the row's changes and is what `apply` compares before it writes; 0 says that there is no
    row yet. `seen_rev` is the newest revision of an *authentic* message, ignored ones too: an export older
    than it is not the end of a resync. `heard_rev` is the newest one of a message that nobody could check: reason
    enough to ask the repo's own host where a mirror is behind it, and for nothing else.
    `hosting_seq` orders #account messages of `hosting_relay`.
    `lease` numbers the claims of this repo, so that a worker can tell whether its claim still stands.
    From `erase_at` on, the records of a deleted account may be erased.
    Times are Unix seconds; `next_attempt_at` is None for "at once" and `PARKED` for "not until something wakes it".
    """

    did: str
    version: int = 0
    status: SyncStatus = SyncStatus.DESYNCHRONIZED
    reason: Desync | None = Desync.NEW
    head: Head | None = None
    seen_rev: str | None = None
    heard_rev: str | None = None
    active: bool = True
    hosting_status: str | None = None
    hosting_relay: str | None = None
    hosting_seq: int = 0
    takedown: bool = False
    buffered_events: int = 0
    buffered_bytes: int = 0
    lease: int = 0
    attempts: int = 0
    next_attempt_at: float | None = None
    last_error: str | None = None
    synchronized_at: float | None = None
    erase_at: float | None = None

    @property
    def known(self) -> bool:
        return self.version > 0
