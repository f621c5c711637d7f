from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from indexer.serve.account_status import MAX_COUNTED_RECORDS, account_status

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
SYNCHRONIZED: dict[str, Any] = {
    "did": "did:plc:one", "handle": "one.test", "pds": "https://pds.test",
    "sync_status": "synchronized", "sync_reason": None, "rev": "3laaaaaaaaa22",
    "active": True, "hosting_status": "active", "withheld_since": None, "takedown": False,
    "tracked": True, "visible": True, "redacted": None, "removed": 0,
    "resync_attempts": 0, "last_failure": None, "last_error": None, "next_attempt_at": None, "parked": False,
    "synchronized_at": NOW - MINUTE, "buffered_events": 0, "records": 7,
}  # fmt: skip
BROKEN = SYNCHRONIZED | {"sync_status": "desynchronized", "sync_reason": "chain-break"}


def test_synchronized_repo() -> None:
    status = account_status(SYNCHRONIZED, NOW)
    assert status["summary"] == ["The repo is synchronized: the stored records are those of rev 3laaaaaaaaa22."]
    assert status["synchronized_seconds_ago"] == 60.0
    assert (status["records"], status["more_records"], status["hosting_status"]) == (7, False, "active")
    many = account_status(SYNCHRONIZED | {"records": MAX_COUNTED_RECORDS + 1}, NOW)
    assert (many["records"], many["more_records"]) == (MAX_COUNTED_RECORDS, True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"next_attempt_at": NOW + 2 * HOUR}, "Reason: chain-break."),
        ({"next_attempt_at": NOW + 2 * HOUR}, " 2 h "),
        ({"parked": True}, "parked"),
        ({"last_failure": "timeout", "last_error": "timeout: pds.test"}, "timeout"),
        ({"sync_status": "in-progress", "buffered_events": 1_200}, "1,200"),
        ({"tracked": False, "active": False}, "untracked"),
        ({"tracked": False, "active": False, "redacted": "a court"}, "never tracked again. Reason: a court."),
        ({"removed": 1_200}, "redacted or hidden: 1,200."),
        ({"takedown": True}, "operator"),
        ({"active": False, "hosting_status": "deleted"}, "deleted"),
        (
            {"withheld_since": NOW - 2 * HOUR, "hosting_status": "throttled"},
            "withheld the account for 2 h",
        ),
    ],
)
def test_state_and_reason_are_said(changes: dict[str, Any], text: str) -> None:
    assert text in " ".join(account_status(BROKEN | changes, NOW)["summary"])
    assert text not in " ".join(account_status(SYNCHRONIZED, NOW)["summary"])


def test_time_of_the_next_attempt_is_given_only_while_the_repo_waits() -> None:
    assert account_status(BROKEN | {"next_attempt_at": NOW + MINUTE}, NOW)["next_attempt_seconds"] == 60.0
    assert account_status(BROKEN | {"next_attempt_at": NOW - MINUTE}, NOW)["next_attempt_seconds"] == 0.0
    assert account_status(SYNCHRONIZED | {"next_attempt_at": NOW + MINUTE}, NOW)["next_attempt_seconds"] is None
