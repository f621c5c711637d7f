"""Entries of the change log: of records, and of a whole repo, which follow from its row before and after."""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from indexer.sync.plan import Action, RecordChange, RepoWrite
from indexer.sync.repo import Repo, SyncStatus

RepoAction = Literal["hidden", "visible", "deleted", "moved", "completed"]


class Change(NamedTuple):
    """One entry. Of a record: collection, rkey, and after it the CID, if there still is one. Of a repo: neither.

    `live` says that it is an event of the stream, and not what a resync found.
    """

    did: str
    action: Action | RepoAction
    rev: str | None
    live: bool
    collection: str | None = None
    rkey: str | None = None
    cid: bytes | None = None


class Standing(NamedTuple):
    """What the feed tells of a repo's row: are its records shown, is the account gone, is our copy whole?"""

    visible: bool
    deleted: bool
    synchronized: bool


def standing(repo: Repo) -> Standing:
    return Standing(
        visible=repo.active and not repo.takedown,
        deleted=not repo.active and repo.hosting_status == "deleted",
        synchronized=repo.status is SyncStatus.SYNCHRONIZED,
    )


def changes_of(before: Standing, write: RepoWrite) -> Iterator[Change]:
    """All that a write changes, in the order in which a reader can follow it.

    Records come before the end of the resync that they belong to, and while the repo is shown, if it is at either end.
    """
    repo, after = write.repo, standing(write.repo)
    rev = repo.head.rev if repo.head else None
    if after.visible and not before.visible:
        yield Change(repo.did, "visible", rev, live=True)
    yield from record_changes(repo.did, write.changes, live=write.live)
    if after.synchronized and not before.synchronized:
        yield Change(repo.did, "completed", rev, live=False)
    if before.visible and not after.visible:
        yield Change(repo.did, "hidden", rev, live=True)
    if after.deleted and not before.deleted:
        yield Change(repo.did, "deleted", rev, live=True)


def record_changes(did: str, changes: Iterable[RecordChange], *, live: bool) -> Iterator[Change]:
    for change in changes:
        yield Change(did, change.action, change.rev, live, change.collection, change.rkey, change.cid)
