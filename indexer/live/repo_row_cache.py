"""The rows of repos that this process wrote last, so that most batches load no rows."""

from collections.abc import Callable, Iterable
from time import monotonic

from indexer.concurrency.bounded_dict import BoundedDict
from indexer.sync.repo import Repo, SyncStatus

MAX_ROWS = 25_000
"""A row takes about 1,200 bytes, and twice the length of its DID, which is at most 2,048."""
MAX_AGE_SECONDS = 60.0
"""A row is used for this time after it was written. A row that is deleted and inserted again starts at version 1, but a
row is deleted only after it was hidden for a day, or parked for a day or `INDEXER_SWEEP_INTERVAL`, and at least for two
minutes."""


class RepoRowCache:
    """Rows of synchronized, tracked, active repos, as they were written last.

    Another process or stage may have changed a row since. Therefore a plan on a cached row counts only if its write
    finds the row at the expected version. A plan that writes nothing must be made again on the row in the database.
    """

    def __init__(self, max_rows: int = MAX_ROWS, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._rows = BoundedDict[str, tuple[Repo, float]](max_rows)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, dids: Iterable[str]) -> dict[str, Repo]:
        """Return the cached rows of these DIDs."""
        oldest, rows = self._clock() - MAX_AGE_SECONDS, self._rows
        found = [(did, rows[did]) for did in dids if did in rows]
        return {did: repo for did, (repo, written_at) in found if written_at >= oldest}

    def put(self, repos: Iterable[Repo]) -> None:
        """Replace the rows by those that were just written."""
        now = self._clock()
        for repo in repos:
            if repo.sync_status is SyncStatus.SYNCHRONIZED and repo.active and repo.tracked:
                self._rows[repo.did] = repo, now
            else:
                self._rows.pop(repo.did, None)

    def drop(self, dids: Iterable[str]) -> None:
        """Drop the rows of these DIDs."""
        for did in dids:
            self._rows.pop(did, None)

    def clear(self) -> None:
        """Drop all rows."""
        self._rows.clear()
