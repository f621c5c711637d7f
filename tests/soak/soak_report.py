"""Describe the result of a soak as text."""

from collections.abc import Iterator, Sequence

from tests.soak.growth_check import Trend
from tests.soak.resource_use import DATABASE_LIMITS, PROCESS_LIMITS
from tests.soak.soak_run import SoakResult

HOUR = 3_600
ALWAYS_SHOWN = PROCESS_LIMITS | DATABASE_LIMITS


def result_lines(result: SoakResult) -> Iterator[str]:
    """Yield a line for each quantity, then the verdict."""
    yield f"{result.seconds / 60:.1f} minutes, {result.commits:,} commits, {result.replaced:,} accounts replaced"
    yield f"{result.small_batches:,} batches written with one statement by the daemon that was never killed"
    yield f"{result.changes:,} changes read from the log"
    yield "faults: " + ", ".join(f"{name} {count}" for name, count in sorted(result.fired.items()))
    yield from trend_lines(result.trends)
    for difference in result.differences:
        yield f"DIFFERENT: {difference}"
    if not result.differences and not result.growing:
        yield "The database equals the world, and the change log equals the records."
        yield "Nothing grows." if result.trends else "Whether anything grows is not known."


def trend_lines(trends: Sequence[Trend]) -> Iterator[str]:
    """Yield a line for each quantity that is not constant, and one for each that grows."""
    if not trends:
        yield "no trend: the soak ended before its warm-up did"
        return
    yield f"{'quantity':40} {'median':>14} {'slope per hour':>16} {'growth':>14} {'limit':>14}"
    shown = [trend for trend in trends if trend.slope or trend.name in ALWAYS_SHOWN]
    for trend in shown:
        slope = trend.slope * HOUR
        yield f"{trend.name:40} {trend.level:14,.0f} {slope:16,.1f} {trend.growth:14,.1f} {trend.limit:14,.1f}"
    yield f"{len(trends) - len(shown)} other sizes and numbers of rows have the slope 0."
    for trend in trends:
        if not trend.is_flat:
            yield f"GROWS: {trend.name}, by {trend.growth:,.1f}; the limit is {trend.limit:,.1f}"
