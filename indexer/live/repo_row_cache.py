"""The rows of repos that this process wrote last, so that most batches load no rows."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from time import monotonic

from indexer.sync.repo import Repo, SyncStatus

ROW_BYTES = 1_200
"""Approximate memory of an entry without its DID, which is counted twice, as key and in the row."""
MAX_BYTES = 32 << 20
MAX_AGE_SECONDS = 60.0
"""A row is used for this time after it was written. A row that is deleted and inserted again starts at version 1, but a
row is deleted only after it was hidden for a day, or parked for a day or `INDEXER_SWEEP_INTERVAL`, and at least for two
minutes."""


class RepoRowCache:
    """Rows of synchronized, tracked, active repos, as they were written last.

    Another process or stage may have changed a row since. Therefore a plan on a cached row counts only if its write
    finds the row at the expected version. A plan that writes nothing must be made again on the row in the database.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_age: float = MAX_AGE_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Keep rows up to `max_bytes`, each for `max_age` seconds after it was written; the oldest one goes first."""
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._clock = clock
        self._bytes = 0
        self._rows: OrderedDict[str, tuple[Repo, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, dids: Iterable[str]) -> dict[str, Repo]:
        """Return the cached rows of these DIDs."""
        oldest, rows = self._clock() - self._max_age, self._rows
        found = [(did, rows[did]) for did in dids if did in rows]
        return {did: repo for did, (repo, written_at) in found if written_at >= oldest}

    def put(self, repos: Iterable[Repo]) -> None:
        """Replace the rows by those that were just written."""
        now = self._clock()
        for repo in repos:
            did = repo.did
            if repo.sync_status is not SyncStatus.SYNCHRONIZED or not repo.active or not repo.tracked:
                self.drop((did,))
                continue
            if did in self._rows:
                self._rows.move_to_end(did)
            else:
                self._bytes += _size(repo)
            self._rows[did] = repo, now
        while self._bytes > self._max_bytes:
            _, (repo, _) = self._rows.popitem(last=False)
            self._bytes -= _size(repo)

    def drop(self, dids: Iterable[str]) -> None:
        """Drop the rows of these DIDs."""
        for did in dids:
            if (row := self._rows.pop(did, None)) is not None:
                self._bytes -= _size(row[0])

    def clear(self) -> None:
        """Drop all rows."""
        self._rows.clear()
        self._bytes = 0


def _size(repo: Repo) -> int:
    return ROW_BYTES + 2 * len(repo.did)
