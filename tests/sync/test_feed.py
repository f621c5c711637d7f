from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from indexer.sync.feed import Standing, changes_of, standing
from indexer.sync.plan import RecordChange, RepoWrite
from indexer.sync.repo import Head, Repo, SyncStatus

NEW = Repo("did:plc:a")
HEAD = Head("3laaaaaaaaa22", bytes(36), bytes(36))
WHOLE = replace(NEW, version=1, status=SyncStatus.SYNCHRONIZED, reason=None, head=HEAD)
GONE: dict[str, Any] = {"active": False, "hosting_status": "deleted"}
LEFT: dict[str, Any] = {"active": False, "hosting_status": "deactivated"}
CHANGE = RecordChange("create", "app.test", "a", "3laaaaaaaaa22", bytes(36))


def actions(before: Repo, after: Repo, *changes: RecordChange) -> list[str]:
    return [change.action for change in changes_of(standing(before), RepoWrite(1, after, changes))]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (NEW, replace(NEW, version=1), []),
        (NEW, replace(NEW, version=1, **LEFT), ["hidden"]),
        (NEW, WHOLE, ["create", "completed"]),
        (WHOLE, replace(WHOLE, version=2), ["create"]),
        (WHOLE, replace(WHOLE, status=SyncStatus.DESYNCHRONIZED), ["create"]),
        (WHOLE, replace(WHOLE, takedown=True), ["create", "hidden"]),
        (replace(WHOLE, takedown=True), WHOLE, ["visible", "create"]),
        (replace(WHOLE, takedown=True), replace(WHOLE, takedown=True, **LEFT), ["create"]),
        (replace(WHOLE, takedown=True, **LEFT), replace(WHOLE, takedown=True), ["create"]),
        (WHOLE, replace(WHOLE, **GONE), ["create", "hidden", "deleted"]),
        (replace(WHOLE, **LEFT), replace(WHOLE, **GONE), ["create", "deleted"]),
        (replace(WHOLE, **GONE), WHOLE, ["visible", "create"]),
        (replace(WHOLE, **GONE), replace(WHOLE, **GONE), ["create"]),
        (WHOLE, replace(WHOLE, active=True, hosting_status="deleted"), ["create"]),
    ],
)
def test_what_a_repo_goes_through_is_told_around_its_records(before: Repo, after: Repo, expected: list[str]) -> None:
    changes = (CHANGE,) if "create" in expected else ()
    assert actions(before, after, *changes) == expected


def test_whoever_follows_knows_how_each_repo_stands() -> None:
    """Any walk through all states, two steps long: the entries alone, played, give the row's standing."""
    states = [
        replace(WHOLE, status=status, takedown=takedown, **hosting)
        for status, takedown, hosting in product(
            (SyncStatus.SYNCHRONIZED, SyncStatus.IN_PROGRESS), (False, True), ({}, LEFT, GONE)
        )
    ]
    for walk in product(states, repeat=2):
        visible, deleted = True, False
        for before, after in pairwise((NEW, *walk)):
            for action in actions(before, after):
                visible = {"hidden": False, "visible": True}.get(action, visible)
                deleted = {"deleted": True, "visible": False}.get(action, deleted)
            assert visible == standing(after).visible
            assert deleted or not standing(after).deleted
            assert not (visible and deleted)


def test_entries_say_where_they_come_from() -> None:
    write = RepoWrite(1, replace(WHOLE, takedown=True), (CHANGE,), live=False)
    record, completed, hidden = changes_of(Standing(visible=True, deleted=False, synchronized=False), write)
    assert (record.live, completed.live, hidden.live) == (False, False, True)
    assert (record.collection, record.rkey, record.cid, record.rev) == ("app.test", "a", bytes(36), CHANGE.rev)
    assert (hidden.collection, hidden.rkey, hidden.cid, hidden.rev) == (None, None, None, HEAD.rev)
