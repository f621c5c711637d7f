from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from indexer.sync.changes import RepoVisibility, change_log_entries, visibility_of
from indexer.sync.plans import RecordChange, RepoWrite
from indexer.sync.repo_state import Head, Repo, SyncStatus

NEW = Repo("did:plc:a")
HEAD = Head("3laaaaaaaaa22", bytes(36), bytes(36))
SYNCHRONIZED = replace(NEW, version=1, sync_status=SyncStatus.SYNCHRONIZED, sync_reason=None, head=HEAD)
DELETED: dict[str, Any] = {"active": False, "hosting_status": "deleted"}
DEACTIVATED: dict[str, Any] = {"active": False, "hosting_status": "deactivated"}
CHANGE = RecordChange("create", "app.test", "a", "3laaaaaaaaa22", bytes(36))


def actions(before: Repo, after: Repo, *changes: RecordChange) -> list[str]:
    return [change.action for change in change_log_entries(visibility_of(before), RepoWrite(1, after, changes))]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (NEW, replace(NEW, version=1), []),
        (NEW, replace(NEW, version=1, **DEACTIVATED), ["hidden"]),
        (NEW, SYNCHRONIZED, ["create", "completed"]),
        (SYNCHRONIZED, replace(SYNCHRONIZED, version=2), ["create"]),
        (SYNCHRONIZED, replace(SYNCHRONIZED, sync_status=SyncStatus.DESYNCHRONIZED), ["create"]),
        (SYNCHRONIZED, replace(SYNCHRONIZED, takedown=True), ["create", "hidden"]),
        (replace(SYNCHRONIZED, takedown=True), SYNCHRONIZED, ["visible", "create"]),
        (replace(SYNCHRONIZED, takedown=True), replace(SYNCHRONIZED, takedown=True, **DEACTIVATED), ["create"]),
        (replace(SYNCHRONIZED, takedown=True, **DEACTIVATED), replace(SYNCHRONIZED, takedown=True), ["create"]),
        (SYNCHRONIZED, replace(SYNCHRONIZED, **DELETED), ["create", "hidden", "deleted"]),
        (replace(SYNCHRONIZED, **DEACTIVATED), replace(SYNCHRONIZED, **DELETED), ["create", "deleted"]),
        (replace(SYNCHRONIZED, **DELETED), SYNCHRONIZED, ["visible", "create"]),
        (replace(SYNCHRONIZED, **DELETED), replace(SYNCHRONIZED, **DELETED), ["create"]),
        (SYNCHRONIZED, replace(SYNCHRONIZED, active=True, hosting_status="deleted"), ["create"]),
    ],
)
def test_entries_of_a_repo_enclose_the_entries_of_its_records(before: Repo, after: Repo, expected: list[str]) -> None:
    changes = (CHANGE,) if "create" in expected else ()
    assert actions(before, after, *changes) == expected


def test_a_consumer_can_follow_the_visibility_of_a_repo() -> None:
    """Takes all pairs of states in sequence: the entries alone tell a consumer what the row says."""
    states = [
        replace(SYNCHRONIZED, sync_status=status, takedown=takedown, **hosting)
        for status, takedown, hosting in product(
            (SyncStatus.SYNCHRONIZED, SyncStatus.IN_PROGRESS), (False, True), ({}, DEACTIVATED, DELETED)
        )
    ]
    for sequence in product(states, repeat=2):
        visible, deleted = True, False
        for before, after in pairwise((NEW, *sequence)):
            for action in actions(before, after):
                visible = {"hidden": False, "visible": True}.get(action, visible)
                deleted = {"deleted": True, "visible": False}.get(action, deleted)
            assert visible == visibility_of(after).visible
            assert deleted or not visibility_of(after).deleted
            assert not (visible and deleted)


def test_live_is_false_only_for_entries_of_a_resync() -> None:
    write = RepoWrite(1, replace(SYNCHRONIZED, takedown=True), (CHANGE,), live=False)
    record, completed, hidden = change_log_entries(
        RepoVisibility(visible=True, deleted=False, synchronized=False), write
    )
    assert (record.live, completed.live, hidden.live) == (False, False, True)
    assert (record.collection, record.rkey, record.cid, record.rev) == ("app.test", "a", bytes(36), CHANGE.rev)
    assert (hidden.collection, hidden.rkey, hidden.cid, hidden.rev) == (None, None, None, HEAD.rev)
