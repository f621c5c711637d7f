"""Status documents of a database whose state and counts a test gives."""

from collections.abc import Sequence
from math import inf
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from indexer.db.process_reports import ProcessReport
from indexer.db.reports import Counts
from indexer.serve.status_document import StatusDocument
from indexer.serve.status_reader import StatusReader
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import Shard

NOON = 1_767_268_800.0  # 2026-01-01T12:00:00Z
NOTHING = Counts(dict.fromkeys(SyncStatus, 0), {}, 0, 0, 0)
SHARD = Shard()
State = tuple[dict[str, Any], Sequence[ProcessReport]]
"""The result of `Reports.state`."""


def state_of(reports: Sequence[ProcessReport] = (), **fields: Any) -> State:
    """Return the state with these fields of the document."""
    return {"cursors": []} | fields, reports


class FakeReports:
    """Reports that return the present state and counts. `since` is that of the last count."""

    def __init__(self) -> None:
        self.present, self.present_counts = state_of(), NOTHING
        self.since = inf

    async def state(self) -> State:
        return self.present

    async def counts(self, since: float = inf) -> Counts:
        self.since = since
        return self.present_counts


class FakeDatabase:
    """A reader of fake reports, and the time."""

    def __init__(self, shard: Shard = SHARD, now: float = NOON) -> None:
        self.reports = FakeReports()
        self.reader = StatusReader(cast(Any, SimpleNamespace(reports=self.reports)), shard)
        self.now = now

    async def read(self, state: State | None = None, counts: Counts | None = None) -> None:
        """Let the reader read this state and count these repos now."""
        self.reports.present, self.reports.present_counts = state or state_of(), counts or NOTHING
        with patch("indexer.serve.status_reader.time", lambda: self.now):
            await self.reader.read()
            await self.reader.count()

    def document(self) -> StatusDocument:
        """Return the document of the present time."""
        with patch("indexer.serve.status_reader.time", lambda: self.now):
            return self.reader.document()


async def document_of(
    state: State | None = None,
    counts: Counts | None = None,
    earlier: tuple[State | None, Counts | None] | None = None,
    *,
    shard: Shard = SHARD,
    seconds: float = 2.0,
) -> StatusDocument:
    """Return the document after two reads, the second one at noon. Without `earlier`, both read the same."""
    database = FakeDatabase(shard, NOON - seconds)
    await database.read(*(earlier or (state, counts)))
    database.now = NOON
    await database.read(state, counts)
    return database.document()


def repos(synchronized: int = 0, in_progress: int = 0, queued: int = 0, parked: int = 0, **others: Any) -> Counts:
    """Return counts with these numbers."""
    statuses = {
        SyncStatus.SYNCHRONIZED: synchronized,
        SyncStatus.IN_PROGRESS: in_progress,
        SyncStatus.DESYNCHRONIZED: queued + parked,
    }
    return Counts(statuses, others.pop("reasons", {}), queued, parked, others.pop("records", 0), **others)


def codes(document: StatusDocument) -> Sequence[str]:
    """Return the codes of the reasons why the indexer is not ready."""
    return [reason.code for reason in document.reasons]
