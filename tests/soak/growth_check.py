"""Fit a slope to the samples of each quantity, and compare it with a limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

MAX_POINTS = 400
"""Points of a fit. Longer series are averaged: the time of a fit grows with the square of this number."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The growth that a quantity may have in a run, however long it is.

    Attributes:
        least: The limit of small quantities.
        share: The limit of others, as a share of the median.
    """

    least: float
    share: float

    def of(self, level: float) -> float:
        """Return the limit for this median."""
        return max(self.least, self.share * abs(level))


@dataclass(frozen=True, slots=True)
class Trend:
    """The growth of a quantity.

    Attributes:
        name: The quantity.
        level: The median.
        slope: The growth per second.
        growth: The growth from the first to the last sample, by the slope.
        limit: The greatest growth that is allowed.
    """

    name: str
    level: float
    slope: float
    growth: float
    limit: float

    @property
    def is_flat(self) -> bool:
        """True if the growth is within the limit."""
        return self.growth <= self.limit


def fit_trends(samples: Sequence[Mapping[str, float]], limit_of: Mapping[str, Limit], time: str) -> list[Trend]:
    """Return the trends of all quantities that have a limit, in the order of their names.

    A quantity that a sample lacks counts as 0 there: for example, the size of a table that did not exist yet.

    Args:
        samples: Values by quantity.
        limit_of: The limits by quantity.
        time: The quantity that is the time.
    """
    times, trends = [sample[time] for sample in samples], []
    for name, limit in sorted(limit_of.items()):
        values = [sample.get(name, 0.0) for sample in samples]
        level, slope = median(values), median_slope(_averaged(times), _averaged(values))
        trends.append(Trend(name, level, slope, slope * (times[-1] - times[0]), limit.of(level)))
    return trends


def median_slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of points (Theil-Sen): a few outliers do not change it.

    Raises:
        ValueError: There are no two points with different times.
    """
    points = zip(times, values, strict=True)
    slopes = [
        (later - value) / (end - begin) for (begin, value), (end, later) in combinations(points, 2) if end > begin
    ]
    if not slopes:
        raise ValueError("a slope needs two points with different times")
    return median(slopes)


def _averaged(series: Sequence[float]) -> list[float]:
    """Return the means of at most `MAX_POINTS` sections of equal length."""
    length = -(-len(series) // MAX_POINTS)
    return [fmean(series[start : start + length]) for start in range(0, len(series), length)]
