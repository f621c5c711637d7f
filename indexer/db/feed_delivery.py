"""The data of a feed: entries of the change log, what is stored about them now, and what was delivered."""

from collections.abc import Sequence
from typing import Literal, NamedTuple


class LoggedChange(NamedTuple):
    """One entry of the change log with its number. The fields are those of `atproto.changes`.

    Attributes:
        batch_time: The time of its batch, in microseconds since the Unix epoch.
    """

    seq: int
    did: str
    collection: str | None
    rkey: str | None
    action: str
    cid: str | None
    rev: str | None
    live: bool
    batch_time: int


class SnapshotPosition(NamedTuple):
    """A position among the stored repos and records, in the order of DIDs; a repo comes before its records.

    Attributes:
        collection: Empty for the repo itself.
        rkey: Empty for the repo itself.
    """

    did: str
    collection: str
    rkey: str


SNAPSHOT_BEGIN = SnapshotPosition("", "", "")


class DeliveryProgress(NamedTuple):
    """The changes that were acknowledged, as they are stored.

    Attributes:
        position: All changes up to this number are acknowledged.
        delivered_to: The number of the newest acknowledged change; `position` if there is none after it.
        undelivered: The numbers of unacknowledged changes up to `delivered_to`, besides those of `behind`.
        snapshot: The snapshot is acknowledged up to here; None if there is none, or if all of it is acknowledged.
        behind: Repos of which no change from this number on is acknowledged.
    """

    position: int
    delivered_to: int
    undelivered: tuple[int, ...] = ()
    snapshot: SnapshotPosition | None = None
    behind: tuple[tuple[str, int], ...] = ()


SetAsideReason = Literal["hidden", "refused"]
SetAsideKey = tuple[SetAsideReason, str, str, str]
"""Reason, DID, collection and record key."""


class SetAside(NamedTuple):
    """Events that a consumer has not received, although its position has passed them.

    Attributes:
        reason: `hidden`: records of a repo that was hidden when their events were due. `refused`: one event that
            clients refused for too long.
        collection: Empty for a whole repo, and for an identity event.
        rkey: Empty for a whole repo, and for an identity event.
        rev: The rev of the event, or the lowest rev of the records; empty for all records.
        action: The action of a refused event.
        attempts: How often a refused event was sent.
        since: When it was set aside, or first not acknowledged, in Unix seconds.
        failure: Why a refused event counts as not acknowledged.
    """

    reason: SetAsideReason
    did: str
    collection: str
    rkey: str
    rev: str
    action: str
    attempts: int
    since: float
    failure: str

    @property
    def key(self) -> SetAsideKey:
        """The primary key."""
        return self.reason, self.did, self.collection, self.rkey


class SetAsideChanges(NamedTuple):
    """Changes of the rows that are set aside, to be stored with the progress that depends on them.

    Attributes:
        added: New rows.
        visible: DIDs of repos that are visible again, so that their records are due.
        delivered: The keys of rows whose events are delivered now.
    """

    added: Sequence[SetAside] = ()
    visible: Sequence[str] = ()
    delivered: Sequence[SetAsideKey] = ()


class StoredRecord(NamedTuple):
    """A record as it is stored now.

    Attributes:
        value: The value as JSON text; None if it is not stored.
    """

    cid: bytes
    rev: str
    value: str | None


class StoredAccount(NamedTuple):
    """The state of an account as it is stored now.

    Attributes:
        handle: The verified handle; None if it has not been checked yet.
        hosting_status: The status as sent upstream; None if it sent none.
        takedown: The repo is taken down locally.
    """

    handle: str | None
    active: bool
    hosting_status: str | None
    takedown: bool

    @property
    def visible(self) -> bool:
        """True if the records may be shown: `Repo.visible`."""
        return self.active and not self.takedown
