"""`python -m tests.soak`: run a world of constant size with faults, and show that nothing grows."""

import asyncio
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
from tests.soak.soak_report import result_lines
from tests.soak.soak_run import SoakPlan, SoakResult, soak

MAX_WARM_UP = 1_200.0
WARM_UP_SHARE = 0.25
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
def main(minutes: float, rate: float, seed: int, samples: Path) -> None:
    """Run a soak. SIGINT ends it early, with the checks and the figures so far.

    The exit code is 1 if a quantity grows beyond its limit, or if the database differs from the world.
    """
    waiting.TIMEOUT = PATIENCE
    duration = minutes * 60
    plan = SoakPlan(duration, min(duration * WARM_UP_SHARE, MAX_WARM_UP), rate=rate, seed=seed)
    start_fork_server()
    with tempfile.TemporaryDirectory(prefix="indexer-soak-") as directory:
        result = asyncio.run(_run(plan, Path(directory), samples))
    for line in result_lines(result):
        click.echo(line)
    sys.exit(1 if result.growing or result.differences else 0)


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
