"""`python -m tests.soak`: run a world of constant size with faults, and show that nothing grows."""

import asyncio
import logging
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from indexer import embedded
from indexer.db.migrate import migrate
from tests import waiting
from tests.daemon_forks import start_fork_server
from tests.database_server import SERVER_SETTINGS
from tests.soak.growth_check import Trend
from tests.soak.resource_use import DATABASE_LIMITS, PROCESS_LIMITS
from tests.soak.soak_run import SoakPlan, SoakResult, soak

WARM_UP_SHARE = 0.5
MAX_WARM_UP = 3_600.0
"""Memory grows until each connection to the database has prepared each statement, and until the largest burst."""
HOUR = 3_600
ALWAYS_SHOWN = PROCESS_LIMITS | DATABASE_LIMITS
PATIENCE = 900.0
"""Seconds until a fault must have had its effect, and until the database must equal the world at the end."""


@click.command()
@click.option("--minutes", default=120.0, show_default=True, help="How long the accounts act.")
@click.option("--rate", default=20.0, show_default=True, help="Commits per second.")
@click.option("--seed", default=1, show_default=True, help="The accounts, their records and the faults.")
@click.option(
    "--samples",
    type=click.Path(dir_okay=False, path_type=Path),
    default="soak-samples.log",
    show_default=True,
    help="File to which each sample is added at once.",
)
@click.option("--warm-up", type=float, help="Minutes whose samples do not count. Default: half of all, at most 60.")
@click.option("--links", is_flag=True, help="Keep links.")
def main(minutes: float, rate: float, seed: int, samples: Path, warm_up: float | None, links: bool) -> None:
    """Run a soak. SIGINT ends it early, with the checks and the figures so far.

    The exit code is 1 if a quantity grows beyond its limit, if the database differs from the world, or if the whole
    time has passed with fewer than three samples after the warm-up.
    """
    beginning = min(minutes * 60 * WARM_UP_SHARE, MAX_WARM_UP) if warm_up is None else warm_up * 60
    samples.unlink(missing_ok=True)
    waiting.TIMEOUT = PATIENCE
    logging.getLogger("aiohttp.server").disabled = True  # faults break its connections
    plan = SoakPlan(minutes * 60, beginning, rate, seed, links)
    start_fork_server()
    with tempfile.TemporaryDirectory(prefix="indexer-soak-") as directory:
        result = asyncio.run(_run(plan, Path(directory), samples))
    for line in result_lines(result):
        click.echo(line)
    unknown = not result.trends and result.seconds >= plan.duration
    sys.exit(1 if result.growing or result.differences or unknown else 0)


async def _run(plan: SoakPlan, directory: Path, samples: Path) -> SoakResult:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end_early() -> None:
        loop.remove_signal_handler(signal.SIGINT)  # a second signal ends the process at once
        stop.set()

    loop.add_signal_handler(signal.SIGINT, end_early)
    async with embedded.database(None, directory, SERVER_SETTINGS) as dsn:
        await migrate(dsn)
        return await soak(plan, dsn, directory, samples, stop, click.echo)


def result_lines(result: SoakResult) -> Iterator[str]:
    """Yield a line for each quantity, then the verdict."""
    yield f"{result.seconds / 60:.1f} minutes, {result.commits:,} commits, {result.replaced:,} accounts replaced"
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


if __name__ == "__main__":
    main()
