"""The progress of backfills: how many repos wait, and how long that takes at the present rate."""

from collections import deque
from dataclasses import dataclass
from math import inf

from indexer.db import Counts
from indexer.sync.repo import SyncStatus

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


@dataclass(frozen=True, slots=True)
class ScopeStatus:
    """The backfill of collections that the scope added at run time.

    Attributes:
        waiting: Repos that were fetched before, and wait for the records of an added collection.
        repos_per_second: Rate at which their number falls, at most the rate of resyncs: many repos that have no such
            records are complete at once, without a resync. None if it is not known yet.
        seconds_left: Time for all of them at this rate; None if none waits or the rate is zero or unknown.
    """

    waiting: int
    repos_per_second: float | None
    seconds_left: float | None


def scope_status_of(waiting: int, earlier: int, seconds: float | None, resyncs_per_second: float | None) -> ScopeStatus:
    """Return the status if `earlier` repos waited this number of seconds ago; None: it is not known."""
    rate = None
    if seconds and resyncs_per_second is not None:
        rate = min(max(0, earlier - waiting) / seconds, resyncs_per_second)
    return ScopeStatus(waiting, rate, waiting / rate if waiting and rate else None)


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
        self._incomplete: deque[tuple[float, int]] = deque()

    def since(self, now: float) -> float:
        """Return the Unix time from which on the next counts must count `ended`; infinity for the first counts."""
        while len(self._times) > 1 and self._times[1] <= now - RATE_SECONDS:
            self._times.popleft()
        return self._times[0] if self._times else inf

    def set(self, counts: Counts, since: float, now: float) -> None:
        """Set the newest counts, which were read at `now` with `ended` since `since`."""
        self.counts, self.counted_at, self._since = counts, now, since
        self._times.append(now)
        self._add_incomplete(now, counts.incomplete)

    def backfill(self) -> Backfill | None:
        """Return the progress of the backfill; None before the first counts."""
        if self.counts is None:
            return None
        seconds = self.counted_at - self._since
        return backfill_of(self.counts, seconds if seconds > 0 else None)

    def scope(self) -> ScopeStatus | None:
        """Return the progress of the backfill of added collections; None before the first counts."""
        backfill = self.backfill()
        if self.counts is None or backfill is None:
            return None
        since, earlier = self._incomplete[0]
        return scope_status_of(self.counts.incomplete, earlier, self.counted_at - since, backfill.repos_per_second)

    def _add_incomplete(self, now: float, incomplete: int) -> None:
        """Note a number for the rate. A number that grew begins anew: the scope has changed."""
        if self._incomplete and incomplete > self._incomplete[-1][1]:
            self._incomplete.clear()
        while len(self._incomplete) > 1 and self._incomplete[1][0] <= now - RATE_SECONDS:
            self._incomplete.popleft()
        self._incomplete.append((now, incomplete))
