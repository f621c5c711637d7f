import pytest

from indexer.live.stream_position import EventClock

NOW = 1_800_000_000.0
RECENT = "2027-01-15T07:59:50Z"
"""Ten seconds before `NOW`."""
AHEAD = "2027-01-15T08:04:00Z"
"""A possible time that is four minutes after `NOW`."""
WRONG = ["1970-01-01T00:00:00Z", "2023-01-01T00:00:00Z", AHEAD, "9999-12-31T23:59:59Z", "noon", ""]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("alone", [True, False])
def test_wrong_times_of_one_account_do_not_move_the_clock(wrong: str, alone: bool) -> None:
    clock = EventClock()
    clock.observe([("did:a", RECENT), ("did:b", RECENT)], NOW)
    honest = [] if alone else [("did:a", RECENT), ("did:b", RECENT)]
    clock.observe([("did:evil", wrong)] * 100 + honest, NOW)
    assert clock.reached == (NOW if alone and wrong == AHEAD else NOW - 10)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_times_of_some_accounts_do_not_move_the_clock(wrong: str) -> None:
    clock = EventClock()
    honest = [(f"did:honest{number}", RECENT) for number in range(9)]
    clock.observe([*honest, *[(f"did:evil{number}", wrong) for number in range(8)] * 100], NOW)
    assert clock.reached == NOW - 10


@pytest.mark.parametrize("wrong", ["1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "noon", ""])
def test_impossible_times_alone_are_unknown(wrong: str) -> None:
    clock = EventClock()
    clock.observe([("did:evil", wrong)], NOW)
    assert clock.reached is None


def test_clock_follows_the_accounts_and_is_never_ahead_of_this_machine() -> None:
    clock = EventClock()
    clock.observe([("did:a", RECENT), ("did:b", "2027-01-15T08:00:05Z"), ("did:c", "2027-01-15T08:00:06Z")], NOW)
    assert clock.reached == NOW


def test_time_from_before_this_machine_set_its_clock_back_does_not_count() -> None:
    clock = EventClock()
    day_ahead = NOW + 86_400
    clock.advance(day_ahead, day_ahead)
    clock.observe([("did:a", RECENT)], NOW)
    assert clock.reached == NOW - 10
    clock.advance(NOW, NOW)
    clock.observe([("did:a", RECENT)], NOW - 1)
    assert clock.reached == NOW, "a clock that is corrected by a second"
