"""The command `run`."""

import click

from indexer.app.processes import run, run_several
from indexer.app.settings import Settings
from indexer.cli.command import command, config_file


@command("run")
@click.option(
    "--no-migrate", is_flag=True, help="Do not upgrade the database schema; stop if this release cannot use it."
)
@click.option(
    "--processes",
    default=1,
    type=click.IntRange(1, 64),
    help="Number of daemon processes; each owns a range of buckets.",
)
async def run_command(settings: Settings, *, no_migrate: bool, processes: int) -> int:
    """Run the daemon: consume, verify, resync, serve health checks and metrics.

    On SIGTERM or SIGINT, the daemon stores the received messages and stops. A second signal stops at once.
    """
    if processes == 1:
        return await run(settings, migrate_first=not no_migrate)
    return await run_several(settings, processes, config_file(), migrate_first=not no_migrate)
