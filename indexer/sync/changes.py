"""Derive the entries of the change log from a write: entries of records, and entries of the repo itself."""

from collections.abc import Container, Iterable, Iterator
from typing import Literal, NamedTuple

from indexer.sync.plans import Action, RecordChange, RepoWrite
from indexer.sync.repo_state import DELETED, Repo, SyncStatus

RepoAction = Literal["hidden", "visible", "deleted", "identity", "moved", "completed"]
RecordKey = tuple[str, str, str]
"""DID, collection and record key."""


class ChangeLogEntry(NamedTuple):
    """One entry of the change log.

    Attributes:
        live: True if the stream caused the change, False if a resync did.
        collection: None for an entry of a repo.
        rkey: None for an entry of a repo.
        cid: The new CID of the record; None for a delete and for an entry of a repo.
    """

    did: str
    action: Action | RepoAction
    rev: str | None
    live: bool
    collection: str | None = None
    rkey: str | None = None
    cid: bytes | None = None


class RepoVisibility(NamedTuple):
    """The properties of a repo that cause entries when they change.

    Attributes:
        visible: The public views show the records (`Repo.visible`).
        deleted: The account is deleted upstream.
        synchronized: The stored records are complete.
        hosting_status: "active", or why the account is not active.
    """

    visible: bool
    deleted: bool
    synchronized: bool
    hosting_status: str = "active"


def visibility_of(repo: Repo) -> RepoVisibility:
    """Return the logged properties of the row."""
    return RepoVisibility(
        visible=repo.visible,
        deleted=not repo.active and repo.hosting_status == DELETED,
        synchronized=repo.sync_status is SyncStatus.SYNCHRONIZED,
        hosting_status="active" if repo.active else repo.hosting_status or "inactive",
    )


def change_log_entries(before: RepoVisibility | None, write: RepoWrite) -> Iterator[ChangeLogEntry]:
    """Return the entries of one write, in the order in which a consumer can apply them.

    Entries of records come while the repo is visible, if it is visible before or after the write, and before the
    "completed" entry of the resync that wrote them. "identity" says that the hosting status changed if no other entry
    does.

    Args:
        before: The properties of the repo before the write; None if the write does not change them.
        write: The write.
    """
    if before is None:
        return record_entries(write.repo.did, write.changes, live=write.live)
    return _entries(before, write)


def _entries(before: RepoVisibility, write: RepoWrite) -> Iterator[ChangeLogEntry]:
    repo, after = write.repo, visibility_of(write.repo)
    rev = repo.head.rev if repo.head else None
    if after.visible and not before.visible:
        yield ChangeLogEntry(repo.did, "visible", rev, live=True)
    yield from record_entries(repo.did, write.changes, live=write.live)
    if after.synchronized and not before.synchronized:
        yield ChangeLogEntry(repo.did, "completed", rev, live=False)
    if before.visible and not after.visible:
        yield ChangeLogEntry(repo.did, "hidden", rev, live=True)
    if after.deleted and not before.deleted:
        yield ChangeLogEntry(repo.did, "deleted", rev, live=True)
    elif after.visible == before.visible and after.hosting_status != before.hosting_status:
        yield ChangeLogEntry(repo.did, "identity", rev, live=True)


def effective_changes(
    did: str, changes: Iterable[RecordChange], stored: Container[RecordKey]
) -> tuple[RecordChange, ...]:
    """Return the changes as they happened to the stored records, without deletions of records that did not exist.

    A commit says what it does to the tree of the repo. The stored records may differ from the tree: after a change of
    the selected collections, they follow at the next resync.

    Args:
        did: The repo.
        changes: Changes of its records, in order. There may be several of one record.
        stored: The keys of the records that were stored before; keys of other records do not matter.
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
