"""The slopes of a soak: what counts as growth, and what does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.growth_check import MAX_POINTS, Limit, fit_trend, fit_trends, median_slope
from tests.soak.resource_use import DATABASE_LIMITS, PROCESS_LIMITS
from tests.soak.soak_run import TIME, missing_quantities

LIMIT = Limit(10.0, 0.1)
TIMES = [10.0 * number for number in range(720)]


@given(st.integers(-1_000, 1_000), st.integers(-1_000, 1_000), st.integers(2, 40))
def test_slope_of_a_line_is_exact(slope: int, first: int, points: int) -> None:
    times = [float(number) for number in range(points)]
    assert median_slope(times, [first + slope * time for time in times]) == slope


def test_few_outliers_do_not_change_the_slope() -> None:
    times = [float(number) for number in range(50)]
    values = [3.0 * time for time in times]
    values[7] = values[30] = 1e9
    assert median_slope(times, values) == pytest.approx(3.0)


def test_slope_needs_two_times() -> None:
    with pytest.raises(ValueError, match="two points"):
        median_slope([1.0, 1.0], [1.0, 2.0])


def test_sawtooth_is_flat() -> None:
    """The change log grows until it is trimmed, again and again."""
    assert fit_trend("change log", TIMES, [100.0 + number % 37 for number in range(720)], LIMIT).is_flat


@pytest.mark.parametrize("period", [1, 7, 60, 180])
def test_leak_grows_however_seldom_it_happens(period: int) -> None:
    """A leak of 40 in two hours, all at once every `period` samples."""
    values = [100.0 + 40 * (number // period * period) / 720 for number in range(720)]
    trend = fit_trend("leak", TIMES, values, LIMIT)
    assert not trend.is_flat
    assert trend.growth == pytest.approx(40, rel=0.35)


def test_decline_is_flat() -> None:
    assert fit_trend("shrinking", TIMES, [-time for time in TIMES], LIMIT).is_flat


def test_limit_is_a_share_of_large_quantities_and_an_amount_of_small_ones() -> None:
    assert [LIMIT.of(level) for level in (0.0, 50.0, 100.0, 1_000.0)] == [10.0, 10.0, 10.0, 100.0]


def test_growth_is_that_of_the_whole_time() -> None:
    """A slow growth is within the limit in a short run, and above it in a long one."""
    values = [100 + 0.005 * time for time in TIMES]
    assert fit_trend("slow", TIMES[:200], values[:200], LIMIT).is_flat
    assert not fit_trend("slow", TIMES, values, LIMIT).is_flat


def test_long_series_are_averaged() -> None:
    times = [float(number) for number in range(5 * MAX_POINTS + 3)]
    trend = fit_trend("long", times, [time + (1_000 if time % 2 else 0) for time in times], Limit(0.0, 0.0))
    assert trend.slope == pytest.approx(1.0, rel=0.01)
    assert trend.growth == pytest.approx(times[-1], rel=0.01)


def test_quantity_that_appears_later_was_zero_before() -> None:
    samples = [{"time": time} | ({"rows of new": time / 60} if time > 3_000 else {}) for time in TIMES]
    [trend] = fit_trends(samples, {"rows of new": LIMIT}, "time")
    assert trend.growth > LIMIT.least


@pytest.mark.parametrize("name", [*PROCESS_LIMITS, *DATABASE_LIMITS])
def test_quantity_that_is_not_sampled_any_more_is_missing(name: str) -> None:
    complete = dict.fromkeys([*PROCESS_LIMITS, *DATABASE_LIMITS], 1.0)
    samples = [complete | {TIME: 10.0 * number} for number in range(5)]
    del samples[1][name]
    assert missing_quantities(samples, 20.0) == []
    del samples[3][name]
    assert missing_quantities(samples, 20.0) == [f"{name} was not always sampled"]
