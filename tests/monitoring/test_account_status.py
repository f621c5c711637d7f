from typing import Any

import pytest

from indexer.monitoring.account_status import account_status
from indexer.store.status_queries import MAX_COUNTED_RECORDS

NOW = 1_000_000.0
SYNCHRONIZED: dict[str, Any] = {
    "did": "did:plc:one",
    "handle": "one.test",
    "pds": "https://pds.test",
    "sync_status": "synchronized",
    "sync_reason": None,
    "rev": "3laaaaaaaaa22",
    "active": True,
    "hosting_status": None,
    "takedown": False,
    "tracked": True,
    "visible": True,
    "attempts": 0,
    "last_error": None,
    "next_attempt_at": None,
    "parked": False,
    "synchronized_at": NOW - 60,
    "updated_at": NOW - 5,
    "buffered_events": 0,
    "records": 7,
}
BROKEN = SYNCHRONIZED | {"sync_status": "desynchronized", "sync_reason": "chain-break"}


def summary(**changes: Any) -> str:
    return " ".join(account_status(BROKEN | changes, NOW).summary)


def test_synchronized_repo() -> None:
    status = account_status(SYNCHRONIZED, NOW)
    assert status.summary == ["The repo is synchronized: the stored records are those of rev 3laaaaaaaaa22."]
    assert (status.synchronized_seconds_ago, status.updated_seconds_ago) == (60.0, 5.0)
    assert (status.records, status.more_records, status.hosting_status) == (7, False, "active")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "Reason: chain-break. A valid commit does not follow the stored rev: an event was missed."),
        ({}, "It waits in the resync queue"),
        ({"next_attempt_at": NOW + 7_200}, "The next attempt starts in 2 h at the earliest."),
        ({"parked": True}, "It is parked: the next attempt follows after a message of the account"),
        ({"last_error": "timeout: pds.test"}, "The last attempt failed: timeout. The host took too long"),
        ({"last_error": "<b>odd</b>"}, "The last attempt failed: <b>odd</b>."),
        (
            {"sync_status": "in-progress", "buffered_events": 1_200},
            "are buffered: 1,200.",
        ),
        ({"tracked": False, "active": False}, "It is untracked: its records are erased"),
        ({"takedown": True}, "An operator has taken the account down here"),
        ({"active": False, "hosting_status": "deleted"}, "Its hosting status is deleted"),
        ({"active": False}, "It is not resynced while its account is not active."),
    ],
)
def test_state_and_reason_are_said_in_words(changes: dict[str, Any], text: str) -> None:
    assert text in summary(**changes)


def test_number_of_records_is_bounded() -> None:
    status = account_status(SYNCHRONIZED | {"records": MAX_COUNTED_RECORDS + 1}, NOW)
    assert (status.records, status.more_records) == (MAX_COUNTED_RECORDS, True)


def test_time_of_the_next_attempt_is_given_only_while_the_repo_waits() -> None:
    assert account_status(BROKEN | {"next_attempt_at": NOW + 60}, NOW).next_attempt_seconds == 60.0
    assert account_status(BROKEN | {"next_attempt_at": NOW - 60}, NOW).next_attempt_seconds == 0.0
    assert account_status(SYNCHRONIZED | {"next_attempt_at": NOW + 60}, NOW).next_attempt_seconds is None
