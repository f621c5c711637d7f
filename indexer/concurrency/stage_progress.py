"""The progress of long-running stages, to notice that one has work and does not make any progress.

A stage reports that it begins to have work, that it made a step, and that it waits for new work. To wait for a result
is work; to wait for messages, for the time of the next run, or for another stage is not. A report costs a call and a
look at the clock. Nothing else is computed until the progress is read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

STALL_SECONDS = 120.0
"""A stage with work that makes no progress for longer counts as stalled, unless it has a limit of its own. It is longer
than the time limit of a statement, a request or a lookup."""


class Work:
    """One activity of a stage: its loop, or one of several concurrent tasks.

    Attributes:
        waits_since: When the last progress was made, or work arrived (monotonic seconds); None if there is no work.
        last_error: The database error of its last attempt; None if that succeeded.
        failing_since: Since when all its attempts have failed (monotonic seconds); None if the last one succeeded.
    """

    def __init__(self) -> None:
        self.waits_since: float | None = None
        self.last_error: str | None = None
        self.failing_since: float | None = None

    def begin(self) -> None:
        """Report that there is work. If there was work before, nothing changes."""
        if self.waits_since is None:
            self.waits_since = monotonic()

    def moved(self) -> None:
        """Report that there is work, and that it made progress just now."""
        self.waits_since = monotonic()

    def idle(self) -> None:
        """Report that there is no work."""
        self.waits_since = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Have work during the block."""
        self.begin()
        try:
            yield
        finally:
            self.idle()

    def failed(self, error: str | None) -> None:
        """Note the database error of an attempt; None: it succeeded."""
        self.last_error = error
        if error is None:
            self.failing_since = None
        elif self.failing_since is None:
            self.failing_since = monotonic()


class StageProgress(Work):
    """The progress of one stage. It has stalled as soon as one of its activities has.

    Attributes:
        name: The name that `/healthz` shows.
        limit: Seconds without progress from which the stage counts as stalled.
        needs_database: The stage cannot work while the database does not answer; that is no stall.
        needs_shard: The stage cannot work while another process owns its shard; that is no stall.
    """

    def __init__(
        self, name: str, limit: float = STALL_SECONDS, *, needs_database: bool = True, needs_shard: bool = False
    ) -> None:
        super().__init__()
        self.name = name
        self.limit = limit
        self.needs_database = needs_database
        self.needs_shard = needs_shard
        self._activities: set[Work] = {self}

    def add(self) -> Work:
        """Return a new activity of the stage."""
        work = Work()
        self._activities.add(work)
        return work

    @contextmanager
    def task(self) -> Iterator[Work]:
        """Add an activity that has work and ends with the block."""
        work = Work()
        work.begin()
        with self.watching(work):
            yield work

    @contextmanager
    def watching(self, work: Work) -> Iterator[None]:
        """Have another activity during the block."""
        self._activities.add(work)
        try:
            yield
        finally:
            self._activities.discard(work)

    def seconds_without_progress(self, able_since: float) -> float:
        """Return for how long the activity that waits longest made no progress; 0 if there is no work.

        Args:
            able_since: Since when the stage is able to work (monotonic seconds). The time before does not count.
        """
        waiting = [work.waits_since for work in self._activities if work.waits_since is not None]
        return max(0.0, monotonic() - max(min(waiting), able_since)) if waiting else 0.0
