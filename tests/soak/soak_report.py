"""Describe the result of a soak as text."""

from collections.abc import Iterator

from tests.soak.growth_check import Trend
from tests.soak.resource_use import DATABASE_LIMITS, PROCESS_LIMITS
from tests.soak.soak_run import SoakResult

HOUR = 3_600
ALWAYS_SHOWN = PROCESS_LIMITS | DATABASE_LIMITS


def result_lines(result: SoakResult) -> Iterator[str]:
    """Yield a line for each quantity, then the verdict."""
    yield f"{result.seconds / 60:.1f} minutes, {result.commits:,} commits, {result.replaced:,} accounts replaced"
    yield f"{result.changes:,} changes read from the log"
    yield "faults: " + ", ".join(f"{name} {count}" for name, count in sorted(result.fired.items()))
    if not result.trends:
        yield "no trend: the soak ended before its warm-up did"
    else:
        yield f"{'quantity':40} {'median':>14} {'slope per hour':>16} {'growth':>14} {'limit':>14}"
    shown = [trend for trend in result.trends if trend.slope or trend.name in ALWAYS_SHOWN]
    yield from map(trend_line, shown)
    yield f"{len(result.trends) - len(shown)} other sizes and numbers of rows have the slope 0."
    for difference in result.differences:
        yield f"DIFFERENT: {difference}"
    for trend in result.growing:
        yield f"GROWS: {trend.name}, by {trend.growth:,.1f}; the limit is {trend.limit:,.1f}"
    if not result.differences and not result.growing:
        yield "Nothing grows, the database equals the world, and the change log equals the records."


def trend_line(trend: Trend) -> str:
    """Return the line of a quantity."""
    return (
        f"{trend.name:40} {trend.level:14,.0f} {trend.slope * HOUR:16,.1f} {trend.growth:14,.1f} {trend.limit:14,.1f}"
    )
