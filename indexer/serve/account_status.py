"""The state of one account in words, for the status page and for `indexer repo`."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from indexer.reasons import Desync, FetchFailure
from indexer.sync.repo import SyncStatus

MAX_COUNTED_RECORDS = 10_000
"""Records of one repo that the status page counts at most."""
_DESYNC_TEXTS = {str(reason): reason.text for reason in Desync}
_FAILURE_TEXTS = {str(reason): reason.text for reason in FetchFailure}


def account_status(report: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the JSON object of the status page for a `Reports.repo` at `now`.

    `summary` has the sentences of `account_summary`. `records` is at most `MAX_COUNTED_RECORDS`; `more_records` is true
    if there are more. `next_attempt_seconds` is the time until the next resync may start; null if none is scheduled.
    """
    next_at, synchronized_at = report["next_attempt_at"], report["synchronized_at"]
    waits = report["sync_status"] == SyncStatus.DESYNCHRONIZED and next_at is not None
    same = ("did", "handle", "pds", "sync_status", "sync_reason", "hosting_status", "visible", "rev", "last_error")
    return {
        "summary": list(account_summary(report, now)),
        **{name: report[name] for name in same},
        "attempts": report["resync_attempts"],
        "records": min(report["records"], MAX_COUNTED_RECORDS),
        "more_records": report["records"] > MAX_COUNTED_RECORDS,
        "next_attempt_seconds": max(0.0, (next_at - now).total_seconds()) if waits else None,
        "synchronized_seconds_ago": synchronized_at and max(0.0, (now - synchronized_at).total_seconds()),
    }


def account_summary(row: Mapping[str, Any], now: datetime) -> Iterator[str]:
    """Yield sentences that say what the state of a repo is, why, and what happens next."""
    match row["sync_status"]:
        case SyncStatus.SYNCHRONIZED:
            yield f"The repo is synchronized: the stored records are those of rev {row['rev']}."
        case SyncStatus.IN_PROGRESS:
            events = row["buffered_events"]
            yield f"The repo is being resynced now. Events that arrived meanwhile and are buffered: {events:,}."
        case _:
            yield "The repo is desynchronized: its stored records may be missing or outdated."
    if row["sync_status"] != SyncStatus.SYNCHRONIZED:
        if row["sync_reason"] is not None:
            yield f"Reason: {row['sync_reason']}. {_DESYNC_TEXTS.get(row['sync_reason'], '')}".rstrip()
        if (failure := row["last_failure"]) is not None:
            yield f"The last attempt failed: {failure}. {_FAILURE_TEXTS.get(failure, '')}".rstrip()
    if row["sync_status"] == SyncStatus.DESYNCHRONIZED:
        yield _next_step(row, now)
    if row["takedown"]:
        yield "An operator has taken the account down here, so the public views hide its records."
    if row["removed"]:
        yield f"Records that operators have redacted or hidden: {row['removed']:,}."
    if not row["tracked"]:
        yield f"It is untracked: its records are erased, and its messages ignored. {_tracked_again(row['redacted'])}"
    elif row["active"] and row["withheld_since"] is not None:
        withheld = _duration((now - row["withheld_since"]).total_seconds())
        is_read = row["sync_status"] == SyncStatus.SYNCHRONIZED
        yield (
            f"The relay has withheld the account for {withheld}, with the status {row['hosting_status']}: "
            f"{'the stream of its host is read' if is_read else 'its latest changes may be missing'}. "
            "The records stay visible."
        )
    elif not row["active"]:
        yield f"Its hosting status is {row['hosting_status']}, so the public views hide its records."


def _tracked_again(redacted: str | None) -> str:
    if redacted is None:
        return "`indexer add` tracks it again."
    return f"An operator has redacted it, so it is never tracked again. Reason: {redacted or 'none given'}."


def _next_step(row: Mapping[str, Any], now: datetime) -> str:
    if not row["tracked"]:
        return "It is not resynced while it is untracked."
    if not row["active"]:
        return "It is not resynced while its account is not active."
    if row["parked"]:
        return "It is parked: the next attempt follows after a message of the account, or after INDEXER_SWEEP_INTERVAL."
    seconds = 0.0 if row["next_attempt_at"] is None else (row["next_attempt_at"] - now).total_seconds()
    if seconds <= 0:
        return "It waits in the resync queue; the next attempt starts when a worker is free."
    return f"The next attempt starts in {_duration(seconds)} at the earliest."


def _duration(seconds: float) -> str:
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"
