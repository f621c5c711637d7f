from heapq import heapify, heappop, heappush

import pytest

from indexer.service.resync.large_repo_slots import MAX_KNOWN, LargeRepoSlots, large_repo_slot_count


def test_slots_are_a_quarter_of_the_workers_and_at_most_eight() -> None:
    assert [large_repo_slot_count(workers) for workers in (1, 4, 8, 28, 32, 1_000)] == [1, 1, 2, 7, 8, 8]


def test_slot_is_free_again_after_its_release() -> None:
    slots = LargeRepoSlots(1)
    assert slots.try_acquire(10.0, 11.0)
    assert not slots.try_acquire(10.0, 11.0)
    slots.release(10.0, 20.0)
    assert slots.try_acquire(20.0, 20.0)


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
