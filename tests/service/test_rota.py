from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from indexer.service.rota import MOST_HOSTS, MOST_SECONDS, Rota


def test_a_host_has_its_places_and_no_more() -> None:
    rota = Rota(6)
    for _ in range(6):
        assert rota.admits("slow", 0)
        rota.begin("slow", 0)
    assert not rota.admits("slow", 0)
    assert rota.admits("other", 0)
    rota.end("slow", 0, 1)
    assert rota.admits("slow", 0)


def test_those_put_off_stand_in_a_line_as_long_as_the_host_needs() -> None:
    rota = Rota(3)
    for _ in range(50):
        rota.begin("slow", 0.0)
        rota.end("slow", 0.0, 30.0)
    turns = [rota.later("slow", 100.0) for _ in range(10)]
    steps = [later - earlier for earlier, later in pairwise(turns)]
    assert all(9.0 < step < 10.1 for step in steps), "thirty seconds each, three at once"
    assert rota.later("other", 100.0) < 101.0


def test_nobody_is_put_off_for_ever() -> None:
    rota = Rota(3)
    rota.begin("huge", -1_000.0)
    assert max(rota.later("huge", 0.0) for _ in range(100)) == MOST_SECONDS


def test_a_host_that_hangs_is_slow_before_anything_of_it_has_ended() -> None:
    rota = Rota(3)
    for _ in range(3):
        rota.begin("hangs", 100.0)
    assert rota.later("hangs", 100.1) < 100.2
    turns = [rota.later("hangs", 160.0) for _ in range(3)]
    assert [round(turn - 160.0) for turn in turns] == [20, 40, 60]


def test_a_pause_is_kept() -> None:
    rota = Rota(3)
    rota.pause("host", 50.0)
    assert not rota.admits("host", 49.0)
    assert rota.later("host", 10.0) >= 50.0
    assert rota.admits("host", 50.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_what_ends_makes_room(steps: list[tuple[str, bool]]) -> None:
    """Held to a plain list of what runs."""
    rota = Rota(3)
    running: list[str] = []
    for host, begins in steps:
        if begins and rota.admits(host, 0):
            assert running.count(host) < 3
            rota.begin(host, 1.0)
            running.append(host)
        elif not begins and host in running:
            rota.end(host, 1.0, 2.0)
            running.remove(host)
        assert rota.admits(host, 0) == (running.count(host) < 3)


def test_it_forgets_hosts() -> None:
    rota = Rota(3)
    for number in range(MOST_HOSTS + 10):
        rota.pause(f"host{number}", 1e9)
    assert rota.admits("host0", 0)
    assert not rota.admits(f"host{MOST_HOSTS}", 0)
