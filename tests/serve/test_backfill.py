from dataclasses import replace
from math import inf

from indexer.db import Counts
from indexer.serve.backfill import RATE_SECONDS, Backfill, RepoCounts, ScopeStatus, scope_status_of
from indexer.sync.repo import SyncStatus

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
    done = Counts({**dict.fromkeys(SyncStatus, 0), SyncStatus.SYNCHRONIZED: 7}, {}, 0, 0, 0, [], ended=1)
    counted.set(done, 0.0, 10.0)
    assert counted.backfill() == Backfill(0, 1.0, 0.1, None), "no time is left if no repo waits"
    assert counted.since(50 * RATE_SECONDS) == 10.0


def scope_of(*numbers: int, ended: int) -> ScopeStatus | None:
    """Return the progress after counts every ten seconds, in which so many repos waited for added collections."""
    counted = RepoCounts()
    for number, incomplete in enumerate(numbers):
        now = 10.0 * number
        counted.set(replace(COUNTS, incomplete=incomplete, ended=ended), counted.since(now), now)
    return counted.scope()


def test_rate_of_added_collections_is_that_at_which_their_repos_become_fewer() -> None:
    assert RepoCounts().scope() is None
    assert scope_of(500, ended=0) == ScopeStatus(500, None, None)
    assert scope_of(500, 480, 460, ended=100) == ScopeStatus(waiting=460, repos_per_second=2.0, seconds_left=230.0)
    assert scope_of(500, 500, ended=100) == ScopeStatus(500, 0.0, None)
    assert scope_of(0, 0, 900, ended=100) == ScopeStatus(900, None, None), "it begins anew when the scope changes"
    assert scope_of(0, 0, 900, 880, ended=100) == ScopeStatus(880, 2.0, 440.0)
    limited = scope_of(1_000_000, 5_000, ended=50)  # a list completes many repos at once
    assert limited == ScopeStatus(5_000, 5.0, 1_000.0), "it is limited by the resyncs"
    assert scope_status_of(0, 40, 10.0, 9.0) == ScopeStatus(0, 4.0, None)
