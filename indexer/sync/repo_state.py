"""The state of one repo: its sync status, its head, and what upstream says about the account.

Two statuses are independent of each other. The *sync status* says how the stored records compare with the repo on the
network. The *hosting status* is what the relay reports about the account; the local takedown is separate from it. The
reason for a desynchronization, the number of attempts, and times are fields, not statuses.
"""

from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

from indexer.reasons import Desync, FetchFailure

PARKED = inf
"""Value of `Repo.next_attempt_at` for a repo that is not tried again until an event unparks it."""
DELETED = "deleted"
"""The hosting status that leads to erasure."""
TOMBSTONED = "tombstoned"
"""The hosting status of a repo whose DID is gone from its directory. No relay sends it."""
OUT_OF_SCOPE = "out-of-scope"
"""The hosting status of a repo that was untracked because the scope wants fewer repos. No relay sends it."""
HIDING_STATUSES = frozenset({"takendown", "suspended", DELETED, "deactivated", "inactive"})
"""The statuses of an account that is not active. `inactive` is the word of Bluesky's relay for no status.

Any other status is a relay's own trouble: `throttled`, `desynchronized`, and what is not known yet
(docs/protocol.md#accounts).
"""
CHOSEN = 2**63 - 1
"""Value of `Repo.wanted_in` for a repo that a command, SQL or a request named: each scope wants it."""


def hides(status: str | None) -> bool:
    """Return True if an account that is not active is hidden, for this status or without one."""
    return status is None or status in HIDING_STATUSES


class SyncStatus(StrEnum):
    """The sync status of a repo, in the words of the specification."""

    DESYNCHRONIZED = "desynchronized"
    IN_PROGRESS = "in-progress"
    SYNCHRONIZED = "synchronized"


class Head(NamedTuple):
    """The commit of the stored records: its rev, the CID of the MST root, and the CID of the commit block."""

    rev: str
    data: bytes
    commit: bytes


class StreamPoint(NamedTuple):
    """The place of a message in the stream of a relay. It orders the reports about an account.

    Attributes:
        epoch: The epoch of the relay's sequence.
        time: The `time` field of the message (Unix seconds); None if it is not known.
    """

    relay: str
    epoch: int
    seq: int
    time: float | None


class Repo(NamedTuple):
    """One row of the table `repo`, with the columns that planning needs.

    Attributes:
        version: Incremented by every write. A write applies only to the version it was planned on; 0: no row yet.
        latest_verified_rev: The newest rev of an authentic message, including ignored ones. An export older than this
            does not complete a resync.
        latest_unverified_rev: The newest rev of a message whose signature could not be checked, or of a repo list. A
            resync prefers a source whose export has reached it. It never decides which records are stored.
        active: False if upstream hides the account, for the reason in `hosting_status`.
        withheld_since: When the relay first said that it withholds the account, for the reason in `hosting_status`
            (Unix seconds); None if it does not. A withheld account is active and never synchronized.
        hosting_relay: The relay that made the last report about the account with a known place in its stream: in an
            #account message, or as the answer to a request.
        hosting_epoch: The epoch of the sequence of `hosting_relay` that `hosting_seq` belongs to.
        hosting_seq: The number of that #account message, or of the last message that was stored before the request.
        hosting_time: The latest `time` of these messages (Unix seconds), at most what clocks may drift after they
            arrived; None if it is not known.
        takedown: True if the local operator hides the account.
        lease: Incremented by every claim, so that a worker can tell whether its claim still holds.
        last_failure: Why the last fetch failed; None if it did not.
        last_error: The same with details, for people.
        next_attempt_at: Unix seconds; None means immediately, `PARKED` means after an event unparks the repo.
        erase_at: Unix seconds from which the records of a deleted account may be erased.
        unproven_since: When the first undecidable commit since the last complete export was applied (Unix seconds);
            None: there is none. Such a commit may hide a change, so that the stored records may be wrong.
        from_stream: True if a message of the stream added the repo, and no repo list and no command has named it since.
        scope_version: The version of the scope for which the stored records are complete.
        tracked: False if an operator untracked the repo, or if the scope wants it no more (`OUT_OF_SCOPE`). Its records
            are erased, and all its messages are ignored.
        wanted_in: The latest version of the scope that wanted the repo, or `CHOSEN`.
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
    hosting_epoch: int = 0
    hosting_seq: int = 0
    hosting_time: float | None = None
    takedown: bool = False
    buffered_events: int = 0
    buffered_bytes: int = 0
    lease: int = 0
    attempts: int = 0
    next_attempt_at: float | None = None
    last_failure: FetchFailure | None = None
    last_error: str | None = None
    synchronized_at: float | None = None
    erase_at: float | None = None
    unproven_since: float | None = None
    from_stream: bool = False
    scope_version: int = 0
    tracked: bool = True
    wanted_in: int = 0
    withheld_since: float | None = None

    @property
    def known(self) -> bool:
        """True if the repo has a row."""
        return self.version > 0

    @property
    def visible(self) -> bool:
        """True if the public views show the repo's records."""
        return self.active and not self.takedown

    @property
    def out_of_scope(self) -> bool:
        """True if the scope wanted the repo no more. It is tracked again as soon as the scope wants it."""
        return not self.tracked and self.hosting_status == OUT_OF_SCOPE

    @property
    def waits_as_new(self) -> bool:
        """True if its first fetch was postponed because its host added too many accounts."""
        return self.last_failure is FetchFailure.NEW_ACCOUNTS

    @property
    def counts_as_new(self) -> bool:
        """True if its first fetch is about to begin, and counts towards the limit of its host."""
        never_fetched = self.head is None and self.last_failure is None
        return never_fetched and self.from_stream and self.sync_reason in (Desync.NEW, Desync.IDENTITY)

    @property
    def newer_is_verified(self) -> bool:
        """True if an authentic message has shown a newer state than the stored one."""
        return self.head is not None and (self.latest_verified_rev or "") > self.head.rev

    @property
    def waits_for_newer_export(self) -> bool:
        """True if its last export was too old, and no authentic message has shown since that the host has a newer one.

        So the first such message changes it, and only the first one.
        """
        stale = self.last_failure is FetchFailure.EXPORT_STALE
        return stale and self.head is not None and not self.newer_is_verified

    def advanced_to(self, head: Head) -> "Repo":
        """Return the next version of the row, with this head."""
        # Slices take a third of the time of `_replace`.
        row: tuple[Any, ...] = self
        return Repo._make((self.did, self.version + 1, *row[_STATUS], head, *row[_AFTER_HEAD]))

    def advances(self, before: "Repo") -> bool:
        """Return True if this row of a synchronized repo differs from the row before in nothing but the head."""
        if self.sync_status is not SyncStatus.SYNCHRONIZED or not before.known:
            return False
        # Slices compare in half the time of a copy with the same version and head.
        return self.did == before.did and self[_STATUS] == before[_STATUS] and self[_AFTER_HEAD] == before[_AFTER_HEAD]


_STATUS = slice(Repo._fields.index("version") + 1, Repo._fields.index("head"))
_AFTER_HEAD = slice(Repo._fields.index("head") + 1, None)
