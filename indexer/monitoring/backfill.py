"""The progress of the backfill: how many repos wait for a resync, and how long that takes at the present rate."""

from collections import deque
from dataclasses import dataclass
from math import inf

from indexer.store import Counts
from indexer.sync.repo_state import SyncStatus

RATE_SECONDS = 600.0
"""Time over which the rate is averaged, or the time between two counts if that is longer."""


@dataclass(frozen=True, slots=True)
class Backfill:
    """The progress of the backfill.

    Attributes:
        waiting: Repos that wait for a resync or are being resynced.
        progress: Share of synchronized repos among those that are synchronized or waiting; None if there are none.
        repos_per_second: Rate at which repos leave the queue, synchronized or parked. Repos that enter the queue in
            the meantime do not reduce it. None if it is not known yet.
        seconds_left: Time for all waiting repos at this rate; None if none waits or the rate is zero or unknown.
    """

    waiting: int
    progress: float | None
    repos_per_second: float | None
    seconds_left: float | None


def backfill_of(counts: Counts, seconds: float | None) -> Backfill:
    """Return the progress, if `counts.ended` was counted over this number of seconds; None: it was not counted."""
    synchronized = counts.statuses[SyncStatus.SYNCHRONIZED]
    waiting = counts.queued + counts.statuses[SyncStatus.IN_PROGRESS]
    rate = counts.ended / seconds if seconds else None
    return Backfill(
        waiting=waiting,
        progress=synchronized / (synchronized + waiting) if synchronized + waiting else None,
        repos_per_second=rate,
        seconds_left=waiting / rate if waiting and rate else None,
    )


class RepoCounts:
    """The newest counts of the repos, and the rate of the backfill. Counting reads many repos, so it is done seldom.

    Attributes:
        counts: The newest counts; None before the first ones.
        counted_at: When they were read, in Unix seconds.
    """

    def __init__(self) -> None:
        self.counts: Counts | None = None
        self.counted_at = 0.0
        self._since = inf
        self._times: deque[float] = deque()

    def since(self, now: float) -> float:
        """Return the Unix time from which on the next counts must count `ended`; infinity for the first counts."""
        while len(self._times) > 1 and self._times[1] <= now - RATE_SECONDS:
            self._times.popleft()
        return self._times[0] if self._times else inf

    def set(self, counts: Counts, since: float, now: float) -> None:
        """Set the newest counts, which were read at `now` with `ended` since `since`."""
        self.counts, self.counted_at, self._since = counts, now, since
        self._times.append(now)

    def backfill(self) -> Backfill | None:
        """Return the progress of the backfill; None before the first counts."""
        if self.counts is None:
            return None
        seconds = self.counted_at - self._since
        return backfill_of(self.counts, seconds if seconds > 0 else None)
