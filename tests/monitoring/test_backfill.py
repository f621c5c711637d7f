from dataclasses import replace
from math import inf

from indexer.monitoring.backfill import RATE_SECONDS, Backfill, RepoCounts
from indexer.store import Counts
from indexer.sync.repo_state import SyncStatus

COUNTS = Counts(
    {SyncStatus.SYNCHRONIZED: 60, SyncStatus.IN_PROGRESS: 4, SyncStatus.DESYNCHRONIZED: 56}, {}, 36, 20, 0, []
)


def test_rate_is_unknown_until_the_second_count() -> None:
    counted = RepoCounts()
    assert (counted.backfill(), counted.since(1_000.0)) == (None, inf)
    counted.set(COUNTS, inf, 1_000.0)
    assert counted.backfill() == Backfill(40, 0.6, None, None)
    assert counted.since(1_010.0) == 1_000.0
    counted.set(replace(COUNTS, ended=5), 1_000.0, 1_010.0)
    assert counted.backfill() == Backfill(waiting=40, progress=0.6, repos_per_second=0.5, seconds_left=80.0)


def test_rate_is_averaged_over_a_limited_time() -> None:
    counted = RepoCounts()
    for number in range(1_000):
        now = 10.0 * number
        since = counted.since(now)
        counted.set(replace(COUNTS, ended=1), since, now)
    assert now - since == RATE_SECONDS


def test_time_between_two_seldom_counts_is_used_if_it_is_longer() -> None:
    counted = RepoCounts()
    counted.set(COUNTS, inf, 0.0)
    assert counted.since(50 * RATE_SECONDS) == 0.0


def test_no_time_is_left_if_no_repo_waits() -> None:
    counted = RepoCounts()
    done = Counts({**dict.fromkeys(SyncStatus, 0), SyncStatus.SYNCHRONIZED: 7}, {}, 0, 0, 0, [], ended=1)
    counted.set(done, 0.0, 10.0)
    assert counted.backfill() == Backfill(0, 1.0, 0.1, None)
