"""The state of one repo: its sync status, its head, and what upstream says about the account.

Two statuses are independent of each other. The *sync status* says how the stored records compare with the repo on the
network. The *hosting status* is what the relay reports about the account; the local takedown is separate from it. The
reason for a desynchronization, the number of attempts, and times are fields, not statuses.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from indexer.reasons import Desync

PARKED = inf
"""Value of `Repo.next_attempt_at` for a repo that is not tried again until an event unparks it."""
DELETED = "deleted"
"""The hosting status that leads to erasure."""
TOMBSTONED = "tombstoned"
"""The hosting status of a repo whose DID is gone from its directory. No relay sends it."""


class SyncStatus(StrEnum):
    """The sync status of a repo, in the words of the specification."""

    DESYNCHRONIZED = "desynchronized"
    IN_PROGRESS = "in-progress"
    SYNCHRONIZED = "synchronized"


@dataclass(frozen=True, slots=True)
class Head:
    """The commit of the stored records: its rev, the CID of the MST root, and the CID of the commit block."""

    rev: str
    data: bytes
    commit: bytes


@dataclass(frozen=True, slots=True)
class Repo:
    """One row of the table `repo`, with the columns that planning needs.

    Attributes:
        version: Incremented by every write. A write applies only to the version it was planned on; 0: no row yet.
        latest_verified_rev: The newest rev of an authentic message, including ignored ones. An export older than this
            does not complete a resync.
        latest_unverified_rev: The newest rev of a message whose signature could not be checked. It makes a resync
            prefer the repo's own PDS over a mirror that is behind, and has no other effect.
        active: False if upstream hides the account, for the reason in `hosting_status`.
        hosting_seq: The sequence number of the last #account message from `hosting_relay`.
        takedown: True if the local operator hides the account.
        lease: Incremented by every claim, so that a worker can tell whether its claim still holds.
        next_attempt_at: Unix seconds; None means immediately, `PARKED` means after an event unparks the repo.
        erase_at: Unix seconds from which the records of a deleted account may be erased.
    """

    did: str
    version: int = 0
    sync_status: SyncStatus = SyncStatus.DESYNCHRONIZED
    sync_reason: Desync | None = Desync.NEW
    head: Head | None = None
    latest_verified_rev: str | None = None
    latest_unverified_rev: str | None = None
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
        """True if the repo has a row."""
        return self.version > 0

    @property
    def visible(self) -> bool:
        """True if the public views show the repo's records."""
        return self.active and not self.takedown
