import asyncio
from collections import Counter

from indexer.app.monitor import WINDOW_SECONDS, RecentTotals
from indexer.db import DatabaseError
from indexer.reasons import FetchFailure
from indexer.serve.recent_read import RecentRead


class Reads:
    def __init__(self, error: Exception | None = None, *, hang: bool = False) -> None:
        self.count = 0
        self.error = error
        self.hang = hang

    async def __call__(self) -> int:
        self.count += 1
        await asyncio.sleep(3_600 if self.hang else 0)
        if self.error is not None:
            raise self.error
        return self.count


async def test_many_callers_cause_one_read() -> None:
    reads = Reads()
    recent = RecentRead(reads, interval=60.0, timeout=60.0)
    await asyncio.gather(*(recent.refresh() for _ in range(100)))
    assert (reads.count, recent.value, recent.error) == (1, 1, None)
    assert recent.read_at is not None


async def test_failed_read_keeps_the_last_value_and_is_not_repeated_at_once() -> None:
    reads = Reads()
    recent = RecentRead(reads, interval=0.0, timeout=60.0)
    await recent.refresh()
    reads.error = DatabaseError(FetchFailure.UNREACHABLE, "no database")
    await recent.refresh()
    assert recent.value == 1
    assert "no database" in (recent.error or "")
    failing = RecentRead(reads, interval=60.0, timeout=60.0)
    for _ in range(10):
        await failing.refresh()
    assert (reads.count, failing.value, failing.read_at) == (3, None, None)


async def test_read_that_takes_too_long_is_ended() -> None:
    recent = RecentRead(Reads(hang=True), interval=0.0, timeout=0.01)
    await recent.refresh()
    assert recent.error == "the database did not answer within 0 s"


def test_growth_is_counted_within_the_window() -> None:
    recent = RecentTotals[str](0.0)
    assert recent.add(2.0, {"a": 3, "b": 1}) == Counter(a=3, b=1)
    assert recent.add(30.0, {"a": 5, "b": 1}) == Counter(a=5, b=1)
    assert recent.add(2.0 + WINDOW_SECONDS, {"a": 6, "b": 1}) == Counter(a=3)
    assert recent.add(30.0 + WINDOW_SECONDS, {"a": 6, "b": 1}) == Counter(a=1)
    assert recent.add(1_000.0, {"a": 6, "b": 1}) == Counter()
