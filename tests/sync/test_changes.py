from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sync.changes import (
    Action,
    ChangeLogEntry,
    RecordChange,
    RepoWrite,
    change_log_entries,
    effective_changes,
    hosting_status_of,
)
from indexer.sync.repo import Head, Repo, SyncStatus

NEW = Repo("did:plc:a")
HEAD = Head("3laaaaaaaaa22", bytes(36), bytes(36))
SYNCHRONIZED = NEW._replace(version=1, sync_status=SyncStatus.SYNCHRONIZED, sync_reason=None, head=HEAD)
TAKEN_DOWN = SYNCHRONIZED._replace(takedown=True)
DELETED: dict[str, Any] = {"active": False, "hosting_status": "deleted"}
DEACTIVATED: dict[str, Any] = {"active": False, "hosting_status": "deactivated"}
SUSPENDED: dict[str, Any] = {"active": False, "hosting_status": "suspended"}
CHANGE = RecordChange("create", "app.test", "a", "3laaaaaaaaa22", bytes(36))


def actions(before: Repo, after: Repo, *changes: RecordChange) -> list[str]:
    """Return the actions of the entries, after checking the others fields of those of the repo."""
    entries = list(change_log_entries(RepoWrite(before, after, changes)))
    rev = after.head and after.head.rev
    for entry in [entry for entry in entries if entry.collection is None]:
        assert entry == ChangeLogEntry(NEW.did, entry.action, rev, live=entry.action != "completed")
    return [entry.action for entry in entries]


S = SYNCHRONIZED


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (NEW, NEW._replace(version=1), ""),
        (NEW, NEW._replace(version=1, **DEACTIVATED), "hidden"),
        (NEW, S, "create completed"),
        (S, S._replace(version=2), "create"),
        (S, S._replace(sync_status=SyncStatus.DESYNCHRONIZED), "create"),
        (S, TAKEN_DOWN, "create hidden"),
        (TAKEN_DOWN, S, "visible create"),
        (TAKEN_DOWN, TAKEN_DOWN._replace(**DEACTIVATED), "create identity"),
        (TAKEN_DOWN._replace(**DEACTIVATED), TAKEN_DOWN, "create identity"),
        (S, S._replace(**DELETED), "create hidden deleted"),
        (S._replace(**DEACTIVATED), S._replace(**DELETED), "create deleted"),
        (S._replace(**DEACTIVATED), S._replace(**SUSPENDED), "create identity"),
        (S._replace(**DELETED), S._replace(**SUSPENDED), "create identity"),
        (S._replace(**DELETED), S, "visible create"),
        (S._replace(**DELETED), S._replace(**DELETED), "create"),
        (S, S._replace(active=True, hosting_status="deleted"), "create"),
    ],
)
def test_entries_of_a_repo_enclose_the_entries_of_its_records(before: Repo, after: Repo, expected: str) -> None:
    changes = (CHANGE,) if "create" in expected else ()
    assert actions(before, after, *changes) == expected.split()


def test_a_consumer_can_follow_the_visibility_of_a_repo() -> None:
    """Takes all pairs of states in sequence: the entries alone tell a consumer what the row says."""
    states = [
        SYNCHRONIZED._replace(sync_status=status, takedown=takedown, **hosting)
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
            assert visible == after.visible
            assert deleted or hosting_status_of(after) != "deleted"
            assert not (visible and deleted)


def test_every_change_of_the_hosting_status_is_logged() -> None:
    states = [
        SYNCHRONIZED._replace(takedown=takedown, **hosting)
        for takedown, hosting in product((False, True), ({}, DEACTIVATED, SUSPENDED, DELETED))
    ]
    for before, after in product(states, repeat=2):
        changed = (before.visible, hosting_status_of(before)) != (after.visible, hosting_status_of(after))
        assert bool(actions(before, after)) == changed, (before, after)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("advances", [True, False])
def test_write_of_records_only_has_their_entries(*, advances: bool, live: bool) -> None:
    entries = change_log_entries(RepoWrite(SYNCHRONIZED, SYNCHRONIZED, (CHANGE,), live=live, advances=advances))
    assert list(entries) == [ChangeLogEntry(NEW.did, "create", CHANGE.rev, live, "app.test", "a", CHANGE.cid)]


def test_account_without_a_status_is_active_or_inactive() -> None:
    assert hosting_status_of(SYNCHRONIZED) == "active"
    assert hosting_status_of(SYNCHRONIZED._replace(active=False)) == "inactive"


@given(
    st.lists(st.tuples(st.sampled_from(["create", "update", "delete"]), st.sampled_from("ab"), st.integers(0, 9))),
    st.frozensets(st.sampled_from("ab")),
)
def test_effective_changes_are_those_of_a_dictionary(
    steps: list[tuple[Action, str, int]], names: frozenset[str]
) -> None:
    changes = [
        RecordChange(action, "app.test", rkey, "3laaaaaaaaa22", None if action == "delete" else bytes([number]))
        for action, rkey, number in steps
    ]
    expected, stored = [], set(names)
    for change in changes:
        if change.action != "delete":
            expected.append(change._replace(action="update" if change.rkey in stored else "create"))
            stored.add(change.rkey)
        elif change.rkey in stored:
            expected.append(change)
            stored.discard(change.rkey)
    keys = {(NEW.did, "app.test", rkey) for rkey in names} | {("did:plc:other", "app.test", "a")}
    assert effective_changes(NEW.did, changes, keys) == tuple(expected)


def test_live_is_false_only_for_entries_of_a_resync() -> None:
    write = RepoWrite(NEW, SYNCHRONIZED._replace(takedown=True), (CHANGE,), live=False)
    record, completed, hidden = change_log_entries(write)
    assert (record.live, completed.live, hidden.live) == (False, False, True)
    assert (record.collection, record.rkey, record.cid, record.rev) == ("app.test", "a", bytes(36), CHANGE.rev)
    assert (hidden.collection, hidden.rkey, hidden.cid, hidden.rev) == (None, None, None, HEAD.rev)
