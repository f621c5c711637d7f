from heapq import heapify, heappop, heappush

import pytest

from indexer.service import lane as module
from indexer.service.lane import Lane, places_of_large


def test_places_grow_with_the_workers_up_to_what_one_thread_and_the_connections_can_bear() -> None:
    assert [places_of_large(workers) for workers in (1, 4, 8, 28, 32, 1_000)] == [1, 1, 2, 7, 8, 8]


def test_a_repo_that_finds_no_place_is_known_all_the_same() -> None:
    lane = Lane(1)
    assert not lane.knows("one")
    assert lane.enter("one", 10.0, 11.0)
    assert not lane.enter("two", 10.0, 11.0)
    assert lane.knows("one")
    assert lane.knows("two")
    lane.leave(10.0, 20.0)
    assert lane.enter("two", 20.0, 20.0)


@pytest.mark.parametrize("places", [1, 2, 8])
def test_each_of_many_has_its_turn(places: int) -> None:
    """A hundred seconds each, all of them due at once: they neither wait for ever nor come up again and again."""
    lane, looks, ends = Lane(places), 0, []
    events: list[tuple[float, str, float | None]] = [(0.0, f"did{number}", None) for number in range(40)]
    heapify(events)
    while events:
        now, did, began = heappop(events)
        if began is not None:
            lane.leave(began, now)
            ends.append(now)
        elif lane.enter(did, now, now):
            heappush(events, (now + 100.0, did, now))
        else:
            looks += 1
            heappush(events, (lane.later(now), did, None))
    assert len(ends) == 40
    assert max(ends) < 2 * 100.0 * 40 / places, "no place is empty for longer than it is taken"
    assert looks < 10 * 40


def test_it_forgets_those_it_has_not_met_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KNOWN", 3)
    lane = Lane(1)
    for did in ("one", "two", "three", "one", "four"):
        lane.enter(did, 0.0, 0.0)
    assert [did for did in ("one", "two", "three", "four") if lane.knows(did)] == ["one", "three", "four"]
