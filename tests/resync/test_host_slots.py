from heapq import heapify, heappop, heappush
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.resync.host_slots import MAX_HOSTS, MAX_WAIT_SECONDS, HostSlots
from indexer.resync.large_repo_slots import MAX_KNOWN, LargeRepoSlots, large_repo_slot_count


def test_retries_are_spaced_by_the_mean_duration_of_the_host() -> None:
    slots = HostSlots(3)
    for _ in range(50):
        slots.acquire("slow", 0.0)
        slots.release("slow", 0.0, 30.0)
    retries = [slots.schedule_retry("slow", 100.0) for _ in range(10)]
    steps = [later - earlier for earlier, later in pairwise(retries)]
    assert all(9.0 < step < 10.1 for step in steps), "30 seconds each, three at a time"
    assert slots.schedule_retry("other", 100.0) < 101.0


def test_longest_wait_is_bounded() -> None:
    slots = HostSlots(3)
    for _ in range(3):
        slots.acquire("huge", -1_000.0)
    assert max(slots.schedule_retry("huge", 0.0) for _ in range(100)) == MAX_WAIT_SECONDS


def test_pauses_and_retries_from_before_the_clock_was_set_back_are_over() -> None:
    slots = HostSlots(3)
    slots.pause("host", 86_400.0 + 60.0, 86_400.0)
    slots.schedule_retry("host", 86_400.0)
    assert not slots.is_free("host", 86_400.0)
    assert slots.is_free("host", 0.0)
    assert slots.schedule_retry("host", 0.0) < 1.0
    slots.pause("host", 50.0, 0.0)
    assert not slots.is_free("host", 49.0)
    assert slots.is_free("host", 50.0)
    assert slots.is_free("host", 86_400.0), "the old pause does not return"


def test_running_resyncs_count_before_any_has_ended() -> None:
    slots = HostSlots(3)
    for _ in range(3):
        slots.acquire("hangs", 100.0)
    assert slots.schedule_retry("hangs", 100.1) < 100.2
    retries = [slots.schedule_retry("hangs", 160.0) for _ in range(3)]
    assert [round(retry - 160.0) for retry in retries] == [20, 40, 60]


def slots_of_fast_host() -> HostSlots:
    """Return the slots of a host whose resyncs took a tenth of a second each."""
    slots = HostSlots(4)
    for _ in range(50):
        slots.acquire("host", 0.0)
        slots.release("host", 0.0, 0.1)
    return slots


def test_one_slow_resync_delays_only_its_share_of_the_others() -> None:
    slots = slots_of_fast_host()
    slots.acquire("host", 0.0)
    for _ in range(3):
        slots.acquire("host", 500.0)
    retries = [slots.schedule_retry("host", 500.0) for _ in range(100)]
    assert retries[-1] - 500.0 < 100 * 0.1 / 3 + 0.1


def test_slow_resync_that_ended_delays_the_others_little() -> None:
    slots = slots_of_fast_host()
    slots.acquire("host", 0.0)
    slots.release("host", 0.0, 500.0)
    retries = [slots.schedule_retry("host", 500.0) for _ in range(100)]
    assert retries[-1] - 500.0 < 2 * 100 * 0.1 / 4


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_slots_equal_a_plain_list_of_running_resyncs(steps: list[tuple[str, bool]]) -> None:
    slots = HostSlots(3)
    running: list[str] = []
    for host, starts in steps:
        if starts and slots.is_free(host, 0):
            assert running.count(host) < 3
            slots.acquire(host, 1.0)
            running.append(host)
        elif not starts and host in running:
            slots.release(host, 1.0, 2.0)
            running.remove(host)
        assert slots.is_free(host, 0) == (running.count(host) < 3)


def test_oldest_hosts_are_forgotten() -> None:
    slots = HostSlots(3)
    for number in range(MAX_HOSTS + 10):
        slots.pause(f"host{number}", 60.0, 0.0)
    assert slots.is_free("host0", 0)
    assert not slots.is_free(f"host{MAX_HOSTS}", 0)


def test_slots_are_a_quarter_of_the_workers_and_at_most_eight() -> None:
    assert [large_repo_slot_count(workers) for workers in (1, 4, 8, 28, 32, 1_000)] == [1, 1, 2, 7, 8, 8]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_forty_waiting_repos_all_get_a_slot_with_few_retries(count: int) -> None:
    """Each takes 100 seconds, and all are due at once."""
    slots, retries, ends = LargeRepoSlots(count), 0, []
    events: list[tuple[float, str, float | None]] = [(0.0, f"did{number}", None) for number in range(40)]
    heapify(events)
    while events:
        now, did, since = heappop(events)
        if since is not None:
            slots.release(since, now)
            ends.append(now)
        elif slots.try_acquire(now, now):
            heappush(events, (now + 100.0, did, now))
        else:
            retries += 1
            heappush(events, (slots.schedule_retry(now), did, None))
    assert len(ends) == 40
    assert max(ends) < 2 * 100.0 * 40 / count, "no slot is free for longer than it is in use"
    assert retries < 10 * 40


def test_least_recently_seen_large_repo_is_forgotten() -> None:
    slots = LargeRepoSlots(1)
    slots.remember("one")
    slots.remember("two")
    for number in range(MAX_KNOWN - 2):
        slots.remember(f"did{number}")
    slots.remember("one")
    slots.remember("another")
    assert [did for did in ("one", "two", "another") if slots.knows(did)] == ["one", "another"]
