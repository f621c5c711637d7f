"""`python -m tests.soak`: run a world of constant size with faults, and show that nothing grows."""

import asyncio
import json
import logging
import signal
import sys
import tempfile
from pathlib import Path

import click

from indexer.store import embedded
from indexer.store.migrate import migrate
from tests import waiting
from tests.daemon_forks import start_fork_server
from tests.database_server import SERVER_SETTINGS
from tests.soak.soak_report import result_lines, trend_lines
from tests.soak.soak_run import SoakPlan, SoakResult, missing_quantities, soak, trends_of

WARM_UP_SHARE = 0.5
MAX_WARM_UP = 3_600.0
"""Memory grows until each connection to the database has prepared each statement, and until the largest burst."""
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
@click.option("--links", is_flag=True, help="Keep links. Then no batch is written as a small one, with one statement.")
@click.option("--fit", is_flag=True, help="Only fit the samples of an earlier run, which the file has.")
def main(minutes: float, rate: float, seed: int, samples: Path, warm_up: float | None, links: bool, fit: bool) -> None:
    """Run a soak. SIGINT ends it early, with the checks and the figures so far.

    The exit code is 1 if a quantity grows beyond its limit, if the database differs from the world, or if the whole
    time has passed with fewer than three samples after the warm-up.
    """
    beginning = min(minutes * 60 * WARM_UP_SHARE, MAX_WARM_UP) if warm_up is None else warm_up * 60
    if fit:
        taken = [json.loads(line) for line in samples.read_text().splitlines()]
        trends, missing = trends_of(taken, beginning), missing_quantities(taken, beginning)
        click.echo("\n".join([*trend_lines(trends), *missing]))
        sys.exit(0 if trends and not missing and all(trend.is_flat for trend in trends) else 1)
    samples.unlink(missing_ok=True)
    waiting.TIMEOUT = PATIENCE
    logging.getLogger("aiohttp.server").disabled = True  # faults break its connections
    plan = SoakPlan(minutes * 60, beginning, rate=rate, seed=seed, links=links)
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


if __name__ == "__main__":
    main()
