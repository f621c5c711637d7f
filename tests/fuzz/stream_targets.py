"""Event times that a relay sends."""

from random import Random

from indexer.sync.events import event_seconds
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.fuzz_target import TextTarget, text_of
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seed_files import published_lines, some_of

DATETIMES = ("2026-11-28T01:02:03.456Z", "2026-11-28T01:02:03+01:00", "2026-11-28", "0001-01-01T00:00:00+23:59", "now")


class EventTimes(TextTarget):
    """Times of events, which their senders choose: a finite number of seconds, or none."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("times", "none")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return published times, a half if there are so many, and some of our own."""
        made = some_of(published_lines("atproto-interop-tests/syntax/datetime_*.txt"), random, count // 2)
        return made + [DATETIMES[number % len(DATETIMES)].encode() for number in range(count - len(made))]

    def compare(self, data: bytes) -> None:
        """Read a time. Raises `DifferenceError`."""
        self.counts.executions += 1
        seconds = event_seconds(text_of(data))
        if seconds is not None and not -63_000_000_000 < seconds < 260_000_000_000:  # the years 1 to 9999
            raise DifferenceError(f"{seconds} seconds")
        self.counts.add("none" if seconds is None else "times")
